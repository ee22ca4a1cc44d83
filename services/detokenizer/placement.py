"""Which scheduler gets a request: one pure function over what is known of all of them.

A request ranks the schedulers by a hash of how its prompt begins and of their names (weighted
rendezvous hashing), and goes to the first of them that is not overloaded. So prompts that begin
alike meet where their start is cached, whichever detokenizer sends them; a scheduler that leaves
gives up its own prompts and no others move; and a start that everybody has in common does not
bury one scheduler.

Law: overloaded is who has, measured by its share of the seats, `skew` times the mean or more of
sequences or of tokens to compute, beyond what it does at no cost to anybody: a sixteenth of its
seats, since that many rows make a step hardly longer, and one step of tokens.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from shared.block_hashes import BlockHashes, root_hash

FREE_SEATS: Final = 1 / 16
# Where a scheduler has not told its own; the only size that exists on the devices.
DEFAULT_BLOCK_SIZE: Final = 128
_HASH_RANGE: Final = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRules:
    """What the choice goes by.

    Attributes:
        num_blocks: Blocks at the start of a prompt that it is ranked by.
        skew: Load of a scheduler, as a multiple of the mean, at which it is passed over.
    """

    num_blocks: int = 4
    skew: float = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """What is to be placed, as a whole: the sequences of a request."""

    num_sequences: int = 1
    num_tokens: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerWork:
    """What a scheduler has to do, with what was sent since it said so.

    Attributes:
        name: The same for every detokenizer: its address.
        num_sequences: That have not ended.
        num_tokens: That are to be computed before all of them decode.
        num_seats: Sequences of a step; its share of the load goes by them.
        num_step_tokens: Tokens of a step.
    """

    name: str
    num_sequences: int = 0
    num_tokens: int = 0
    num_seats: int = 1
    num_step_tokens: int = 0


def choose_scheduler(
    key: bytes,
    newcomer: Newcomer,
    works: Sequence[SchedulerWork | None],
    rules: PlacementRules,
) -> int | None:
    """The scheduler for a request; None when there is none at all.

    Args:
        key: Of the prompt, from `prompt_key`.
        newcomer: What the request brings.
        works: Of each scheduler; None for one that is to get nothing.
        rules: What the choice goes by.
    """
    found = [(number, work) for number, work in enumerate(works) if work is not None]
    if len(found) <= 1:
        return found[0][0] if found else None
    excesses = _excesses(newcomer, [work for _, work in found], rules)
    ranked = sorted(
        zip(found, excesses, strict=True),
        key=lambda entry: (-_score(key, entry[0][1]), entry[0][1].name),
    )
    for (number, _), excess in ranked:
        if excess < 1:
            return number
    # One may have too many sequences and another too many tokens: the least evil.
    return min(ranked, key=lambda entry: entry[1])[0][0]


def prompt_key(
    cache_salt: str, prompt_token_ids: bytes, model_digest: str, block_size: int, num_blocks: int
) -> bytes:
    """How a prompt begins: the name that caches have for its first blocks, as many as are full.

    A prompt without a full block is its own: nothing of it can be shared.

    Args:
        cache_salt: Of the request.
        prompt_token_ids: Little-endian uint32.
        model_digest: Of the model.
        block_size: Tokens of a block; 0 where that is not known yet.
        num_blocks: Blocks that count.
    """
    size = block_size or DEFAULT_BLOCK_SIZE
    hashes = BlockHashes(root_hash(model_digest, size, cache_salt), size)
    count = min(num_blocks, len(prompt_token_ids) // (4 * size))
    if not count:
        return sha256(hashes.root + prompt_token_ids).digest()
    hashes.extend(count, array("I", prompt_token_ids[: 4 * size * count]), array("I"))
    return hashes.known[-1]


def _score(key: bytes, work: SchedulerWork) -> float:
    """The larger the earlier; over all keys a scheduler comes first as often as it has seats."""
    drawn = int.from_bytes(sha256(key + work.name.encode()).digest()[:8], "little")
    # In (0, 1): neither the logarithm nor the quotient meets a zero.
    return max(1, work.num_seats) / -math.log((drawn + 0.5) / (_HASH_RANGE + 1))


def _excesses(
    newcomer: Newcomer, works: Sequence[SchedulerWork], rules: PlacementRules
) -> list[float]:
    """Load of each scheduler over its bound; from 1 on it is overloaded."""
    num_seats = sum(max(1, work.num_seats) for work in works)
    num_sequences = sum(work.num_sequences for work in works) + newcomer.num_sequences
    num_tokens = sum(work.num_tokens for work in works) + newcomer.num_tokens
    excesses = []
    for work in works:
        share = rules.skew * max(1, work.num_seats) / num_seats
        most_sequences = share * num_sequences + FREE_SEATS * work.num_seats
        most_tokens = share * num_tokens + work.num_step_tokens
        excesses.append(max(work.num_sequences / most_sequences, work.num_tokens / most_tokens))
    return excesses
