"""Pytest plugin: torch_npu's schemas and shape functions stand in for ours during the tests.

The numeric tests take kernels from `registry.cpu_kernels` and shape functions from `meta.kernels`.
Here both lead through the dispatcher: our CPU kernels run behind the wheel's true schemas, and
where the tests compare shapes they compare with the wheel's own functions.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch_npu  # noqa: F401 - registers the operators; before ours, as in the worker
from torch_npu.op_plugin.meta import _meta_registrations

from services.worker import ops
from services.worker.ops import meta, registry
from services.worker.ops.native import Native
from services.worker.ops.schemas import SCHEMAS

Kernel = Callable[..., object]

_A2 = 220  # torch_npu's number of an Ascend910B1


class Switchboard:
    """Puts one version of our CPU kernels at a time behind the true schemas."""

    def __init__(self, kernels_of: Callable[[Native | None], dict[str, Kernel]]) -> None:
        self._kernels_of = kernels_of
        self._library: torch.library.Library | None = None
        self._shown: object = self

    def kernels(self, native: Native | None) -> dict[str, Kernel]:
        """Each operator as a call through the dispatcher to the version of `native`."""
        return {name: functools.partial(self._call, native, name) for name in SCHEMAS}

    def _call(self, native: Native | None, name: str, *args: object, **kwargs: object) -> object:
        if self._shown is not native:
            self._install(native)
        return getattr(torch.ops.npu, name)(*args, **kwargs)

    def _install(self, native: Native | None) -> None:
        self.close()
        self._library = torch.library.Library("npu", "IMPL")
        with warnings.catch_warnings():
            # Replacing the version before it is what this is for.
            warnings.simplefilter("ignore")
            for name, kernel in self._kernels_of(native).items():
                self._library.impl(name, kernel, "CPU", allow_override=True)
        self._shown = native

    def close(self) -> None:
        """Leave the kernels that `ops.register` installed."""
        if self._library is not None:
            self._library._destroy()
        self._library, self._shown = None, self


def pytest_configure() -> None:
    """Get ready before tests are collected: what is to be planted is found by running steps."""
    ops.register()
    # Some shape functions ask the device which chip it is, and there is none.
    _meta_registrations.get_soc_version = lambda: _A2


@pytest.fixture(scope="session", autouse=True)
def true_operators() -> Iterator[None]:
    """Lead the tests through the dispatcher for the whole session."""
    switchboard = Switchboard(registry.cpu_kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "cpu_kernels", switchboard.kernels)
        patch.setattr(meta, "kernels", lambda: {n: getattr(torch.ops.npu, n) for n in SCHEMAS})
        yield
    switchboard.close()
