"""The layer norm of the indexer's keys: float32 inside, the input's type outside.

``torch.ops.glm.layer_norm`` is ours as `dense` says: torch's by default, and on a CPU a compiled
kernel, which can be part of a recorded step and takes rows that lie apart.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.ops.checks import require, require_contiguous, require_same_float
from services.worker.ops.native import Native

_NAME = "layer_norm"
SCHEMAS = ("layer_norm(Tensor input, Tensor gamma, Tensor beta, float epsilon) -> Tensor",)


def layer_norm(input: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> Tensor:
    """Normalise the rows of `input` [T, N], then ``* gamma + beta``, [N] each."""
    return torch.nn.functional.layer_norm(input, gamma.shape, gamma, beta, epsilon)


def defaults() -> dict[str, Callable[..., object]]:
    """The operator on every device that has no kernel of ours."""
    return {_NAME: layer_norm}


def _native_layer_norm(
    native: Native, input: Tensor, gamma: Tensor, beta: Tensor, epsilon: float
) -> Tensor:
    require(input.dim() == 2, _NAME, "input must be [T, N]")
    is_matching = gamma.shape == beta.shape == input.shape[1:]
    require(is_matching, _NAME, "gamma and beta must match the rows")
    require_same_float(_NAME, input, gamma, beta)
    require_contiguous(_NAME, gamma, beta)
    rows, width = input.shape
    if input.stride(1) != 1:
        input = input.contiguous()
    output = input.new_empty(rows, width)
    numbers = (rows, width, input.stride(0), epsilon)
    native.call("layer_norm", input.dtype, numbers, input, gamma, beta, output)
    return output


def kernels(native: Native | None) -> dict[str, Callable[..., object]]:
    """The kernel; without a compiled one the default stands."""
    if native is None:
        return {}
    return {_NAME: functools.partial(_native_layer_norm, native)}
