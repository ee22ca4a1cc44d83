"""Numbers of one process in Prometheus' text form.

A `Metrics` owns its registry, so two of them in one process (tests) never meet. Names are used as
given; a counter's name ends in `_total`. Labels never hold request ids or text of a tenant.

Processes that are one service to the outside count together where `PROMETHEUS_MULTIPROC_DIR` is
a folder of theirs: each page shows the sums over all of them, also over those that have ended.
"""

import os
from collections.abc import Callable, Sequence
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

# The library reads it too, when it is imported.
SHARED_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The metrics of a process."""

    def __init__(self) -> None:
        """Start empty."""
        # The `_created` twin of every series doubles the page and tells nothing here.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library leaves it bare
        self._registry = CollectorRegistry(auto_describe=True)
        self._sources: list[tuple[Gauge, Callable[[], float]]] = []

    def counter(self, name: str, description: str, labels: Sequence[str] = ()) -> Counter:
        """A number that only grows."""
        return Counter(name, description, labels, registry=self._registry)

    def gauge(
        self,
        name: str,
        description: str,
        labels: Sequence[str] = (),
        *,
        source: Callable[[], float] | None = None,
    ) -> Gauge:
        """A number that goes up and down; `source` is asked at every scrape instead of `set`."""
        gauge = Gauge(
            name, description, labels, registry=self._registry, multiprocess_mode="mostrecent"
        )
        if source is not None:
            self._sources.append((gauge, source))
        return gauge

    def histogram(
        self, name: str, description: str, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        """A distribution; `buckets` are upper bounds."""
        return Histogram(name, description, labels, buckets=buckets, registry=self._registry)

    def render(self) -> bytes:
        """All series as Prometheus' text, of type `CONTENT_TYPE`."""
        for gauge, source in self._sources:
            gauge.set(source())
        if SHARED_VARIABLE not in os.environ:
            return generate_latest(self._registry)
        shared = CollectorRegistry(auto_describe=True)
        MultiProcessCollector(shared)  # type: ignore[no-untyped-call]  # the library leaves it bare
        return generate_latest(shared)
