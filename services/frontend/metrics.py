"""Numbers of the gateway, under the names that dashboards and routers of vLLM know.

Load gauges show the scheduler's latest snapshot, as relayed by the detokenizer.
"""

from collections.abc import Callable, Mapping
from typing import Final

from prometheus_client import Gauge

from shared.metrics import Metrics
from shared.sampling import LoadSnapshot, SequenceStats

_LATENCY_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip


# Field of `ReplicaLoad`, name of its series, what it tells.
_REPLICA_SERIES: Final = (
    ("is_ready", "is_ready", "Whether the replica makes steps, 0 or 1."),
    ("is_draining", "is_draining", "Whether it gets nothing new while another stands, 0 or 1."),
    ("num_running", "num_requests_running", "Sequences with a row in the replica."),
    ("num_waiting", "num_requests_waiting", "Sequences that wait for this replica."),
    ("num_free_blocks", "num_free_blocks", "KV blocks that can be handed out."),
    ("num_total_blocks", "num_total_blocks", "KV blocks of the replica."),
    ("num_cached_blocks", "num_cached_blocks", "KV blocks whose content can be shared."),
    ("num_prefix_cache_queries_total", "prefix_cache_queries_total", "Tokens looked up."),
    ("num_prefix_cache_hits_total", "prefix_cache_hits_total", "Tokens found."),
    ("num_steps_total", "steps_total", "Steps, also those that only its world needed."),
)
# Field of `LoadSnapshot`, name of its series, what it tells, its unit in that of the series.
_STEP_SERIES: Final = (
    ("step_us_total", "step_seconds_total", "Time of steps, from plan to result.", 1e-6),
    (
        "step_idle_us_total",
        "step_idle_seconds_total",
        "Time between steps for which a device waited though there was work.",
        1e-6,
    ),
    (
        "num_recomputed_tokens_total",
        "recomputed_tokens_total",
        "Tokens of preempted or lost sequences that were computed once more.",
        1,
    ),
    (
        "gc_pause_us_total",
        "scheduler_gc_pause_seconds_total",
        "Time that collections of garbage took of the scheduler.",
        1e-6,
    ),
    (
        "max_gc_pause_us",
        "scheduler_gc_pause_max_seconds",
        "The longest of them.",
        1e-6,
    ),
    ("num_prepared_total", "constraints_total", "Requests whose constraint was got ready.", 1),
    (
        "prepare_us_total",
        "constraint_prepare_seconds_total",
        "Time that workers took to check and compile constraints.",
        1e-6,
    ),
    ("num_masks_total", "constraint_masks_total", "Masks of constraints that were made.", 1),
    (
        "mask_us_total",
        "constraint_mask_seconds_total",
        "Time that making them took; while a device computes it costs nothing.",
        1e-6,
    ),
    ("num_schedulers", "num_schedulers", "Schedulers that the detokenizers were told of.", 1),
    ("num_reached_schedulers", "num_schedulers_reached", "Those of them that are there.", 1),
    (
        "num_scheduler_losses_total",
        "scheduler_losses_total",
        "Times that a detokenizer lost a scheduler.",
        1,
    ),
    (
        "num_resubmissions_total",
        "sequence_resubmissions_total",
        "Sequences of lost schedulers that were given to one again, with the tokens they had.",
        1,
    ),
    (
        "num_unresumed_total",
        "unresumed_sequences_total",
        "Sequences of lost schedulers that could not go on in time.",
        1,
    ),
)

# Field of `LoadSnapshot`, series, what it tells.
_CACHE_SERIES: Final = (
    (
        "num_prefix_cache_queries_total",
        "vllm:prefix_cache_queries_total",
        "Tokens that were looked up in the prefix cache, at the first admission of a sequence.",
    ),
    ("num_prefix_cache_hits_total", "vllm:prefix_cache_hits_total", "Tokens found there."),
    (
        "num_cached_blocks",
        "glm_mesh:num_cached_blocks",
        "KV blocks whose content can be shared; those of them that nobody uses count as free.",
    ),
)

# Field of `OutputOddities`, series, what it tells.
_ODDITIES: Final = (
    ("num_unclosed_reasoning", "unclosed_reasoning_total", "Choices that ended inside a thought."),
    (
        "num_dropped_calls",
        "dropped_tool_calls_total",
        "Calls that were not shown: tools that may not be called, names that were cut off.",
    ),
    (
        "num_unreadable_calls",
        "unreadable_tool_calls_total",
        "Texts behind the opening tag of a call that were no call; shown as content.",
    ),
)


class GatewayMetrics:
    """All series of the gateway."""

    def __init__(
        self,
        model_name: str,
        load: Callable[[], LoadSnapshot],
        num_ready: Callable[[], int] = lambda: 0,
    ) -> None:
        """Register every series; `load` and `num_ready` are asked at each scrape."""
        self._metrics = Metrics()
        self._load = load
        counter = self._metrics.counter
        self._add_load_gauges(load)
        label = ("model_name",)
        self._prompt_tokens = counter(
            "vllm:prompt_tokens_total", "Prompt tokens of finished requests.", label
        ).labels(model_name)
        self._cached_tokens = counter(
            "vllm:prompt_tokens_cached_total",
            "Prompt tokens of finished requests that came from the prefix cache.",
            label,
        ).labels(model_name)
        self._output_tokens = counter(
            "vllm:generation_tokens_total", "Generated tokens of finished requests.", label
        ).labels(model_name)
        self._success = counter(
            "vllm:request_success_total",
            "Requests that ended well, by the first choice's reason.",
            ("model_name", "finished_reason"),
        )
        self._failures = counter(
            "glm_mesh:request_failures_total", "Requests that ended badly.", ("reason",)
        )
        self._resubmissions = counter(
            "glm_mesh:request_resubmissions_total",
            "Requests that went to another detokenizer: theirs was lost, or refused them.",
            ("cause",),
        )
        self._metrics.gauge(
            "glm_mesh:num_detokenizers_ready",
            "Detokenizers that take new requests.",
            source=lambda: float(num_ready()),
        )
        self._oddities = {
            name: counter(f"glm_mesh:{series}", text) for name, series, text in _ODDITIES
        }
        self._disconnects = counter(
            "glm_mesh:client_disconnects_total", "Clients that left before their end."
        )
        self._add_latencies(model_name)
        self._http = counter(
            "http_requests_total", "HTTP answers.", ("handler", "method", "status")
        )
        self._model_name = model_name

    def count_http(self, handler: str, method: str, status: int) -> None:
        """One HTTP answer."""
        self._http.labels(handler, method, str(status)).inc()

    def count_success(self, reason: str, stats: SequenceStats, seconds: float) -> None:
        """One request that ended well."""
        self._success.labels(self._model_name, reason).inc()
        self._prompt_tokens.inc(stats.num_prompt_tokens)
        self._cached_tokens.inc(stats.num_cached_tokens)
        self._output_tokens.inc(stats.num_output_tokens)
        self._latency.observe(seconds)

    def count_oddities(self, oddities: Mapping[str, int]) -> None:
        """What models did not do as their dialect wants it, in one request that ended well."""
        for name, count in oddities.items():
            if name in self._oddities:  # a newer detokenizer may know more
                self._oddities[name].inc(count)

    def count_failure(self, reason: str) -> None:
        """One request that was refused or failed."""
        self._failures.labels(reason).inc()

    def count_resubmission(self, cause: str) -> None:
        """One request that was submitted again."""
        self._resubmissions.labels(cause).inc()

    def count_disconnect(self) -> None:
        """One client that left early."""
        self._disconnects.inc()

    def observe_first_bytes(self, seconds: float) -> None:
        """Time to the first output of a stream."""
        self._ttft.observe(seconds)

    def render(self) -> bytes:
        """The page for Prometheus."""
        for position, count in enumerate(self._load().num_accepted_tokens_per_position):
            self._accepted.labels(str(position)).set(count)
        for number, replica in enumerate(self._load().replicas):
            for name, gauge in self._replicas.items():
                gauge.labels(str(number)).set(getattr(replica, name))
        return self._metrics.render()

    def _add_latencies(self, model_name: str) -> None:
        histogram, label = self._metrics.histogram, ("model_name",)
        self._ttft = histogram(
            "vllm:time_to_first_token_seconds",
            "Request to its first bytes of output; streams only.",
            _LATENCY_BUCKETS,
            label,
        ).labels(model_name)
        self._latency = histogram(
            "vllm:e2e_request_latency_seconds",
            "Request to its end.",
            _LATENCY_BUCKETS,
            label,
        ).labels(model_name)

    def _add_load_gauges(self, load: Callable[[], LoadSnapshot]) -> None:
        gauge, total = self._metrics.gauge, self._metrics.total
        gauge(
            "vllm:num_requests_running",
            "Sequences with a row in the worker.",
            source=lambda: load().num_running,
        )
        gauge(
            "vllm:num_requests_waiting",
            "Sequences that wait for admission.",
            source=lambda: load().num_waiting,
        )
        gauge(
            "vllm:kv_cache_usage_perc",
            "Share of KV blocks in use, 0 to 1.",
            source=lambda: kv_usage(load()),
        )
        total(
            "vllm:num_preemptions_total",
            "Sequences that lost their blocks and were computed again.",
            source=lambda: load().num_preemptions_total,
        )
        for field, series, text, unit in _STEP_SERIES:
            self._add_series(f"glm_mesh:{series}", text, source=_scaled(load, field, unit))
        for field, series, text in _CACHE_SERIES:
            self._add_series(series, text, source=_scaled(load, field, 1.0))
        total(
            "vllm:spec_decode_num_drafts_total",
            "Rows of steps in which drafts were verified.",
            source=lambda: load().num_drafts_total,
        )
        total(
            "vllm:spec_decode_num_draft_tokens_total",
            "Draft tokens that were verified.",
            source=lambda: load().num_drafted_tokens_total,
        )
        total(
            "vllm:spec_decode_num_accepted_tokens_total",
            "Draft tokens that were kept.",
            source=lambda: sum(load().num_accepted_tokens_per_position),
        )
        self._replicas = {
            name: self._add_series(f"glm_mesh:replica_{series}", text, ("replica",))
            for name, series, text in _REPLICA_SERIES
        }
        self._accepted = total(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "Draft tokens that were kept, by their place among the drafts of a step.",
            ("position",),
        )

    def _add_series(
        self,
        series: str,
        text: str,
        labels: tuple[str, ...] = (),
        source: Callable[[], float] | None = None,
    ) -> Gauge:
        """A series of the snapshot; the name tells whether it only grows."""
        metrics = self._metrics
        add = metrics.total if series.endswith("_total") else metrics.gauge
        return add(series, text, labels, source=source)


def _scaled(load: Callable[[], LoadSnapshot], field: str, unit: float) -> Callable[[], float]:
    """What a scrape asks for: a field of the latest snapshot, in the unit of its series."""
    return lambda: float(getattr(load(), field)) * unit


def kv_usage(load: LoadSnapshot) -> float:
    """Share of blocks that cannot be handed out."""
    if not load.num_total_blocks:
        return 0.0
    return 1.0 - load.num_free_blocks / load.num_total_blocks
