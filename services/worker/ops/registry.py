"""Registers our kernels for the CPU (and shape functions for meta tensors) with the dispatcher.

Registration is a call, never an import effect, and may be repeated. Where torch_npu is loaded its
schemas stand and only the CPU kernels are added, and shape functions where it has none; an operator
it lacks is refused by name.
"""

import functools
import logging
import sys
from collections.abc import Callable, Mapping

import torch

from services.worker.ops import (
    attention,
    attention_quant,
    cache,
    cache_quant,
    dense,
    distribute,
    indexer,
    indexer_quant,
    layer_norm,
    lengths,
    meta,
    moe,
    moe_gated,
    native,
    norm,
    quant,
    quant_product,
    rope,
)
from services.worker.ops.schemas import SCHEMAS, TORCH_NPU_VERSION
from shared.errors import ConfigError

_LOG = logging.getLogger(__name__)
_NAMESPACE = "npu"
_OWN_NAMESPACE = "glm"
_FAMILIES = (
    attention,
    attention_quant,
    cache,
    cache_quant,
    distribute,
    indexer,
    indexer_quant,
    moe,
    moe_gated,
    norm,
    quant,
    quant_product,
    rope,
)
_OWN_FAMILIES = (dense, layer_norm, lengths)

Kernel = Callable[..., object]


def register() -> None:
    """Make every operator of `SCHEMAS` callable on CPU and meta tensors; safe to repeat."""
    _register_once()


def set_num_threads(count: int) -> None:
    """Threads of one operator, the caller's included.

    The compiled kernels have threads of their own and leave torch little to do; a second pool of
    torch's would only take cores from them. Without compiled kernels all threads are torch's.
    """
    library = native.load()
    if library is None:
        torch.set_num_threads(count)
        return
    torch.set_num_threads(1)
    library.set_num_threads(count)


@functools.cache
def _register_once() -> tuple[torch.library.Library, ...]:
    # The libraries live in the cache: the dispatcher drops a kernel with the object that added it.
    is_provided = "torch_npu" in sys.modules
    libraries = []
    if is_provided:
        check_provided(SCHEMAS, has_operator)
        libraries.append(_implement(_without_shapes(meta.kernels()), "Meta"))
    else:
        definitions = torch.library.Library(_NAMESPACE, "FRAGMENT")
        for name, schema in SCHEMAS.items():
            if not has_operator(name):
                definitions.define(schema)
        libraries.append(definitions)
        libraries.append(_implement(meta.kernels(), "Meta"))
    library = native.load()
    if library is None:
        _LOG.warning(
            "no compiled CPU kernels (run `python -m services.worker.ops.build`): "
            "serving with the slow torch versions"
        )
    libraries.append(_implement(cpu_kernels(library), "CPU"))
    libraries.append(_define_own(library))
    return tuple(libraries)


def _define_own(native_library: native.Native | None) -> torch.library.Library:
    """The operators that are ours on every device: plain torch, and a CPU kernel where built."""
    library = torch.library.Library(_OWN_NAMESPACE, "DEF")
    for family in _OWN_FAMILIES:
        for schema in family.SCHEMAS:
            library.define(schema)
        for name, default in family.defaults().items():
            library.impl(name, default, "CompositeExplicitAutograd")
        for name, kernel in family.kernels(native_library).items():
            library.impl(name, kernel, "CPU")
    return library


def cpu_kernels(library: native.Native | None) -> dict[str, Kernel]:
    """CPU kernel of each operator: the compiled one, or the torch version without a library."""
    kernels: dict[str, Kernel] = {}
    for family in _FAMILIES:
        kernels.update(family.kernels(library))
    return kernels


def has_operator(name: str) -> bool:
    """Whether the dispatcher knows `npu::name`."""
    return bool(torch._C._jit_get_schemas_for_operator(f"{_NAMESPACE}::{name}"))


def _without_shapes(kernels: Mapping[str, Kernel]) -> dict[str, Kernel]:
    """Shape functions of the operators that have none yet."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {
        name: kernel
        for name, kernel in kernels.items()
        if not has_kernel(f"{_NAMESPACE}::{name}", "Meta")
    }


def check_provided(schemas: Mapping[str, str], is_known: Callable[[str], bool]) -> None:
    """Refuse a torch_npu that lacks an operator, naming it."""
    missing = [name for name in schemas if not is_known(name)]
    if missing:
        raise ConfigError(
            f"the installed torch_npu lacks {', '.join(missing)}; "
            f"version {TORCH_NPU_VERSION} provides them"
        )


def _implement(kernels: Mapping[str, Kernel], key: str) -> torch.library.Library:
    library = torch.library.Library(_NAMESPACE, "IMPL")
    for name, kernel in kernels.items():
        library.impl(name, kernel, key)
    return library
