"""Numbers of one process in Prometheus' text form.

A `Metrics` owns its registry, so two of them in one process (tests) never meet. Names are used as
given; a counter's name ends in `_total`. Labels never hold request ids or text of a tenant.

Processes that are one service to the outside count together where `PROMETHEUS_MULTIPROC_DIR` is
a folder of theirs: each page shows the sums over all of them, also over those that have ended.
"""

import os
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

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
        self._totals: set[str] = set()

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

    def total(
        self,
        name: str,
        description: str,
        labels: Sequence[str] = (),
        *,
        source: Callable[[], float] | None = None,
    ) -> Gauge:
        """A number that only grows and is counted elsewhere; shown as a counter.

        Processes that are one service are told of the same events: the largest count is shown.
        """
        gauge = Gauge(name, description, labels, registry=self._registry, multiprocess_mode="max")
        self._totals.add(name)
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
        counted = self._registry
        if SHARED_VARIABLE in os.environ:
            counted = CollectorRegistry(auto_describe=True)
            MultiProcessCollector(counted)  # type: ignore[no-untyped-call]  # the library's
        return generate_latest(_Page(counted, self._totals))


class _Page(Collector):
    """All series, those that only grow as what they are: the library has no such counters."""

    def __init__(self, counted: CollectorRegistry, totals: Set[str]) -> None:
        self._counted = counted
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        """As the library asks for it."""
        for metric in self._counted.collect():
            if metric.name in self._totals:
                name = metric.name.removesuffix("_total")
                counter = Metric(name, metric.documentation, "counter")
                counter.samples = metric.samples
                yield counter
            else:
                yield metric
