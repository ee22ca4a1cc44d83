"""One operator's demands: the forms of its tensors, the values of its options, its limits.

An operator that the model calls in several ways (plain and quantized, say) has several rules; the
first one whose `applies` holds for a call is the one the call is held against.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.worker.ops.form import Form, Sizes

Arguments = Mapping[str, Any]

INNER_LIMIT = 65536
"""Rows of a product are shorter than this on the device."""


def _no_limits(arguments: Arguments, sizes: Sizes) -> str:
    return ""


def _always(arguments: Arguments) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The demands on one kind of call of an operator."""

    tensors: Mapping[str, Form]
    options: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Arguments that may have these values only; the schema's default counts when unset."""
    limits: Callable[[Arguments, Sizes], str] = _no_limits
    """What else is wrong; empty when nothing is. Its docstring states the limits."""
    case: str = ""
    """What tells this kind of call from the operator's others; empty where there is one kind."""
    applies: Callable[[Arguments], bool] = _always
    """Whether a call is of this kind."""


Rules = Mapping[str, tuple[Rule, ...]]
