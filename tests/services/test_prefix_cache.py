"""Scheduler and worker together: sharing blocks, and other switches, change no output.

glm-nano in float32, prompts longer than what attention selects, many that begin alike. The CPU's
products and attention are bitwise the same in any batch, so tokens and logprobs have to be equal.
"""

import itertools
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from services.worker.kv_cache import KVCaches
from services.worker.model_build import build_model_executor
from services.worker.settings import WorkerSettings
from shared.block_hashes import BlockHashes, root_hash
from tests.services.pair import Pair
from tests.services.worker.drafting_cases import PROMPTS, SAMPLINGS
from tests.services.worker.fake_decoder import make_executor
from tools.nano.tasks import make_task
from tools.nano.template import ChatTemplate

NANO = Path(__file__).parents[2] / "models" / "glm-nano"
EOS = (846, 853, 855)
SIZE = 128
# One greedy, one random, one whose penalties look at the prompt, one with logprobs.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "num_logprobs": 0},
    {"temperature": 0.9, "seed": 3, "num_logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.0, "num_logprobs": 3},
]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The builder sets torch's threads for its process: put them back for the other tests."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Two pages of lines that are looked up in; the questions come last."""
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    template = ChatTemplate(NANO)
    found = []
    for seed in (0, 1):
        task = make_task("lookup", seed)
        text = template.render(task.messages, None)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        # The whole, a start of it that goes on otherwise, and two cut at and behind the end of a
        # block: the last one finds all but one token, and starts like a row that decodes.
        found += [ids, [*ids[:400], *ids[:9]], ids[: 4 * SIZE], ids[: 4 * SIZE + 1]]
    return found


def executor(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "num_speculative_tokens": 0,
        "num_kv_blocks": 60,
        "max_num_batched_tokens": 300,
    }
    settings = WorkerSettings(
        address="unix:/tmp/w.sock",
        model=NANO,
        max_model_len=1536,
        max_num_seqs=6,
        num_threads=1,
        dtype="float32",
        **(values | changes),
    )
    return build_model_executor(settings, NANO)


def run(
    prompts: list[list[int]], *, cache: bool, window: int = 1, preempt_every: int = 0, **worker: Any
) -> Pair:
    """All prompts in all kinds, a second turn of each, and each once more."""
    pair = Pair(executor(**worker), max_plans_in_flight=window, enable_prefix_caching=cache)
    pairs = [*itertools.product(prompts, KINDS[:2]), *zip(prompts, itertools.cycle(KINDS[2:]))]
    for prompt, kind in pairs:
        pair.add(prompt, max_tokens=20, eos_token_ids=EOS, **kind)
    pair.run(preempt_every)
    for stream, kind in zip(pair.streams[2:6], KINDS, strict=True):
        turn = [*stream.prompt, *stream.tokens, *range(300, 320)]
        pair.add(turn, max_tokens=20, eos_token_ids=EOS, **kind)
    pair.run(preempt_every)
    return pair


def outputs(pair: Pair) -> list[tuple[list[int], list[Any]]]:
    return [(stream.tokens, stream.logprobs) for stream in pair.streams]


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> list[tuple[list[int], list[Any]]]:
    """What comes out where nothing is shared."""
    pair = run(prompts, cache=False)
    assert pair.core.load().num_prefix_cache_hits_total == 0
    return outputs(pair)


# Whether starts are shared, drafts, plans in flight, steps between preemptions, blocks.
SWITCHES = [
    (True, 0, 1, 0, 60),
    (True, 0, 2, 9, 60),
    (True, 3, 1, 0, 60),
    (True, 3, 2, 7, 60),
    # So few that sequences give way by themselves.
    (True, 0, 2, 0, 16),
    (True, 3, 2, 5, 18),
    (True, 0, 1, 6, 60),
    (False, 3, 2, 8, 20),
]
# What the others are held against.
PLAIN = (False, 0, 1, 0, 60)


@pytest.mark.parametrize(
    ("cache", "num_drafts", "window", "preempt_every", "num_kv_blocks"), SWITCHES
)
def test_the_same_tokens_and_logprobs_whatever_is_switched_on(
    cache: bool,
    num_drafts: int,
    window: int,
    preempt_every: int,
    num_kv_blocks: int,
    prompts: list[list[int]],
    plain: list[tuple[list[int], list[Any]]],
) -> None:
    """Sharing starts, drafts, preemption and planning one step ahead: greedy and sampled."""
    pair = run(
        prompts,
        cache=cache,
        window=window,
        preempt_every=preempt_every,
        num_speculative_tokens=num_drafts,
        num_kv_blocks=num_kv_blocks,
    )
    assert outputs(pair) == plain
    load = pair.core.load()
    assert (load.num_prefix_cache_hits_total > 2000) == cache
    assert (load.num_preemptions_total > 0) == (preempt_every > 0)
    assert (sum(load.num_accepted_tokens_per_position) > 0) == (num_drafts > 0)
    # Plans that the worker had at once.
    assert pair.max_in_flight == window


def test_every_two_of_these_switches_meet_in_every_position() -> None:
    seen = {
        frozenset(two)
        for cache, drafts, window, preempt, _ in (PLAIN, *SWITCHES)
        for two in itertools.combinations(
            enumerate((cache, drafts > 0, window == 2, preempt > 0)), 2
        )
    }
    assert len(seen) == 6 * 4


def test_eight_bit_caches_are_shared_as_they_are(prompts: list[list[int]]) -> None:
    caches = {"enable_sparse_li_c8": True, "enable_sparse_sfa_c8": True}
    alone = run(prompts[:4], cache=False, **caches)
    shared = run(prompts[:4], cache=True, num_speculative_tokens=3, window=2, **caches)
    # What is read is what was written, whoever wrote it: not even a rounding step differs.
    assert outputs(shared) == outputs(alone)
    assert shared.core.load().num_prefix_cache_hits_total > 2000


def test_every_cache_of_a_shared_block_is_complete(prompts: list[list[int]]) -> None:
    """Latents, indexer keys and those of the MTP layer: as if the text were computed in one go.

    What drafts wrote, right ones and wrong ones, and chunks that end within blocks leave no trace.
    """
    pair = run(prompts, cache=True, window=2, num_speculative_tokens=3, max_num_batched_tokens=150)
    names = {}
    for stream in pair.streams:
        text = stream.prompt + stream.tokens
        chain = BlockHashes(root_hash(*pair.core.block_naming, ""), SIZE)
        chain.extend((len(text) - 1) // SIZE, array("I", text), array("I"))
        names |= {name: (text, place) for place, name in enumerate(chain.known)}
    named = pair.core.cache_log.read(None).snapshot or ()
    assert len(named) > 10
    fresh: dict[tuple[int, ...], KVCaches] = {}
    for block in named:
        text, place = names[block.block_hash]
        if tuple(text) not in fresh:
            fresh[tuple(text)] = computed_at_once(text)
        _compare(pair.executor._caches, block.block, fresh[tuple(text)], place + 1)


def computed_at_once(text: list[int]) -> KVCaches:
    """Caches of a sequence alone, in blocks 1, 2, 3 and so on."""
    alone = executor(num_speculative_tokens=3, num_kv_blocks=14, max_num_batched_tokens=1536)
    pair = Pair(alone, enable_prefix_caching=False)
    pair.add(text, max_tokens=1, temperature=0.0)
    pair.run()
    alone.finish_step()
    return alone._caches  # type: ignore[no-any-return]  # any executor


def _compare(caches: KVCaches, block: int, others: KVCaches, place: int) -> None:
    for number, (layer, other) in enumerate(zip(caches.layers, others.layers, strict=True)):
        for name in ("latent", "rope", "indexer", "indexer_scale"):
            ours, theirs = getattr(layer, name), getattr(other, name)
            assert (ours is None) == (theirs is None)
            if ours is not None:
                # The last slot of the MTP layer also knows the token behind the block, which
                # whoever computed it first may have had another of: it costs a draft, no token.
                end = SIZE - 1 if number == len(caches.layers) - 1 else SIZE
                assert torch.equal(ours[block][:end], theirs[place][:end]), (name, number)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("num_blocks", [14, 60])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_any_mix_of_small_requests_is_the_same(
    num_drafts: int, num_blocks: int, window: int
) -> None:
    """The fake model checks each position that it reads."""

    def mix(*, cache: bool) -> list[tuple[list[int], list[Any]]]:
        limits = {"num_blocks": num_blocks, "max_num_batched_tokens": 20, "num_rows": 12}
        made = make_executor(max_num_seqs=6, num_speculative_tokens=num_drafts, **limits)
        pair = Pair(made, max_plans_in_flight=window, enable_prefix_caching=cache)
        for turn in range(3):
            for index, sampling in enumerate(SAMPLINGS):
                pair.add(PROMPTS[7][: 5 + index + turn], max_tokens=15, **sampling)
            pair.run()
        hits = pair.core.load().num_prefix_cache_hits_total
        assert (hits > 0) == cache
        return outputs(pair)

    assert mix(cache=True) == mix(cache=False)


def test_drafts_are_as_good_behind_a_shared_start(prompts: list[list[int]]) -> None:
    """One slot in a block's length is of another text: hardly a draft is lost by it."""
    alone, shared = (
        run(prompts[:4], cache=on, num_speculative_tokens=1).core.load() for on in (False, True)
    )
    share = [
        load.num_accepted_tokens_per_position[0] / load.num_drafts_total for load in (alone, shared)
    ]
    assert share[1] > share[0] - 0.02
