"""Writes ``docs/operators.md`` from the rules, the model's calls, our kernels and their tests.

python -m tools.operators_page > docs/operators.md
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import cast

from services.worker import ops
from services.worker.ops import registry
from services.worker.ops.device_rules import RULES
from services.worker.ops.form import Blocked, Form
from services.worker.ops.native import SIGNATURES, Native
from services.worker.ops.rules.rule import Rule
from services.worker.ops.variants import SOURCE_DIR
from tools.npu_contract.faults import find_faults
from tools.npu_contract.sites import find_reached, find_sites

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "operators.md"
TESTS = ROOT / "tests" / "services" / "worker" / "ops"
# These look at every operator; what names one operator alone is its numeric test.
_GENERAL = {
    "test_device_rules.py",
    "test_form.py",
    "test_meta.py",
    "test_meta_moe_quant.py",
    "test_meta_quant.py",
    "test_registry.py",
    "test_schemas.py",
}

_BLOCKED = {
    Blocked.REFUSED: [],
    Blocked.ALLOWED: ["blocked or not"],
    Blocked.REQUIRED: ["blocked"],
}

BEGIN = "<!-- written by tools/operators_page.py -->\n"
END = "<!-- end -->\n"
_HEAD = """| operator | called in | takes | CPU kernel | numeric test | planted faults |
|---|---|---|---|---|---|
"""


def main() -> int:
    """Write the table between its marks; exit code 1 when it was out of date."""
    old = PAGE.read_text(encoding="utf-8")
    new = update(old)
    PAGE.write_text(new, encoding="utf-8")
    return int(new != old)


def update(page: str) -> str:
    """`page` with the table as it should be."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{render()}{END}{rest.split(END)[1]}"


def render() -> str:
    """The table."""
    ops.register()
    places: dict[str, list[str]] = defaultdict(list)
    for site in find_sites():
        place = f"`{site.module.replace('.', '/')}.py` `{site.function}`"
        if place not in places[site.operator]:
            places[site.operator].append(place)
    num_faults: dict[str, int] = defaultdict(int)
    for fault in find_faults(find_reached()):
        num_faults[fault.site.operator] += 1
    rows = [
        _row(
            f"`{name}`",
            "<br>".join(places[name]),
            "<br><br>".join(_demands(rule) for rule in rules),
            _kernels(name),
            ", ".join(_numeric_tests(name)),
            str(num_faults[name]),
        )
        for name, rules in sorted(RULES.items())
    ]
    return _HEAD + "".join(rows)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def _demands(rule: Rule) -> str:
    tensors = [f"{name} {_form(form)}" for name, form in rule.tensors.items()]
    options = [
        f"{name} = {' or '.join(f'`{value}`' for value in values)}"
        for name, values in rule.options.items()
        if name not in {"pre_tokens", "next_tokens"}  # no window: the schema's default
    ]
    limits = [(rule.limits.__doc__ or "").rstrip(".")]
    case = [f"*{rule.case}*"] if rule.case else []
    return "<br>".join([*case, *tensors, *options, *(text for text in limits if text)])


def _form(form: Form) -> str:
    words = [form.kind.name, *(["flat"] if form.is_flat else []), *_BLOCKED[form.blocked]]
    return f"`[{form.shape}]` {', '.join(words)}"


def _kernels(name: str) -> str:
    """The C functions and the torch version of an operator."""
    torch_version = registry.cpu_kernels(None)[name]
    module = Path(inspect.getfile(torch_version)).name
    # Only the wiring is looked at; no library is needed for it.
    compiled = registry.cpu_kernels(cast("Native", object()))[name]
    symbols = _symbols(compiled.func, set()) if isinstance(compiled, functools.partial) else []
    lines = [f"C: `{_source_of(symbol)}` `{symbol}`" for symbol in symbols]
    return "<br>".join([*lines, f"torch: `{module}` `{torch_version.__name__}`"])


def _symbols(function: Callable[..., object], seen: set[object]) -> list[str]:
    """The C functions named in a kernel, and in the functions beside it that it calls."""
    seen.add(function)
    found: list[str] = []
    module = inspect.getmodule(function)
    for node in ast.walk(ast.parse(inspect.getsource(function))):
        if isinstance(node, ast.Constant) and node.value in SIGNATURES:
            found.append(node.value)
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        called = _find(module, name.split("."))
        if called in seen or not inspect.isfunction(called):
            continue
        if called.__module__.startswith(ops.__name__):
            found += _symbols(called, seen)
    return list(dict.fromkeys(found))


def _find(start: object, names: list[str]) -> object:
    """What a dotted name means in a module; None if it is no name of it."""
    return functools.reduce(lambda owner, name: getattr(owner, name, None), names, start)


def _source_of(symbol: str) -> str:
    pattern = rf"^int (?:KERNEL\({symbol}\)|glm_{symbol}_f32)\("
    sources = sorted(SOURCE_DIR.glob("*.c"))
    return next(path.name for path in sources if re.search(pattern, path.read_text(), re.M))


def _numeric_tests(name: str) -> list[str]:
    return [
        f"`{path.name}`"
        for path in sorted(TESTS.glob("test_*.py"))
        if path.name not in _GENERAL
        and not path.name.startswith("test_meta_")
        and f'"{name}"' in path.read_text()
    ]


if __name__ == "__main__":
    sys.exit(main())
