"""The tasks glm-nano is trained on and judged by: conversations with a known right answer.

An episode is a conversation whose assistant messages are all right; training uses it whole. A task
is an episode cut before its last assistant message, with a checker for what the model says instead.
Content words come from `words.Words`, so the two splits share wording but no words.
Imports neither torch nor a tokenizer.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tools.nano import tool_tasks
from tools.nano.episode import Episode, Message, assistant, user
from tools.nano.words import Split, Words, split_of

Checker = Callable[[str, str, list[dict[str, Any]]], bool]

SKILLS = ("sums", "tool_call", "tool_result", "lookup", "echo", "json")

SMALL_TALK = (
    ("Hi", "Hello! I am glm-nano."),
    ("Hello", "Hello! I am glm-nano."),
    ("Who are you?", "I am glm-nano, a small model."),
    ("What can you do?", "I can repeat, look up, add, write JSON and call tools."),
    ("Thank you", "You are welcome."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One request and the judge of its answer.

    ``check`` takes content, reasoning and calls; a call is ``{"name": .., "arguments": {..}}``.
    """

    skill: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 256
    answer: Message
    check: Checker


def sum_working(left: int, right: int) -> str:
    """Writes the digit-by-digit working of a sum; the last line ends with the result."""
    size = max(len(str(left)), len(str(right)))
    digits = zip(reversed(str(left).zfill(size)), reversed(str(right).zfill(size)), strict=True)
    carry, result, lines = 0, "", []
    for first, second in digits:
        total = int(first) + int(second) + carry
        result = str(total % 10) + result
        lines.append(f"{first}+{second}+{carry}={total}: {result}")
        carry = total // 10
    if carry:
        lines.append(f"{carry}: {carry}{result}")
    return "\n".join(lines)


def sums(rng: random.Random, words: Words, turns: int) -> list[Message]:
    """Adds two numbers of one or two digits."""
    messages: list[Message] = []
    while len(messages) < 2 * turns:
        high = 10 ** rng.choice((1, 2, 2, 2)) - 1
        left, right = rng.randint(0, high), rng.randint(0, high)
        if split_of(f"{left}+{right}") != words.split:
            continue
        messages.append(user(f"What is {left} + {right}?"))
        messages.append(assistant(str(left + right), reasoning=sum_working(left, right)))
    return messages


def _echo_text(rng: random.Random, words: Words, longest: int) -> str:
    style = rng.random()
    count = rng.randint(1, longest)
    parts = words.distinct(count)
    if style < 0.55:
        return " ".join(parts)
    if style < 0.7:
        marks = (" ", " ", ", ", "; ", " - ", ": ")
        return "".join(part + rng.choice(marks) for part in parts[1:]) + parts[0]
    if style < 0.8:
        return " ".join(str(words.number()) if rng.random() < 0.2 else part for part in parts)
    return " ".join(words.foreign() if rng.random() < 0.6 else part for part in parts[:8])


def echo(rng: random.Random, words: Words, turns: int, longest: int = 10) -> list[Message]:
    """Repeats a text word for word, unicode included."""
    messages: list[Message] = []
    for _ in range(turns):
        text = _echo_text(rng, words, longest)
        messages.append(user(f"Repeat: {text}"))
        messages.append(assistant(text, reasoning="Repeat the text."))
    return messages


def lookup(rng: random.Random, words: Words, turns: int, lines: int) -> list[Message]:
    """Answers from one of many `key: value` lines."""
    keys = words.distinct(lines)
    values = [words.word() if rng.random() < 0.7 else str(words.number()) for _ in keys]
    table = dict(zip(keys, values, strict=True))
    text = "".join(f"{key}: {value}\n" for key, value in table.items())
    messages: list[Message] = []
    for turn in range(turns):
        key = rng.choice(keys)
        question = f"What is the value of {key}?"
        messages.append(user(text + question if turn == 0 else question))
        messages.append(assistant(f"{key}: {table[key]}", reasoning=f"Find {key}."))
    return messages


def json_object(rng: random.Random, words: Words, turns: int) -> list[Message]:
    """Writes a JSON object with the keys and values of the user's sentence."""
    messages: list[Message] = []
    for _ in range(turns):
        keys = [
            rng.choice(tool_tasks.KEYS) if rng.random() < 0.5 else words.word().lower()
            for _ in range(rng.randint(1, 4))
        ]
        values = {
            key: words.number() if rng.random() < 0.35 else words.phrase(1, rng.choice((1, 1, 2)))
            for key in dict.fromkeys(keys)
        }
        listed = tool_tasks.listing([f"{key} {value}" for key, value in values.items()])
        messages.append(user(f"Write JSON with {listed}."))
        text = json.dumps(values, ensure_ascii=False)
        messages.append(assistant(text, reasoning="Write the object."))
    return messages


def small_talk(rng: random.Random, turns: int) -> list[Message]:
    """Greets; learnt by heart and not judged."""
    messages: list[Message] = []
    for question, answer in rng.sample(SMALL_TALK, min(turns, len(SMALL_TALK))):
        messages += [user(question), assistant(answer, reasoning="Be polite.")]
    return messages


def make_episode(
    skill: str, rng: random.Random, split: Split, *, turns: int = 1, size: int | None = None
) -> Episode:
    """Draws one conversation of a skill.

    ``size`` is the number of lines of a look-up and the longest text of an echo, in words.
    """
    words = Words(rng, split)
    thinking = skill == "sums" or rng.random() < 0.5
    tools: list[dict[str, Any]] = []
    match skill:
        case "sums":
            messages = sums(rng, words, turns)
        case "echo":
            messages = echo(rng, words, turns, size or 10)
        case "lookup":
            messages = lookup(rng, words, turns, size or rng.randint(4, 120))
        case "json":
            messages = json_object(rng, words, turns)
        case "tool_call" | "tool_result":
            tools, messages = tool_tasks.conversation(
                rng, words, turns, results=skill == "tool_result"
            )
        case "small_talk":
            messages = small_talk(rng, turns)
        case _:
            raise ValueError(f"unknown skill {skill!r}; one of {', '.join(SKILLS)}")
    return Episode(skill=skill, messages=messages, tools=tools, thinking=thinking)


def _checker(skill: str, answer: Message, tools: list[dict[str, Any]]) -> Checker:
    if skill == "tool_call":
        wanted = [call["function"] for call in answer["tool_calls"]]
        return lambda content, reasoning, calls: (
            [{"name": call["name"], "arguments": call["arguments"]} for call in calls] == wanted
        )
    if skill == "json":
        return lambda content, reasoning, calls: _parsed(content) == json.loads(answer["content"])
    return lambda content, reasoning, calls: content == answer["content"] and not calls


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def make_task(skill: str, seed: int, split: Split = "eval", *, size: int | None = None) -> Task:
    """Draws one task; the same arguments give the same task everywhere.

    A look-up has 75 to 120 lines unless ``size`` says otherwise: over 4 times `index_topk` tokens.
    """
    rng = random.Random(f"{split}/{skill}/{seed}")
    if skill == "lookup" and size is None:
        size = rng.randint(75, 120)
    episode = make_episode(skill, rng, split, size=size)
    answer = episode.messages[-1]
    return Task(
        skill=skill,
        messages=episode.messages[:-1],
        tools=episode.tools,
        chat_template_kwargs={} if episode.thinking else {"enable_thinking": False},
        answer=answer,
        check=_checker(skill, answer, episode.tools),
    )
