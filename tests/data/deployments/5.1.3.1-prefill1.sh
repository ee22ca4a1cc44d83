# GLM-5.2 guide, 5.1.3.1-prefill1
# arguments: 0 9081
nic_name="eth0"
local_ip="10.0.0.1"
node_p0_ip="10.0.0.1"
export VLLM_PP_LAYER_PARTITION="41,37"
export HCCL_BUFFSIZE=400
export HCCL_IF_IP=$local_ip
export HCCL_OP_EXPANSION_MODE="AIV"
export HCCL_SOCKET_IFNAME=$nic_name
export LD_LIBRARY_PATH=$LD_LIBRARY_PATH:/usr/local/lib
export GLOO_SOCKET_IFNAME=$nic_name
export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True
vllm serve /models/GLM-5.2 \
    --host 0.0.0.0 \
    --port $2 \
    --tensor-parallel-size 16 \
    --enable-expert-parallel \
    --pipeline-parallel-size 2 \
    --distributed-executor-backend mp \
    --master-addr $node_p0_ip \
    --master-port 7060 \
    --nnodes 2 \
    --node-rank 1 \
    --speculative-config '{"num_speculative_tokens": 1, "method":"deepseek_mtp","enforce_eager":true}' \
    --seed 1024 \
    --served-model-name glm-5 \
    --max-model-len 202752 \
    --safetensors-load-strategy 'prefetch' \
    --additional-config '{"fuse_muls_add":true, "enable_dsa_cp":true, "enable_sparse_li_c8": true, "enable_flashcomm1": true, "enable_fused_mc2": 1}' \
    --max-num-batched-tokens 16384 \
    --trust-remote-code \
    --enable-prefix-caching \
    --max-num-seqs 64 \
    --quantization ascend \
    --gpu-memory-utilization 0.85 \
    --headless \
    --enforce-eager \
    --enable-auto-tool-choice \
    --tool-call-parser glm47 \
    --reasoning-parser glm45 \
    --kv-transfer-config '{
        "kv_connector": "MooncakeConnectorV1",
        "kv_role": "kv_producer",
        "kv_port": "30000",
        "engine_id": "0",
        "kv_connector_extra_config": {
            "use_ascend_direct": true,
            "prefill": {"dp_size": 1, "pp_size": 2, "tp_size": 16, "pp_layer_partition": "41,37"},
            "decode": { "dp_size": 16, "tp_size": 2}
        }
    }'
