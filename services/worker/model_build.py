"""Builds the model executor: settings, operators, weights, KV blocks, one step as a proof.

Runs on the runner's thread, as all torch work does: a second thread that ever ran parallel torch
work makes every later step two to four times slower.
"""

import gc
import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from services.worker import capacity, ops
from services.worker.build import choose_max_model_len
from services.worker.checkpoint_facts import model_digest, num_known_ids
from services.worker.device import open_device
from services.worker.dummy import dummy_step
from services.worker.grammar.compiler import GrammarCompiler
from services.worker.graphs.choose import Capture, capture_steps
from services.worker.kv_cache import KVCaches, allocate, bytes_per_block, check_layout
from services.worker.largest_step import run_largest_step
from services.worker.loading.load import load_model
from services.worker.loading.progress import LoadProgress, shown_progress
from services.worker.loading.strategy import LoadStrategy, ReadMode
from services.worker.model.beside import Beside, InLine, SecondStream
from services.worker.model.cache_format import CacheFormat
from services.worker.model.config import BLOCK_SIZE, ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.spec import ModelSpec
from services.worker.model_executor import ModelExecutor
from services.worker.npu_generation import choose_generation
from services.worker.ops import native
from services.worker.ops.device_rules import DeviceGuard
from services.worker.plan import Capacity
from services.worker.prefault import prefault
from services.worker.quant.scheme import QuantDescription
from services.worker.ranks import Alone, Ranks
from services.worker.runner import BuildStoppedError, StepExecutor
from services.worker.settings import WorkerSettings
from services.worker.tokens import TokenSource
from shared.errors import CheckpointError, ConfigError
from shared.log import get_logger

_log = get_logger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def build_model_executor(
    settings: WorkerSettings,
    path: Path,
    is_stopping: Callable[[], bool] = lambda: False,
    ranks: Ranks | None = None,
    grammars: GrammarCompiler | None = None,
) -> StepExecutor:
    """Everything up to the first plan; `ranks` are the others of a world, if there are any.

    `grammars` are those that whoever prepares constraints has, in the rank that answers.

    Raises:
        BuildStoppedError: `is_stopping` said so while weights were read.
        ConfigError: A setting does not fit the model or the machine.
        CheckpointError: The checkpoint cannot be used, or its first step gives no numbers.
    """
    started = time.monotonic()
    # At its end torch tells statistics of caches nobody asked about.
    logging.getLogger("torch").setLevel(logging.WARNING)
    # Before any other torch work, so that one pool of threads exists in the process.
    num_threads = settings.num_threads or len(os.sched_getaffinity(0))
    ops.set_num_threads(num_threads)
    ranks = ranks or Alone()
    spec = ranks.place(_choose_spec(settings, path))
    known = num_known_ids(path, spec.config.vocab_size)
    ops.register()
    decoder = _load(settings, path, spec, is_stopping)
    ranks.wait_for_others(is_stopping)
    limits = ranks.agree(_own_limits(settings, path, decoder, known), spec)
    with _guarded(spec.device):
        caches = allocate(spec, limits.num_blocks)
        check_layout(spec, caches)
        _prove(decoder, caches, ranks)
    row_multiple = _row_multiple(spec.dtype, spec.device)
    capture = _capture(settings, decoder, caches, limits, ranks, row_multiple)
    if capture.sizes is not None and limits.data_parallel_size > 1:
        limits = replace(limits, captured_num_seqs=capture.sizes.num_seqs)
    parts = ranks.parts(decoder, caches, row_multiple, capture.sizes)
    executor = ModelExecutor(
        capture.model,
        caches,
        limits,
        num_known_ids=known,
        device=spec.device,
        row_multiple=row_multiple,
        drafter=capture.model if decoder.mtp is not None else None,
        partial=capture.partial,
        has_head=parts.has_head,
        tokens=parts.tokens,
        pace=parts.pace,
        sizes=capture.sizes,
        grammars=grammars or _own_grammars(path, parts.tokens),
        take_memory=partial(prefault, caches),
    )
    executor.capture_steps()
    # What was built lives as long as the process: collections need not look at it again.
    gc.collect()
    gc.freeze()
    _tell(path, spec, limits, num_threads, time.monotonic() - started)
    return ranks.finish(executor)


def _own_grammars(path: Path, tokens: TokenSource | None) -> GrammarCompiler:
    """Those of a rank that answers nobody; where it samples they are needed within a step."""
    grammars = GrammarCompiler.of_checkpoint(path)
    # Without a tokenizer, as `num_known_ids` allows, constraints are refused when they come.
    has_tokenizer = (path / "tokenizer.json").exists()
    if has_tokenizer and tokens is not None and tokens.is_sampling:
        grammars.load()
    return grammars


def _capture(
    settings: WorkerSettings,
    decoder: Decoder,
    caches: KVCaches,
    limits: Capacity,
    ranks: Ranks,
    row_multiple: int,
) -> Capture:
    """The model that runs decode steps: one that captures them, where it can."""
    if not ranks.can_capture:
        return Capture(model=decoder)
    method_of = ranks.method_of(decoder.spec)
    return capture_steps(
        settings, decoder, caches, limits, row_multiple=row_multiple, method_of=method_of
    )


def _own_limits(settings: WorkerSettings, path: Path, decoder: Decoder, known: int) -> Capacity:
    """What this rank can do, whatever the others can; `known` ids may be sampled."""
    spec = decoder.spec
    with _guarded(spec.device):
        num_blocks = _choose_num_blocks(settings, decoder, spec.context_length)
    max_num_seqs = _choose_max_num_seqs(settings)
    return Capacity(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_rows=2 * max_num_seqs,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=spec.context_length,
        vocab_size=known,
        block_size_bytes=bytes_per_block(spec),
        model_digest=model_digest(path),
        num_speculative_tokens=settings.num_speculative_tokens,
    )


def _tell(path: Path, spec: ModelSpec, limits: Capacity, num_threads: int, seconds: float) -> None:
    _log.info(
        "model ready",
        extra={
            "model": path.name,
            "dtype": str(spec.dtype).removeprefix("torch."),
            "num_blocks": limits.num_blocks,
            "max_model_len": limits.max_model_len,
            "num_speculative_tokens": limits.num_speculative_tokens,
            "num_threads": num_threads,
            "seconds": round(seconds, 2),
        },
    )


def _choose_spec(settings: WorkerSettings, path: Path) -> ModelSpec:
    """What the settings and the checkpoint's small files make of the model."""
    device = open_device(settings.device)
    config = ModelConfig.from_dir(path)
    num_drafts = settings.num_speculative_tokens
    if num_drafts and not config.num_nextn_predict_layers:
        raise ConfigError(
            f"--num-speculative-tokens {num_drafts}: {path / 'config.json'} has no MTP layer "
            "(num_nextn_predict_layers is 0)"
        )
    return ModelSpec(
        config=config,
        dtype=_choose_dtype(settings, config, path),
        device=device,
        beside=_beside(settings, device),
        quantization=QuantDescription.from_dir(path),
        cache=_choose_cache_format(settings, device),
        weight_nz_mode=settings.weight_nz_mode,
        has_mtp=num_drafts > 0,
        max_model_len=choose_max_model_len(settings.max_model_len, config.max_position_embeddings),
    )


def _choose_max_num_seqs(settings: WorkerSettings) -> int:
    """As asked for, as far as a step holds a token and all drafts of each."""
    num_tokens = 1 + settings.num_speculative_tokens
    held = settings.max_num_batched_tokens // num_tokens
    if held < settings.max_num_seqs:
        _log.warning(
            "--max-num-batched-tokens %d holds %d sequences of 1 + %d tokens: "
            "--max-num-seqs is lowered to that",
            settings.max_num_batched_tokens,
            held,
            settings.num_speculative_tokens,
        )
    return min(settings.max_num_seqs, held)


def _load(
    settings: WorkerSettings, path: Path, spec: ModelSpec, is_stopping: Callable[[], bool]
) -> Decoder:
    """Read the weights and show how far that is."""
    strategy = LoadStrategy(
        mode=ReadMode(settings.safetensors_load_strategy),
        num_threads=settings.num_load_threads,
        memory_bytes=settings.load_memory_bytes,
    )
    with shown_progress(path.name, Console(stderr=True)) as show:

        def report(progress: LoadProgress) -> None:
            if is_stopping():
                raise BuildStoppedError
            show(progress)

        return load_model(path, spec, strategy, report)


def _choose_dtype(settings: WorkerSettings, config: ModelConfig, path: Path) -> torch.dtype:
    """The type of weights and caches: as asked for, or the checkpoint's own."""
    name = config.dtype if settings.dtype == "auto" else settings.dtype
    if name not in _DTYPES:
        raise ConfigError(
            f"{path / 'config.json'}: dtype is {name!r}, must be one of {', '.join(_DTYPES)}; "
            "--dtype overrides it"
        )
    return _DTYPES[name]


def _beside(settings: WorkerSettings, device: torch.device) -> Beside:
    """A second stream where it is asked for and the device has streams; a host has none."""
    if not settings.multistream_overlap_shared_expert or device.type == "cpu":
        return InLine()
    return SecondStream(torch.npu)  # type: ignore[attr-defined]  # by torch_npu


def _choose_cache_format(settings: WorkerSettings, device: torch.device) -> CacheFormat:
    """What the flags say, in the types of the device."""
    return CacheFormat(
        sparse_sfa_c8=settings.enable_sparse_sfa_c8,
        sparse_li_c8=settings.enable_sparse_li_c8,
        generation=choose_generation(settings.npu_generation, device),
    )


def _guarded(device: torch.device) -> AbstractContextManager[object]:
    """Checks on the first steps of a device, whose kernels do not name what they cannot take.

    Our CPU kernels check each call themselves; the guard would cost them a second of imports.
    """
    if device.type == "cpu":
        return nullcontext()
    guard: AbstractContextManager[object] = DeviceGuard()  # type: ignore[no-untyped-call]  # torch's
    return guard


def _row_multiple(dtype: torch.dtype, device: torch.device) -> int:
    """Padding that keeps a row's numbers independent of the batch, where padding is needed for it.

    The compiled products of a CPU are independent anyhow. torch's own are for float32 when the rows
    are a multiple of 4 (measured with torch 2.13; for bfloat16 no multiple helps).
    """
    is_torch_product = device.type == "cpu" and native.load() is None
    return 4 if is_torch_product and dtype == torch.float32 else 1


def _choose_num_blocks(settings: WorkerSettings, decoder: Decoder, max_model_len: int) -> int:
    if settings.num_kv_blocks is not None:
        return capacity.check_block_count(settings.num_kv_blocks, max_model_len)
    block_bytes = bytes_per_block(decoder.spec)
    budget = settings.kv_cache_memory_bytes
    if decoder.device.type == "cpu":
        budget = capacity.host_budget(budget, capacity.free_host_bytes())
    elif budget is None:
        use = capacity.measure_device(
            decoder.device, lambda: run_largest_step(settings, decoder, max_model_len)
        )
        budget = capacity.device_budget(use, settings.gpu_memory_utilization)
    return capacity.count_blocks(budget, block_bytes, max_model_len)


def _prove(decoder: Decoder, caches: KVCaches, ranks: Ranks) -> None:
    """One real step on the scratch block: every operator runs, and the logits are numbers."""
    token_ids, plain = dummy_step(2, 3, decoder.device)
    for step in ranks.traffic(decoder.spec, plain):
        hidden = decoder.forward(token_ids, step, caches)
        found = {}
        if decoder.lm_head is not None:
            found["logits"] = decoder.compute_logits(hidden)
        if decoder.mtp is not None:
            states = decoder.draft(token_ids, hidden, step, caches)
            found["logits of drafts"] = decoder.compute_draft_logits(states)
        for name, logits in found.items():
            assert logits.shape == (6, decoder.config.vocab_size)
            if not bool(torch.isfinite(logits).all()):
                raise CheckpointError(f"self-check: the {name} of the first step are not finite")
