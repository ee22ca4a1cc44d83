"""Holds calls of device operators against what the NPU's kernels demand.

The schemas say which arguments exist; the rules (`services.worker.ops.rules`) say which shapes,
types, layouts and modes the kernels of an Atlas A2 or A3 take (torch_npu's own documentation and
CANN's operator pages). Neither torch_npu's shape functions nor its dispatcher check them: a wrong
layout gives wrong numbers or an error code without a name. `DeviceGuard` checks every call made
inside it, on any device.

A shape is written with one letter per size (see `services.worker.model`) or its number; equal
letters in one call are equal sizes. ``...`` stands for any leading sizes.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import FunctionSchema, Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker.ops.rules import attention, attention_quant, dense, distribute, moe, quant
from services.worker.ops.rules.rule import Arguments, Rule, Rules
from shared.errors import ConfigError

RULES: Rules = MappingProxyType(
    {
        **attention.RULES,
        **attention_quant.RULES,
        **dense.RULES,
        **distribute.RULES,
        **moe.RULES,
        **quant.RULES,
    }
)


def find_rule(name: str, arguments: Arguments) -> Rule | None:
    """The rule that a call is held against; None where none is written down for it."""
    return next((rule for rule in RULES.get(name, ()) if rule.applies(arguments)), None)


def find_violation(name: str, arguments: Arguments) -> str:
    """What the kernel of `name` would refuse in a call; empty when it takes the call."""
    rule = find_rule(name, arguments)
    if rule is None:
        return "no rule is written down for this operator, or for such a call of it"
    sizes: dict[str, int] = {}
    types: set[torch.dtype] = set()
    for argument, value in arguments.items():
        form = rule.tensors.get(argument)
        if form is not None:
            reason = form.find_violation(_single(value), sizes, types)
        elif argument in rule.options:
            reason = _option_violation(value, rule.options[argument])
        else:
            reason = "this version passes no tensor here" if _has_tensor(value) else ""
        if reason:
            return f"{argument}: {reason}"
    return rule.limits(arguments, sizes)


def _single(value: object) -> object:
    """The tensor of an argument that is a list of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _has_tensor(value: object) -> bool:
    entries = value if isinstance(value, list) else [value]
    return any(isinstance(entry, Tensor) for entry in entries)


def _option_violation(value: object, allowed: Sequence[object]) -> str:
    return "" if value in allowed else f"{value!r} must be one of {list(allowed)}"


class DeviceGuard(TorchDispatchMode):
    """Inside it, a call that an NPU's kernel would refuse or misread is a `ConfigError`."""

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Check one call, then make it."""
        named = kwargs or {}
        if func.namespace == "npu":
            name = func._schema.name.removeprefix("npu::")
            reason = find_violation(name, bind(func._schema, args, named))
            if reason:
                raise ConfigError(f"{name}: {reason}")
        return func(*args, **named)


def bind(
    schema: FunctionSchema, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Every argument of a call by its name, defaults included."""
    bound: dict[str, object] = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(args):
            bound[argument.name] = args[position]
        else:
            bound[argument.name] = kwargs.get(argument.name, argument.default_value)
    return bound
