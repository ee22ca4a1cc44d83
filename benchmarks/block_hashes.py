"""What naming and finding the blocks of a long prompt costs the scheduler.

A prompt of 131,072 tokens: the whole chain of names, and what an admission pays for it when nothing
is cached (one name), when all is (`hit_ms`, unprepared), and when the scheduler had time to look it
up while it waited (`prepared_ms`). The peer's numbers are the medians of vLLM 0.32 with its default
hash on two cores: 14.4, 5.1 and 3.6 ms for the chain with blocks of 16, 64 and 128 tokens. All are
thread CPU time, medians.

    python -m benchmarks.block_hashes [--repeats 30]
"""

import argparse
import json
import statistics
import time
from array import array
from collections.abc import Callable

from services.scheduler.cache_events import CachedBlock, CacheLog
from services.scheduler.limits import CoreConfig, Limits
from services.scheduler.messages import SequenceSubmit, Submission
from services.scheduler.outlet import Outlet
from services.scheduler.plan import Capacity
from services.scheduler.prefix_cache import PrefixCache
from services.scheduler.sequence import Request, Sequence
from shared.block_hashes import BlockHashes, root_hash
from shared.sampling import SamplingSpec

NUM_TOKENS = 131_072
PEER_MS = {16: 14.4, 64: 5.1, 128: 3.6}
# Share of the peer's time that must be enough.
MUST = 0.5


def make_sequence(num_tokens: int) -> Sequence:
    """A waiting sequence with so many prompt tokens."""
    entry = SequenceSubmit(
        stream_id=0,
        index=0,
        prompt_token_ids=array("I", range(num_tokens)),
        output_token_ids=array("I"),
        seed=0,
    )
    sampling = SamplingSpec(max_tokens=1)
    submission = Submission(request_id="r", sequences=(entry,), sampling=sampling)
    return Sequence(Request(submission), Outlet(), entry, sampling, 0.0)


def filled_cache(block_size: int) -> PrefixCache:
    """A cache that holds the prompt."""
    capacity = Capacity(
        num_blocks=NUM_TOKENS // block_size + 2,
        block_size_tokens=block_size,
        num_rows=2,
        max_num_seqs=1,
        max_num_batched_tokens=8192,
        max_model_len=2 * NUM_TOKENS,
    )

    def named_blocks() -> list[CachedBlock]:
        return cache.named_blocks()

    cache = PrefixCache(Limits.of(CoreConfig(), capacity), CacheLog(named_blocks), 0)
    first = make_sequence(NUM_TOKENS)
    first.blocks = cache.pool.allocate(NUM_TOKENS // block_size)
    cache.publish(first, NUM_TOKENS)
    return cache


def median_ms(
    repeats: int, prepare: Callable[[], Sequence], work: Callable[[Sequence], None]
) -> float:
    """Thread CPU time of `work`, milliseconds."""
    samples = []
    for _ in range(repeats):
        sequence = prepare()
        before = time.thread_time_ns()
        work(sequence)
        samples.append((time.thread_time_ns() - before) / 1e6)
    return statistics.median(samples)


def measure(block_size: int, repeats: int) -> dict[str, object]:
    """One line."""
    cache = filled_cache(block_size)
    root = root_hash("", block_size, "")

    def hash_all(sequence: Sequence) -> None:
        hashes = BlockHashes(root, block_size)
        hashes.extend(
            NUM_TOKENS // block_size, sequence.prompt_token_ids, sequence.output_token_ids
        )

    def find(sequence: Sequence) -> None:
        cache.find(sequence)

    def fresh() -> Sequence:
        return make_sequence(NUM_TOKENS + 1)

    def unknown() -> Sequence:
        sequence = fresh()
        sequence.request.cache_salt = "other"
        return sequence

    def prepared() -> Sequence:
        sequence = fresh()
        while cache.look_ahead(sequence):
            pass
        return sequence

    hash_ms = median_ms(repeats, fresh, hash_all)
    return {
        "claim": "block_hashes",
        "block_size": block_size,
        "num_tokens": NUM_TOKENS,
        "hash_ms": round(hash_ms, 3),
        "miss_ms": round(median_ms(repeats, unknown, find), 4),
        "hit_ms": round(median_ms(repeats, fresh, find), 3),
        "prepared_ms": round(median_ms(repeats, prepared, find), 4),
        "peer_ms": PEER_MS[block_size],
        "ratio": round(hash_ms / PEER_MS[block_size], 3),
        "must": MUST,
    }


def main() -> None:
    """Print one JSON line per block size."""
    parser = argparse.ArgumentParser(description="names of the blocks of a long prompt")
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    for block_size in PEER_MS:
        print(json.dumps(measure(block_size, arguments.repeats)), flush=True)


if __name__ == "__main__":
    main()
