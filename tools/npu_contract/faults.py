"""Plants one fault at a time at the worker's calls of device operators.

The source of the calling module is parsed, one argument of one call is changed, and the changed
methods stand in for the true ones while a test runs. What may be wrong with an argument follows
from what a sound run passes there.
"""

from __future__ import annotations

import ast
import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from services.worker.ops import nz
from services.worker.ops.device_rules import RULES, find_rule
from services.worker.ops.form import Blocked, Form
from tools.npu_contract.sites import PACKAGE, Reached, Site, call_at, sources

_PLANT = "_planted"


class Kind(StrEnum):
    """What is wrong with an argument."""

    NAME = "name"
    """It has another name."""
    MISSING = "missing"
    """It is left out, so that the schema's default counts."""
    TYPE = "type"
    """The tensor has another element type."""
    LAYOUT = "layout"
    """The tensor's sizes or their order are others."""
    BLOCKS = "blocks"
    """The weight is plain where it must be blocked, or the other way round."""
    VALUE = "value"
    """The number, text, type or flag is another."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One argument of one call, and what is wrong with it."""

    site: Site
    argument: str
    kind: Kind

    def __str__(self) -> str:
        place = f"{self.site.module}:{self.site.line}"
        return f"{place} {self.site.operator} {self.argument} {self.kind}"


def find_faults(reached: Mapping[Site, Sequence[Reached]]) -> list[Fault]:
    """Everything that may be wrong with the arguments that a call passes.

    A fault is left out where it would change nothing: a value left out that equals the default.
    """
    return [
        Fault(site, argument, kind)
        for site, runs in reached.items()
        for argument, is_keyword in _passed(site)
        for kind in _kinds(site, argument, is_keyword, [run.arguments for run in runs])
    ]


def _passed(site: Site) -> Iterator[tuple[str, bool]]:
    """Arguments that a call passes, and whether by keyword."""
    call = call_at(ast.parse(sources()[site.module]), site)
    keywords = {keyword.arg for keyword in call.keywords}
    yield from ((name, name in keywords) for name in _expressions(call, site.operator))


def _kinds(
    site: Site, argument: str, is_keyword: bool, runs: Sequence[Mapping[str, Any]]
) -> Iterator[Kind]:
    if is_keyword:
        yield Kind.NAME
        default = _schema(site.operator)[argument]
        if any(not _is_default(arguments[argument], default) for arguments in runs):
            yield Kind.MISSING
    values = [_first(arguments[argument]) for arguments in runs]
    if not any(isinstance(value, Tensor) for value in values):
        yield Kind.VALUE
        return
    yield Kind.TYPE
    yield Kind.LAYOUT
    if any(_can_block(site.operator, argument, arguments) for arguments in runs):
        yield Kind.BLOCKS


def _schema(operator: str) -> dict[str, object]:
    """Names of the arguments with their defaults."""
    arguments = getattr(torch.ops.npu, operator).default._schema.arguments
    return {argument.name: argument.default_value for argument in arguments}


def _is_default(value: object, default: object) -> bool:
    return not isinstance(_first(value), Tensor) and value == default


def _first(value: object) -> object:
    """A tensor in a list of one, or the value."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Tensor):
        return value[0]
    return value


def _can_block(operator: str, argument: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a sound tensor would be wrong with its other memory."""
    rule = find_rule(operator, arguments)
    assert rule is not None
    value = _first(arguments[argument])
    if not isinstance(value, Tensor) or value.dim() < 2:
        return False
    is_weight = value.dtype in {torch.int8, torch.int32}
    return is_weight and rule.tensors[argument].blocked is not Blocked.ALLOWED


def _expressions(call: ast.Call, operator: str) -> dict[str, ast.expr]:
    named = dict(zip(_schema(operator), call.args, strict=False))
    return named | {k.arg: k.value for k in call.keywords if k.arg is not None}


def planted_methods(fault: Fault | None, module: str) -> Iterator[tuple[type, str, FunctionType]]:
    """Class, name and changed function of every method of a module; without a fault, unchanged."""
    tree = ast.parse(sources()[module])
    changed = ModuleType(f"{PACKAGE}.{module}")
    if fault is not None:
        _change(call_at(tree, fault.site), fault)
        changed.__dict__[_PLANT] = lambda value: _wrong(value, fault)
    file = f"<fault in {module}>"
    exec(compile(ast.fix_missing_locations(tree), file, "exec"), changed.__dict__)
    true = importlib.import_module(changed.__name__)
    for name, owner in vars(true).items():
        if isinstance(owner, type) and owner.__module__ == true.__name__:
            for method, function in vars(vars(changed)[name]).items():
                # Methods that a dataclass was given know their own class and must stay.
                if isinstance(function, FunctionType) and function.__code__.co_filename == file:
                    yield owner, method, function


def _change(call: ast.Call, fault: Fault) -> None:
    keyword = next((k for k in call.keywords if k.arg == fault.argument), None)
    if fault.kind is Kind.NAME:
        assert keyword is not None
        keyword.arg = f"{fault.argument}_"
    elif fault.kind is Kind.MISSING:
        call.keywords = [k for k in call.keywords if k is not keyword]
    else:
        value = _expressions(call, fault.site.operator)[fault.argument]
        planted = ast.Call(ast.Name(_PLANT, ast.Load()), [copy.copy(value)], [])
        for entry in call.keywords:
            if entry.value is value:
                entry.value = planted
        call.args = [planted if argument is value else argument for argument in call.args]


def _wrong(value: object, fault: Fault) -> object:
    """`value`, or the tensor in a list of one, made wrong."""
    if fault.kind is Kind.VALUE:
        return _wrong_value(value)
    if isinstance(value, list):
        return [_wrong(entry, fault) for entry in value]
    if not isinstance(value, Tensor):
        return value
    # What makes a tensor wrong is no call of the model's, and is not looked at as one.
    with _disable_current_modes():
        return _WRONG[fault.kind](value, fault)


def _wrong_value(value: object) -> object:
    """Another value of the same kind, near it."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value - 1 if value > 0 else value + 1
    if isinstance(value, float):
        return 2 * value
    if isinstance(value, torch.dtype):
        return torch.float32 if value is not torch.float32 else torch.int16
    if isinstance(value, str):
        return next(text for text in _TEXTS if text != value)
    assert isinstance(value, list), value
    return value[::-1]


_TEXTS = ("BSND", "Norm")
_NEIGHBOURS: Mapping[torch.dtype, torch.dtype] = MappingProxyType(
    {
        torch.bfloat16: torch.float32,
        torch.float32: torch.bfloat16,
        torch.float16: torch.bfloat16,
        torch.int8: torch.int16,
        torch.int32: torch.int64,
        torch.int64: torch.int32,
        torch.float8_e4m3fn: torch.int8,
        torch.bool: torch.int8,
    }
)


def _wrong_type(value: Tensor, fault: Fault) -> Tensor:
    """A type near the tensor's own that the operator does not take there.

    One that it takes is wrong beside others of the call that must have the same.
    """
    rules = [rule for rule in RULES[fault.site.operator] if fault.argument in rule.tensors]
    kinds = [rule.tensors[fault.argument].kind for rule in rules]
    taken = {kind for entry in kinds for kind in entry.types}
    is_bound = all(sum(map(_must_agree, rule.tensors.values())) > 1 for rule in rules)
    near = _NEIGHBOURS[value.dtype]
    if is_bound and value.is_floating_point() and all(kind.agrees for kind in kinds):
        return value.to(near)
    return value.to(next(t for t in (near, torch.float16, torch.int16) if t not in taken))


def _must_agree(form: Form) -> bool:
    return form.kind.agrees and any(kind.is_floating_point for kind in form.kind.types)


def _wrong_layout(value: Tensor, fault: Fault) -> Tensor:
    return value.unsqueeze(0) if value.dim() == 1 else value.transpose(-1, -2)


def _wrong_blocks(value: Tensor, fault: Fault) -> Tensor:
    return (
        torch.empty(value.shape, dtype=value.dtype, device="meta")
        if nz.is_nz(value)
        else nz.shaped(value)
    )


_WRONG: Mapping[Kind, Callable[[Tensor, Fault], Tensor]] = MappingProxyType(
    {Kind.TYPE: _wrong_type, Kind.LAYOUT: _wrong_layout, Kind.BLOCKS: _wrong_blocks}
)
