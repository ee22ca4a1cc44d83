"""Writes ``docs/options.md`` from the tables of the launcher.

python -m tools.options_page
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from services.launcher.options.conflicts.table import CONFLICTS
from services.launcher.options.deployment import named
from services.launcher.options.environment import LEGACY, Environment
from services.launcher.options.fields import Options, groups_in, spelled
from services.launcher.options.idle import IDLE
from services.launcher.options.passing import PASSED
from services.launcher.options.rules import Conflict
from services.launcher.options.serve import SHORT, ServeOptions
from services.launcher.options.unbuilt import UNBUILT
from services.launcher.settings import UpSettings

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "options.md"

BEGIN = "<!-- written by tools/options_page.py -->\n"
END = "<!-- end -->\n"
_HEAD = "| option | what it does here | default | conflicts |\n|---|---|---|---|\n"
_CONFLICT_HEAD = "| rule | options | outcome | why | source |\n|---|---|---|---|---|\n"


def main() -> int:
    """Write the tables between their marks; exit code 1 when they were out of date."""
    old = PAGE.read_text(encoding="utf-8")
    new = update(old)
    PAGE.write_text(new, encoding="utf-8")
    return int(new != old)


def update(page: str) -> str:
    """`page` with the tables as they should be."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{render()}{END}{rest.split(END)[1]}"


def render() -> str:
    """All tables."""
    return "\n".join(
        [
            "## Settings of `glm-mesh up`\n",
            _HEAD + "".join(_row(f"settings.{name}") for name in UpSettings.model_fields),
            "## Flags of `vllm serve`\n",
            _HEAD + "".join(_row(path) for path in _flags()),
            "## Keys of flags that take JSON\n",
            _HEAD + "".join(_row(path) for path in _keys()),
            "## Environment variables\n",
            _HEAD + "".join(_row(f"environment.{name}") for name in Environment.model_fields),
            "Older forms of keys; where both are given, the key wins: "
            + ", ".join(f"`{variable}` for `{key}`" for variable, key in LEGACY.items())
            + ".\n",
            f"## Conflicts ({len(CONFLICTS)})\n",
            _CONFLICT_HEAD + "".join(_conflict_row(rule) for rule in CONFLICTS),
        ]
    )


def _flags() -> Iterator[str]:
    yield from ServeOptions.model_fields


def _keys() -> Iterator[str]:
    """Every key of a JSON flag, outer ones first."""
    for name, field in ServeOptions.model_fields.items():
        for group in groups_in(field.annotation):
            yield from _inner(name, group, seen=frozenset())


def _inner(path: str, group: type[Options], seen: frozenset[type[Options]]) -> Iterator[str]:
    for name, field in group.model_fields.items():
        inner = groups_in(field.annotation)
        if inner and inner[0] in seen:
            yield f"{path}.{name}"
            continue
        if not inner or field.description:
            yield f"{path}.{name}"
        for deeper in inner:
            yield from _inner(f"{path}.{name}", deeper, seen | {group})


def _row(path: str) -> str:
    cells = (_named(path), _does(path), _default(path), ", ".join(_conflicts_of(path)))
    return f"| {' | '.join(_escaped(cell) for cell in cells)} |\n"


def _named(path: str) -> str:
    root, _, inner = path.partition(".")
    name = named(path)
    if root == "settings" or not inner:
        short = next((form for form, flag in SHORT.items() if flag == name), None)
        return f"`{name}`" + (f" `{short}`" if short else "")
    return f"`{name}`"


def _does(path: str) -> str:
    """Description, and what the tables say of the option itself."""
    parts = [_described(path)]
    parts += [
        f"Becomes `{passed.flag}` of the {passed.service}."
        for passed in PASSED
        if passed.name == path
    ]
    parts += [f"Refused: {rule.missing}." for rule in UNBUILT if rule.name == path]
    for rule in IDLE:
        if path in rule.names:
            case = "" if rule.when is None else " in one case"
            parts.append(f"No effect{case}: {rule.reason}.")
    return " ".join(part for part in parts if part)


def _field(path: str) -> tuple[type[Options] | type[UpSettings], str]:
    """The model and the name of a path's last part."""
    root, _, inner = path.partition(".")
    if root == "settings":
        return UpSettings, inner
    parts = path.split(".")
    model: type[Options] = ServeOptions
    if root == "environment":
        parts, model = parts[1:], Environment
    for part in parts[:-1]:
        model = groups_in(model.model_fields[part].annotation)[0]
    return model, parts[-1]


def _described(path: str) -> str:
    model, name = _field(path)
    text = model.model_fields[name].description or ""
    return text if not text or text.endswith(".") else f"{text}."


def _default(path: str) -> str:
    model, name = _field(path)
    field = model.model_fields[name]
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value == [] or isinstance(value, Options):
        return ""
    return f"`{spelled(value)}`"


def _conflicts_of(path: str) -> Iterable[str]:
    return [f"[{rule.key}](#{rule.key})" for rule in CONFLICTS if path in rule.names]


def _conflict_row(rule: Conflict) -> str:
    names = "<br>".join(f"`{_conflict_name(name)}`" for name in rule.names)
    cells = (
        f'<a id="{rule.key}"></a>{rule.key}',
        names,
        rule.outcome.value,
        rule.text,
        rule.source,
    )
    return f"| {' | '.join(_escaped(cell) for cell in cells)} |\n"


def _conflict_name(path: str) -> str:
    root, _, inner = path.partition(".")
    return f"--model: {inner}" if root == "model" else named(path)


def _escaped(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("|", r"\|"))


if __name__ == "__main__":
    sys.exit(main())
