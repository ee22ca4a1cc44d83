"""What the sources take from torch_npu, and from torch for the device's sake, and how."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

PREFIXES = ("torch.accelerator.", "torch.npu.", "torch_npu.")
_LIBRARY = "torch_npu"


class Way(StrEnum):
    """What is done with a name."""

    READ = "read"
    CALLED = "called"
    SET = "set"


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a name."""

    name: str
    """Dotted, from `torch` or `torch_npu` on."""
    way: Way
    num_positional: int = 0
    keywords: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.way}"


def find_uses(paths: Iterable[Path]) -> list[Use]:
    """Every use in some source files, each kind once."""
    found = {use for path in paths for use in _uses(ast.parse(path.read_text(encoding="utf-8")))}
    return sorted(found, key=lambda use: (use.name, use.way, use.num_positional, use.keywords))


def _uses(tree: ast.Module) -> Iterator[Use]:
    aliases = _aliases(tree)
    inner: set[ast.expr] = set()
    for node in ast.walk(tree):  # outer expressions come before what they are made of
        target = node.func if isinstance(node, ast.Call) else node
        if not isinstance(target, ast.Attribute) or target in inner:
            continue
        name = _dotted(target, aliases)
        if not name.startswith(PREFIXES):
            continue
        inner.update(part for part in ast.walk(target) if isinstance(part, ast.Attribute))
        if isinstance(node, ast.Call):
            keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
            yield Use(name, Way.CALLED, len(node.args), keywords)
        else:
            yield Use(name, Way.SET if isinstance(target.ctx, ast.Store) else Way.READ)


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Names that stand for the library, which is imported when a device is opened."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            call = node.value
            names = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
            if ast.unparse(call.func).endswith("import_module") and names == [_LIBRARY]:
                found |= {ast.unparse(target): _LIBRARY for target in node.targets}
    return found


def _dotted(node: ast.Attribute, aliases: dict[str, str]) -> str:
    start, _, rest = ast.unparse(node).partition(".")
    return f"{aliases.get(start, start)}.{rest}"
