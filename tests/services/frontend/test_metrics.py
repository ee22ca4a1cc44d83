"""The names that dashboards and routers read."""

import pytest

from services.frontend.metrics import GatewayMetrics, kv_usage
from shared.sampling import LoadSnapshot, ReplicaLoad, SequenceStats


def page_of(metrics: GatewayMetrics) -> list[str]:
    return metrics.render().decode().splitlines()


def test_gauges_show_the_latest_load() -> None:
    load = LoadSnapshot(num_running=3, num_waiting=2, num_free_blocks=75, num_total_blocks=100)
    page = page_of(GatewayMetrics("m", lambda: load))
    assert "vllm:num_requests_running 3.0" in page
    assert "vllm:num_requests_waiting 2.0" in page
    assert "vllm:kv_cache_usage_perc 0.25" in page


def test_each_replica_has_its_own_gauges() -> None:
    first = ReplicaLoad(
        is_ready=True, num_running=2, num_steps_total=7, num_prefix_cache_hits_total=9
    )
    replicas = (first, ReplicaLoad())
    page = page_of(GatewayMetrics("m", lambda: LoadSnapshot(replicas=replicas)))
    assert 'glm_mesh:replica_is_ready{replica="0"} 1.0' in page
    assert 'glm_mesh:replica_is_ready{replica="1"} 0.0' in page
    assert 'glm_mesh:replica_num_requests_running{replica="0"} 2.0' in page
    assert 'glm_mesh:replica_steps_total{replica="0"} 7.0' in page
    assert 'glm_mesh:replica_prefix_cache_hits_total{replica="0"} 9.0' in page


@pytest.mark.parametrize(("free", "total", "usage"), [(0, 0, 0.0), (4, 4, 0.0), (0, 4, 1.0)])
def test_usage_is_a_share_also_before_the_first_load(free: int, total: int, usage: float) -> None:
    assert kv_usage(LoadSnapshot(num_free_blocks=free, num_total_blocks=total)) == usage


def test_finished_requests_are_counted_by_reason_with_their_tokens() -> None:
    metrics = GatewayMetrics("m", LoadSnapshot)
    stats = SequenceStats(num_prompt_tokens=5, num_cached_tokens=3, num_output_tokens=7)
    metrics.count_success("stop", stats, 0.2)
    metrics.count_success("length", stats, 0.2)
    metrics.observe_first_bytes(0.03)
    metrics.count_failure("upstream_lost")
    metrics.count_disconnect()
    metrics.count_http("/v1/completions", "POST", 200)
    page = page_of(metrics)
    for line in (
        'vllm:request_success_total{finished_reason="stop",model_name="m"} 1.0',
        'vllm:request_success_total{finished_reason="length",model_name="m"} 1.0',
        'vllm:prompt_tokens_total{model_name="m"} 10.0',
        'vllm:prompt_tokens_cached_total{model_name="m"} 6.0',
        'vllm:generation_tokens_total{model_name="m"} 14.0',
        'vllm:time_to_first_token_seconds_count{model_name="m"} 1.0',
        'vllm:e2e_request_latency_seconds_count{model_name="m"} 2.0',
        'glm_mesh:request_failures_total{reason="upstream_lost"} 1.0',
        "glm_mesh:client_disconnects_total 1.0",
        'http_requests_total{handler="/v1/completions",method="POST",status="200"} 1.0',
    ):
        assert line in page


def test_odd_output_is_counted_by_its_kind() -> None:
    metrics = GatewayMetrics("m", LoadSnapshot)
    metrics.count_oddities({"num_unclosed_reasoning": 2, "num_dropped_calls": 1})
    metrics.count_oddities({"num_unreadable_calls": 3, "num_of_a_newer_kind": 1})
    page = page_of(metrics)
    for line in (
        "glm_mesh:unclosed_reasoning_total 2.0",
        "glm_mesh:dropped_tool_calls_total 1.0",
        "glm_mesh:unreadable_tool_calls_total 3.0",
    ):
        assert line in page


def test_drafts_are_told_in_all_and_by_position() -> None:
    load = LoadSnapshot(
        num_drafts_total=10,
        num_drafted_tokens_total=30,
        num_accepted_tokens_per_position=(9, 5, 1),
    )
    page = page_of(GatewayMetrics("m", lambda: load))
    for line in (
        "vllm:spec_decode_num_drafts_total 10.0",
        "vllm:spec_decode_num_draft_tokens_total 30.0",
        "vllm:spec_decode_num_accepted_tokens_total 15.0",
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 9.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 1.0',
    ):
        assert line in page
