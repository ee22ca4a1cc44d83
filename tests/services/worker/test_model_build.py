import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.worker import capacity, largest_step, model_build
from services.worker.dummy import dummy_step
from services.worker.kv_cache import KVCaches, bytes_per_block
from services.worker.loading.strategy import LoadStrategy, ReadMode
from services.worker.model.beside import InLine, SecondStream
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.spec import ModelSpec
from services.worker.model_build import _beside, build_model_executor
from services.worker.model_executor import ModelExecutor
from services.worker.ops import native
from services.worker.settings import WorkerSettings
from shared.errors import CheckpointError, ConfigError
from tests.services.worker.plans import Live, MiniScheduler

CHANCE = random.Random(1)
# On both sides of the tiny model's index_topk of 16 and of the block size of 128.
PROMPTS = [[CHANCE.randrange(3, 97) for _ in range(n)] for n in (1, 9, 40, 150)]
GREEDY = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The builder sets torch's threads for its process: put them back for the other tests."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def oracle(make_checkpoint: Callable[..., Any]) -> Any:
    return make_checkpoint(seed=4)


def settings(path: Path, **changes: Any) -> WorkerSettings:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "num_threads": 1}
    return WorkerSettings(address="unix:/tmp/w.sock", model=path, **(values | changes))


def spec_of(path: Path) -> ModelSpec:
    config = ModelConfig.from_dir(path)
    return ModelSpec(config=config, dtype=torch.float32, device=torch.device("cpu"))


def build(path: Path, **changes: Any) -> ModelExecutor[KVCaches]:
    return build_model_executor(settings(path, **changes), path)


def run(executor: ModelExecutor[KVCaches], prompts: list[list[int]], chunk: int) -> list[Live]:
    scheduler = MiniScheduler(executor, chunk=chunk)
    lives = [scheduler.add(prompt, **GREEDY) for prompt in prompts]
    scheduler.run()
    assert [one.error for one in lives] == [None] * len(lives)
    return lives


def test_greedy_tokens_are_those_of_the_oracle(oracle: Any) -> None:
    lives = run(build(oracle.path, num_kv_blocks=16), PROMPTS, 1000)
    for one in lives:
        ids = torch.tensor([one.prompt])
        with torch.no_grad():
            for _ in range(GREEDY["max_tokens"]):
                best = oracle.model(input_ids=ids).logits[0, -1].argmax()
                ids = torch.cat([ids, best.view(1, 1)], dim=1)
        assert one.outputs == ids[0, len(one.prompt) :].tolist()


@pytest.mark.parametrize("chunk", [7, 32])
def test_tokens_do_not_depend_on_chunks_or_neighbours(oracle: Any, chunk: int) -> None:
    executor = build(oracle.path, num_kv_blocks=16)
    together = [one.outputs for one in run(executor, PROMPTS, chunk)]
    executor.start_epoch(1)
    for prompt, outputs in zip(PROMPTS, together, strict=True):
        assert run(executor, [prompt], 1000)[0].outputs == outputs
        executor.start_epoch(1)


def test_settings_decide_how_weights_are_read(oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[LoadStrategy] = []
    load = model_build.load_model

    def spy(path: Path, spec: ModelSpec, strategy: LoadStrategy, report: Any) -> Decoder:
        asked.append(strategy)
        return load(path, spec, strategy, report)

    monkeypatch.setattr(model_build, "load_model", spy)
    build(oracle.path, num_kv_blocks=16)
    changes = {"num_load_threads": 3, "load_memory_bytes": 1 << 20}
    build(oracle.path, num_kv_blocks=16, safetensors_load_strategy="prefetch", **changes)
    assert asked == [
        LoadStrategy(),
        LoadStrategy(mode=ReadMode.PREFETCH, num_threads=3, memory_bytes=1 << 20),
    ]


def test_settings_decide_which_weights_get_the_blocked_layout(
    oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    load = model_build.load_model

    def spy(path: Path, spec: ModelSpec, strategy: LoadStrategy, report: Any) -> Decoder:
        modes.append(spec.weight_nz_mode)
        return load(path, spec, strategy, report)

    monkeypatch.setattr(model_build, "load_model", spy)
    build(oracle.path, num_kv_blocks=16)
    build(oracle.path, num_kv_blocks=16, weight_nz_mode=0)
    assert modes == [1, 0]


def test_a_preempted_sequence_continues_with_the_same_tokens(oracle: Any) -> None:
    executor = build(oracle.path, num_kv_blocks=16)
    expected = run(executor, [PROMPTS[2]], 1000)[0].outputs
    executor.start_epoch(1)
    scheduler = MiniScheduler(executor, chunk=20)
    other = scheduler.add(PROMPTS[3], **GREEDY)
    one = scheduler.add(PROMPTS[2], **GREEDY)
    while len(one.outputs) < 5:
        scheduler.run_step()
    scheduler.preempt(one)
    scheduler.run()
    assert one.outputs == expected
    assert len(other.outputs) == 12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_bitwise_those_of_any_batch(oracle: Any, dtype: str) -> None:
    """Logprobs show the last bit of the logits: equal for one row and for four."""
    if native.load() is None and dtype == "bfloat16":
        pytest.skip("only the compiled products are independent of the batch in bfloat16")
    executor = build(oracle.path, num_kv_blocks=16, dtype=dtype)
    asked = GREEDY | {"num_logprobs": 5, "max_tokens": 3}

    def top_of(prompts: list[list[int]]) -> list[list[float]]:
        scheduler = MiniScheduler(executor)
        for prompt in prompts:
            scheduler.add(prompt, **asked)
        scheduler.run()
        executor.start_epoch(1)
        # Each prompt's alternatives of every step, first prompt first.
        return [columns.top_logprobs.tolist()[:5] for columns in scheduler.logprobs]

    assert top_of([PROMPTS[2]]) == top_of([PROMPTS[2], PROMPTS[0], PROMPTS[1], PROMPTS[3]])


def test_steps_are_padded_only_where_that_makes_rows_independent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row_multiple, cpu = model_build._row_multiple, torch.device("cpu")
    monkeypatch.setattr(model_build.native, "load", lambda: None)
    assert row_multiple(torch.float32, cpu) == 4
    assert row_multiple(torch.bfloat16, cpu) == 1
    assert row_multiple(torch.float32, torch.device("meta")) == 1
    monkeypatch.setattr(model_build.native, "load", object)
    assert row_multiple(torch.float32, cpu) == 1


def test_capacity_tells_what_was_built(oracle: Any) -> None:
    block = bytes_per_block(spec_of(oracle.path))
    executor = build(oracle.path, kv_cache_memory_bytes=20 * block + 5)
    capacity = executor.capacity
    assert capacity.num_blocks == 20
    assert capacity.block_size_bytes == block
    assert capacity.max_model_len == 512
    assert capacity.num_rows == 8
    assert capacity.vocab_size == 97
    assert len(capacity.model_digest) == 64


def test_the_memory_of_its_blocks_is_taken_when_a_process_serves_and_not_before(
    oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[KVCaches] = []
    monkeypatch.setattr(model_build, "prefault", taken.append)
    executor = build(oracle.path)
    assert not taken
    executor.take_memory()
    assert [caches.num_blocks for caches in taken] == [executor.capacity.num_blocks]


def test_a_model_is_built_for_the_length_it_serves(
    oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    load = model_build.load_model

    def spy(path: Path, spec: ModelSpec, strategy: LoadStrategy, report: Any) -> Decoder:
        lengths.append(spec.num_positions)
        return load(path, spec, strategy, report)

    monkeypatch.setattr(model_build, "load_model", spy)
    served = build(oracle.path, num_kv_blocks=16, max_model_len=300)
    own = build(oracle.path, num_kv_blocks=16)
    assert [one.capacity.max_model_len for one in (served, own)] == [300, 512]
    assert lengths == [384, 512]


def test_too_little_memory_names_both_numbers(oracle: Any) -> None:
    with pytest.raises(ConfigError, match=r"holds 0 blocks.*needs 5"):
        build(oracle.path, kv_cache_memory_bytes=1000)
    with pytest.raises(ConfigError, match="--num-kv-blocks 4"):
        build(oracle.path, num_kv_blocks=4)


def test_a_device_without_a_budget_runs_the_largest_step_first(
    oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU in the place of a device: what is run and what becomes of the measurement."""
    executor = build(oracle.path, num_kv_blocks=16, enforce_eager=True)
    decoder = executor._decoder
    assert isinstance(decoder, Decoder)
    shapes: list[tuple[int, ...]] = []
    head = decoder.compute_logits
    monkeypatch.setattr(decoder, "compute_logits", lambda x: shapes.append(x.shape) or head(x))
    block = bytes_per_block(decoder.spec)

    def measured(device: torch.device, run: Callable[[], None]) -> capacity.MemoryUse:
        run()
        return capacity.MemoryUse(total=100 * block, peak=20 * block, others=10 * block)

    monkeypatch.setattr(model_build.capacity, "measure_device", measured)
    monkeypatch.setattr(decoder, "device", SimpleNamespace(type="npu"))
    monkeypatch.setattr(
        largest_step, "dummy_step", lambda n, t, d: dummy_step(n, t, torch.device("cpu"))
    )
    chosen = settings(oracle.path, gpu_memory_utilization=0.8)
    assert model_build._choose_num_blocks(chosen, decoder, 512) == 50
    assert shapes == [(4, 64)]


@pytest.fixture(scope="module")
def drafting(make_checkpoint: Callable[..., Any]) -> Any:
    return make_checkpoint(seed=4, num_nextn_predict_layers=1)


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
@pytest.mark.parametrize("chunk", [7, 1000])
def test_greedy_tokens_do_not_depend_on_drafts(drafting: Any, chunk: int, num_drafts: int) -> None:
    """An untrained layer is seldom right: mostly this is about drafts that are rejected."""
    plain = [one.outputs for one in run(build(drafting.path, num_kv_blocks=16), PROMPTS, 1000)]
    executor = build(drafting.path, num_kv_blocks=24, num_speculative_tokens=num_drafts)
    assert [one.outputs for one in run(executor, PROMPTS, chunk)] == plain


@pytest.mark.parametrize("chunk", [7, 1000])
def test_drafts_are_those_of_a_fresh_computation(drafting: Any, chunk: int) -> None:
    """So the MTP layer's caches have no gaps, whatever was rejected or cut before."""

    def drafts_of(executor: ModelExecutor[KVCaches], one: Live) -> list[int]:
        table = executor._table
        known = int(table.num_tokens[one.row])
        return table.tokens[one.row, known : known + int(table.num_drafts[one.row])].tolist()

    executor = build(drafting.path, num_kv_blocks=24, num_speculative_tokens=3)
    scheduler = MiniScheduler(executor, chunk=chunk)
    for prompt in PROMPTS:
        scheduler.add(prompt, temperature=0.0, max_tokens=60)
    for _ in range(30):
        scheduler.run_step()
    executor.finish_step()
    fresh = MiniScheduler(build(drafting.path, num_kv_blocks=24, num_speculative_tokens=3))
    for one in scheduler.live:
        assert len(one.outputs) > 2
        again = fresh.add(one.prompt, outputs=one.outputs[:-1], temperature=0.0, max_tokens=60)
        fresh.run_step()
        fresh.executor.finish_step()
        assert again.outputs == one.outputs
        assert len(drafts_of(executor, one)) == 3
        assert drafts_of(fresh.executor, again) == drafts_of(executor, one)
        fresh.preempt(again)
        fresh.live.clear()


def test_capacity_tells_what_drafts_take(drafting: Any) -> None:
    executor = build(
        drafting.path, num_kv_blocks=16, num_speculative_tokens=3, max_num_batched_tokens=8
    )
    assert executor.capacity.num_speculative_tokens == 3
    assert (executor.capacity.max_num_seqs, executor.capacity.num_rows) == (2, 4)
    spec = replace(spec_of(drafting.path), has_mtp=True)
    assert executor.capacity.block_size_bytes == bytes_per_block(spec)


def test_drafts_without_an_mtp_layer_are_refused_by_flag_and_file(oracle: Any) -> None:
    with pytest.raises(ConfigError, match=r"--num-speculative-tokens 2: .*config.json has no MTP"):
        build(oracle.path, num_speculative_tokens=2)


def test_a_checkpoint_that_lost_its_mtp_layer_is_refused(oracle: Any, tmp_path: Path) -> None:
    for file in oracle.path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(
        json.dumps(oracle.values | {"num_nextn_predict_layers": 1})
    )
    with pytest.raises(CheckpointError, match=r"model\.layers\.4\.eh_proj\.weight: is missing"):
        build(tmp_path, num_speculative_tokens=1)


def test_an_mtp_layer_whose_logits_overflow_does_not_get_past_the_self_check(
    drafting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflow(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        return torch.full((len(hidden), 97), float("inf"))

    monkeypatch.setattr(Decoder, "compute_draft_logits", overflow)
    with pytest.raises(CheckpointError, match="logits of drafts"):
        build(drafting.path, num_kv_blocks=16, num_speculative_tokens=1)


def test_bfloat16_serves_too(oracle: Any) -> None:
    executor = build(oracle.path, num_kv_blocks=16, dtype="bfloat16")
    assert len(run(executor, [PROMPTS[1]], 1000)[0].outputs) == 12


def test_weights_whose_logits_overflow_do_not_get_past_the_self_check(
    make_checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    made = make_checkpoint(seed=5)
    tensors = load_file(str(made.path / "model.safetensors"))
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 1e37
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1e5
    (tmp_path / "config.json").write_bytes((made.path / "config.json").read_bytes())
    save_file(tensors, str(tmp_path / "model.safetensors"))
    with pytest.raises(CheckpointError, match="not finite"):
        build(tmp_path, num_kv_blocks=16)


def test_the_first_steps_of_a_device_are_checked_and_those_of_a_cpu_check_themselves() -> None:
    """The CPU takes float32; an NPU's attention and rotary kernels do not."""
    x, angles = (torch.zeros(shape, device="meta") for shape in ((3, 4, 1, 64), (3, 1, 1, 64)))
    with model_build._guarded(torch.device("cpu")):
        torch.ops.npu.npu_interleave_rope(x, angles, angles)
    with (
        model_build._guarded(torch.device("meta")),
        pytest.raises(ConfigError, match=r"npu_interleave_rope: x: torch\.float32"),
    ):
        torch.ops.npu.npu_interleave_rope(x, angles, angles)


def test_shared_experts_get_a_second_stream_where_there_are_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = WorkerSettings(
        address="unix:/x", model=Path("m"), multistream_overlap_shared_expert=True
    )
    asked = replace_stream(monkeypatch)
    assert isinstance(_beside(settings, torch.device("cpu")), InLine)
    assert isinstance(_beside(settings, torch.device("meta")), SecondStream)
    assert asked == ["Stream"]
    off = settings.model_copy(update={"multistream_overlap_shared_expert": False})
    assert isinstance(_beside(off, torch.device("meta")), InLine)


def replace_stream(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch_npu adds to torch, as far as it is asked for."""
    asked: list[str] = []
    streams = SimpleNamespace(Stream=lambda: asked.append("Stream"))
    monkeypatch.setattr(torch, "npu", streams, raising=False)
    return asked


def test_an_npu_without_its_library_is_a_clear_error(oracle: Any) -> None:
    with pytest.raises(ConfigError, match="--device npu: torch_npu cannot be imported"):
        build(oracle.path, device="npu")


def test_a_missing_checkpoint_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        build(tmp_path / "nowhere")


def test_a_number_type_that_is_not_served_is_named_with_its_file(
    oracle: Any, tmp_path: Path
) -> None:
    values = json.loads((oracle.path / "config.json").read_text())
    for file in oracle.path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(values | {"dtype": "float16"}))
    with pytest.raises(ConfigError, match=r"config.json: dtype is 'float16', must be one of"):
        build(tmp_path, dtype="auto")
    build(tmp_path, dtype="float32")
