"""What a scheduler may do: its own settings, and their minimum with a worker's capacity."""

from dataclasses import dataclass

from services.scheduler.plan import Capacity
from shared.errors import ConfigError

# Below this a prompt is not worth cutting: a step has costs of its own.
MIN_LONG_TOKENS = 256
# A long prompt gets this part of a step by default; docs/scheduling.md has the figures.
LONG_SHARE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Settings of the scheduler core; 0 for a maximum means "as the worker says".

    `policy` is the order in which waiting sequences are admitted, "fcfs" or "priority".
    `watermark` is the share of blocks that admission leaves free beside running sequences.
    A prompt with more than `long_prefill_token_threshold` tokens to go is a long one and gets so
    many of a step that others need as well; None is an eighth of the step, 0 calls none long.
    Replicas that step together take prompts in every `prefill_schedule_interval`th step.
    """

    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_model_len: int = 0
    max_queued_requests: int = 4096
    max_queued_tokens: int = 16_777_216  # 64 MiB of token ids
    max_plans_in_flight: int = 1
    max_timeout_s: float = 3600.0
    policy: str = "fcfs"
    priority_ageing_s: float = 30.0
    enable_fair_share: bool = True
    watermark: float = 0.0
    long_prefill_token_threshold: int | None = None
    max_num_partial_prefills: int = 4
    max_long_partial_prefills: int = 3
    prefill_schedule_interval: int = 2
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        """Refuse values outside their bounds."""
        bounds = {
            "max_num_seqs": 0,
            "max_num_batched_tokens": 0,
            "max_model_len": 0,
            "max_queued_requests": 1,
            "max_queued_tokens": 1,
            "priority_ageing_s": 0,
            "max_num_partial_prefills": 1,
            "max_long_partial_prefills": 1,
            "prefill_schedule_interval": 1,
        }
        for name, least in bounds.items():
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name} is {value}, at least {least} needed")
        if self.max_plans_in_flight not in {1, 2}:
            raise ConfigError(f"max_plans_in_flight is {self.max_plans_in_flight}, 1 or 2 needed")
        if not self.max_timeout_s > 0:
            raise ConfigError(f"max_timeout_s is {self.max_timeout_s}, more than 0 needed")
        self._check_policies()

    def _check_policies(self) -> None:
        if self.policy not in {"fcfs", "priority"}:
            raise ConfigError(f"policy is {self.policy!r}, 'fcfs' or 'priority' needed")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is {self.watermark}, 0 to less than 1 needed")
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise ConfigError(
                f"max_long_partial_prefills is {self.max_long_partial_prefills}, at most "
                f"max_num_partial_prefills {self.max_num_partial_prefills} allowed"
            )
        threshold = self.long_prefill_token_threshold
        if threshold is not None and threshold < 0:
            raise ConfigError(f"long_prefill_token_threshold is {threshold}, at least 0 needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of one epoch.

    `max_model_len` is what settings and worker allow; `max_sequence_len` also fits the block pool,
    so a sequence alone can always run to its end.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_sequence_len: int
    block_size: int
    num_blocks: int
    num_rows: int
    vocab_size: int
    is_replay: bool
    max_plans_in_flight: int
    num_speculative_tokens: int = 0
    """Drafts that a decoding sequence may bring into a step."""
    is_drafting: bool = False
    """Whether results tell about drafts; also where a step has no room for any."""
    is_priority: bool = False
    """Whether requests may have priorities."""
    num_watermark_blocks: int = 0
    """Blocks that admission leaves free beside running sequences."""
    num_long_tokens: int = 0
    """A prompt with more tokens to go is long; 0 calls none long."""
    max_partial_prefills: int = 4
    max_long_partial_prefills: int = 3
    is_caching: bool = False
    """Whether sequences share the blocks of equal prefixes."""
    model_digest: str = ""

    @classmethod
    def of(cls, config: CoreConfig, capacity: Capacity) -> "Limits":
        """The minimum of what both sides allow."""
        max_model_len = _least(config.max_model_len, capacity.max_model_len)
        max_num_batched_tokens = _least(
            config.max_num_batched_tokens, capacity.max_num_batched_tokens
        )
        # Drafts are a service: where a step is too small for all of them there are fewer.
        num_drafts = min(capacity.num_speculative_tokens, max_num_batched_tokens - 1)
        # A decoding sequence takes a token and its drafts of a step, and a freed row comes back one
        # plan later, so half of the rows can be in use.
        max_num_seqs = min(
            _least(config.max_num_seqs, capacity.max_num_seqs),
            max_num_batched_tokens // (1 + num_drafts),
            max(1, capacity.num_rows // 2),
        )
        num_usable_tokens = (capacity.num_blocks - 1) * capacity.block_size_tokens
        return cls(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            max_sequence_len=min(max_model_len, num_usable_tokens),
            block_size=capacity.block_size_tokens,
            num_blocks=capacity.num_blocks,
            num_rows=capacity.num_rows,
            vocab_size=capacity.vocab_size,
            is_replay=capacity.is_replay,
            max_plans_in_flight=config.max_plans_in_flight,
            num_speculative_tokens=num_drafts,
            is_drafting=capacity.num_speculative_tokens > 0,
            is_priority=config.policy == "priority",
            num_watermark_blocks=int(config.watermark * capacity.num_blocks),
            num_long_tokens=_long_tokens(config, max_num_batched_tokens),
            max_partial_prefills=config.max_num_partial_prefills,
            max_long_partial_prefills=config.max_long_partial_prefills,
            is_caching=config.enable_prefix_caching,
            model_digest=capacity.model_digest,
        )

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of a step that a decoding sequence takes, drafts included."""
        return 1 + self.num_speculative_tokens

    @property
    def num_proposal_tokens(self) -> int:
        """Positions behind the last computed one that proposing drafts writes."""
        return max(0, self.num_speculative_tokens - 1)

    @property
    def num_lookahead_tokens(self) -> int:
        """Positions behind the next one that a decoding sequence may use before its next result.

        Every plan in flight may keep all its drafts, and behind the last of them new ones are
        proposed.
        """
        most = self.max_plans_in_flight * self.num_speculative_tokens
        return most + self.num_proposal_tokens

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


def _long_tokens(config: CoreConfig, max_num_batched_tokens: int) -> int:
    threshold = config.long_prefill_token_threshold
    if threshold is not None:
        return threshold
    return max(MIN_LONG_TOKENS, max_num_batched_tokens // LONG_SHARE)


def _least(own: int, worker: int) -> int:
    return min(own, worker) if own else worker
