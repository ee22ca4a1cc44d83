"""Reads calibration prompts: a file with one on each line, as text, chat or token ids.

A line of a `.jsonl` file is JSON: a string, a list of token ids, a list of chat messages, or an
object with "text", "token_ids" or "messages" (and, as in a request, "tools" and
"chat_template_kwargs"). A line of any other file is text. A chat that ends with what the model said
is taken as it is, any other one as a question to it.
"""

import functools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shared.errors import ConfigError, RequestError
from shared.glm.dialect import Dialect

DEFAULT_FILE: Final = "calibration.jsonl"
"""Used when a checkpoint has it and nothing else is asked for."""

# Lines are drawn in this order, so that a file sorted by topic is not cut off at one.
_SEED: Final = 0
_MESSAGES_KEYS: Final = frozenset({"messages", "tools", "chat_template_kwargs"})


def read_prompts(
    file: Path, model: Path, *, vocab_size: int, max_tokens: int, max_length: int
) -> list[list[int]]:
    """Token ids of prompts.

    Args:
        file: The prompts.
        model: The checkpoint; its tokenizer and chat template are used where a line is no ids.
        vocab_size: Ids are below it.
        max_tokens: How many tokens to take in all; the last prompt is cut off there.
        max_length: Longest prompt; what is behind it is cut off.

    Raises:
        ConfigError: The file cannot be read, has no prompt, or a line is none of the above.
        CheckpointError: The tokenizer or template cannot be used.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--calibration {file}: cannot be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    random.Random(_SEED).shuffle(numbered)
    dialect = functools.cache(lambda: Dialect.load(model))
    is_json = file.suffix == ".jsonl"
    prompts: list[list[int]] = []
    left = max_tokens
    for number, line in numbered:
        where = f"--calibration {file}: line {number}"
        value = _parse(line, where) if is_json else line
        ids = _checked(_encode(value, dialect, where), vocab_size, where)
        ids = ids[: min(max_length, left)]
        left -= len(ids)
        if ids:
            prompts.append(ids)
        if not left:
            break
    if not prompts:
        raise ConfigError(f"--calibration {file}: has no prompt")
    return prompts


def _parse(line: str, where: str) -> Any:  # noqa: ANN401 - any JSON value
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is no JSON: {error}") from error


def _encode(value: Any, dialect: Callable[[], Dialect], where: str) -> Sequence[int]:  # noqa: ANN401
    """Token ids of a prompt in any of the forms."""
    if isinstance(value, Mapping):
        value = _content(value, where)
    if isinstance(value, str):
        return dialect().encode(value, allow_control=True)
    if isinstance(value, list) and all(type(entry) is int for entry in value):
        return value
    if isinstance(value, list):
        value = {"messages": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: is {value!r}, must be text, chat or token ids")
    return _render(value, dialect(), where)


def _content(value: Mapping[str, Any], where: str) -> Any:  # noqa: ANN401 - any JSON value
    """What an object holds: its text or ids, or itself if it is a chat."""
    if "messages" in value:
        unknown = sorted(value.keys() - _MESSAGES_KEYS)
        if unknown:
            raise ConfigError(f"{where}: has unknown key {unknown[0]!r}")
        return value
    kinds = {"text": str, "token_ids": list}
    if len(value) == 1:
        for key, kind in kinds.items():
            if isinstance(value.get(key), kind):
                return value[key]
    raise ConfigError(f"{where}: must be an object with one of text, token_ids, messages")


def _render(chat: Mapping[str, Any], dialect: Dialect, where: str) -> list[int]:
    messages = chat["messages"]
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages is {messages!r}, must be a list of messages")
    try:
        is_answered = messages[-1].get("role") == "assistant"
        prompt = dialect.render_chat(
            messages,
            chat.get("tools"),
            template_kwargs=chat.get("chat_template_kwargs") or {},
            add_generation_prompt=not is_answered,
        )
    except RequestError as error:
        raise ConfigError(f"{where}: {error.message}") from error
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}: is no chat: {error!r}") from error
    return prompt.token_ids


def _checked(ids: Sequence[int], vocab_size: int, where: str) -> list[int]:
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ConfigError(f"{where}: token id {wrong} is outside the vocabulary of {vocab_size}")
    return list(ids)
