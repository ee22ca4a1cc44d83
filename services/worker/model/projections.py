"""Builds each product of the model in the form that its weights are stored in."""

from collections.abc import Mapping

from services.worker.model.linear import Linear, Projection
from services.worker.model.linear_int8 import DynamicInt8Linear, StaticInt8Linear
from services.worker.model.shards import Cut, Shards
from services.worker.model.spec import ModelSpec
from services.worker.quant.scheme import Scheme
from shared.errors import CheckpointError


def make_projection(
    spec: ModelSpec, prefix: str, parts: Mapping[str, int], size_in: int, cut: Cut = Cut.WHOLE
) -> Projection:
    """One product of matrices that share their input.

    Args:
        spec: The model.
        prefix: Start of the matrices' names, with its dot.
        parts: Outputs of each matrix by name, in the order of the product.
        size_in: Inputs.
        cut: What is divided over the tensor-parallel ranks.

    Raises:
        CheckpointError: The matrices are stored in different ways, or in one not served here.
    """
    shards = Shards.cut(spec.placement, prefix, parts, size_in, cut)
    scheme = spec.quantization.scheme(prefix, shards.names())
    if scheme is Scheme.FLOAT:
        return Linear(shards, spec.dtype, spec.device)
    if scheme is Scheme.W8A8_DYNAMIC:
        return DynamicInt8Linear(spec, shards)
    if scheme is Scheme.W8A8:
        return StaticInt8Linear(spec, shards)
    names = ", ".join(shards.names())
    raise CheckpointError(
        f"{spec.quantization.source}: {prefix}{names}: {scheme} is served for routed experts only"
    )


def make_float_projection(
    spec: ModelSpec, prefix: str, parts: Mapping[str, int], size_in: int
) -> Linear:
    """A product whose matrices may not be quantized, whole on every rank."""
    for part in parts:
        check_is_float(spec, prefix, part)
    shards = Shards.cut(spec.placement, prefix, parts, size_in, Cut.WHOLE)
    return Linear(shards, spec.dtype, spec.device)


def check_is_float(spec: ModelSpec, prefix: str, name: str) -> None:
    """Refuse a quantized matrix where the model computes with a float one.

    Raises:
        CheckpointError: The matrix is quantized.
    """
    scheme = spec.quantization.scheme(prefix, (name,))
    if scheme is not Scheme.FLOAT:
        raise CheckpointError(
            f"{spec.quantization.source}: {prefix}{name}.weight: is {scheme}, must be "
            f"{Scheme.FLOAT}"
        )
