"""Health, version and metrics."""

import asyncio

import httpx

from shared.admin import software_version
from tests.services.frontend.conftest import Mesh


async def test_health_is_503_without_the_chain(lone: httpx.AsyncClient) -> None:
    for path in ("/health", "/ping"):
        response = await lone.get(path)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert "detokenizer" in response.json()["error"]["message"]


async def test_health_is_200_with_the_whole_chain_and_503_without_a_worker(mesh: Mesh) -> None:
    assert (await mesh.http.get("/health")).json() == {"status": "ready"}
    assert (await mesh.http.head("/health")).status_code == 200
    mesh.fake.load.is_worker_ready = False
    await mesh.fake.stop()
    await mesh.fake.start()
    async with asyncio.timeout(30):
        text = ""
        while "the worker is not ready" not in text:
            text = (await mesh.http.get("/health")).text


async def test_metrics_are_prometheus_text_with_the_load(mesh: Mesh) -> None:
    await mesh.chat()
    page = await mesh.http.get("/metrics")
    assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    for line in (
        "vllm:num_requests_running 3.0",
        "vllm:num_requests_waiting 2.0",
        "vllm:kv_cache_usage_perc 0.25",
        "vllm:num_preemptions_total 7.0",
        "vllm:prefix_cache_queries_total 400.0",
        "vllm:prefix_cache_hits_total 300.0",
        "glm_mesh:num_cached_blocks 60.0",
        "glm_mesh:recomputed_tokens_total 90.0",
        "glm_mesh:step_seconds_total 4.0",
        "glm_mesh:step_idle_seconds_total 0.25",
        "glm_mesh:scheduler_gc_pause_seconds_total 0.0015",
        "glm_mesh:scheduler_gc_pause_max_seconds 0.0005",
        'vllm:request_success_total{finished_reason="stop",model_name="nano"} 1.0',
        'vllm:generation_tokens_total{model_name="nano"} 4.0',
    ):
        assert line in page.text.splitlines()


async def test_version_is_the_distributions(lone: httpx.AsyncClient) -> None:
    assert (await lone.get("/version")).json() == {"version": software_version()}
