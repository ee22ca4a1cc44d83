"""Memory of the largest step: what its tensors take at the fullest moment.

Formulas over the tensors that the model's code holds, so exact up to what a kernel allocates by
itself; where tokens change ranks on the way to their experts, the share of a busy rank is an
estimate.
"""

from dataclasses import dataclass
from typing import Final

from services.worker.model.config import ModelConfig
from services.worker.parallel.moe_method import MoeMethod
from services.worker.quant.scheme import Scheme
from services.worker.sizing.deployment import Deployment
from services.worker.sizing.moe_traffic import mc2_capacity, moe_method

_STREAM_TENSORS: Final = 6
"""[T, E] tensors alive inside a layer: input and sum before and after each norm, two results."""

_MET_TENSORS: Final = 2
"""[T, E] tensors of a block that needs all tokens of a stream that is cut: its input and output."""

_BUSY: Final = 2
"""Estimate: rows of the busiest rank, in shares of an even spread over experts."""

_DRAW_BYTES: Final = 34
"""Per logit of a drawn row, sampler.py and draw.py: copy, scaled, probabilities, sorted values
with their ids, running sums, masks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Parts of a step that are alive together."""

    stream: int
    attention: int
    experts: int

    @property
    def peak(self) -> int:
        """The fullest moment: attention and experts take turns."""
        return self.stream + max(self.attention, self.experts)


def step_bytes(deployment: Deployment, num_tokens: int) -> StepBytes:
    """A step in which a replica has `num_tokens`, without its top-k indices."""
    config, size = deployment.config, deployment.element_bytes
    row = config.hidden_size * size
    # Behind norms of a share are all tokens of it, and the parts of sums before they are scattered.
    brought = _MET_TENSORS * num_tokens * row if _cuts_stream(deployment) else 0
    return StepBytes(
        stream=_stream_tensors(deployment) * _stream_tokens(deployment, num_tokens) * row,
        # By then all tokens are gone: only their queries are left.
        attention=_attention(deployment, num_tokens) + brought // 2,
        experts=_experts(deployment, num_tokens) + (0 if _keeps_share(deployment) else brought),
    )


def _stream_tensors(deployment: Deployment) -> int:
    """Tensors of the stream's form: shared experts' results wait there for those of the others."""
    has_shared = deployment.config.n_shared_experts and _has_experts(deployment.config)
    return _STREAM_TENSORS + bool(has_shared and not _cuts_stream(deployment))


def _has_experts(config: ModelConfig) -> bool:
    return any(map(config.is_sparse, range(config.num_hidden_layers)))


def topk_bytes(deployment: Deployment, num_tokens: int) -> int:
    """Selected positions of a step, int32: those in use and those a layer is choosing."""
    return 2 * _attention_tokens(deployment, num_tokens) * deployment.config.index_topk * 4


def logits_bytes(deployment: Deployment) -> int:
    """Logits of the sampled rows, and what drawing from all of them takes."""
    config, size = deployment.config, deployment.element_bytes
    parts = 1 + (deployment.topology.tensor_parallel_size > 1)  # own columns, then all of them
    return deployment.decode_tokens * config.vocab_size * (parts * size + 4 + _DRAW_BYTES)


def gathered_latent_bytes(deployment: Deployment, latent_row: int) -> int:
    """Rows of a longest sequence, brought together for one layer of a step with a prompt."""
    if deployment.topology.decode_context_parallel_size == 1:
        return 0
    return deployment.max_model_len * latent_row


def stage_bytes(deployment: Deployment, num_tokens: int) -> int:
    """Hidden states and running sum on their way to the next pipeline stage."""
    if deployment.topology.pipeline_parallel_size == 1:
        return 0
    return 2 * num_tokens * deployment.config.hidden_size * deployment.element_bytes


def _cuts_stream(deployment: Deployment) -> bool:
    """Whether a rank has its share of the tokens alone between blocks."""
    return deployment.is_flashcomm and deployment.topology.tensor_parallel_size > 1


def _keeps_share(deployment: Deployment) -> bool:
    """Whether the ways to experts begin and end with such shares."""
    return _cuts_stream(deployment) and deployment.topology.expert_parallel_size > 1


def _share(deployment: Deployment, num_tokens: int) -> int:
    return -(-num_tokens // deployment.topology.tensor_parallel_size)


def _stream_tokens(deployment: Deployment, num_tokens: int) -> int:
    return _share(deployment, num_tokens) if _cuts_stream(deployment) else num_tokens


def _attention_tokens(deployment: Deployment, num_tokens: int) -> int:
    """Tokens whose attention a rank computes: all, or its share where tokens are cut."""
    return _share(deployment, num_tokens) if deployment.is_dsa_cp else num_tokens


def _attention(deployment: Deployment, num_tokens: int) -> int:
    config, size = deployment.config, deployment.element_bytes
    tp = deployment.topology.tensor_parallel_size
    heads = config.num_attention_heads // (1 if deployment.is_dsa_cp else tp)
    per_head = (
        config.qk_head_dim
        + 2 * config.kv_lora_rank  # the query brought into the latent space, and the result
        + config.qk_rope_head_dim
        + config.v_head_dim
    )
    if deployment.cache.sparse_sfa_c8:
        # Packed rows want both parts of a query side by side.
        per_head += 2 * config.qk_rope_head_dim
    latents = 2 * config.q_lora_rank + config.kv_lora_rank + config.qk_rope_head_dim
    indexer = (config.index_n_heads + 1) * config.index_head_dim
    per_token = heads * per_head + latents + indexer
    own = _attention_tokens(deployment, num_tokens)
    if deployment.is_dsa_cp and tp > 1:
        # Results of all heads on their way, and as many that arrive: of all tokens, for own heads.
        per_token += 2 * heads * config.v_head_dim
    return own * per_token * size


def _experts(deployment: Deployment, num_tokens: int) -> int:
    """The MLP's tensors: rows in, between the products, rows out, and the sum of each token."""
    config, size = deployment.config, deployment.element_bytes
    if not _has_experts(config):
        width = config.intermediate_size // deployment.topology.tensor_parallel_size
        return num_tokens * 3 * width * size
    scheme = deployment.quantization.scheme(*_first_expert(deployment))
    width = config.moe_intermediate_size
    if deployment.topology.expert_parallel_size == 1:
        width //= deployment.topology.tensor_parallel_size
    hidden = config.hidden_size
    # Gate, up and their product; then what is left of them while the second product is made.
    first, second = {
        Scheme.W8A8_DYNAMIC: (width, width),
        Scheme.W4A8_DYNAMIC: (3 * width * size, width * size + width),
    }.get(scheme, (3 * width * size, width * size))
    rows = _rows(deployment, num_tokens)
    row_in = hidden * (size if scheme is Scheme.FLOAT else 1)
    results = rows.computed * hidden * size + rows.summed * hidden * size
    held = rows.gathered * hidden * size + rows.taken * row_in
    return held + max(rows.computed * first, rows.computed * second + results)


def _first_expert(deployment: Deployment) -> tuple[str, tuple[str, ...]]:
    config = deployment.config
    layer = next(x for x in range(config.num_hidden_layers) if config.is_sparse(x))
    return f"model.layers.{layer}.mlp.experts.0.", ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Rows of a rank's experts."""

    taken: int
    """Sorted by expert, and copies on the way there."""
    computed: int
    summed: int
    """Results on their way back, and the sums of tokens."""
    gathered: int = 0
    """Tokens of all replicas."""


def _rows(deployment: Deployment, num_tokens: int) -> _Rows:
    topology, config = deployment.topology, deployment.config
    choices, ranks = config.num_experts_per_tok, topology.expert_parallel_size
    method = moe_method(deployment, num_tokens)
    if method is MoeMethod.ALLGATHER:
        replicas = topology.data_parallel_size if ranks > 1 else 1
        tokens = num_tokens * replicas
        copies = tokens * choices
        is_gathered = replicas > 1 or _keeps_share(deployment)
        gathered = tokens if is_gathered else 0
        return _Rows(taken=copies, computed=copies, summed=tokens, gathered=gathered)
    own = _share(deployment, num_tokens)
    totals = own if _keeps_share(deployment) else num_tokens
    if method is MoeMethod.MC2:
        per_rank = mc2_capacity(deployment) // topology.tensor_parallel_size
        slots = per_rank * ranks * min(-(-config.n_routed_experts // ranks), choices)
        return _Rows(taken=slots, computed=slots, summed=totals)
    sent, arriving = own * choices, own * choices * _BUSY
    # Sorted to be sent, received, sorted by expert; then results go the same way back.
    return _Rows(taken=sent + 2 * arriving, computed=arriving, summed=arriving + sent + totals)
