import pytest

from services.launcher.options.idle import IDLE
from tests.services.launcher.options.cases import extra, join, verdict


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("-ep", "--enable-expert-parallel: no effect: one rank holds every expert"),
        ("--trust-remote-code", "--trust-remote-code: no effect: no code"),
        ("--data-parallel-rank 0", "--data-parallel-rank 0: no effect: there is one replica"),
        ("--master-port 7060", "--master-port 7060: no effect: there is one machine"),
        ("--cp-kv-cache-interleave-size 128", "--cp-kv-cache-interleave-size 128: no effect"),
        ("--gpu-memory-utilization 0.9", "--gpu-memory-utilization 0.9: no effect: on a CPU"),
        (extra(enable_dsa_cp=True), "--additional-config enable_dsa_cp=true: no effect: one rank"),
        (extra(enable_flashcomm1=True), "enable_flashcomm1=true: no effect: one rank"),
        ("VLLM_ASCEND_ENABLE_FLASHCOMM1=1", "VLLM_ASCEND_ENABLE_FLASHCOMM1=true: no effect: one"),
        (extra(enable_mlapo=True), "--additional-config enable_mlapo=true: no effect"),
        (extra(weight_nz_mode=2), "weight_nz_mode=2: no effect: float weights keep"),
        (extra(enable_cpu_binding=True), "--additional-config enable_cpu_binding=true: no effect"),
        (extra(fuse_muls_add=False), "--additional-config fuse_muls_add=false: no effect"),
        (extra(enable_balance_scheduling=True), "enable_balance_scheduling=true: no effect"),
        (extra(mega_moe_max_tokens=8192), "mega_moe_max_tokens=8192: no effect: one rank"),
        (
            extra(multistream_overlap_shared_expert=True),
            "overlap_shared_expert=true: no effect: a CPU",
        ),
        (extra(eplb_config={"num_redundant_experts": 8}), "eplb_config: no effect: experts stay"),
        ("--kv-transfer-config {}", "--kv-transfer-config: no effect: no connector"),
        ("--guided-decoding-backend guidance", "guidance: no effect: grammars have one engine"),
        ("--profiler-config {}", "--profiler-config: no effect: it names no profiler"),
        ("HCCL_BUFFSIZE=200", "HCCL_BUFFSIZE=200: no effect: one rank talks to no other"),
        ("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=3000", "=3000: no effect: the scheduler's"),
    ],
)
def test_what_means_nothing_here_is_served_and_told(text: str, told: str) -> None:
    found = verdict(text)
    assert not found.refusals
    assert any(told in line for line in found.lines), found.lines


def test_tokens_are_cut_where_there_are_ranks_and_experts_overlap_where_there_are_streams() -> None:
    assert not verdict(join("-tp 2", extra(enable_dsa_cp=True, enable_flashcomm1=True))).lines
    overlap = extra(multistream_overlap_shared_expert=True)
    assert not verdict(join("--device npu", overlap)).lines


def test_what_a_device_reads_itself_is_told_on_a_cpu_only() -> None:
    text = "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True --gpu-memory-utilization 0.9"
    assert len(verdict(text).lines) == 2
    assert not verdict(join(text, "--device npu")).lines


def test_every_rule_gives_a_reason() -> None:
    assert all(rule.reason and rule.names for rule in IDLE)
