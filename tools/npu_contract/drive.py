"""Builds a variant without memory, runs steps of it, and notes every call of a device operator.

Each call goes through the shape function of whoever provides the operator (torch_npu under the
contract test), the rules of the device, and `numbers`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker import kv_cache
from services.worker.kv_cache import KVCaches
from services.worker.model.decoder import Decoder
from services.worker.model.metadata import ExpertTraffic, StepMetadata
from services.worker.model.spec import ModelSpec
from services.worker.ops.device_rules import DeviceGuard, bind
from services.worker.ops.nz import is_nz
from shared.errors import ConfigError
from tools.npu_contract.cases import StepCase, make_caches, make_step
from tools.npu_contract.numbers import find_wrong_number
from tools.npu_contract.ranks import ShapeGroup
from tools.npu_contract.variants import Variant

WORKER = Path(kv_cache.__file__).parent
OPERATORS = WORKER / "ops"
# A new element type or name moves no byte; all other operators would see blocks as rows.
_BLIND = frozenset({"aten::view.dtype", "aten::detach"})


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a device operator: where from, with what, and what it gave."""

    operator: str
    place: tuple[str, int]
    """Module below `services.worker`, with dots, and line of the call."""
    arguments: dict[str, Any]
    """Every argument by name, defaults included."""
    results: list[Tensor]


@dataclass(slots=True)
class Run:
    """What a step gave, and all that it called."""

    calls: list[Call] = field(default_factory=list)
    others: set[str] = field(default_factory=set)
    """Names of operators that are no device operators."""
    outputs: dict[str, Tensor] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Notes calls in a `Run` and holds their free numbers against the model's sizes."""

    def __init__(self, spec: ModelSpec, run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._spec = spec
        self._run = run

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Make one call and note it."""
        named = kwargs or {}
        if func.namespace != "npu":
            return self._note_other(func, args, named)
        result = func(*args, **named)
        name = func._schema.name.removeprefix("npu::")
        arguments = bind(func._schema, args, named)
        reason = find_wrong_number(self._spec, name, func._schema, arguments)
        if reason:
            raise ConfigError(f"{name}: {reason}")
        results = _tensors(result)
        self._run.calls.append(Call(name, _place(), arguments, results))
        return result

    def _note_other(
        self, func: OpOverload[..., object], args: tuple[object, ...], named: dict[str, object]
    ) -> object:
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # made of other operators on every device: note those
                return func.decompose(*args, **named)
        if func.name() not in _BLIND and any(_is_blocked(value) for value in args):
            raise ConfigError(f"{func.name()}: a weight in the blocked layout is opaque")
        self._run.others.add(func.name())
        return func(*args, **named)


def _tensors(result: object) -> list[Tensor]:
    entries = [result] if isinstance(result, Tensor) else result
    assert isinstance(entries, list | tuple)
    assert all(isinstance(entry, Tensor) for entry in entries)
    return list(entries)


def _is_blocked(value: object) -> bool:
    if not isinstance(value, Tensor) or value.dim() < 2 or value.is_floating_point():
        return False
    return is_nz(value)


def _guard() -> AbstractContextManager[object]:
    guard: AbstractContextManager[object] = DeviceGuard()  # type: ignore[no-untyped-call]  # torch's
    return guard


def _place() -> tuple[str, int]:
    """Where the worker's code called an operator: the innermost frame of it outside `ops`."""
    frame = sys._getframe(2)
    while True:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(WORKER) and not path.is_relative_to(OPERATORS):
            return ".".join(path.relative_to(WORKER).with_suffix("").parts), frame.f_lineno
        assert frame.f_back is not None
        frame = frame.f_back


def build(variant: Variant, run: Run | None = None) -> Decoder:
    """A decoder in its loaded form: what loading does to weights is done, and noted in `run`."""
    spec = variant.spec
    with Recorder(spec, run or Run()), _guard():
        decoder = Decoder.build(spec)
        decoder.finish_loading()
    return decoder


def drive(decoder: Decoder, variant: Variant, case: StepCase) -> Run:
    """One step: the layers, the head, and the MTP layer if there is one.

    Raises:
        ConfigError: A call that the device would refuse or misread.
    """
    spec = decoder.spec
    token_ids, step = make_step(case, "meta")
    traffic = ExpertTraffic(method=variant.method, num_tokens=step.num_tokens)
    step = replace(step, traffic=traffic)
    experts = spec.groups.ep
    assert isinstance(experts, ShapeGroup)
    sent = -(-step.num_tokens // spec.placement.tp_size)
    experts.num_rows = sent * spec.config.num_experts_per_tok
    caches = make_caches(spec, case)
    kv_cache.check_layout(spec, caches)
    run = Run()
    with Recorder(spec, run), _guard():
        _step(decoder, token_ids, step, caches, run.outputs)
    return run


def _step(
    decoder: Decoder,
    token_ids: Tensor,
    step: StepMetadata,
    caches: KVCaches,
    outputs: dict[str, Tensor],
) -> None:
    outputs["hidden"] = hidden = decoder.forward(token_ids, step, caches)
    if decoder.lm_head is not None:
        outputs["logits"] = decoder.compute_logits(hidden)
    if decoder.mtp is not None:
        outputs["draft hidden"] = drafted = decoder.draft(token_ids, hidden, step, caches)
        outputs["draft logits"] = decoder.compute_draft_logits(drafted)
