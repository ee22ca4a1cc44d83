"""A prefix cache with its log, and sequences for it."""

from array import array

from services.scheduler.cache_events import CacheChange, CachedBlock, CacheLog
from services.scheduler.limits import CoreConfig, Limits
from services.scheduler.messages import SequenceSubmit, Submission
from services.scheduler.outlet import Outlet
from services.scheduler.plan import Capacity
from services.scheduler.prefix_cache import PrefixCache
from services.scheduler.sequence import Request, Sequence
from shared.sampling import SamplingSpec

SIZE = 4


class Room:
    """A cache with the log that it tells."""

    def __init__(self, num_blocks: int = 17, *, enabled: bool = True, **changes: object) -> None:
        capacity = Capacity(
            num_blocks=num_blocks,
            block_size_tokens=SIZE,
            num_rows=8,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            max_model_len=4096,
            **changes,
        )
        limits = Limits.of(CoreConfig(enable_prefix_caching=enabled), capacity)
        self.log = CacheLog(self._named)
        self.cache = PrefixCache(limits, self.log, 0)

    def _named(self) -> list[CachedBlock]:
        return self.cache.named_blocks()

    def compute(self, tokens: list[int], **options: object) -> Sequence:
        """A sequence that had all its blocks computed and named."""
        made = make(tokens, **options)
        made.blocks = self.cache.pool.allocate(-(-len(tokens) // SIZE))
        self.cache.publish(made, len(tokens))
        return made

    def changes(self) -> list[CacheChange]:
        return [event.change for event in self.log.read(0).events]


def make(
    tokens: list[int],
    *,
    salt: str = "",
    skip: bool = False,
    output: tuple[int, ...] = (),
    num_prompt_logprobs: int | None = None,
) -> Sequence:
    entry = SequenceSubmit(
        stream_id=0,
        index=0,
        prompt_token_ids=array("I", tokens),
        output_token_ids=array("I", output),
        seed=0,
    )
    sampling = SamplingSpec(
        max_tokens=8, skip_reading_prefix_cache=skip, num_prompt_logprobs=num_prompt_logprobs
    )
    submission = Submission(request_id="r", sequences=(entry,), sampling=sampling, cache_salt=salt)
    return Sequence(Request(submission), Outlet(), entry, sampling, 0.0)
