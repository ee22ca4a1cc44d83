"""Schemas of the ``torch.ops.npu`` operators in use, of torch_npu 2.13.0.

Written by ``tools/npu_schemas.py`` from the wheel; do not edit by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TORCH_NPU_VERSION = "2.13.0"

SCHEMAS: Mapping[str, str] = MappingProxyType(
    {
        "npu_add_rms_norm": (
            "npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> "
            "(Tensor, Tensor, Tensor)"
        ),
        "npu_dequant_swiglu_quant": (
            "npu_dequant_swiglu_quant(Tensor x, *, Tensor? weight_scale=None, Tensor? "
            "activation_scale=None, Tensor? bias=None, Tensor? quant_scale=None, Tensor? "
            "quant_offset=None, Tensor? group_index=None, bool activate_left=False, int "
            "quant_mode=0, int? dst_type=None, int? round_mode=None, int? activate_dim=None, int "
            "swiglu_mode=0, float clamp_limit=7.0, float glu_alpha=1.702, float glu_bias=1.0) -> "
            "(Tensor, Tensor)"
        ),
        "npu_dynamic_block_quant": (
            'npu_dynamic_block_quant(Tensor x, *, float min_scale=0.0, str round_mode="rint", '
            "int dst_type=1, int row_block_size=1, int col_block_size=128, float "
            "dst_type_max=0.0) -> (Tensor y, Tensor scale)"
        ),
        "npu_dynamic_quant": (
            "npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? "
            'group_index=None, int? dst_type=None, str quant_mode="pertoken", float '
            "dst_type_max=0.0) -> (Tensor, Tensor)"
        ),
        "npu_format_cast": (
            "npu_format_cast(Tensor input, int acl_format, *, int? customize_dtype=None, int? "
            "input_dtype=None) -> Tensor"
        ),
        "npu_grouped_matmul": (
            "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? "
            "scale=None, Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? "
            "antiquant_offset=None, Tensor[]? per_token_scale=None, Tensor? group_list=None, "
            "Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, Tensor[]? "
            "activation_quant_offset=None, int? split_item=0, int? group_type=None, int? "
            "group_list_type=0, int? act_type=0, int[]? tuning_config=None, int? "
            "output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? "
            "scale_dtype=None, int? per_token_scale_dtype=None) -> Tensor[]"
        ),
        "npu_grouped_matmul_swiglu_quant_v2": (
            "npu_grouped_matmul_swiglu_quant_v2(Tensor x, Tensor[] weight, Tensor[] "
            "weight_scale, Tensor x_scale, Tensor group_list, *, Tensor? smooth_scale=None, "
            "Tensor[]? weight_assist_matrix=None, Tensor? bias=None, int? dequant_mode=0, int? "
            "dequant_dtype=6, int? quant_mode=0, int? quant_dtype=1, int? group_list_type=0, "
            "int[]? tuning_config=None, int? x_dtype=None, int? weight_dtype=None, int? "
            "weight_scale_dtype=None, int? x_scale_dtype=None) -> (Tensor, Tensor)"
        ),
        "npu_interleave_rope": ("npu_interleave_rope(Tensor x, Tensor cos, Tensor sin) -> Tensor"),
        "npu_kv_quant_sparse_flash_attention": (
            "npu_kv_quant_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor "
            "sparse_indices, float scale_value, int key_quant_mode, int value_quant_mode, *, "
            "Tensor? key_dequant_scale=None, Tensor? value_dequant_scale=None, Tensor? "
            "block_table=None, Tensor? actual_seq_lengths_query=None, Tensor? "
            'actual_seq_lengths_kv=None, int sparse_block_size=1, str layout_query="BSND", str '
            'layout_kv="BSND", int sparse_mode=3, int pre_tokens=9223372036854775807, int '
            "next_tokens=9223372036854775807, int attention_mode=0, int quant_scale_repo_mode=1, "
            "int tile_size=128, int rope_head_dim=64, int? key_dtype=None, int? "
            "value_dtype=None) -> Tensor"
        ),
        "npu_kv_rmsnorm_rope_cache_v2": (
            "npu_kv_rmsnorm_rope_cache_v2(Tensor kv, Tensor gamma, Tensor cos, Tensor sin, "
            "Tensor index, Tensor(a!) k_cache, Tensor(b!) ckv_cache, *, Tensor? "
            "k_rope_scale=None, Tensor? c_kv_scale=None, Tensor? k_rope_offset=None, Tensor? "
            "c_kv_offset=None, Tensor? v=None, float epsilon=1e-5, str cache_mode='Norm', bool "
            "is_output_kv=False, int? k_cache_dtype=None, int? ckv_cache_dtype=None) -> (Tensor, "
            "Tensor)"
        ),
        "npu_lightning_indexer": (
            "npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, Tensor? "
            "actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, Tensor? "
            'block_table=None, str layout_query="BSND", str layout_key="BSND", int '
            "sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807, int "
            "next_tokens=9223372036854775807, bool return_value=False) -> (Tensor, Tensor)"
        ),
        "npu_moe_distribute_combine_v2": (
            "npu_moe_distribute_combine_v2(Tensor expand_x, Tensor expert_ids, Tensor "
            "assist_info_for_combine, Tensor ep_send_counts, Tensor expert_scales, str group_ep, "
            "int ep_world_size, int ep_rank_id, int moe_expert_num, *, Tensor? "
            "tp_send_counts=None, Tensor? x_active_mask=None, Tensor? expand_scales=None, "
            "Tensor? shared_expert_x=None, Tensor? elastic_info=None, Tensor? ori_x=None, "
            "Tensor? const_expert_alpha_1=None, Tensor? const_expert_alpha_2=None, Tensor? "
            'const_expert_v=None, Tensor? performance_info=None, str group_tp="", int '
            "tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, int "
            "shared_expert_num=1, int shared_expert_rank_num=0, int global_bs=0, int "
            'comm_quant_mode=0, str comm_alg="", int zero_expert_num=0, int copy_expert_num=0, '
            "int const_expert_num=0) -> Tensor"
        ),
        "npu_moe_distribute_dispatch_v2": (
            "npu_moe_distribute_dispatch_v2(Tensor x, Tensor expert_ids, str group_ep, int "
            "ep_world_size, int ep_rank_id, int moe_expert_num, *, Tensor? scales=None, Tensor? "
            "x_active_mask=None, Tensor? expert_scales=None, Tensor? elastic_info=None, Tensor? "
            'performance_info=None, str group_tp="", int tp_world_size=0, int tp_rank_id=0, int '
            "expert_shard_type=0, int shared_expert_num=1, int shared_expert_rank_num=0, int "
            'quant_mode=0, int global_bs=0, int expert_token_nums_type=1, str comm_alg="", int '
            "zero_expert_num=0, int copy_expert_num=0, int const_expert_num=0, int? "
            "y_dtype=None, int? x_dtype=None, int? scales_dtype=None) -> (Tensor, Tensor, "
            "Tensor, Tensor, Tensor, Tensor, Tensor)"
        ),
        "npu_moe_gating_top_k": (
            "npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, "
            "Tensor? tid2eid=None, int k_group=1, int group_count=1, int group_select_mode=0, "
            "int renorm=0, int norm_type=0, bool out_flag=False, float "
            "routed_scaling_factor=1.0, float eps=1e-20) -> (Tensor, Tensor, Tensor)"
        ),
        "npu_moe_init_routing_v2": (
            "npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? "
            "offset=None, int active_num=-1, int expert_capacity=-1, int expert_num=-1, int "
            "drop_pad_mode=0, int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, "
            "int quant_mode=-1, int[2] active_expert_range=[], int row_idx_type=0, int? "
            "x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)"
        ),
        "npu_moe_token_unpermute": (
            "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? "
            "probs=None, bool padded_mode=False, int[]? restore_shape=None) -> Tensor"
        ),
        "npu_quant_lightning_indexer": (
            "npu_quant_lightning_indexer(Tensor query, Tensor key, Tensor weights, Tensor "
            "query_dequant_scale, Tensor key_dequant_scale, int query_quant_mode, int "
            "key_quant_mode, *, Tensor? actual_seq_lengths_query=None, Tensor? "
            'actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query="BSND", str '
            'layout_key="BSND", int sparse_count=2048, int sparse_mode=3, int '
            "pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int? "
            "query_dtype=None, int? key_dtype=None) -> Tensor"
        ),
        "npu_quant_matmul": (
            "npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, "
            "Tensor? pertoken_scale=None, Tensor? bias=None, int? output_dtype=None, int? "
            "x1_dtype=None, int? x2_dtype=None, int? pertoken_scale_dtype=None, int? "
            "scale_dtype=None, int[]? group_sizes=None, Tensor? y_scale=None) -> Tensor"
        ),
        "npu_quantize": (
            "npu_quantize(Tensor input, Tensor scales, Tensor? zero_points, int dtype, int "
            "axis=1, bool div_mode=True) -> Tensor"
        ),
        "npu_rms_norm": (
            "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)"
        ),
        "npu_scatter_nd_update_": (
            "npu_scatter_nd_update_(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)"
        ),
        "npu_sparse_flash_attention": (
            "npu_sparse_flash_attention(Tensor query, Tensor key, Tensor? value, Tensor "
            "sparse_indices, float scale_value, *, Tensor? block_table=None, Tensor? "
            "actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None, Tensor? "
            "query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, str "
            'layout_query="BSND", str layout_kv="BSND", int sparse_mode=3, int '
            "pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int "
            "attention_mode=0, bool return_softmax_lse=False, Tensor? sinks=None) -> (Tensor, "
            "Tensor, Tensor)"
        ),
        "npu_swiglu": ("npu_swiglu(Tensor input, int dim=-1) -> Tensor"),
        "npu_transpose_batchmatmul": (
            "npu_transpose_batchmatmul(Tensor input, Tensor weight, *, Tensor? bias=None, "
            "Tensor? scale=None, int[]? perm_x1=None, int[]? perm_x2=None, int[]? perm_y=None, "
            "int? batch_split_factor=1) -> Tensor"
        ),
    }
)
