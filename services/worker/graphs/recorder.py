"""Takes down a step on a CPU: every compiled kernel it calls, with numbers and addresses.

The step runs without touching data. Each operator comes by here: ours check their arguments and
make their results as always, and their kernels are noted in place of run. Of torch's, views touch
no data, memory comes from the arena, and what moves data stands for a kernel of ours (`lowering`).
Exchanges with other ranks are the host's, between two runs of kernels.
Anything else would be missing when the step is done from the record: it is refused by its name, as
is reading a tensor on the host.

What operators find out on first use (about a weight, say) they must know before.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker.graphs.arena import Arena, Loans
from services.worker.graphs.lowering import lowered
from services.worker.graphs.recording import Call, CaptureError, HostCall, KernelCall, Recording
from services.worker.ops.native import SIGNATURES, Native

_OURS = frozenset({"npu", "glm"})
_COLLECTIVES = frozenset({"c10d"})
_WORK = "c10d.Work"
_ATEN = torch.ops.aten
# They are views too, but say nothing of it.
_VIEWS = frozenset({_ATEN._unsafe_view.default})
_HOST_READS = frozenset({_ATEN.resolve_conj.default, _ATEN._local_scalar_dense.default})


def record(
    native: Native,
    arena: Arena,
    step: Callable[[], tuple[Tensor, ...]],
    plan: Loans | None = None,
) -> Recording:
    """Take down a step.

    Args:
        native: The kernels that the operators call.
        arena: Where its results lie, until the next recorded step.
        step: Runs the model on buffers that stay where they are.
        plan: Places in the arena for what it computes.

    Raises:
        CaptureError: The step does what cannot be done again from a record.
    """
    # Only there does torch show every operator, also those that are made of others.
    assert torch.is_inference_mode_enabled()
    arena.restart(plan)
    recorder = _Recorder(native, arena)
    with native.noted_by(recorder), recorder:
        result = step()
    return Recording(native, recorder.calls, result)


class _Recorder(TorchDispatchMode):
    """Sees every operator of a step, and hears of every kernel."""

    def __init__(self, native: Native, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.calls: list[Call] = []
        self._arena = arena
        self._lowered: Mapping[OpOverload, Callable[..., object]] = lowered(native)
        self._operator = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch imports its compiler on first use, which takes a second.
        return False

    def note(
        self,
        name: str,
        dtype: torch.dtype,
        arguments: tuple[float, ...],
        tensors: tuple[Tensor, ...],
    ) -> None:
        """Take down one kernel."""
        num_addresses = SIGNATURES[name].count("p")
        addresses = tuple(int(address) for address in arguments[-num_addresses:])
        stale = next((a for a in addresses if self._arena.is_free(a)), None)
        if stale is not None:
            raise CaptureError(f"{self._operator}: reads what another recorded step computed")
        self.calls.append(
            KernelCall(
                operator=self._operator,
                name=name,
                dtype=dtype,
                numbers=_plain(arguments[:-num_addresses]),
                addresses=addresses,
                tensors=tuple(t for t in tensors if not self._arena.has(t.data_ptr())),
            )
        )

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run one operator in the way that can be done again."""
        options = kwargs or {}
        if func.namespace in _OURS:
            self._operator = func.name()
            # Straight to the kernel, whose own operators come by here again.
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **options)
        if func in _HOST_READS or _leaves_device(func, options):
            raise CaptureError(f"{func.name()}: the host reads a tensor, behind {self._operator}")
        if func in self._lowered:
            self._operator = func.name()
            with self:
                return self._lowered[func](*args, **options)
        if func in _ALLOCATIONS:
            return self._allocate(func, args, options)
        if _is_composite(func):
            with self:
                return func.decompose(*args, **options)
        if func.is_view or func in _VIEWS:
            return func(*args, **options)
        if func.namespace in _COLLECTIVES and not options:
            self.calls.append(HostCall(operator=func.name(), function=func, arguments=args))
            return _done(func, args)
        raise CaptureError(f"{func.name()}: cannot be recorded, behind {self._operator}")

    def _allocate(self, func: OpOverload, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        shape, like = _ALLOCATIONS[func](*args)
        dtype = options.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
        return self._arena.empty(tuple(shape), dtype)


def _done(func: OpOverload, args: tuple[Any, ...]) -> object:
    """What a collective returns, without an exchange: other ranks may not take down the same."""
    work = FakeWork().boxed()
    results = [work if _WORK in str(result.type) else args[0] for result in func._schema.returns]
    return results[0] if len(results) == 1 else tuple(results)


def _plain(numbers: tuple[float, ...]) -> tuple[float, ...]:
    """Truth values as whole numbers."""
    return tuple(int(number) if isinstance(number, bool) else number for number in numbers)


def _is_composite(func: OpOverload) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(func.has_kernel_for_dispatch_key(key))


def _leaves_device(func: OpOverload, options: dict[str, Any]) -> bool:
    """Whether a tensor is sent to another device, or to the one it is on as `cpu()` does."""
    if func is _ATEN.to.device:
        return True
    is_conversion = func is _ATEN.to.dtype_layout or func is _ATEN._to_copy.default
    return is_conversion and options.get("device") is not None


_ALLOCATIONS: Mapping[OpOverload, Callable[..., tuple[Any, Tensor | None]]] = {
    _ATEN.empty.memory_format: lambda size: (size, None),
    _ATEN.new_empty.default: lambda like, size: (size, like),
    _ATEN.empty_like.default: lambda like: (like.shape, like),
}
"""Shape of what is made, and what it is like."""
