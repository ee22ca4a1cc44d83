"""Writes ``docs/operators.md`` from the rules, the model's calls, our kernels and their tests.

python -m tools.operators_page > docs/operators.md
"""

from __future__ import annotations

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
from services.worker.ops.native import Native
from services.worker.ops.rules.rule import Rule
from services.worker.ops.variants import SOURCE_DIR
from tools.npu_contract.faults import find_faults, find_sites

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "operators.md"
TESTS = ROOT / "tests" / "services" / "worker" / "ops"
# These look at every operator; what names one operator alone is its numeric test.
_GENERAL = {
    "test_device_rules.py",
    "test_form.py",
    "test_meta.py",
    "test_registry.py",
    "test_schemas.py",
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
        place = f"`{site.module}.py` `{site.function}`"
        if place not in places[site.operator]:
            places[site.operator].append(place)
    num_faults: dict[str, int] = defaultdict(int)
    for fault in find_faults():
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
    tensors = [
        f"{name} `[{form.shape}]` {form.kind.name}{', flat' if form.is_flat else ''}"
        for name, form in rule.tensors.items()
    ]
    options = [
        f"{name} = {' or '.join(f'`{value}`' for value in values)}"
        for name, values in rule.options.items()
        if name not in {"pre_tokens", "next_tokens"}  # no window: the schema's default
    ]
    limits = [(rule.limits.__doc__ or "").rstrip(".")]
    case = [f"*{rule.case}*"] if rule.case else []
    return "<br>".join([*case, *tensors, *options, *(text for text in limits if text)])


def _kernels(name: str) -> str:
    """The torch version and the C function of an operator."""
    torch_version = registry.cpu_kernels(None)[name]
    module = Path(inspect.getfile(torch_version)).name
    # Only the wiring is looked at; no library is needed for it.
    compiled = registry.cpu_kernels(cast("Native", object()))[name]
    assert isinstance(compiled, functools.partial)
    symbol = _symbol(compiled.func)
    source = next(
        path.name
        for path in sorted(SOURCE_DIR.glob("*.c"))
        if re.search(rf"^int (?:KERNEL\({symbol}\)|glm_{symbol}_f32)\(", path.read_text(), re.M)
    )
    return f"C: `{source}` `{symbol}`<br>torch: `{module}` `{torch_version.__name__}`"


def _symbol(function: Callable[..., object]) -> str:
    found = re.search(r'native\.(?:call|function)\(\s*"(\w+)"', inspect.getsource(function))
    assert found is not None, function
    return found.group(1)


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
