"""Who asks for what, when: requests whose tokens follow from a seed.

A conversation is a list of turns; a turn's prompt is all that was said before it, the answers
included, and some new tokens. Its next turn comes a while after its answer.
"""

import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

VOCABULARY: Final = 150_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """New tokens of a prompt, length of the answer, seconds to think before it is asked."""

    num_new_tokens: int
    num_output_tokens: int
    pause_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Conversation:
    """Turns one after the other; most have a single one."""

    arrives_at: float
    turns: list[Turn]
    prefix: "array[int]" = field(default_factory=lambda: array("I"))
    tenant_id: str = ""
    priority: int = 0
    forgets: bool = False
    """Whether each turn starts from the prefix again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much of a trace: requests (conversations) per second, for how long."""

    rate: float
    seconds: float
    seed: int = 0


Trace = Callable[[Load], list[Conversation]]


def poisson(load: Load) -> list[Conversation]:
    """Chats: prompts around 700 tokens, answers around 200."""
    dice = random.Random(load.seed)
    return [_chat(dice, at) for at in _arrivals(dice, load)]


def short(load: Load) -> list[Conversation]:
    """Classification and the like: 100 tokens in, 16 out; for rates of thousands."""
    dice = random.Random(load.seed)
    return [
        Conversation(arrives_at=at, turns=[Turn(num_new_tokens=100, num_output_tokens=16)])
        for at in _arrivals(dice, load)
    ]


def bursts(load: Load) -> list[Conversation]:
    """The same chats, five times the rate for two seconds of each ten."""
    dice = random.Random(load.seed)
    found = []
    for at in _arrivals(dice, Load(rate=5 * load.rate, seconds=load.seconds, seed=load.seed)):
        if at % 10.0 < 2.0:
            found.append(_chat(dice, at))
    return found


def agents(load: Load) -> list[Conversation]:
    """Agents: one of four system prompts of 6,000 tokens, six turns of tool results."""
    dice = random.Random(load.seed)
    prefixes = [tokens(10_000 + kind, 6000) for kind in range(4)]
    found = []
    for at in _arrivals(dice, load):
        turns = [
            Turn(
                num_new_tokens=_length(dice, 600, 8000),
                num_output_tokens=_length(dice, 150, 2000),
                pause_s=dice.expovariate(1 / 2.0),
            )
            for _ in range(6)
        ]
        found.append(Conversation(arrives_at=at, turns=turns, prefix=dice.choice(prefixes)))
    return found


def mixed(load: Load) -> list[Conversation]:
    """Chats, and among a hundred requests two with prompts of 100,000 tokens."""
    dice = random.Random(load.seed)
    found = []
    for number, at in enumerate(_arrivals(dice, load)):
        if number % 50 == 20:
            turn = Turn(num_new_tokens=100_000, num_output_tokens=_length(dice, 200, 2000))
            found.append(Conversation(arrives_at=at, turns=[turn]))
        else:
            found.append(_chat(dice, at))
    return found


def tenants(load: Load) -> list[Conversation]:
    """Four tenants ask for a tenth each, a fifth one for the rest."""
    dice = random.Random(load.seed)
    found = []
    for at in _arrivals(dice, load):
        chat = _chat(dice, at)
        draw = dice.random()
        chat.tenant_id = "heavy" if draw >= 0.4 else f"light-{int(draw * 10)}"
        found.append(chat)
    return found


def urgent(load: Load) -> list[Conversation]:
    """Chats, of which one in ten is urgent (priority -1)."""
    dice = random.Random(load.seed)
    found = [_chat(dice, at) for at in _arrivals(dice, load)]
    for chat in found:
        chat.priority = -1 if dice.random() < 0.1 else 0
    return found


def long_answers(load: Load) -> list[Conversation]:
    """Reasoning: prompts around 700 tokens, answers around 2,000; blocks run short."""
    dice = random.Random(load.seed)
    return [
        Conversation(
            arrives_at=at,
            turns=[
                Turn(
                    num_new_tokens=_length(dice, 700, 20_000),
                    num_output_tokens=_length(dice, 2000, 12_000),
                )
            ],
        )
        for at in _arrivals(dice, load)
    ]


TRACES: Final[dict[str, Trace]] = {
    "poisson": poisson,
    "short": short,
    "bursts": bursts,
    "agents": agents,
    "mixed": mixed,
    "tenants": tenants,
    "urgent": urgent,
    "long_answers": long_answers,
}


def tokens(seed: int, count: int) -> "array[int]":
    """Token ids that follow from a seed."""
    dice = random.Random(seed)
    start = dice.randrange(VOCABULARY)
    step = dice.randrange(1, VOCABULARY)
    return array("I", [(start + number * step) % VOCABULARY for number in range(count)])


def _arrivals(dice: random.Random, load: Load) -> Iterator[float]:
    at = dice.expovariate(load.rate)
    while at < load.seconds:
        yield at
        at += dice.expovariate(load.rate)


def _chat(dice: random.Random, at: float) -> Conversation:
    turn = Turn(
        num_new_tokens=_length(dice, 700, 20_000), num_output_tokens=_length(dice, 200, 4000)
    )
    return Conversation(arrives_at=at, turns=[turn])


def _length(dice: random.Random, median: int, most: int) -> int:
    """Lengths of requests are spread like this: many short ones, few long ones."""
    return max(1, min(most, round(median * dice.lognormvariate(0.0, 0.8))))
