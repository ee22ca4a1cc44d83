"""The deployments of the published guide for GLM-5.2: flags as they are given to `vllm serve`."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One role of one deployment."""

    scheme: str
    hardware: str
    command: str
    environment: dict[str, str] = field(default_factory=dict)
    world: int
    nodes: int


def _mtp(drafts: int) -> str:
    return (
        f"""--speculative-config '{{"num_speculative_tokens": {drafts}, """
        """"method": "deepseek_mtp", "enforce_eager": true}'"""
    )


_COMMON = (
    "--host 0.0.0.0 --seed 1024 --served-model-name glm-5 --trust-remote-code "
    "--quantization ascend --safetensors-load-strategy prefetch --enable-expert-parallel "
    "--enable-auto-tool-choice --tool-call-parser glm47 --reasoning-parser glm45 "
)
_GRAPHS = """--compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}' """
_CP = "--prefill-context-parallel-size 1 --cp-kv-cache-interleave-size 128 "
_LI = '"enable_dsa_cp": true, "enable_sparse_sfa_c8": false, "enable_sparse_li_c8": true'
_BOTH = '"enable_dsa_cp": {cp}, "enable_sparse_sfa_c8": true, "enable_sparse_li_c8": true'


def _additional(keys: str) -> str:
    return f"--additional-config '{{{keys}, \"fuse_muls_add\": true}}' "


_BOTH_CP = _additional(_BOTH.format(cp="true"))
_BOTH_HEADS = _additional(_BOTH.format(cp="false"))

GUIDE = {
    "one A3 node": Case(
        scheme="w4a8c8",
        hardware="a3",
        world=16,
        nodes=1,
        environment={"HCCL_BUFFSIZE": "200"},
        command=_COMMON
        + _GRAPHS
        + _additional(_LI)
        + _mtp(3)
        + " --port 8077 --api-server-count 1 --data-parallel-size 2 --tensor-parallel-size 8 "
        "--max-num-seqs 12 --max-model-len 135000 --max-num-batched-tokens 8192 "
        "--gpu-memory-utilization 0.92",
    ),
    "two A3 nodes": Case(
        scheme="w4a8c8",
        hardware="a3",
        world=32,
        nodes=2,
        environment={"HCCL_BUFFSIZE": "400"},
        command=_COMMON
        + _GRAPHS
        + _additional(_LI)
        + _mtp(3)
        + " --headless --data-parallel-size 4 --data-parallel-start-rank 2 "
        "--data-parallel-size-local 2 --data-parallel-address 10.0.0.1 "
        "--data-parallel-rpc-port 12980 --tensor-parallel-size 8 --max-num-seqs 16 "
        "--max-model-len 66000 --max-num-batched-tokens 8192 --gpu-memory-utilization 0.90",
    ),
    "two A2 nodes": Case(
        scheme="w4a8c8",
        hardware="a2",
        world=16,
        nodes=2,
        command=_COMMON
        + _GRAPHS
        + _mtp(5)
        + " --max_model_len 40000 --max-num-batched-tokens 4096 --gpu-memory-utilization 0.95 "
        "--max-num-seqs 16 --data-parallel-size 2 --data-parallel-size-local 1 "
        "--tensor-parallel-size 8 --block-size 128",
    ),
    "prefill on A3": Case(
        scheme="w8a8c8",
        hardware="a3",
        world=32,
        nodes=2,
        environment={"HCCL_BUFFSIZE": "400", "VLLM_PP_LAYER_PARTITION": "41,37"},
        command=_COMMON
        + _additional(_LI)
        + _mtp(1)
        + " --tensor-parallel-size 16 --pipeline-parallel-size 2 "
        "--distributed-executor-backend mp --master-addr 10.0.0.1 --master-port 7060 --nnodes 2 "
        "--node-rank 0 --max-model-len 202752 --max-num-batched-tokens 16384 "
        "--enable-prefix-caching --max-num-seqs 64 --gpu-memory-utilization 0.85 --enforce-eager",
    ),
    "decode on A3": Case(
        scheme="w8a8c8",
        hardware="a3",
        world=32,
        nodes=2,
        environment={"HCCL_BUFFSIZE": "256"},
        command=_COMMON
        + _GRAPHS
        + _BOTH_HEADS
        + _mtp(5)
        + " --data-parallel-size 16 --data-parallel-rank 3 --tensor-parallel-size 2 "
        "--max-model-len 202752 --max-num-batched-tokens 192 --max-num-seqs 32 "
        "--gpu-memory-utilization 0.90 --async-scheduling",
    ),
    "prefill on A2": Case(
        scheme="w8a8c8",
        hardware="a2",
        world=32,
        nodes=4,
        environment={"HCCL_BUFFSIZE": "256"},
        command=_COMMON
        + _BOTH_CP
        + _mtp(1)
        + " --data-parallel-size 4 --data-parallel-rank 0 --tensor-parallel-size 8 "
        "--enable-chunked-prefill --max-model-len 200000 --max-num-batched-tokens 8192 "
        "--max-num-seqs 512 --gpu-memory-utilization 0.92 --enforce-eager",
    ),
    "decode on A2": Case(
        scheme="w8a8c8",
        hardware="a2",
        world=32,
        nodes=4,
        environment={"HCCL_BUFFSIZE": "2560"},
        command=_COMMON
        + _BOTH_HEADS
        + _mtp(3)
        + " --data-parallel-size 8 --data-parallel-rank 0 --tensor-parallel-size 4 "
        "--max-model-len 200000 --max-num-batched-tokens 256 --max-num-seqs 256 "
        "--gpu-memory-utilization 0.92 --compilation-config "
        """'{"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [4,8,16,24,32,"""
        """40,48,56,64,96,128,160,192,224,256,298,320,352,384]}'""",
    ),
    "a million tokens on one A3 node": Case(
        scheme="w4a8c8",
        hardware="a3",
        world=16,
        nodes=1,
        environment={"HCCL_BUFFSIZE": "768"},
        command=_COMMON
        + _CP
        + _BOTH_CP
        + _mtp(3)
        + " --max-model-len 1024000 --max-num-batched-tokens 16384 --gpu-memory-utilization 0.80 "
        "--max-num-seqs 32 --data-parallel-size 1 --pipeline-parallel-size 1 "
        "--tensor-parallel-size 16 --decode-context-parallel-size 16 --compilation-config "
        """'{"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [4, 16, 128]}'""",
    ),
    "a million tokens on two A3 nodes": Case(
        scheme="w4a8c8",
        hardware="a3",
        world=32,
        nodes=2,
        environment={"HCCL_BUFFSIZE": "768"},
        command=_COMMON
        + _CP
        + _GRAPHS
        + _BOTH_CP
        + _mtp(3)
        + " --max-model-len 1024000 --max-num-batched-tokens 16384 --gpu-memory-utilization 0.75 "
        "--max-num-seqs 8 --data-parallel-size 4 --pipeline-parallel-size 1 "
        "--tensor-parallel-size 8 --decode-context-parallel-size 8",
    ),
    "prefill of a million tokens": Case(
        scheme="w8a8c8",
        hardware="a3",
        world=32,
        nodes=2,
        environment={"HCCL_BUFFSIZE": "400"},
        command=_COMMON
        + _CP
        + _BOTH_CP
        + _mtp(1)
        + " --data-parallel-size 2 --tensor-parallel-size 16 --decode-context-parallel-size 16 "
        "--max-model-len 1048576 --max-num-batched-tokens 8192 --max-num-seqs 64 "
        "--gpu-memory-utilization 0.85 --enforce-eager",
    ),
    "decode of a million tokens": Case(
        scheme="w8a8c8",
        hardware="a3",
        world=32,
        nodes=2,
        environment={"HCCL_BUFFSIZE": "400"},
        command=_COMMON
        + _CP
        + _GRAPHS
        + _BOTH_HEADS
        + _mtp(5)
        + " --data-parallel-size 4 --tensor-parallel-size 8 --decode-context-parallel-size 8 "
        "--max-model-len 1048576 --max-num-batched-tokens 192 --max-num-seqs 32 "
        "--gpu-memory-utilization 0.90",
    ),
}
