"""A command line of `vllm serve` taken apart: its options, and the words of `up`'s own settings.

Takes `--flag value`, `--flag=value`, dashes or underscores, short forms, `--no-flag`, JSON over
several lines, and single JSON keys as `--flag.key value`. Mistakes are kept beside the rest.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_origin

from services.launcher.options.fields import read_json
from services.launcher.options.serve import FLAGS, JSON_FLAGS, LISTS, SHORT, SWITCHES
from services.launcher.settings import UpSettings
from shared.config import flag_of
from shared.errors import ConfigError

OWN: Final = {flag_of(name): name for name in UpSettings.model_fields}
_REPEATABLE: Final = frozenset(
    flag_of(name)
    for name, field in UpSettings.model_fields.items()
    if get_origin(field.annotation) is list
)
# The one flag of `up` that vLLM lets take several words.
_GREEDY: Final = "--served-model-name"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """What was read.

    Attributes:
        values: Field of `ServeOptions` -> value as it was given, JSON already read.
        rest: Words for the settings of `up`; a checkpoint without a flag has become `--model`.
        problems: What is wrong with the words themselves.
        lines: What is right but must be told.
    """

    values: Mapping[str, Any]
    rest: tuple[str, ...]
    problems: tuple[str, ...]
    lines: tuple[str, ...]


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Take a command line apart."""
    reader = _Reader(argv)
    reader.read()
    return CommandLine(
        values=reader.values,
        rest=tuple(reader.rest),
        problems=tuple(reader.problems),
        lines=tuple(reader.lines),
    )


class _Reader:
    """One pass over the words."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._words = list(argv)
        self._next = 0
        self._has_model = False
        self._own: dict[str, str] = {}
        self.values: dict[str, Any] = {}
        self.rest: list[str] = []
        self.problems: list[str] = []
        self.lines: list[str] = []

    def read(self) -> None:
        """Go through all words."""
        while self._next < len(self._words):
            word = self._words[self._next]
            self._next += 1
            if not _is_flag(word):
                self._take_model(word)
                continue
            try:
                self._take_flag(word)
            except ConfigError as error:
                self.problems.append(str(error))

    def _take_model(self, word: str) -> None:
        if self._has_model:
            self.problems.append(f"{word}: belongs to no option, and the checkpoint is given")
            return
        self._has_model = True
        self._put_own("--model", word)
        self.rest += ["--model", word]

    def _take_flag(self, word: str) -> None:
        flag, equals, value = _normal(word).partition("=")
        name, _, key = flag.partition(".")
        if name in FLAGS and (not key or FLAGS[name] in JSON_FLAGS):
            self._take_option(FLAGS[name], flag, value if equals else None)
        elif flag in OWN:
            self._take_own(flag, value if equals else None)
        elif flag.startswith("--no-") and FLAGS.get("--" + flag[5:]) in SWITCHES:
            self._take_switch(FLAGS["--" + flag[5:]], flag, value if equals else None, to=False)
        elif flag in {"--help", "-h"}:
            self.rest.append("--help")
        else:
            if not equals and self._has_value():
                self._next += 1  # most likely its value; it is no checkpoint
            raise ConfigError(f"unknown option {flag}{_near(flag)}")

    def _take_option(self, name: str, flag: str, value: str | None) -> None:
        if name in SWITCHES:
            self._take_switch(name, flag, value, to=True)
        elif name in JSON_FLAGS:
            self._take_json(name, flag, self._value(flag, value))
        elif name in LISTS:
            self.values.setdefault(name, []).extend(self._several(flag, value))
        else:
            self._put(name, flag, self._value(flag, value))

    def _take_switch(self, name: str, flag: str, value: str | None, *, to: bool) -> None:
        if value is not None:
            off = flag_of("no_" + name)
            raise ConfigError(f"{flag}={value}: takes no value; {flag_of(name)} or {off} it is")
        self._put(name, flag, to)

    def _take_json(self, name: str, flag: str, text: str) -> None:
        _, _, key = flag.partition(".")
        if not key:
            self._put(name, flag, read_json(flag, text), is_whole=True)
            return
        # `a.b` under --flag is {"a": {"b": value}}; dashes became of underscores in the keys, too.
        holder = self.values.setdefault(name, {})
        *outer, last = key.replace("-", "_").split(".")
        for part in outer:
            holder = holder.setdefault(part, {})
            if not isinstance(holder, dict):
                raise ConfigError(f"{flag}: {part} has a value already")
        if last in holder:
            raise ConfigError(f"{flag}: {last} is given twice")
        holder[last] = _json_or_text(text)

    def _take_own(self, flag: str, value: str | None) -> None:
        if flag == "--model":
            self._has_model = True
        if flag == _GREEDY:
            for word in self._several(flag, value):
                self.rest += [flag, word]
            return
        if value is not None:
            self.rest.append(f"{flag}={value}")
            self._put_own(flag, value)
        elif self._has_value():
            self.rest += [flag, self._value(flag, None)]
            self._put_own(flag, self.rest[-1])
        else:
            self.rest.append(flag)  # the settings tell that its value is missing

    def _put_own(self, flag: str, value: str) -> None:
        if flag not in _REPEATABLE and self._own.setdefault(flag, value) != value:
            self.lines.append(f"{flag} is given twice: {flag} {value} counts")
            self._own[flag] = value

    def _put(self, name: str, flag: str, value: object, *, is_whole: bool = False) -> None:
        if name in self.values:
            if is_whole and self.values[name] != value:
                raise ConfigError(f"{flag_of(name)} is given twice")
            if self.values[name] != value:
                last = flag if isinstance(value, bool) else f"{flag} {value}"
                self.lines.append(f"{flag_of(name)} is given twice: {last} counts")
        self.values[name] = value

    def _value(self, flag: str, value: str | None) -> str:
        if value is not None:
            return value
        if not self._has_value():
            raise ConfigError(f"{flag} needs a value")
        self._next += 1
        return self._words[self._next - 1]

    def _several(self, flag: str, value: str | None) -> list[str]:
        words = [self._value(flag, value)]
        while value is None and self._has_value():
            words.append(self._value(flag, None))
        return words

    def _has_value(self) -> bool:
        return self._next < len(self._words) and not _is_flag(self._words[self._next])


def _is_flag(word: str) -> bool:
    """Whether a word names an option; a negative number, a lone dash and JSON do not."""
    return word.startswith("-") and not word[1:2].isdigit() and len(word) > 1


def _normal(word: str) -> str:
    flag, equals, value = word.partition("=")
    if flag.startswith("--"):
        flag = flag.replace("_", "-")
    name, dot, key = flag.partition(".")
    return SHORT.get(name, name) + dot + key + equals + value


def _near(flag: str) -> str:
    known = [*FLAGS, *OWN, "--help"]
    close = difflib.get_close_matches(flag, known, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else "; see --help"


def _json_or_text(text: str) -> Any:  # noqa: ANN401  # any JSON
    try:
        return json.loads(text)
    except ValueError:
        return text
