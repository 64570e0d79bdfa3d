"""StatsCollector: the metrics of connections, streams and listeners that a program watches."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aiordma.errors import RdmaError
from aiordma.prometheus.metrics import METRICS, Metrics, Stats


class HasStats(Protocol):
    """A connection, a stream, a listener or a server, of any module of aiordma."""

    @property
    def stats(self) -> Stats: ...


class StatsCollector(Collector):
    """A collector of prometheus_client, with one time series for each name and metric.

    The metrics are the fields of {py:class}`aiordma.ConnectionStats`,
    {py:class}`aiordma.MessageStreamStats`, {py:class}`aiordma.StreamStats` and
    {py:class}`aiordma.ListenerStats`, such as `aiordma_connection_bytes_sent_total`,
    `aiordma_message_stream_bytes_copied_total`, `aiordma_stream_bytes_unread` and
    `aiordma_listener_connections`. Three more are about the connections that are watched, and three
    each about `aiordma_message_streams` and `aiordma_streams`:

    - `aiordma_connections`: how many are open,
    - `aiordma_connections_opened_total`,
    - `aiordma_connections_ended_total`, with the label `error`: the name of the error that ended
      the block of watch(), such as `PeerTimeout`; "" without an error, "other" if it was not an
      {py:class}`aiordma.RdmaError`.

    A counter includes the connections that have ended. `collect()` can be called by any thread.
    """

    def __init__(self, registry: CollectorRegistry | None = REGISTRY) -> None:
        """Register the collector with `registry`, or with none."""
        self._lock = threading.Lock()
        self._groups: dict[tuple[type[Stats], str], _Group] = {}
        if registry is not None:
            registry.register(self)

    @contextlib.contextmanager
    def watch(self, name: str, source: HasStats) -> Iterator[None]:
        """Include the numbers of a connection, stream or listener, in the block and after it.

        Sources of the same kind and name are added up. Use few names: one for each service or
        listener, not one for each peer.
        """
        kind = type(source.stats)
        with self._lock:
            group = self._groups.setdefault((kind, name), _Group())
            group.open.append(source)
            group.opened += 1
        error = ""
        try:
            yield
        except BaseException as raised:
            error = type(raised).__name__ if isinstance(raised, RdmaError) else "other"
            raise
        finally:
            with self._lock:
                group.open.remove(source)
                group.ended[error] += 1
                _add(group.totals, source.stats, METRICS[kind].counters)

    def collect(self) -> Iterable[Metric]:
        """Return the metrics with their present values."""
        with self._lock:
            return [metric for kind in METRICS for metric in self._collect_kind(kind)]

    def _collect_kind(self, kind: type[Stats]) -> Iterator[Metric]:
        metrics = METRICS[kind]
        groups = {name: one for (of, name), one in self._groups.items() if of is kind}
        families = _Families(metrics)
        for name, group in groups.items():
            families.add(name, group)
        yield from families.counters.values()
        yield from families.gauges.values()
        if metrics.plural:
            yield from _opened(metrics.plural, groups)

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, which the registry compares with those it has."""
        return StatsCollector(registry=None).collect()


class _Group:
    """The sources of one kind and name."""

    def __init__(self) -> None:
        self.open: list[HasStats] = []
        self.opened = 0
        self.ended: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        """The counters of the sources that have ended."""


class _Families:
    """The metrics of one kind of stats."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.counters = {
            field: CounterMetricFamily(f"{metrics.prefix}_{field}", text, labels=["name"])
            for field, text in metrics.counters.items()
        }
        self.gauges = {
            field: GaugeMetricFamily(f"{metrics.prefix}_{field}", text, labels=["name"])
            for field, text in metrics.gauges.items()
        }

    def add(self, name: str, group: _Group) -> None:
        """Add the values of a group."""
        counted, level = Counter(group.totals), Counter[str]()
        for source in group.open:
            stats = source.stats
            _add(counted, stats, self._metrics.counters)
            _add(level, stats, self._metrics.gauges)
        for field, counter in self.counters.items():
            counter.add_metric([name], counted[field])
        for field, gauge in self.gauges.items():
            gauge.add_metric([name], level[field])


def _opened(plural: str, groups: dict[str, _Group]) -> Iterable[Metric]:
    """Return how many connections or streams are open, were opened, and have ended."""
    name, noun = f"aiordma_{plural}", plural.replace("_", " ")
    open_now = GaugeMetricFamily(name, f"Open {noun}.", labels=["name"])
    opened = CounterMetricFamily(
        f"{name}_opened", f"{noun.capitalize()} that were opened.", labels=["name"]
    )
    ended = CounterMetricFamily(
        f"{name}_ended",
        f"{noun.capitalize()} that have ended, by the name of the error.",
        labels=["name", "error"],
    )
    for group_name, group in groups.items():
        open_now.add_metric([group_name], len(group.open))
        opened.add_metric([group_name], group.opened)
        for error, count in group.ended.items():
            ended.add_metric([group_name, error], count)
    return open_now, opened, ended


def _add(total: Counter[str], stats: Stats, fields: Iterable[str]) -> None:
    for field in fields:
        total[field] += getattr(stats, field)
