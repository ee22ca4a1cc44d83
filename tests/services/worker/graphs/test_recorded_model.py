"""A worker whose steps are recorded does what one does that calls each operator.

Same tokens, and the same bytes in every cache: each operator that writes in place is among them.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.graphs.recorded_function import RecordedFunction
from services.worker.graphs.recorded_model import RecordedModel
from services.worker.graphs.recording import difference
from services.worker.kv_cache import KVCaches, LayerCache
from services.worker.loading.reader import CheckpointReader
from services.worker.model.config import ModelConfig
from services.worker.model.metadata import StepMetadata
from services.worker.model.spec import ModelSpec
from services.worker.model_build import build_model_executor
from services.worker.model_executor import ModelExecutor
from services.worker.ops.native import Native
from services.worker.quant.convert import Conversion, Job
from services.worker.quant.recipe import RECIPES, SchemeName
from services.worker.quant.writer import CheckpointWriter
from services.worker.settings import WorkerSettings
from tests.services.worker.plans import MiniScheduler

SIZES = {"hidden_size": 64, "q_lora_rank": 64, "num_nextn_predict_layers": 1}
C8 = {"enable_sparse_sfa_c8": True, "enable_sparse_li_c8": True}
SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5, "top_p": 0.8},
    {"temperature": 0.0, "num_logprobs": 3},
    {"temperature": 1.1, "seed": 2, "repetition_penalty": 1.2},
]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The builder sets torch's threads for its process: put them back for the other tests."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def float_path(make_checkpoint: Callable[..., Any]) -> Path:
    path: Path = make_checkpoint(**SIZES).path
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory, float_path: Path) -> dict[str, Path]:
    """The model in each form that weights have."""
    folder = tmp_path_factory.mktemp("quantized")
    config = ModelConfig.from_dir(float_path)
    spec = ModelSpec(config=config, dtype=torch.float32, device=torch.device("cpu"))
    prompts = [random.Random(7).choices(range(97), k=length) for length in (40, 150)]
    names: tuple[SchemeName, ...] = ("w8a8", "w4a8c8")
    for name in names:
        with CheckpointReader(float_path) as reader:
            conversion = Conversion(reader, Job(spec=spec, recipe=RECIPES[name], prompts=prompts))
            with CheckpointWriter(folder / name, max_shard_bytes=1 << 20) as writer:
                conversion.run(writer, lambda _: None)
                values = json.loads((float_path / "config.json").read_text())
                writer.commit(values, conversion.description_entries())
    return {"float": float_path} | {name: folder / name for name in names}


def build(path: Path, **changes: Any) -> ModelExecutor[KVCaches]:
    values = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 300,
        "num_kv_blocks": 16,
        "num_threads": 1,
    }
    settings = WorkerSettings(address="unix:/tmp/w.sock", model=path, **(values | changes))
    return build_model_executor(settings, path)


def run(executor: ModelExecutor[KVCaches]) -> list[list[int]]:
    """Prompts in chunks beside decodes, on both sides of index_topk and of the block size."""
    executor.start_epoch(1)
    scheduler, chance = MiniScheduler(executor, chunk=17), random.Random(3)
    lives = []
    for index, length in enumerate((1, 9, 140, 40, 23, 125)):
        prompt = [chance.randrange(3, 97) for _ in range(length)]
        sampling = SAMPLINGS[index % len(SAMPLINGS)]
        lives.append(scheduler.add(prompt, max_tokens=9 + 3 * index, **sampling))
        if index == 3:
            for _ in range(12):
                scheduler.run_step()
    scheduler.run()
    assert [one.error for one in lives] == [None] * len(lives)
    return [one.outputs for one in lives]


def bytes_of(executor: ModelExecutor[KVCaches]) -> list[torch.Tensor]:
    """Every cache but for the scratch block, which the first step of a worker writes."""
    return [
        cache[1:].view(torch.uint8)
        for layer in executor._caches.layers
        for field in fields(LayerCache)
        if (cache := getattr(layer, field.name)) is not None
    ]


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize(
    ("weights", "dtype", "flags"),
    [
        ("float", "float32", {}),
        ("float", "bfloat16", C8),
        ("w8a8", "bfloat16", {}),
        ("w8a8", "float32", {"weight_nz_mode": 0}),
        ("w4a8c8", "bfloat16", C8),
    ],
)
def test_records_give_the_tokens_and_the_caches_of_operators(
    paths: dict[str, Path], weights: str, dtype: str, flags: dict[str, Any], num_drafts: int
) -> None:
    flags = flags | {"dtype": dtype, "num_speculative_tokens": num_drafts}
    eager = build(paths[weights], enforce_eager=True, **flags)
    recorded = build(paths[weights], **flags)
    assert isinstance(recorded._decoder, RecordedModel)
    assert not isinstance(eager._decoder, RecordedModel)
    assert run(recorded) == run(eager)
    for one, other in zip(bytes_of(recorded), bytes_of(eager), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_leaving_out_what_nobody_samples_changes_no_token(
    float_path: Path, is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = build(float_path, enforce_eager=not is_recorded)
    partial = executor._partial
    assert partial is executor._decoder
    num_tokens = []
    end = partial.end

    def counted(state: Any, step: StepMetadata, caches: KVCaches) -> torch.Tensor:
        num_tokens.append(step.num_tokens)
        return end(state, step, caches)

    monkeypatch.setattr(partial, "end", counted)
    tokens, caches = run(executor), [cache.clone() for cache in bytes_of(executor)]
    assert num_tokens
    assert max(num_tokens) <= 4
    monkeypatch.setattr(executor, "_partial", None)
    assert run(executor) == tokens
    for one, other in zip(bytes_of(executor), caches, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_drafts_need_the_states_of_all_tokens(float_path: Path, num_drafts: int) -> None:
    executor = build(float_path, num_speculative_tokens=num_drafts)
    assert (executor._partial is None) == (num_drafts > 0)


def functions_of(model: RecordedModel[KVCaches]) -> list[RecordedFunction]:
    found = [value for value in vars(model).values() if isinstance(value, RecordedFunction)]
    assert len(found) == 4
    return found


@pytest.mark.parametrize(("weights", "num_drafts"), [("float", 2), ("w4a8c8", 2), ("float", 0)])
def test_every_size_does_what_a_recording_of_it_would(
    library: Native, paths: dict[str, Path], weights: str, num_drafts: int
) -> None:
    """Also while a step is in the buffers: nothing of it is among the numbers."""
    executor = build(paths[weights], dtype="bfloat16", num_speculative_tokens=num_drafts)
    model = executor._decoder
    assert isinstance(model, RecordedModel)
    run(executor)
    for function in functions_of(model):
        template = function._template
        assert template is not None
        function.record(template._most)
        plan = function._arena.loans
        for num_rows in range(2, template._most + 1):
            expected = function.record(num_rows, plan)
            for scaled in template._parts:
                scaled.set_rows(template._most - num_rows)  # type: ignore[union-attr]
            assert [
                part.segment.arguments.tolist()  # type: ignore[union-attr]
                for part in template._parts
            ] == [part.arguments.tolist() for part in expected.parts]  # type: ignore[union-attr]
        template.run(template._most)


def test_times_of_a_step_are_told_by_operator(float_path: Path) -> None:
    executor = build(float_path)
    model = executor._decoder
    assert isinstance(model, RecordedModel)
    assert run(executor)
    times = model.measure(1, times=2)
    assert "npu::npu_sparse_flash_attention" in [operator for operator, _ in times]
    assert times[-1][0] in {"glm::linear", "aten::_to_copy"}
    assert all(0 < seconds < 1 for _, seconds in times)


def test_a_step_recorded_again_is_the_same(library: Native, float_path: Path) -> None:
    executor = build(float_path, num_speculative_tokens=1)
    model = executor._decoder
    assert isinstance(model, RecordedModel)
    for function in functions_of(model):
        before = list(function.record(5).calls())
        assert run(executor)
        after = list(function.record(5).calls())
        assert [difference(*pair) for pair in zip(before, after, strict=True)] == [""] * len(before)
