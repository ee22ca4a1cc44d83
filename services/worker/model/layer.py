"""One decoder layer: attention and MLP around a running residual."""

from collections.abc import Iterator

from torch import Tensor

from services.worker.kv_cache import LayerCache
from services.worker.model.backends import attention_backend
from services.worker.model.experts import MixtureOfExperts
from services.worker.model.experts_parallel import ExpertParallelMixture
from services.worker.model.mlp import MLP, make_mlp
from services.worker.model.norm import RMSNorm
from services.worker.model.slots import WeightSlot, plain_slot
from services.worker.model.spec import ModelSpec
from services.worker.model.step import StepInputs


class Dense:
    """A gated MLP as a layer's block."""

    def __init__(self, mlp: MLP) -> None:
        self.mlp = mlp

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        """[.., E] -> [.., E] in the form of the stream."""
        return step.stream.add_up(self.mlp(step.stream.whole(x)))

    def slots(self) -> Iterator[WeightSlot]:
        """Its checkpoint tensors."""
        return self.mlp.slots()

    def finish_loading(self) -> None:
        """Finish its products."""
        self.mlp.finish_loading()


def make_block(
    spec: ModelSpec, layer: int, prefix: str
) -> Dense | MixtureOfExperts | ExpertParallelMixture:
    """What follows a layer's attention."""
    if not spec.config.is_sparse(layer):
        return Dense(make_mlp(spec, prefix, spec.config.intermediate_size))
    if spec.placement.ep_size > 1:
        return ExpertParallelMixture(spec, prefix)
    return MixtureOfExperts(spec, prefix)


class DecoderLayer:
    """Pre-norm layer; the sum of block output and residual is taken inside the next norm.

    Norms take the stream as it is, whole or cut; attention and the block behind it bring together
    what they need and give it back in that form.
    """

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        config = spec.config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.index = layer
        self._prefix = prefix = f"model.layers.{layer}."
        self.input_layernorm = RMSNorm(hidden, eps, spec.dtype, spec.device)
        self.self_attn = attention_backend(config)(spec, layer, f"{prefix}self_attn.")
        self.post_attention_layernorm = RMSNorm(hidden, eps, spec.dtype, spec.device)
        self.mlp = make_block(spec, layer, f"{prefix}mlp.")

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepInputs, cache: LayerCache, topk: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the layer.

        Args:
            x: [.., E] output of the layer before (embeddings at first).
            residual: [.., E] running sum without `x`; None at first.
            step: The step.
            cache: This layer's caches, written.
            topk: [T, 1, K] positions selected so far in this step.

        Returns:
            Block output, residual and selected positions for the next layer.
        """
        residual, queries = self.write(x, residual, step, cache)
        return self.finish(residual, queries, step, cache, topk)

    def write(
        self, x: Tensor, residual: Tensor | None, step: StepInputs, cache: LayerCache
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the layer up to its caches: the residual, and queries as attention keeps them."""
        if residual is None:
            normed, residual = self.input_layernorm(x), x
        else:
            normed, residual = self.input_layernorm.add(x, residual)
        return residual, self.self_attn.write(normed, step, cache)

    def finish(
        self,
        residual: Tensor,
        queries: tuple[Tensor, ...],
        step: StepInputs,
        cache: LayerCache,
        topk: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The rest of the layer, for any rows of what `write` returned and a step of those."""
        attended, topk = self.self_attn.attend(queries, step, cache, topk)
        normed, residual = self.post_attention_layernorm.add(attended, residual)
        return self.mlp(normed, step), residual, topk

    def slots(self) -> Iterator[WeightSlot]:
        """Checkpoint tensors of this layer."""
        prefix = self._prefix
        yield plain_slot(f"{prefix}input_layernorm.weight", self.input_layernorm.weight)
        yield from self.self_attn.slots()
        yield plain_slot(
            f"{prefix}post_attention_layernorm.weight", self.post_attention_layernorm.weight
        )
        yield from self.mlp.slots()

    def finish_loading(self) -> None:
        """Finish attention and MLP."""
        self.self_attn.finish_loading()
        self.mlp.finish_loading()
