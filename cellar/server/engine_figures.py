"""What engines count, as Prometheus' families; with several engines each sample says whose it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from cellar.core.messages import SchedulerStats, Tier, TierStats

_STEP_BUCKETS = 17
"""Bounds of a step's tokens: 1, 2, 4, ... 65,536."""


class EngineFigures:
    """One engine's figures under its labels; `cache` are the options of its KV cache."""

    def __init__(self, labels: Mapping[str, str], cache: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._cache = cache

    def families(self, stats: SchedulerStats | None) -> Iterator[Metric]:
        """All of them; without an engine only that it is down."""
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
        yield self._steps(stats)
        cache = InfoMetricFamily("cellar:cache_config", "How the KV cache is set up.", labels=list(self._labels))
        blocks = {"num_gpu_blocks": str(stats.total_chunks)}
        cache.add_metric(list(self._labels.values()), {**self._cache, **blocks})
        yield cache
        yield self._sources(stats)
        yield from self._tiers(stats.tiers[1:])

    def _sources(self, stats: SchedulerStats) -> Metric:
        """Prompt tokens that were there, by tier, and those that had been and were computed again."""
        family = CounterMetricFamily(
            "cellar:prompt_tokens_by_source",
            "Prompt tokens found in each tier, and computed again though they had been computed before.",
            labels=[*self._labels, "source"],
        )
        hits = {tier.tier: tier.hit_tokens for tier in stats.tiers}
        for tier in Tier:
            family.add_metric([*self._labels.values(), tier.name.lower()], hits.get(tier, 0))
        family.add_metric([*self._labels.values(), "recomputed"], stats.recomputed_tokens)
        return family

    def _steps(self, stats: SchedulerStats) -> Metric:
        """Tokens of a step, those of prompts and those made."""
        family = HistogramMetricFamily(
            "cellar:iteration_tokens_total", "Tokens that a step computes.", labels=list(self._labels)
        )
        *bounded, last = accumulate(stats.steps or (0,))
        buckets = [(str(float(2**b)), float(count)) for b, count in enumerate(bounded[:_STEP_BUCKETS])]
        family.add_metric(list(self._labels.values()), [*buckets, ("+Inf", float(last))], stats.step_tokens)
        return family

    def _tiers(self, tiers: Sequence[TierStats]) -> Iterator[Metric]:
        """What lies below the device, and what has moved."""
        labels = [*self._labels, "tier"]
        for family, value in (
            (GaugeMetricFamily("cellar:kv_tier_total_chunks", "Chunks that a tier holds.", labels=labels), "total"),
            (GaugeMetricFamily("cellar:kv_tier_cached_chunks", "Chunks in a tier.", labels=labels), "cached"),
            (CounterMetricFamily("cellar:kv_tier_loaded_chunks", "Chunks that came back.", labels=labels), "loaded"),
            (CounterMetricFamily("cellar:kv_tier_saved_chunks", "Chunks that went there.", labels=labels), "saved"),
            (CounterMetricFamily("cellar:kv_tier_failed_chunks", "Chunks not copied.", labels=labels), "failed"),
            (CounterMetricFamily("cellar:kv_tier_load_seconds", "Time of loads.", labels=labels), "load_seconds"),
            (CounterMetricFamily("cellar:kv_tier_save_seconds", "Time of saves.", labels=labels), "save_seconds"),
            (CounterMetricFamily("cellar:kv_tier_loaded_bytes", "Bytes that came back.", labels=labels), "load_nbytes"),
            (CounterMetricFamily("cellar:kv_tier_saved_bytes", "Bytes that went there.", labels=labels), "save_nbytes"),
        ):
            for stats in tiers:
                family.add_metric([*self._labels.values(), stats.tier.name.lower()], getattr(stats, value))
            if tiers:
                yield family

    def _gauge(self, stem: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"cellar:{stem}", help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, stem: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(f"cellar:{stem}", help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


def together(engines: Iterable[Iterable[Metric]]) -> Iterator[Metric]:
    """The families of several engines, each family once with everybody's samples."""
    found: dict[str, Metric] = {}
    for families in engines:
        for family in families:
            if (first := found.setdefault(family.name, family)) is not family:
                first.samples += family.samples
    return iter(found.values())
