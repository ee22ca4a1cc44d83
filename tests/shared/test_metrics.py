import os
import subprocess
import sys
from pathlib import Path

from shared.metrics import SHARED_VARIABLE, Metrics

COUNTING = """
import sys
from shared.metrics import Metrics
metrics = Metrics()
metrics.counter("glm_seen_total", "Seen.", ("kind",)).labels("a").inc(float(sys.argv[1]))
metrics.gauge("glm_live", "Live.", source=lambda: float(sys.argv[1]))
metrics.histogram("glm_wait_seconds", "Wait.", (1.0,)).observe(0.5)
metrics.total("glm_steps_total", "Steps.", source=lambda: float(sys.argv[1]))
print(metrics.render().decode())
"""


def test_names_appear_as_given() -> None:
    metrics = Metrics()
    metrics.counter("vllm:prompt_tokens_total", "Prompt tokens.").inc(3)
    metrics.gauge("vllm:num_requests_running", "Running.").set(2)
    text = metrics.render().decode()
    assert "\nvllm:prompt_tokens_total 3.0\n" in text
    assert "\nvllm:num_requests_running 2.0\n" in text
    assert "_created" not in text


def test_gauge_with_a_source_is_asked_at_every_scrape() -> None:
    metrics, values = Metrics(), iter([1.0, 2.0])
    metrics.gauge("glm_live", "Live.", source=lambda: next(values))
    assert b"glm_live 1.0" in metrics.render()
    assert b"glm_live 2.0" in metrics.render()


def test_a_total_that_is_counted_elsewhere_is_shown_as_a_counter() -> None:
    metrics = Metrics()
    metrics.total("glm_steps_total", "Steps.", source=lambda: 7.0)
    metrics.total("glm_of_each_total", "Of each.", ("replica",)).labels("0").set(3)
    metrics.gauge("glm_live", "Live.").set(1)
    text = metrics.render().decode()
    for line in (
        "# TYPE glm_steps_total counter",
        "# HELP glm_steps_total Steps.",
        "glm_steps_total 7.0",
        'glm_of_each_total{replica="0"} 3.0',
        "# TYPE glm_live gauge",
    ):
        assert line in text.splitlines()


def test_histogram_counts_into_its_buckets() -> None:
    metrics = Metrics()
    metrics.histogram("glm_wait_seconds", "Wait.", (0.1, 1.0), ("route",)).labels("chat").observe(
        0.5
    )
    text = metrics.render().decode()
    assert 'glm_wait_seconds_bucket{le="0.1",route="chat"} 0.0' in text
    assert 'glm_wait_seconds_bucket{le="1.0",route="chat"} 1.0' in text


def test_two_registries_do_not_share_names() -> None:
    first, second = Metrics(), Metrics()
    first.counter("same_total", "x").inc()
    second.counter("same_total", "x")
    assert b"same_total 0.0" in second.render()


def test_processes_that_share_a_folder_count_together(tmp_path: Path) -> None:
    pages = [
        subprocess.run(
            [sys.executable, "-c", COUNTING, number],
            env={**os.environ, SHARED_VARIABLE: str(tmp_path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for number in ("2", "3")
    ]
    assert 'glm_seen_total{kind="a"} 2.0' in pages[0]
    assert 'glm_seen_total{kind="a"} 5.0' in pages[1]
    assert "glm_live 3.0" in pages[1]
    assert "glm_steps_total 3.0" in pages[1], "told of the same events"
    assert "# TYPE glm_steps_total counter" in pages[1]
    assert "glm_wait_seconds_count 2.0" in pages[1]
    assert "pid=" not in pages[1]
