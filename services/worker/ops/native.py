"""The compiled CPU kernels, loaded through ctypes.

`services.worker.ops.build` compiles the C sources once per instruction set; `load` takes the best
build this CPU can run. Tensors cross as raw pointers, so every check belongs to the caller.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from services.worker.ops.variants import VARIANTS, cpu_flags, library_path

SIGNATURES: Mapping[str, str] = MappingProxyType(
    {
        "rms_norm": "iiifpppp",
        "add_rms_norm": "iifpppppp",
        "layer_norm": "iiifpppp",
        "interleave_rope": "iiiipppp",
        "kv_rmsnorm_rope_cache": "iiiifppppppp",
        "scatter_rows": "iiiippp",
        "lightning_indexer": "iiiiiiippppppp",
        "sparse_attention": "iiiiiiifppppppppp",
        "packed_attention": "iiiiiiifppppppp",
        "quant_lightning_indexer": "iiiiiippppppppp",
        "block_quant": "iiippp",
        "gating_top_k": "iiiiiffpppp",
        "init_routing": "iiiiippppp",
        "init_routing_int8": "iiiiiippppppp",
        "grouped_matmul": "iiiiiipppp",
        "grouped_int8": "iiiiiiiipppppppp",
        "grouped_swiglu": "iiiiiiippppppppp",
        "dequant_swiglu": "iiiipppppp",
        "head_matmul": "iiiiiiippp",
        "dynamic_quant": "iiippp",
        "quantize": "iiiipppp",
        "quant_matmul": "iiiiipppppp",
        "pack_weights": "iiipp",
        "pack_floats": "iiipp",
        "swiglu": "iipp",
        "token_unpermute": "iiiipppp",
        "draw": "iiippppppppp",
        "largest": "iiippp",
        "allow_only": "iiiippp",
        "add": "ipp",
        "take_rows": "iiippp",
        "convert": "iiiiiipp",
        "clear": "ip",
        "cumsum": "ipp",
        "compare": "iiiipp",
        "either": "ippp",
        "subtract": "iipp",
        "mask_rows": "iiippp",
        "at_least": "iipp",
        "all": "ipp",
        "cut_lengths": "iiipppp",
    }
)
"""Arguments of each C function, in this order: i int64, f double, p pointer."""

# Router scores and logits are float32 in every model; int8 keys and whole rows have no float type,
# and where types are numbers of the call there is one function for all.
_FLOAT32_ONLY = frozenset(
    {
        "gating_top_k",
        "draw",
        "largest",
        "allow_only",
        "quant_lightning_indexer",
        "scatter_rows",
        "grouped_swiglu",
        "dequant_swiglu",
        "pack_weights",
        "take_rows",
        "convert",
        "clear",
        "cumsum",
        "compare",
        "either",
        "subtract",
        "mask_rows",
        "at_least",
        "all",
        "cut_lengths",
    }
)

_NO_MEMORY = 1
_WRONG_LAYOUT = 3
_TYPES = {"i": ctypes.c_int64, "f": ctypes.c_double, "p": ctypes.c_void_p}
_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}


class Recorder(Protocol):
    """Takes note of kernels in place of running them."""

    def note(
        self,
        name: str,
        dtype: torch.dtype,
        arguments: tuple[float, ...],
        tensors: tuple[Tensor, ...],
    ) -> None:
        """Note one call: numbers and addresses, and the tensors behind those as far as known."""
        ...


class Native:
    """The functions of one compiled library, by name and element type."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.path = path
        self._recorder: Recorder | None = None
        self._call_of = library.glm_call_of
        self._call_of.argtypes = [ctypes.c_int64] * 3
        self._call_of.restype = ctypes.c_void_p
        self._replay = library.glm_replay
        self._replay.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
        self._replay_timed = library.glm_replay_timed
        self._replay_timed.argtypes = [*self._replay.argtypes, ctypes.c_void_p]
        self._set_num_threads = library.glm_set_num_threads
        self._set_num_threads.argtypes = [ctypes.c_int64]
        self._functions: dict[tuple[str, torch.dtype], Callable[..., int]] = {}
        for name, signature in SIGNATURES.items():
            for dtype, suffix in _SUFFIXES.items():
                if name in _FLOAT32_ONLY and dtype != torch.float32:
                    continue
                function = getattr(library, f"glm_{name}_{suffix}")
                function.argtypes = [_TYPES[kind] for kind in signature]
                function.restype = ctypes.c_int
                self._functions[name, dtype] = function

    def set_num_threads(self, count: int) -> None:
        """Threads a kernel may use, the caller's included; one caller at a time."""
        if self._set_num_threads(count):
            raise OSError(f"cannot start {count - 1} threads for the CPU kernels")

    def call(
        self, name: str, dtype: torch.dtype, numbers: tuple[float, ...], *tensors: Tensor
    ) -> None:
        """Run one kernel; every tensor must outlive the call, which the argument list ensures."""
        pointers = [tensor.data_ptr() for tensor in tensors]
        if self._recorder is not None:
            self._recorder.note(name, dtype, (*numbers, *pointers), tensors)
            return
        status = self._functions[name, dtype](*numbers, *pointers)
        if status:
            raise failure(name, status)

    def function(self, name: str, dtype: torch.dtype) -> Callable[..., int] | None:
        """The C function, for callers that count microseconds; None for a type it has not.

        It takes the numbers, then addresses. A result other than 0 is a `failure`.
        """
        run = self._functions.get((name, dtype))
        if self._recorder is None or run is None:
            return run
        return functools.partial(self._note, name, dtype)

    def _note(self, name: str, dtype: torch.dtype, *arguments: float) -> int:
        assert self._recorder is not None
        self._recorder.note(name, dtype, arguments, ())
        return 0

    @contextmanager
    def noted_by(self, recorder: Recorder) -> Iterator[None]:
        """Have each kernel that is called inside noted in place of run; for one thread."""
        assert self._recorder is None
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None

    def addresses(self, name: str, dtype: torch.dtype) -> tuple[int, int]:
        """Address of the C function that calls such a kernel, and of the kernel."""
        counts = (SIGNATURES[name].count(kind) for kind in "ifp")
        call = self._call_of(*counts)
        assert call, f"no function calls kernels like {name}; see csrc/replay.c"
        kernel = ctypes.cast(self._functions[name, dtype], ctypes.c_void_p).value  # type: ignore[arg-type]  # a ctypes function
        assert kernel
        return call, kernel

    def replay(self, count: int, records: int, seconds: int | None = None) -> tuple[int, int]:
        """Call recorded kernels in order, up to the first that fails.

        Args:
            count: How many.
            records: Address of their records, as csrc/replay.c has them.
            seconds: Address of a double for each, to which the time it took is added.

        Returns:
            Status of the last one called, 0 if all went well, and its place if not.
        """
        place = ctypes.c_int64()
        at = ctypes.addressof(place)
        if seconds is None:
            return self._replay(count, records, at), place.value
        return self._replay_timed(count, records, at, seconds), place.value


def failure(name: str, status: int) -> Exception:
    """What a kernel's result means."""
    if status == _NO_MEMORY:
        return MemoryError(f"kernel {name} could not get its work space")
    if status == _WRONG_LAYOUT:
        return ValueError(f"kernel {name}: a packed (NZ) weight was cut or copied")
    return ValueError(f"kernel {name}: an index or a length lies outside its tensor")


@functools.cache
def load() -> Native | None:
    """The best compiled library for this CPU, or None where none was built."""
    flags = cpu_flags()
    for variant in VARIANTS:
        path = library_path(variant)
        if variant.flags <= flags and path.exists():
            return _open(path)
    return None


@functools.cache
def _open(path: Path) -> Native:
    """One object for each library: what is noted of its calls must be all of them."""
    return Native(path)
