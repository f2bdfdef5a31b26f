"""Metrics under vLLM's names, beside our own, so that dashboards and rules made for vLLM find what they ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

OURS, THEIRS = "cellar:", "vllm:"

NAMES: dict[str, tuple[str, ...]] = {
    stem: (stem,)
    for stem in (
        *("num_requests_running", "num_requests_waiting", "prefix_cache_queries", "prefix_cache_hits"),
        *("num_preemptions", "prompt_tokens", "generation_tokens", "request_success", "cache_config"),
        *("time_to_first_token_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
        *("iteration_tokens_total", "request_max_num_generation_tokens", "request_params_n"),
        "request_params_max_tokens",
    )
} | {
    # The second name is that of earlier versions, which many dashboards still ask for.
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "kv_cache_usage_perc": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
}
"""By our stem, vLLM's."""


def with_vllm_names(families: Iterable[Metric], engine: str) -> Iterator[Metric]:
    """The families, and those that vLLM has once more under each of its names, with its label `engine` where there is
    none."""
    for family in families:
        yield family
        for stem in NAMES.get(family.name.removeprefix(OURS), ()):
            alias = Metric(THEIRS + stem, family.documentation, family.type)
            alias.samples = [
                Sample(
                    sample.name.replace(family.name, alias.name, 1),
                    {"engine": engine, **sample.labels},
                    sample.value,
                    sample.timestamp,
                    sample.exemplar,
                )
                for sample in family.samples
            ]
            yield alias
