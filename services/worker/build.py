"""Which executor a worker gets. A model is imported only when one is asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from services.worker.checkpoint_facts import num_known_ids
from services.worker.model.config import BLOCK_SIZE, ModelConfig
from services.worker.plan import Capacity
from services.worker.replay import ReplayExecutor
from services.worker.runner import StepExecutor
from services.worker.settings import WorkerSettings
from shared.errors import ConfigError

if TYPE_CHECKING:  # a replay worker does without the engine
    from services.worker.grammar.compiler import GrammarCompiler

# Without a checkpoint a replay worker takes these.
_REPLAY_MAX_MODEL_LEN = 131_072
_REPLAY_VOCAB_SIZE = 1 << 20
# A nominal size: 2 million tokens, about what one node holds.
_REPLAY_NUM_BLOCKS = 16_384


class RankBuilder(Protocol):
    """Builds the executor of one rank of a world."""

    def build(self, is_stopping: Callable[[], bool]) -> StepExecutor:
        """Meet the others, and build with them."""
        ...


def executor_builder(
    settings: WorkerSettings,
    is_stopping: Callable[[], bool],
    rank: RankBuilder | None = None,
    grammars: "GrammarCompiler | None" = None,
) -> Callable[[], StepExecutor]:
    """The function that builds the executor on the runner's thread.

    Once `is_stopping` says so, a build that takes long ends with `BuildStoppedError`. `rank` builds
    it where this process is one of several. `grammars` are those that requests are prepared with.
    """
    if rank is not None:
        return lambda: rank.build(is_stopping)
    if settings.worker_mode == "replay":
        return lambda: ReplayExecutor(replay_capacity(settings))
    assert settings.model is not None
    path = settings.model

    def build() -> StepExecutor:
        # Here and not above: a replay worker starts in a fraction of torch's import time.
        from services.worker.model_build import build_model_executor  # noqa: PLC0415

        return build_model_executor(settings, path, is_stopping, grammars=grammars)

    return build


def choose_max_model_len(asked: int | None, own: int) -> int:
    """The context length to serve: as asked for, within the model's own."""
    if asked is not None and asked > own:
        raise ConfigError(f"--max-model-len {asked} is above the model's own {own}")
    return asked or own


def replay_capacity(settings: WorkerSettings) -> Capacity:
    """Limits of a replay worker; blocks are counted but hold nothing."""
    own, vocab_size = _sizes(settings.model)
    max_model_len = choose_max_model_len(settings.max_model_len, own)
    needed = -(-max_model_len // BLOCK_SIZE) + 1
    num_blocks = settings.num_kv_blocks or max(_REPLAY_NUM_BLOCKS, needed)
    if num_blocks < needed:
        raise ConfigError(
            f"--num-kv-blocks {num_blocks} is too few for one sequence of {max_model_len} tokens, "
            f"which needs {needed}"
        )
    return Capacity(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_rows=2 * settings.max_num_seqs,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        block_size_bytes=0,
        is_replay=True,
    )


def _sizes(model: Path | None) -> tuple[int, int]:
    if model is None:
        return _REPLAY_MAX_MODEL_LEN, _REPLAY_VOCAB_SIZE
    config = ModelConfig.from_dir(model)
    return config.max_position_embeddings, num_known_ids(model, config.vocab_size)
