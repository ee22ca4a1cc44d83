"""Every call of a device operator in the worker's source, and which variants reach it with what."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tools.npu_contract.cases import STEPS
from tools.npu_contract.drive import OPERATORS, WORKER, Run, build, drive
from tools.npu_contract.variants import FAULT_VARIANTS, Variant

PACKAGE = "services.worker"
_CALL = "torch.ops.npu."
STEP = STEPS["mixed with padding"]


@dataclass(frozen=True, slots=True)
class Site:
    """One call in the source."""

    module: str
    """Below `services.worker`, with dots."""
    line: int
    function: str
    operator: str


@dataclass(frozen=True, slots=True)
class Reached:
    """A variant that makes a site's call, and the arguments of its first such call."""

    variant: Variant
    arguments: Mapping[str, Any]


@functools.cache
def sources() -> Mapping[str, str]:
    """Text of every module that may call operators, by its name below `services.worker`.

    Read once: while a test runs, all looks at a module are looks at the same text.
    """
    found = {}
    for path in sorted(WORKER.rglob("*.py")):
        if not path.is_relative_to(OPERATORS):
            name = ".".join(path.relative_to(WORKER).with_suffix("").parts)
            found[name] = path.read_text(encoding="utf-8")
    return MappingProxyType(found)


def operator_calls(tree: ast.AST) -> Iterator[ast.Call]:
    """The calls ``torch.ops.npu.x(...)`` below a node, in source order."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        if ast.unparse(call.func).startswith(_CALL):
            yield call


def find_sites() -> list[Site]:
    """Every call of a device operator in the worker."""
    sites = []
    for module, text in sources().items():
        for name, function in _functions(ast.parse(text)):
            for call in operator_calls(function):
                operator = ast.unparse(call.func).removeprefix(_CALL)
                sites.append(Site(module, call.lineno, name, operator))
    return sites


def call_at(tree: ast.AST, site: Site) -> ast.Call:
    """A site's call in its module's source."""
    return next(
        call
        for call in operator_calls(tree)
        if call.lineno == site.line and ast.unparse(call.func) == f"{_CALL}{site.operator}"
    )


def find_reached() -> dict[Site, list[Reached]]:
    """For each site the variants that make its call, found by running them."""
    found: dict[Site, list[Reached]] = {site: [] for site in find_sites()}
    at = {(site.module, site.line, site.operator): site for site in found}
    for variant in FAULT_VARIANTS:
        loading = Run()
        decoder = build(variant, loading)
        seen: dict[Site, Reached] = {}
        for call in (*loading.calls, *drive(decoder, variant, STEP).calls):
            site = at[*call.place, call.operator]
            seen.setdefault(site, Reached(variant, call.arguments))
        for site, reached in seen.items():
            found[site].append(reached)
    return found


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of a module, and the methods of its classes as ``Class.method``."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
            yield from ((f"{node.name}.{method.name}", method) for method in methods)
