"""Scheduler and worker together, through their messages: drafts change nothing but the steps."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from services.worker.model_build import build_model_executor
from services.worker.settings import WorkerSettings
from shared.endings import FinishReason
from tests.services.pair import Pair, Stream
from tests.services.worker.drafting_cases import PROMPTS, SAMPLINGS
from tests.services.worker.fake_decoder import make_executor
from tools.nano.tasks import SKILLS, make_task
from tools.nano.template import ChatTemplate

NANO = Path(__file__).parents[2] / "models" / "glm-nano"


def run_cases(
    num_drafts: int, indices: Sequence[int], *, window: int = 1, skill: float = 0.7, **limits: int
) -> Pair:
    """Sequences of the fake model, whose drafts are right at a share of all contexts."""
    values = {"num_blocks": 60, "max_num_batched_tokens": 60, "max_num_seqs": 6, "num_rows": 12}
    executor = make_executor(skill=skill, **(values | limits), num_speculative_tokens=num_drafts)
    pair = Pair(executor, max_plans_in_flight=window)
    for index in indices:
        pair.add(PROMPTS[index], max_tokens=15, **SAMPLINGS[index])
    pair.run()
    return pair


@pytest.fixture(scope="module")
def plain() -> list[Stream]:
    """What each case gives alone and without drafts."""
    return [run_cases(0, [index]).streams[0] for index in range(8)]


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("num_drafts", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_tokens_and_logprobs_are_those_of_runs_without_drafts(
    seed: int, num_drafts: int, window: int, plain: list[Stream]
) -> None:
    """Any mix of requests, chunks and preemptions; the fake model checks what it reads."""
    dice = random.Random(seed)
    indices = [dice.randrange(8) for _ in range(10)]
    pair = run_cases(
        num_drafts,
        indices,
        window=window,
        num_blocks=dice.choice([12, 16, 60]),
        max_num_batched_tokens=dice.choice([12, 20, 60]),
    )
    for index, stream in zip(indices, pair.streams, strict=True):
        assert stream.tokens == plain[index].tokens
        assert stream.logprobs == plain[index].logprobs
        assert stream.end is not None
        assert plain[index].end is not None
        assert stream.end.finish_reason == plain[index].end.finish_reason


@pytest.mark.parametrize("window", [1, 2])
def test_preemption_is_part_of_these_tests(window: int) -> None:
    pair = run_cases(3, [0, 1, 2, 3, 4, 5] * 2, window=window, num_blocks=12)
    load = pair.core.load()
    assert load.num_preemptions_total > 0
    assert sum(load.num_accepted_tokens_per_position) > 0


@pytest.mark.parametrize("window", [1, 2])
def test_good_drafts_save_steps(window: int) -> None:
    steps = [
        run_cases(count, [0], window=window, skill=1.0).core.load().num_steps_total
        for count in (0, 1, 3)
    ]
    assert steps[0] > 1.5 * steps[1]
    assert steps[1] > 1.4 * steps[2]


NANO_SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "seed": 4, "top_p": 0.9, "num_logprobs": 2},
    {"temperature": 0.0, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    {"temperature": 0.0, "min_tokens": 40, "num_logprobs": 0},
    {"temperature": 0.7, "seed": 5, "min_p": 0.02, "logit_bias": ((100, 2.0),)},
]


@pytest.fixture(scope="module")
def nano_prompts() -> list[list[int]]:
    """One prompt of each skill."""
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    template = ChatTemplate(NANO)
    prompts = []
    for skill in SKILLS:
        task = make_task(skill, 11)
        text = template.render(task.messages, task.tools or None)
        prompts.append(tokenizer.encode(text, add_special_tokens=False).ids)
    return prompts


@pytest.fixture(scope="module")
def run_nano(nano_prompts: list[list[int]]) -> Callable[..., Pair]:
    """All prompts, each with its sampling, through glm-nano in float32."""
    num_threads = torch.get_num_threads()

    def run(num_drafts: int, *, window: int = 1, preempt_every: int = 0) -> Pair:
        settings = WorkerSettings(
            address="unix:/tmp/w.sock",
            model=NANO,
            num_speculative_tokens=num_drafts,
            num_kv_blocks=60,
            max_model_len=1024,
            max_num_batched_tokens=192,
            max_num_seqs=8,
            num_threads=1,
            dtype="float32",
        )
        pair = Pair(build_model_executor(settings, NANO), max_plans_in_flight=window)
        for prompt, sampling in zip(nano_prompts, NANO_SAMPLINGS, strict=True):
            pair.add(prompt, max_tokens=60, eos_token_ids=(846, 853, 855), **sampling)
        pair.run(preempt_every)
        torch.set_num_threads(num_threads)
        return pair

    return run


@pytest.fixture(scope="module")
def plain_nano(run_nano: Callable[..., Pair]) -> list[Stream]:
    return run_nano(0).streams


@pytest.mark.parametrize(
    ("num_drafts", "window", "preempt_every"), [(1, 2, 5), (3, 1, 0), (3, 2, 7), (5, 1, 4)]
)
def test_the_trained_model_says_the_same_with_drafts(
    num_drafts: int,
    window: int,
    preempt_every: int,
    run_nano: Callable[..., Pair],
    plain_nano: list[Stream],
) -> None:
    pair = run_nano(num_drafts, window=window, preempt_every=preempt_every)
    for stream, other in zip(pair.streams, plain_nano, strict=True):
        assert stream.tokens == other.tokens
        # The products and the attention of the CPU are bitwise the same in any batch.
        assert stream.logprobs == other.logprobs
    load = pair.core.load()
    # Most first drafts of the trained layer are right, and steps are saved.
    assert (load.num_preemptions_total > 0) == (preempt_every > 0)
    first = load.num_accepted_tokens_per_position[0] / load.num_drafts_total
    assert first > 0.6
    assert any(one.end and one.end.finish_reason is FinishReason.STOP for one in pair.streams)
