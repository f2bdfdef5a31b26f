"""Prometheus metrics with vLLM's stems under the prefix `cellar:`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cellar.core.messages import RequestOutput, SchedulerStats

_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """All metrics of one server; `stats` gives the engine's snapshot, or None while there is no engine."""

    def __init__(self, model_name: str, stats: Callable[[], SchedulerStats | None]) -> None:
        self._registry = CollectorRegistry()
        names, values = ("model_name",), (model_name,)

        def histogram(stem: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"cellar:{stem}", help, names, buckets=buckets, registry=self._registry)
            return made.labels(*values)

        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", _LONG)
        self.inter_token = histogram("inter_token_latency_seconds", "Between tokens of one sequence.", _SHORT)
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first, per request.", _SHORT
        )
        self.end_to_end = histogram("e2e_request_latency_seconds", "From arrival to the end.", _LONG)
        self.queue = histogram("request_queue_time_seconds", "From arrival to the first step.", _LONG)
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.output_length = histogram("request_generation_tokens", "Tokens made for a request.", _TOKENS)
        success = Counter(
            "cellar:request_success",
            "Sequences that ended, by reason.",
            (*names, "finished_reason"),
            registry=self._registry,
        )
        self._ended = {
            reason: success.labels(*values, reason) for reason in ("stop", "length", "abort", "error", "tool_calls")
        }
        self._responses = Counter(
            "cellar:http_responses",
            "HTTP answers, by route and status.",
            (*names, "route", "status"),
            registry=self._registry,
        )
        self._model_name = model_name
        self._restarts = Counter(
            "cellar:engine_restarts", "Times that the engine was started again.", names, registry=self._registry
        ).labels(*values)
        self._registry.register(_EngineMetrics(model_name, stats))

    def arrived(self, num_prompt: int) -> Timing:
        """A request begins."""
        self.prompt_length.observe(num_prompt)
        return Timing(self)

    def ended(self, reason: str) -> None:
        """A sequence ended."""
        self._ended[reason].inc()

    def answered(self, route: str, status: int) -> None:
        """An HTTP answer was begun."""
        self._responses.labels(self._model_name, route, str(status)).inc()

    def restarted(self) -> None:
        """The engine was started again."""
        self._restarts.inc()

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


class Timing:
    """The clock of one request; times in seconds."""

    __slots__ = ("_arrived", "_last", "_metrics", "_num_tokens", "first")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrived = perf_counter()
        self._last: dict[int, float] = {}
        self._num_tokens = 0
        self.first: float | None = None

    def delta(self, index: int, num_tokens: int) -> None:
        """Tokens of one of the request's sequences came."""
        if not num_tokens:
            return
        now, last = perf_counter(), self._last.get(index)
        if self.first is None:
            self.first = now
            self._metrics.first_token.observe(now - self._arrived)
        if last is not None:
            for _ in range(num_tokens):
                self._metrics.inter_token.observe((now - last) / num_tokens)
        self._last[index] = now
        self._num_tokens += num_tokens

    def ended(self, output: RequestOutput) -> None:
        """The whole request is there."""
        metrics = self._metrics
        elapsed = perf_counter() - self._arrived
        metrics.end_to_end.observe(elapsed)
        metrics.queue.observe(output.queue_seconds)
        metrics.output_length.observe(self._num_tokens)
        longest = max(len(completion.token_ids) for completion in output.outputs)
        if self.first is not None and longest > 1:
            metrics.per_token.observe((elapsed - (self.first - self._arrived)) / (longest - 1))
        for completion in output.outputs:
            metrics.ended(completion.finish_reason or "abort")

    def left(self, num_sequences: int) -> None:
        """The client went away before the end."""
        for _ in range(num_sequences):
            self._metrics.ended("abort")


class _EngineMetrics:
    """The engine's own figures, read when somebody asks."""

    def __init__(self, model_name: str, stats: Callable[[], SchedulerStats | None]) -> None:
        self._model_name = model_name
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """All families; without an engine only that it is down."""
        stats = self._stats()
        yield self._gauge("engine_up", "1 while the engine runs.", 0 if stats is None else 1)
        if stats is None:
            return
        used = stats.total_chunks - stats.free_chunks - stats.cached_chunks
        yield self._gauge("num_requests_running", "Requests in the batch.", stats.running)
        yield self._gauge("num_requests_waiting", "Requests waiting for a row or memory.", stats.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV chunks in use.", used / max(stats.total_chunks, 1))
        yield self._gauge("kv_cache_total_chunks", "Chunks of KV cache.", stats.total_chunks)
        yield self._gauge("kv_cache_cached_chunks", "Chunks kept for later requests.", stats.cached_chunks)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.prefix_hits)
        yield self._counter("num_preemptions", "Requests suspended for want of memory.", stats.preemptions)
        yield self._counter("prompt_tokens", "Prompt tokens taken in.", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.generation_tokens)

    def _gauge(self, stem: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"cellar:{stem}", help, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, stem: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(f"cellar:{stem}", help, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family
