"""GLM-5.2 (``glm_moe_dsa``) as one readable decoder.

Reading order: config, metadata, norm, rope, indexer, attention, experts, layer, decoder.
The model calls ``torch.ops.npu.*`` and plain torch; it knows no device, no request and no text.

Shape letters used in every docstring of this package:

====  ==============================================================================
T     tokens in the flattened step (prefill chunks and decodes mixed, padding included)
R     sequences in the step
S     rows for which logits are wanted
E     hidden size
H     attention heads
P     head size without position (``qk_nope_head_dim``)
Dr    rotary head size (64)
D     value head size (``v_head_dim``)
Q     rank of the query latent (``q_lora_rank``)
C     latent size of the KV cache (``kv_lora_rank``, 512)
Hi    indexer heads
Di    indexer head size (128)
K     positions selected per token (``index_topk``)
B     blocks of 128 slots in the cache
N     routed experts
I     width of one expert
V     vocabulary
====  ==============================================================================
"""
