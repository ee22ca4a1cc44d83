"""What the products of a layer are multiplied with, seen at the operators.

Nothing in the model knows of it: a dispatch mode sees the calls of the two operators that multiply
by a float weight, and tells the products apart by that weight's memory.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker.model.experts import FloatExperts, MixtureOfExperts
from services.worker.model.layer import DecoderLayer
from services.worker.model.linear import Linear, Projection
from services.worker.quant.input_range import Histogram, InputRange
from services.worker.quant.moments import Moments
from services.worker.quant.recipe import Part, Recipe
from services.worker.quant.scheme import Scheme

_LINEAR: Final = "glm::linear"
_GROUPED: Final = "npu::npu_grouped_matmul"
_EXPERT: Final = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(\d+)\.(gate|up|down)_proj")


class InputObserver(TorchDispatchMode):
    """Inside it, what is multiplied by a watched weight is handed on as well.

    Args:
        dense: By the address of the weight.
        grouped: The same for weights of several matrices.
    """

    def __init__(self, dense: Mapping[int, Histogram], grouped: Mapping[int, Moments]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._dense = dense
        self._grouped = grouped

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Look at one call, then make it."""
        named = kwargs or {}
        if func._schema.name == _LINEAR:
            rows, weight = args
            assert isinstance(rows, Tensor)
            assert isinstance(weight, Tensor)
            if histogram := self._dense.get(weight.data_ptr()):
                histogram.add(rows)
        elif func._schema.name == _GROUPED:
            self._look_at_groups(args, named["group_list"])
        return func(*args, **named)

    def _look_at_groups(self, args: tuple[object, ...], counts: object) -> None:
        inputs, weights = args
        assert isinstance(inputs, list)
        assert isinstance(weights, list)
        assert isinstance(counts, Tensor)
        if moments := self._grouped.get(weights[0].data_ptr()):
            moments.add(inputs[0], counts)


class LayerInputs:
    """What calibration tells about the inputs of one layer's matrices."""

    def __init__(self, layer: DecoderLayer, recipe: Recipe) -> None:
        """Watch what the recipe wants to know; `observer` gathers it."""
        self._prefix = f"model.layers.{layer.index}."
        self._dense: dict[int, Histogram] = {}
        self._grouped: dict[int, Moments] = {}
        self._histograms: dict[str, Histogram] = {}
        self._ranges: dict[str, InputRange] = {}
        self._experts: dict[str, Moments] = {}
        if recipe.schemes[Part.ATTENTION] is Scheme.W8A8:
            for names, projection in _attention_products(layer):
                self._watch(names, projection)
        if recipe.schemes[Part.EXPERTS] is Scheme.W4A8_DYNAMIC:
            self._watch_experts(layer)

    def _watch(self, names: tuple[str, ...], projection: Projection) -> None:
        assert isinstance(projection, Linear)
        histogram = self._dense[projection.weight.data_ptr()] = Histogram()
        for name in names:
            self._histograms[f"{self._prefix}self_attn.{name}"] = histogram

    def _watch_experts(self, layer: DecoderLayer) -> None:
        if not isinstance(layer.mlp, MixtureOfExperts):
            return
        experts = layer.mlp.experts
        assert isinstance(experts, FloatExperts)
        for kinds, weight in ((("gate", "up"), experts.w13), (("down",), experts.w2)):
            moments = self._grouped[weight.data_ptr()] = Moments(*weight.shape[:2])
            self._experts |= dict.fromkeys(kinds, moments)

    def observer(self) -> InputObserver:
        """Gathers inside it; the layer must still be the one that is watched."""
        return InputObserver(self._dense, self._grouped)

    def finish(self) -> None:
        """Choose the ranges; nothing more is gathered."""
        chosen = {id(histogram): histogram.best_range() for histogram in self._dense.values()}
        self._ranges = {name: chosen[id(seen)] for name, seen in self._histograms.items()}
        self._dense.clear()
        self._grouped.clear()

    def range_of(self, name: str) -> InputRange:
        """How a matrix's input is quantized; one product's matrices have one range."""
        return self._ranges[name]

    def moments_of(self, name: str) -> Tensor | None:
        """Mean squares of an expert matrix's input [in]."""
        found = _EXPERT.fullmatch(name)
        assert found is not None
        return self._experts[found.group(2)].of(int(found.group(1)))


def _attention_products(layer: DecoderLayer) -> Iterator[tuple[tuple[str, ...], Projection]]:
    """The products with a quantized matrix, and those matrices' names."""
    attention = layer.self_attn
    yield ("q_a_proj", "kv_a_proj_with_mqa"), attention.fused_qkv_a_proj
    yield ("q_b_proj",), attention.q_b_proj
    yield ("o_proj",), attention.o_proj
    if attention.indexer is not None:
        yield ("indexer.wq_b",), attention.indexer.wq_b
