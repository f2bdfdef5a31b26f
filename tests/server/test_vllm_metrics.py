"""/metrics by vLLM's names: what dashboards made for it ask for is there, and says what happened."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.served import Served, serve

# What the expressions of vLLM's own Grafana dashboards ask for, of earlier versions and of today's.
ASKED = [
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:gpu_cache_usage_perc",
    "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_success_total",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_inference_time_seconds_sum",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:iteration_tokens_total_bucket",
    "vllm:iteration_tokens_total_sum",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:request_params_n_sum",
    "vllm:request_params_max_tokens_sum",
    "vllm:cache_config_info",
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(max_model_len=256, latency=0.002) as served:
        yield served


def samples(served: Served) -> dict[str, float]:
    """Values by name and labels, without the names of model and engine, which all of vLLM's have."""
    found = {}
    with served.http() as http:
        text = http.get("/metrics").text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            rest = dict(sample.labels)
            if sample.name.startswith("vllm:"):
                assert (rest.pop("engine"), rest.pop("model_name")) == ("0", "fake")
            found[sample.name + "".join(f"|{name}={value}" for name, value in sorted(rest.items()))] = sample.value
    return found


def test_what_dashboards_ask_for_is_there(served: Served) -> None:
    names = {name.partition("|")[0] for name in samples(served)}
    assert set(ASKED) <= names, sorted(set(ASKED) - names)


def test_the_figures_are_those_of_the_requests(served: Served) -> None:
    before = samples(served)
    client = served.client()
    prompts = [[5] * 10, [6] * 130]
    for prompt in prompts:
        client.completions.create(model="fake", prompt=prompt, max_tokens=20, n=2, extra_body={"ignore_eos": True})
    client.embeddings.create(model="fake", input=[7] * 40)
    served.settle()
    after = samples(served)

    def grown(name: str) -> float:
        return after[f"vllm:{name}"] - before.get(f"vllm:{name}", 0.0)

    assert grown("request_success_total|finished_reason=length") == 4
    assert grown("request_success_total|finished_reason=stop") == 1
    assert grown("generation_tokens_total") == 80
    # A second sequence finds all but the last chunk of its prompt, and computes that part again.
    computed = grown("iteration_tokens_total_sum")
    assert 10 + 130 + 40 + 80 - 4 <= computed <= 2 * (10 + 130) + 40 + 80
    assert grown("iteration_tokens_total_count") == grown("iteration_tokens_total_bucket|le=+Inf") > 20
    assert grown("iteration_tokens_total_bucket|le=64.0") == grown("iteration_tokens_total_count")  # the step's budget
    assert 0 < grown("iteration_tokens_total_bucket|le=1.0") < grown("iteration_tokens_total_bucket|le=2.0")
    assert grown("request_params_n_sum") == 5
    assert grown("request_params_max_tokens_sum") == 40
    assert grown("request_max_num_generation_tokens_sum") == 40
    seconds = {stem: grown(f"request_{stem}_time_seconds_sum") for stem in ("queue", "prefill", "decode", "inference")}
    assert grown("request_prefill_time_seconds_count") == grown("request_inference_time_seconds_count") == 3
    assert grown("request_decode_time_seconds_count") == 2  # an embedding has nothing to decode
    assert min(seconds["prefill"], seconds["decode"]) > 0
    assert seconds["inference"] >= 2 * 20 * 0.002  # steps, of at least the device's time
    assert seconds["inference"] == pytest.approx(seconds["prefill"] + seconds["decode"], abs=1e-3)
    whole = grown("e2e_request_latency_seconds_sum")
    assert seconds["inference"] <= whole


def test_the_cache_says_how_it_is_set_up(served: Served) -> None:
    with served.http() as http:
        (line,) = re.findall(r"^vllm:cache_config_info{(.*)} 1.0$", http.get("/metrics").text, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
    assert labels["block_size"] == "32"
    assert labels["num_gpu_blocks"] == "64"
    assert labels["enable_prefix_caching"] == "True"
    assert "kv_disk_path" not in labels
