"""Which matrices each scheme of `glm-mesh quantize` quantizes, and how.

As ModelSlim's recipes for GLM do: the absorbed ``kv_b_proj``, the router, the indexer's keys and
head weights, norms, embeddings, head and the whole MTP layer stay as they are.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final, Literal

from services.worker.model.config import ModelConfig
from services.worker.quant.scheme import Scheme

SchemeName = Literal["w8a8", "w8a8c8", "w4a8c8"]


class Part(Enum):
    """What a recipe tells apart."""

    ATTENTION = "attention"
    MLP = "MLPs and shared experts"
    EXPERTS = "routed experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Schemes of the parts, and whether indexer keys are to be kept in eight bits."""

    schemes: Mapping[Part, Scheme]
    has_c8: bool = False

    @property
    def needs_calibration(self) -> bool:
        """Whether scales of activations must be known beforehand."""
        return Scheme.W8A8 in self.schemes.values()

    @property
    def uses_calibration(self) -> bool:
        """Whether calibration makes a difference."""
        return self.needs_calibration or Scheme.W4A8_DYNAMIC in self.schemes.values()


_INT8: Final = MappingProxyType(
    {
        Part.ATTENTION: Scheme.W8A8,
        Part.MLP: Scheme.W8A8_DYNAMIC,
        Part.EXPERTS: Scheme.W8A8_DYNAMIC,
    }
)
_INT4: Final = MappingProxyType(
    {
        Part.ATTENTION: Scheme.W8A8_DYNAMIC,
        Part.MLP: Scheme.W8A8_DYNAMIC,
        Part.EXPERTS: Scheme.W4A8_DYNAMIC,
    }
)
RECIPES: Final[Mapping[SchemeName, Recipe]] = MappingProxyType(
    {
        "w8a8": Recipe(schemes=_INT8),
        "w8a8c8": Recipe(schemes=_INT8, has_c8=True),
        "w4a8c8": Recipe(schemes=_INT4, has_c8=True),
    }
)

_NUMBER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_PARTS: Final[Mapping[Part, re.Pattern[str]]] = MappingProxyType(
    {
        Part.ATTENTION: re.compile(
            r"self_attn\.(q_a_proj|kv_a_proj_with_mqa|q_b_proj|o_proj|indexer\.wq_b)"
        ),
        Part.MLP: re.compile(r"mlp\.(shared_experts\.)?(gate|up|down)_proj"),
        Part.EXPERTS: re.compile(r"mlp\.experts\.\d+\.(gate|up|down)_proj"),
    }
)


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to; None for those outside the layers."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return None if found is None else int(found.group(1))


def scheme_of(recipe: Recipe, config: ModelConfig, name: str) -> Scheme:
    """How a recipe stores a tensor of the float checkpoint."""
    found = _NUMBER.fullmatch(name)
    # An MTP layer is as it was: a wrong draft costs a little time, never a wrong token.
    if found is None or int(found.group(1)) >= config.num_hidden_layers:
        return Scheme.FLOAT
    for part, pattern in _PARTS.items():
        if pattern.fullmatch(found.group(2)):
            return recipe.schemes[part]
    return Scheme.FLOAT


# The recipes keep the indexer keys of the first and last layers of GLM-5 whole, where errors weigh
# most: 0 to 4 and 74 to 78, the MTP layer being the last.
_EDGE_LAYERS: Final = 5
# A model of few layers has no inner ones to speak of; all of its keys are quantized.
_DEEP: Final = 4 * _EDGE_LAYERS


def default_whole_layers(config: ModelConfig) -> frozenset[int]:
    """Layers whose indexer keys stay in the model's type unless something else is asked for."""
    num_layers = config.num_hidden_layers + config.num_nextn_predict_layers
    if num_layers < _DEEP:
        return frozenset()
    first, last = range(_EDGE_LAYERS), range(num_layers - _EDGE_LAYERS, num_layers)
    return frozenset((*first, *last))
