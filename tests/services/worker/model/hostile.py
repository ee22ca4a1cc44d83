"""CPU kernels that leave open what a device leaves open, and random weights in every form.

What nobody asked for is NaN or garbage: results for training, rows behind the last expert's, rows
of padding, scales of rows of zeros. Positions may come in any order.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from services.worker.model.slots import WeightSlot
from services.worker.ops import native, registry

Kernel = Callable[..., Any]


class Hostile:
    """The friendly kernels, and what is done to their results."""

    def __init__(self, *, is_shuffling: bool) -> None:
        self._generator = torch.Generator().manual_seed(1)
        self._is_shuffling = is_shuffling
        self.friendly = registry.cpu_kernels(native.load())

    def kernels(self) -> dict[str, Kernel]:
        """Those that a device leaves something open in."""
        return {
            "npu_rms_norm": self._unset("npu_rms_norm", 1),
            "npu_add_rms_norm": self._unset("npu_add_rms_norm", 1),
            "npu_kv_rmsnorm_rope_cache_v2": self._unset("npu_kv_rmsnorm_rope_cache_v2", 0, 1),
            "npu_moe_gating_top_k": self._unset("npu_moe_gating_top_k", 2),
            "npu_lightning_indexer": self._select_plain,
            "npu_quant_lightning_indexer": self._select_quantized,
            "npu_sparse_flash_attention": self._attend_plain,
            "npu_kv_quant_sparse_flash_attention": self._attend_packed,
            "npu_dynamic_quant": self._quantize,
            "npu_moe_init_routing_v2": self._sort,
            "npu_grouped_matmul": self._multiply,
            "npu_grouped_matmul_swiglu_quant_v2": self._multiply_and_gate,
            "npu_dequant_swiglu_quant": self._gate,
        }

    def _spoil(self, tensor: Tensor) -> None:
        """Fill with what no computation may meet."""
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        else:
            tensor.random_(-100, 100, generator=self._generator)

    def _unset(self, name: str, *places: int) -> Kernel:
        def call(*arguments: Any, **options: Any) -> Any:
            results = self.friendly[name](*arguments, **options)
            for place in places:
                self._spoil(results[place])
            return results

        return call

    def _shuffle(self, positions: Tensor) -> None:
        """Valid positions stay in front of those that are -1."""
        if not self._is_shuffling:
            return
        for row in positions[:, 0]:
            count = int((row >= 0).sum())
            row[:count] = row[torch.randperm(count, generator=self._generator)]

    def _select_plain(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        positions, values = self.friendly["npu_lightning_indexer"](*arguments, **options)
        self._shuffle(positions)
        self._spoil(values)
        return positions, values

    def _select_quantized(self, *arguments: Any, **options: Any) -> Tensor:
        positions: Tensor
        positions = self.friendly["npu_quant_lightning_indexer"](*arguments, **options)
        self._shuffle(positions)
        return positions

    def _attend_plain(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor,
                      *arguments: Any, **options: Any) -> tuple[Tensor, ...]:  # fmt: skip
        results: tuple[Tensor, ...] = self.friendly["npu_sparse_flash_attention"](
            query, key, value, positions, *arguments, **options
        )
        results[0][positions[:, 0, 0] < 0] = float("nan")
        for unused in results[1:]:
            self._spoil(unused)
        return results

    def _attend_packed(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor,
                       *arguments: Any, **options: Any) -> Tensor:  # fmt: skip
        result: Tensor = self.friendly["npu_kv_quant_sparse_flash_attention"](
            query, key, value, positions, *arguments, **options
        )
        result[positions[:, 0, 0] < 0] = float("nan")
        return result

    def _quantize(self, input: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        rows, scales = self.friendly["npu_dynamic_quant"](input, **options)
        # Zero, or a smallest number: a row of zeros stays one with any.
        scales[scales == 0] = 1e-12
        return rows, scales

    def _sort(self, x: Tensor, experts: Tensor, **options: Any) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...]
        results = self.friendly["npu_moe_init_routing_v2"](x, experts, **options)
        rows, _, counts, scales = results
        last = int(counts.sum())
        self._spoil(rows[last:])
        self._spoil(scales[last:] if options.get("quant_mode") == 1 else scales)
        return results

    def _multiply(self, x: list[Tensor], weight: list[Tensor], **options: Any) -> list[Tensor]:
        products: list[Tensor] = self.friendly["npu_grouped_matmul"](x, weight, **options)
        self._spoil(products[0][int(options["group_list"].sum()) :])
        return products

    def _multiply_and_gate(self, x: Tensor, weight: list[Tensor], scale: list[Tensor],
                           x_scale: Tensor, groups: Tensor, **options: Any
                           ) -> tuple[Tensor, Tensor]:  # fmt: skip
        rows, scales = self.friendly["npu_grouped_matmul_swiglu_quant_v2"](
            x, weight, scale, x_scale, groups, **options
        )
        last = int(groups.sum())
        self._spoil(rows[last:])
        self._spoil(scales[last:])
        return rows, scales

    def _gate(self, x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        rows, scales = self.friendly["npu_dequant_swiglu_quant"](x, **options)
        groups = options.get("group_index")
        last = len(x) if groups is None else int(groups.sum())
        self._spoil(rows[last:])
        self._spoil(scales[last:])
        return rows, scales


@contextlib.contextmanager
def installed(kernels: dict[str, Kernel]) -> Iterator[None]:
    """Put kernels over those that are registered for the CPU, for a while."""
    library = torch.library.Library("npu", "IMPL")
    try:
        _put(library, kernels)
        yield
    finally:
        # Under a dispatch mode torch calls what was registered last, even after its library is
        # gone: the friendly kernels have to be that.
        friendly = registry.cpu_kernels(native.load())
        _put(library, {name: friendly[name] for name in kernels})
        library._destroy()


def _put(library: torch.library.Library, kernels: dict[str, Kernel]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overriding is what this is for
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU", allow_override=True)


INPUT_SCALE = 0.03
_CONSTANT = {
    "weight_offset": 0.0,
    "scale_bias": 0.0,
    "input_offset": -3.0,
    "input_scale": INPUT_SCALE,
}


def random_weight(slot: WeightSlot, generator: torch.Generator) -> Tensor:
    """Numbers for a slot that keep activations near unit size, in the type of the file."""
    shape, leaf = slot.kept_shape, slot.name.rpartition(".")[2]
    if "I8" in slot.types:
        return torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
    if "I32" in slot.types:
        return torch.randint(-100, 101, shape, generator=generator).to(torch.int32)
    if leaf in _CONSTANT:
        return torch.full(shape, _CONSTANT[leaf])
    numbers = torch.rand(shape, generator=generator)
    if leaf in {"weight_scale", "deq_scale"}:
        # 73 is the deviation of the weights, 16 the root of an inner size.
        return (0.5 + numbers) / 73 / 16 * (INPUT_SCALE if leaf == "deq_scale" else 1)
    is_vector = len(slot.shape) == 1
    return 0.5 + numbers if is_vector else (numbers - 0.5) * 3.5 / slot.shape[-1] ** 0.5
