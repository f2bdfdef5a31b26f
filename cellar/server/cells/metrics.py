"""Prometheus metrics of a server of cells under the prefix `cellar:`; stems as the LLM server's where they agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cellar.core.cell_graphs import CellStats

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_NODES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5)
_MODEL = ("model_name",)

REASONS = ("stop", "abort", "error")


class CellMetrics:
    """All metrics of one server; `stats` gives the engine's snapshot, or None while it does not run. One thread."""

    def __init__(self, models: tuple[str, ...], stats: Callable[[], CellStats | None]) -> None:
        self._registry = registry = CollectorRegistry()
        self._stats = stats
        self.end_to_end = Histogram(
            "cellar:e2e_request_latency_seconds",
            "From arrival to the end.",
            _MODEL,
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_step = Histogram(
            "cellar:time_to_first_step_seconds",
            "From arrival to a stream's first step.",
            _MODEL,
            buckets=_SECONDS,
            registry=registry,
        )
        self.num_nodes = Histogram(
            "cellar:request_cell_nodes",
            "Cells of a request, growing chains at their limit.",
            _MODEL,
            buckets=_NODES,
            registry=registry,
        )
        self._ended = Counter(
            "cellar:request_success",
            "Requests that ended, by reason.",
            (*_MODEL, "finished_reason"),
            registry=registry,
        )
        self._responses = Counter(
            "cellar:http_responses", "HTTP answers, by route and status.", ("route", "status"), registry=registry
        )
        for model in models:
            for family in (self.end_to_end, self.first_step, self.num_nodes):
                family.labels(model)
            for reason in REASONS:
                self._ended.labels(model, reason)
        registry.register(_Engine(stats))

    def arrived(self, model: str, num_nodes: int) -> CellTiming:
        """A request begins."""
        self.num_nodes.labels(model).observe(num_nodes)
        return CellTiming(self, model)

    def ended(self, model: str, reason: str) -> None:
        """A request ended."""
        self._ended.labels(model, reason).inc()

    def answered(self, route: str, status: int) -> None:
        """An HTTP answer was begun."""
        self._responses.labels(route, str(status)).inc()

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


class CellTiming:
    """The clock of one request; it ends once, by the first call that says how."""

    __slots__ = ("_arrived", "_ended", "_metrics", "_model", "_stepped")

    def __init__(self, metrics: CellMetrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._arrived = perf_counter()
        self._stepped = self._ended = False

    def step(self) -> None:
        """A step of a stream has come."""
        if not self._stepped:
            self._stepped = True
            self._metrics.first_step.labels(self._model).observe(perf_counter() - self._arrived)

    def end(self, reason: str) -> None:
        """The request has ended: stop, abort or error."""
        if self._ended:
            return
        self._ended = True
        self._metrics.ended(self._model, reason)
        if reason == "stop":
            self._metrics.end_to_end.labels(self._model).observe(perf_counter() - self._arrived)


class _Engine:
    """The engine's own figures, read when somebody asks."""

    def __init__(self, stats: Callable[[], CellStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """All families; without an engine only that it is down."""
        stats = self._stats()
        yield GaugeMetricFamily("cellar:engine_up", "1 while the engine runs.", value=float(stats is not None))
        if stats is None:
            return
        yield GaugeMetricFamily("cellar:num_requests_running", "Requests whose cells run.", value=stats.running)
        yield GaugeMetricFamily("cellar:num_requests_waiting", "Requests that wait for memory.", value=stats.waiting)
        yield CounterMetricFamily("cellar:cell_tasks", "Tasks: batches of cells.", value=stats.tasks)
        yield CounterMetricFamily("cellar:cell_nodes", "Cells in those batches.", value=stats.nodes)
