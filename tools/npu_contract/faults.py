"""Plants one fault at a time at the model's calls of device operators.

The source of a module of `services/worker/model` is parsed, one argument of one call is changed,
and the changed methods stand in for the true ones while a test runs.
"""

from __future__ import annotations

import ast
import copy
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType

import torch
from torch import Tensor

from services.worker.model import decoder
from services.worker.ops.device_rules import RULES
from services.worker.ops.form import INDEX

MODEL = Path(decoder.__file__).parent
_PACKAGE = "services.worker.model"
_PLANT = "_planted"
_OTHER_TEXT = {"TND": "BSND", "PA_BSND": "TND", "PA": "Norm"}
_OTHER_TYPE = {
    torch.bfloat16: torch.float32,
    torch.float32: torch.bfloat16,
    torch.int32: torch.int64,
    torch.int64: torch.int32,
    torch.int8: torch.int16,
    torch.float16: torch.float32,
}


@dataclass(frozen=True, slots=True)
class Site:
    """One call of a device operator in the model's source."""

    module: str
    line: int
    function: str
    operator: str


@dataclass(frozen=True, slots=True)
class Fault:
    """One argument of one call, and what is wrong with it: "name", "type" or "layout"."""

    site: Site
    argument: str
    kind: str

    def __str__(self) -> str:
        place = f"{self.site.module}:{self.site.line}"
        return f"{place} {self.site.operator} {self.argument} {self.kind}"


def operator_calls(tree: ast.AST) -> Iterator[ast.Call]:
    """The calls ``torch.ops.npu.x(...)`` below a node, in source order."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        if ast.unparse(call.func).startswith("torch.ops.npu."):
            yield call


def find_sites() -> list[Site]:
    """Every call of a device operator in the model."""
    sites = []
    for path in sorted(MODEL.glob("*.py")):
        for name, function in _functions(ast.parse(path.read_text())):
            for call in operator_calls(function):
                operator = ast.unparse(call.func).removeprefix("torch.ops.npu.")
                sites.append(Site(path.stem, call.lineno, name, operator))
    return sites


def find_faults() -> list[Fault]:
    """A wrong name for each keyword; a wrong type and layout for each tensor; each text changed."""
    faults = []
    for site in find_sites():
        call = _call_at(_parse(site), site)
        names = _argument_names(call, site.operator)
        faults += [Fault(site, k.arg, "name") for k in call.keywords if k.arg is not None]
        for name, value in names.items():
            if any(name in rule.tensors for rule in RULES[site.operator]):
                faults += [Fault(site, name, "type"), Fault(site, name, "layout")]
            elif isinstance(value, ast.Constant) and isinstance(value.value, str):
                faults.append(Fault(site, name, "layout"))
    return faults


def planted_methods(fault: Fault | None, module: str) -> Iterator[tuple[type, str, FunctionType]]:
    """Class, name and changed function of every method of a module; without a fault, unchanged."""
    tree = ast.parse((MODEL / f"{module}.py").read_text())
    if fault is not None:
        _change(_call_at(tree, fault.site), fault)
    changed = ModuleType(f"{_PACKAGE}.{module}")
    wrong = _wrong_type if fault is not None and fault.kind == "type" else _wrong_layout
    changed.__dict__[_PLANT] = lambda value: _on_tensor(value, fault, wrong)
    code = compile(ast.fix_missing_locations(tree), f"<fault in {module}>", "exec")
    exec(code, changed.__dict__)
    true = importlib.import_module(changed.__name__)
    for name, owner in vars(true).items():
        if isinstance(owner, type) and owner.__module__ == true.__name__:
            for method, function in vars(vars(changed)[name]).items():
                if isinstance(function, FunctionType):
                    yield owner, method, function


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of a module, and the methods of its classes as ``Class.method``."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
            yield from ((f"{node.name}.{method.name}", method) for method in methods)


def _parse(site: Site) -> ast.AST:
    return ast.parse((MODEL / f"{site.module}.py").read_text())


def _call_at(tree: ast.AST, site: Site) -> ast.Call:
    return next(
        call
        for call in operator_calls(tree)
        if call.lineno == site.line and ast.unparse(call.func).endswith(site.operator)
    )


def _argument_names(call: ast.Call, operator: str) -> dict[str, ast.expr]:
    schema = getattr(torch.ops.npu, operator).default._schema
    names = [argument.name for argument in schema.arguments]
    named = dict(zip(names, call.args, strict=False))
    return named | {k.arg: k.value for k in call.keywords if k.arg is not None}


def _change(call: ast.Call, fault: Fault) -> None:
    if fault.kind == "name":
        next(k for k in call.keywords if k.arg == fault.argument).arg = f"{fault.argument}_"
        return
    names = _argument_names(call, fault.site.operator)
    value = names[fault.argument]
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        value.value = _OTHER_TEXT[value.value]
        return
    planted = ast.Call(ast.Name(_PLANT, ast.Load()), [copy.copy(value)], [])
    for keyword in call.keywords:
        if keyword.value is value:
            keyword.value = planted
    call.args = [planted if argument is value else argument for argument in call.args]


def _on_tensor(
    value: object, fault: Fault | None, wrong: Callable[[Tensor, Fault], Tensor]
) -> object:
    """`value`, or the tensor in a list of one, made wrong."""
    assert fault is not None
    if isinstance(value, list):
        return [_on_tensor(entry, fault, wrong) for entry in value]
    assert isinstance(value, Tensor), f"{fault}: not a tensor"
    return wrong(value, fault)


def _wrong_type(value: Tensor, fault: Fault) -> Tensor:
    forms = [rule.tensors.get(fault.argument) for rule in RULES[fault.site.operator]]
    takes_both = any(form is not None and form.kind == INDEX for form in forms)
    return value.to(torch.int16 if takes_both else _OTHER_TYPE[value.dtype])


def _wrong_layout(value: Tensor, fault: Fault) -> Tensor:
    return value.unsqueeze(0) if value.dim() == 1 else value.transpose(-1, -2)
