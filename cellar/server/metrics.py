"""Prometheus metrics with vLLM's stems under the prefix `cellar:`.

What the fronts count stands in their tallies, summed when somebody asks; what the engine counts comes with its steps.
Whichever front is asked, the answer is the whole server's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import perf_counter

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric

from cellar.core.messages import RequestOutput, SchedulerStats
from cellar.core.sampling import SamplingParams
from cellar.server.engine_figures import EngineFigures, together
from cellar.server.histogram import Histogram
from cellar.server.routing_figures import RoutingFigures
from cellar.server.shared import Shared
from cellar.server.tally import Tally
from cellar.server.vllm_names import with_vllm_names

_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_COUNTS = (1, 2, 5, 10, 20)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

REASONS = ("stop", "length", "abort", "error")

ENGINE_RESTARTS, FRONT_RESTARTS = "engine_restarts", "front_restarts"

_COUNTERS = {
    "conversation_requests": "Requests that named their conversation.",
    "conversation_prompt_tokens": "Prompt tokens of requests that named their conversation.",
    "conversation_cached_tokens": "Of these, tokens found in the cache.",
    "chat_characters": "Characters of rendered conversations.",
    "chat_characters_tokenized": "Of these, characters that were tokenized; ids of the others were known.",
    "chat_tokenizing_seconds": "Time spent on that.",
    "turns_continued": "Turns of stored conversations that went on from their stored ids.",
    "turns_rendered": "Turns that did not: earlier turns were rewritten, or have no ids.",
    ENGINE_RESTARTS: "Times that the engine was started again.",
    FRONT_RESTARTS: "Times that a front process was started again.",
}


class Metrics:
    """All metrics of one server; `stats` gives the engine's snapshot, or None while there is no engine; of several
    `engines` gives each one's by its name. `cache` are the options of an engine's KV cache.

    One thread counts, except that `restarted` may come from another, and `routing` is the engine's thread's.
    """

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], SchedulerStats | None],
        shared: Shared | None = None,
        cache: Mapping[str, str] | None = None,
        engines: Callable[[], Mapping[str, SchedulerStats | None]] = dict,
    ) -> None:
        self._tally = Tally() if shared is None else shared.tally()
        self._counts = self._tally.counts if shared is None else shared.counts
        self._labels = {"model_name": model_name}
        self._stats = stats
        self._cache = dict(cache or {})
        self._engines = engines
        tally = self._tally
        self.first_token = Histogram(tally, "time_to_first_token_seconds", "From arrival to the first token.", _LONG)
        self.inter_token = Histogram(tally, "inter_token_latency_seconds", "Between tokens of one sequence.", _SHORT)
        self.per_token = Histogram(
            tally,
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, per request.",
            _SHORT,
        )
        self.end_to_end = Histogram(tally, "e2e_request_latency_seconds", "From arrival to the end.", _LONG)
        self.queue = Histogram(tally, "request_queue_time_seconds", "From arrival to the first step.", _LONG)
        self.prefill = Histogram(
            tally, "request_prefill_time_seconds", "From the first step to the first token.", _LONG
        )
        self.decode = Histogram(tally, "request_decode_time_seconds", "From the first token to the last.", _LONG)
        self.inference = Histogram(tally, "request_inference_time_seconds", "From the first step to the end.", _LONG)
        self.prompt_length = Histogram(tally, "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.output_length = Histogram(tally, "request_generation_tokens", "Tokens made for a request.", _TOKENS)
        self.longest = Histogram(
            tally, "request_max_num_generation_tokens", "Tokens of the longest of a request's sequences.", _TOKENS
        )
        self.asked_n = Histogram(tally, "request_params_n", "The n of a request.", _COUNTS)
        self.asked_tokens = Histogram(tally, "request_params_max_tokens", "The max_tokens of a request.", _TOKENS)
        self._histograms = (
            *(self.first_token, self.inter_token, self.per_token, self.end_to_end, self.queue, self.prefill),
            *(self.decode, self.inference, self.prompt_length, self.output_length, self.longest),
            *(self.asked_n, self.asked_tokens),
        )
        for reason in REASONS:
            tally.place(f"ended/{reason}")
        for name in _COUNTERS:
            tally.place(name)
        self.routing = RoutingFigures(tally)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def arrived(self, num_prompt: int, params: SamplingParams, named: bool = False) -> Timing:
        """A request begins. `named`: it said to which conversation it belongs."""
        self.prompt_length.observe(num_prompt)
        self.asked_n.observe(params.n)
        if params.max_tokens is not None and params.pooling is None:
            self.asked_tokens.observe(params.max_tokens)
        return Timing(self, named)

    def ended(self, reason: str) -> None:
        """A sequence ended."""
        self._tally.add(f"ended/{reason}")

    def returned(self, num_prompt: int, num_cached: int) -> None:
        """A request that named its conversation is complete."""
        self._tally.add("conversation_requests")
        self._tally.add("conversation_prompt_tokens", num_prompt)
        self._tally.add("conversation_cached_tokens", num_cached)

    def tokenized(self, characters: int, anew: int, seconds: float) -> None:
        """Rendered conversations of so many characters became ids, `anew` of them by tokenizing."""
        self._tally.add("chat_characters", characters)
        self._tally.add("chat_characters_tokenized", anew)
        self._tally.add("chat_tokenizing_seconds", seconds)

    def turn(self, continued: bool) -> None:
        """A turn of a stored conversation begins: from its ids, or rendered and tokenized as a whole."""
        self._tally.add("turns_continued" if continued else "turns_rendered")

    def answered(self, route: str, status: int) -> None:
        """An HTTP answer was begun."""
        self._tally.add(f"answers/{status}/{route}")

    def restarted(self) -> None:
        """The engine was started again."""
        self._tally.add(ENGINE_RESTARTS)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """All families, under our names and vLLM's."""
        return with_vllm_names(self._families(), "all" if self._engines() else "0")

    def _families(self) -> Iterator[Metric]:
        counts = self._counts()
        for histogram in self._histograms:
            yield histogram.family(self._labels, counts)
        ended = CounterMetricFamily(
            "cellar:request_success", "Sequences that ended, by reason.", labels=[*self._labels, "finished_reason"]
        )
        for reason in REASONS:
            ended.add_metric([*self._labels.values(), reason], counts.get(f"ended/{reason}", 0.0))
        yield ended
        answers = CounterMetricFamily(
            "cellar:http_responses", "HTTP answers, by route and status.", labels=[*self._labels, "route", "status"]
        )
        for name, count in counts.items():
            if name.startswith("answers/"):
                _, status, route = name.split("/", 2)
                answers.add_metric([*self._labels.values(), route, status], count)
        yield answers
        for name, help in _COUNTERS.items():
            yield self._counter(name, help, counts.get(name, 0.0))
        yield from self.routing.families(self._labels, counts)
        yield from self._engine()

    def _engine(self) -> Iterator[Metric]:
        """What engines count; of several each by itself."""
        engines = self._engines()
        if not engines:
            return EngineFigures(self._labels, self._cache).families(self._stats())
        return together(
            EngineFigures({**self._labels, "engine": name}, self._cache).families(stats)
            for name, stats in engines.items()
        )

    def _counter(self, stem: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(f"cellar:{stem}", help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


class Timing:
    """The clock of one request; times in seconds."""

    __slots__ = ("_arrived", "_last", "_metrics", "_named", "_num_tokens", "first")

    def __init__(self, metrics: Metrics, named: bool = False) -> None:
        self._metrics = metrics
        self._named = named
        self._arrived = perf_counter()
        self._last: dict[int, float] = {}
        self._num_tokens = 0
        self.first: float | None = None

    def delta(self, index: int, num_tokens: int) -> None:
        """Tokens of one of the request's sequences came, at once: with the first one no time lies between them."""
        if not num_tokens:
            return
        now, last = perf_counter(), self._last.get(index)
        if self.first is None:
            self.first = now
            self._metrics.first_token.observe(now - self._arrived)
        if last is not None:
            self._metrics.inter_token.observe((now - last) / num_tokens, num_tokens)
        elif num_tokens > 1:
            self._metrics.inter_token.observe(0.0, num_tokens - 1)
        self._last[index] = now
        self._num_tokens += num_tokens

    def ended(self, output: RequestOutput) -> None:
        """The whole request is there."""
        metrics = self._metrics
        elapsed = perf_counter() - self._arrived
        metrics.end_to_end.observe(elapsed)
        metrics.queue.observe(output.queue_seconds)
        metrics.output_length.observe(self._num_tokens)
        if self._named:
            metrics.returned(len(output.prompt_token_ids), output.num_cached_tokens)
        longest = max(len(completion.token_ids) for completion in output.outputs)
        metrics.longest.observe(longest)
        self._phases(elapsed, output.queue_seconds)
        if self.first is not None and longest > 1:
            metrics.per_token.observe((elapsed - (self.first - self._arrived)) / (longest - 1))
        for completion in output.outputs:
            metrics.ended(completion.finish_reason or "abort")

    def _phases(self, elapsed: float, queued: float) -> None:
        """Where the time went that it did not wait; what makes no token is all prefill."""
        metrics, last = self._metrics, max(self._last.values(), default=0.0)
        first = elapsed if self.first is None else self.first - self._arrived
        metrics.prefill.observe(max(0.0, first - queued))
        metrics.inference.observe(max(0.0, (last - self._arrived if last else elapsed) - queued))
        if self.first is not None:
            metrics.decode.observe(last - self.first)

    def left(self, num_sequences: int) -> None:
        """The client went away before the end."""
        for _ in range(num_sequences):
            self._metrics.ended("abort")
