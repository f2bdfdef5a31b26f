"""`cellar bench serve` against Cellar's own server over the fake device, and against a server that takes notes."""

from __future__ import annotations

import asyncio
import csv
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from benchmarks.serve_overhead import Pace, main
from cellar.bench.serve.cached import cache_section
from cellar.bench.serve.client import Answer, EventReader, LoadClient
from cellar.bench.serve.command import build_load
from cellar.bench.serve.comparison import Row
from cellar.bench.serve.options import DatasetOptions, ResultOptions, TargetOptions, TrafficOptions
from cellar.bench.serve.prompts import TokenScript, choose_vocabulary
from cellar.bench.serve.run import ClientLoad, run_load
from cellar.bench.workloads import Load, Vocabulary, gamma_arrivals, random_requests
from cellar.cli.main import build
from cellar.core.errors import ConfigError
from cellar.core.extras import command
from tests.bench.serve_stub import IDS, Stub, stub
from tests.fake_front import TOKENIZER, engine_of
from tests.server.served import serve

PNG = b"\x89PNG\r\n\x1a\n"

APP = build()


def cellar(*arguments: str) -> Result:
    return CliRunner().invoke(APP, ["bench", "serve", *arguments, "--disable-tqdm"])


def bench(url: str, *arguments: str) -> tuple[Any, str]:
    """The last line as JSON, and everything before it."""
    done = cellar("--base-url", url, *arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    *lines, last = done.stdout.strip().splitlines()
    return json.loads(last), "\n".join(lines)


def small(count: int = 6, input_len: int = 8, output_len: int = 4) -> list[str]:
    sizes = [("--num-prompts", count), ("--random-input-len", input_len), ("--random-output-len", output_len)]
    return [str(part) for pair in sizes for part in pair]


# -- against Cellar -------------------------------------------------------------------------------


def test_against_our_own_server(tmp_path: Path) -> None:
    with serve(num_rows=16, num_slots=256, latency=0.002) as served:
        options = [*small(20, 40, 10), "--ignore-eos", "--request-rate", "100", "--vocab-size", "200"]
        files = ["--save-result", "--save-detailed", "--plot", "--result-dir", str(tmp_path), "--label", "fake"]
        found, lines = bench(served.url, *options, *files, "--goodput", "ttft:60000 e2el:60000", "--metadata", "a=b")
        served.settle()
        assert (found["completed"], found["failed"]) == (20, 0)
        assert (found["total_input_tokens"], found["total_output_tokens"]) == (800, 200)
        assert found["request_goodput"] == found["request_throughput"] > 0
        assert found["mean_ttft_ms"] >= 2  # a step of the fake
        assert found["mean_itl_ms"] > 0
        assert (
            "============ Serving Benchmark Result ============\nSuccessful requests:                     20" in lines
        )
        assert "Request rate configured (RPS):           100.00" in lines
        (path,) = tmp_path.glob("fake-100qps-fake-*.json")
        kept = json.loads(path.read_text())
        assert (kept["model_id"], kept["backend"], kept["a"], kept["num_prompts"]) == ("fake", "openai", "b", 20)
        assert kept["output_lens"] == [10] * 20
        assert len(kept["ttfts"]) == len(kept["itls"]) == len(kept["generated_texts"]) == 20
        assert all(len(gaps) <= 9 for gaps in kept["itls"])
        (plot,) = tmp_path.glob("*-cdf.png")
        assert plot.read_bytes().startswith(PNG)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_conversations_find_their_history_in_the_cache(backend: str) -> None:
    """Also: every request's prompt is what the conversation had so far, to the token, or the cache would not hit."""
    with serve(num_rows=8, num_slots=512, max_model_len=512) as served:
        options = ["--backend", backend, "--multi-turn", "--num-turns", "4", "--think-time", "0.01"]
        found, lines = bench(served.url, *small(4, 32, 16), *options, "--ignore-eos", "--vocab-size", "200")
        assert (found["completed"], found["failed"]) == (16, 0)
        assert "Median TTFT of later turns (ms)" in lines
        stats = engine_of(served.opened).scheduler.stats()
        # Turns of 32 + 16 tokens: three of four turns have a whole history to find.
        least = 4 * (48 - 16 + 96 - 16 + 144 - 16)
        assert stats.prefix_hits >= (least if backend == "openai" else 4 * 48)


def test_the_context_of_the_server_bounds_the_dataset() -> None:
    with serve(max_model_len=64, num_slots=64) as served:
        found, lines = bench(
            served.url, *small(30, 40, 16), "--random-range-ratio", "0.5", "--ignore-eos", "--vocab-size", "200"
        )
        assert "do not fit a context of 64 tokens and are left out" in lines
        assert found["failed"] == 0
        assert 0 < found["completed"] < 30
        done = cellar("--base-url", served.url, *small(3, 100, 4))
        assert done.exit_code == 2
        assert "no request of the dataset fits a context of 64 tokens" in done.stderr


# -- times ----------------------------------------------------------------------------------------


@pytest.mark.long
def test_latencies_are_those_that_the_server_made() -> None:
    begin = time.perf_counter()
    with stub(first=0.15, gap=0.1) as server:
        found, _ = bench(server.url, *small(8, 8, 6), "--max-concurrency", "2", "--metric-percentiles", "50,90")
        longest = time.perf_counter() - begin
        assert 150 <= found["median_ttft_ms"] < 1e3 * longest
        assert 60 <= found["p50_itl_ms"] < 1e3 * longest  # an event that comes late shortens the next pause
        assert 60 <= found["median_tpot_ms"] < 1e3 * longest / 5
        assert found["mean_e2el_ms"] == pytest.approx(found["mean_ttft_ms"] + 5 * found["mean_tpot_ms"], rel=1e-6)
        assert 4 * (0.15 + 5 * 0.1) <= found["duration"] < longest
        assert 4 * found["mean_e2el_ms"] <= 1.001e3 * found["duration"]  # two at a time
        assert server.most == 2
        assert found["max_concurrent_requests"] == 2
        assert found["max_concurrency"] == 2


def test_a_chat_s_first_chunk_without_text_is_no_token() -> None:
    with stub(first=0.1) as server:
        found, _ = bench(server.url, *small(3), "--backend", "openai-chat")
        assert found["median_ttft_ms"] >= 100
        assert found["total_input_tokens"] == 3 * 77  # as the server says


def undisturbed(attempt: Callable[[], None]) -> None:
    """What must hold at a moment at which nobody else wants the machine: one of several attempts meets one."""
    for _ in range(9):
        with suppress(AssertionError):
            attempt()
            return
    attempt()


@pytest.mark.long
def test_requests_are_sent_when_they_are_due() -> None:
    def attempt() -> None:
        with stub(first=0.5) as server:
            bench(server.url, *small(40), "--request-rate", "40", "--seed", "3", "--burstiness", "0.5")
            sent = np.array([one.at for one in server.load()])
            due = gamma_arrivals(40, 40.0, 0.5, 3)
            late = sent - due
            late -= late.min()
            assert np.median(late) < 0.05
            assert server.most > 10  # open loop: nobody waits for answers of half a second

    undisturbed(attempt)


def test_a_trace_is_replayed_at_its_own_times_or_faster(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(0, 600, [5, 6]), (400, 600, [5, 6]), (800, 520, [5, 7])]
    keys = ("timestamp", "input_length", "hash_ids", "output_length")
    path.write_text("".join(json.dumps(dict(zip(keys, (*row, 3), strict=True))) + "\n" for row in rows))
    with stub() as server:
        dataset = ["--dataset-name", "trace", "--dataset-path", str(path)]
        found, _ = bench(server.url, *dataset, "--trace-speedup", "2")
        a, b, c = (one.body["prompt"] for one in server.load())
        assert (len(a), len(c)) == (600, 520)
        assert a == b
        assert a[:512] == c[:512]
        assert a[512:520] != c[512:]
        assert found["total_output_tokens"] == 9
        assert found["request_rate"] == pytest.approx(3 / 0.4)

        def gaps(*options: str) -> list[float]:
            server.seen.clear()
            bench(server.url, *dataset, *options)
            return np.diff([one.at for one in server.load()]).tolist()

        def at_the_traces_times() -> None:
            assert gaps("--trace-speedup", "2") == pytest.approx([0.2, 0.2], abs=0.15)

        def at_a_rate() -> None:
            (gap,) = gaps("--request-rate", "50", "--num-prompts", "2")  # it replaces the trace's times
            assert gap < 0.2

        undisturbed(at_the_traces_times)
        undisturbed(at_a_rate)


# -- what is sent ---------------------------------------------------------------------------------


def test_every_field_that_flags_decide() -> None:
    with stub() as server:
        flags = ["--model", "m", "--endpoint", "/elsewhere", "--api-key", "k", "--header", "X-A=1", "--header", "x-b=2"]
        flags += ["--temperature", "0.5", "--ignore-eos", "--extra-body", '{"top_p": 0.9}', "--vocab-size", "64"]
        bench(server.url + "/v1", *small(2, 30, 7), *flags, "--num-warmups", "2")
        assert len(server.seen) == 5  # the trial, two to warm up, two that count
        one = server.seen[-1]
        assert one.path == "/elsewhere"
        assert one.headers["authorization"] == "Bearer k"
        assert (one.headers["x-a"], one.headers["x-b"]) == ("1", "2")
        prompt = one.body.pop("prompt")
        assert len(prompt) == 30
        assert all(8 <= token < 64 for token in prompt)
        assert one.body == {
            "model": "m",
            "temperature": 0.5,
            "top_p": 0.9,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "max_tokens": 7,
        }
        assert "x-session-id" not in one.headers


def test_defaults() -> None:
    with stub() as server:
        host, port = server.url.removeprefix("http://").split(":")
        done = cellar("--host", host, "--port", port, *small(1))
        assert done.exit_code == 0, done.output
        (one,) = server.load()
        assert one.body["model"] == "stub/model"
        assert one.body["temperature"] == 0
        assert "ignore_eos" not in one.body
        assert all(125 <= token < 1000 for token in one.body["prompt"])


def test_datasets_by_flags(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.json"
    turns = [{"context_tokens": 9, "output_tokens": 5}, {"context_tokens": 20, "output_tokens": 6}]
    lengths.write_text(json.dumps([{"turns": turns}]))
    with stub() as server:
        prefix = ["--prefix-repetition-prefix-len", "12", "--prefix-repetition-suffix-len", "3"]
        prefix += ["--prefix-repetition-num-prefixes", "2", "--prefix-repetition-output-len", "4"]
        bench(server.url, "--dataset-name", "prefix", "--num-prompts", "6", *prefix)
        prompts = [one.body["prompt"] for one in server.load()]
        assert {len(p) for p in prompts} == {15}
        assert len({tuple(p[:12]) for p in prompts}) == 2
        assert {one.body["max_tokens"] for one in server.load()} == {4}
        server.seen.clear()
        sharegpt = ["--dataset-name", "sharegpt", "--dataset-path", str(lengths)]
        bench(server.url, *sharegpt, "--num-prompts", "2")
        assert [(len(one.body["prompt"]), one.body["max_tokens"]) for one in server.load()] == [(9, 5)] * 2
        server.seen.clear()
        bench(server.url, *sharegpt, "--num-prompts", "1", "--sharegpt-output-len", "2", "--max-context-len", "11")
        assert [one.body["max_tokens"] for one in server.load()] == [2]
        server.seen.clear()
        bench(server.url, *small(4, 10, 2), "--random-prefix-len", "6", "--random-range-ratio", "0.4")
        prompts = [one.body["prompt"] for one in server.load()]
        assert len({tuple(p[:6]) for p in prompts}) == 1
        assert all(12 <= len(p) <= 20 for p in prompts)


def test_a_seed_decides_everything() -> None:
    with stub() as server:
        for seed in ("1", "1", "2"):
            bench(server.url, *small(3), "--random-range-ratio", "0.5", "--max-concurrency", "1", "--seed", seed)
        prompts = [one.body["prompt"] for one in server.seen]
        assert prompts[1:4] == prompts[5:8]
        assert prompts[1:4] != prompts[9:12]
        assert prompts[0] not in prompts[1:4]  # the trial leaves nothing of theirs in a cache


def _pause(server: Stub) -> float:
    a, b = server.load()[:2]
    return b.at - a.ended


def test_turns_carry_the_history_and_wait() -> None:
    with stub() as server:
        options = ["--multi-turn", "--num-turns", "3", "--think-time", "0.2", "--think-time-distribution", "constant"]
        bench(server.url, *small(1, 5, 4), *options)
        one, two, three = server.load()
        assert one.body["return_token_ids"]
        answered = [IDS[k % 3] for k in range(4)]
        assert two.body["prompt"][:9] == one.body["prompt"] + answered
        assert three.body["prompt"][:18] == two.body["prompt"] + answered
        assert len(three.body["prompt"]) == 23
        assert one.headers["x-session-id"] == two.headers["x-session-id"]
        assert one.headers["x-session-id"].startswith("bench-")
        assert 0.19 <= _pause(server) < 60


def test_a_server_that_tells_no_ids_gets_as_many_others() -> None:
    with stub(ids=False) as server:
        bench(server.url, *small(1, 5, 4), "--multi-turn", "--num-turns", "2", "--think-time", "0")
        one, two = server.load()
        assert two.body["prompt"][:5] == one.body["prompt"]
        assert len(two.body["prompt"]) == 5 + 4 + 5


def test_chats_carry_the_history_too() -> None:
    with stub() as server:
        options = ["--backend", "openai-chat", "--multi-turn", "--num-turns", "2", "--think-time", "0"]
        bench(server.url, *small(1, 5, 2), *options)
        one, two = server.load()
        assert one.path == "/v1/chat/completions"
        assert [m["role"] for m in two.body["messages"]] == ["user", "assistant", "user"]
        assert two.body["messages"][0] == one.body["messages"][0]
        assert two.body["messages"][1]["content"] == "w0 w1 "
        assert len(one.body["messages"][0]["content"].split()) == 5
        assert one.body["max_completion_tokens"] == 2


def test_a_tokenizer_of_ours_spells_chats_and_counts_texts(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    said = [{"from": "human", "value": "Where is the old house?"}, {"from": "gpt", "value": "Behind the old trees."}]
    path.write_text(json.dumps([{"conversations": said}]))
    with stub() as server:
        dataset = ["--dataset-name", "sharegpt", "--dataset-path", str(path), "--num-prompts", "1"]
        bench(server.url, *dataset, "--backend", "openai-chat", "--tokenizer", str(TOKENIZER))
        assert server.load()[0].body["messages"] == [{"role": "user", "content": "Where is the old house?"}]
        server.seen.clear()
        bench(server.url, *small(1, 5, 2), "--backend", "openai-chat", "--tokenizer", str(TOKENIZER))
        assert not server.load()[0].body["messages"][0]["content"].replace(" ", "").isdigit()  # not the stub's words
        done = cellar("--base-url", server.url, *dataset)
        assert done.exit_code == 2
        assert "give a tokenizer" in done.stderr


# -- sweeps ---------------------------------------------------------------------------------------


def test_a_sweep_over_rates(tmp_path: Path) -> None:
    with stub() as server:
        files = ["--save-result", "--plot", "--result-dir", str(tmp_path), "--result-filename", "s.json"]
        found, lines = bench(server.url, *small(5), "--request-rate", "50,100,inf", *files)
        assert [run["label"] for run in found] == ["rate 50", "rate 100", "rate inf"]
        assert [run["request_rate"] for run in found] == [50.0, 100.0, "inf"]
        assert "rate 100" in lines.splitlines()[-6]
        prompts = {tuple(one.body["prompt"]) for one in server.load()}
        assert len(prompts) == 15  # no run finds in a cache what another has left
        assert {path.name for path in tmp_path.iterdir()} == {"s.json", "s.csv", "s.png", "s-cdf.png"}
        assert (tmp_path / "s.png").read_bytes().startswith(PNG)
        with (tmp_path / "s.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert [row["label"] for row in rows] == ["rate 50", "rate 100", "rate inf"]
        assert [run["completed"] for run in json.loads((tmp_path / "s.json").read_text())] == [5, 5, 5]


def test_a_sweep_over_concurrency() -> None:
    with stub(first=0.02) as server:
        found, _ = bench(server.url, *small(6), "--max-concurrency", "1,3", "--percentile-metrics", "ttft")
        assert [run["max_concurrent_requests"] for run in found] == [1, 3]
        assert "mean_itl_ms" not in found[0]


# -- two servers ----------------------------------------------------------------------------------


@pytest.mark.long
def test_two_servers_in_turns(tmp_path: Path) -> None:
    with stub(first=0.02) as quick, stub(first=0.2) as slow:
        found, lines = bench(
            quick.url,
            *small(4),
            *("--compare", slow.url, "--max-concurrency", "1", "--compare-rounds", "2"),
            *("--percentile-metrics", "ttft", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "c"),
        )
        assert found["median_ttft_ms"] < 0.7
        assert found["request_throughput"] > 1.4
        verdicts = {line[:20].strip(): line.split()[-1] for line in lines.splitlines()}
        assert (verdicts["requests/s"], verdicts["TTFT p50, ms"]) == ("first", "first")
        written = json.loads((tmp_path / "c-compare.json").read_text())
        assert written["ratios"] == found
        assert [[side["completed"] for side in sides] for sides in written["rounds"]] == [[4, 4], [4, 4]]
        # Both get the same prompts within a round, others in the next; each goes first once.
        mine, theirs = (
            [tuple(one.body["prompt"]) for one in server.seen if one.body["prompt"]] for server in (quick, slow)
        )
        assert mine == theirs
        assert len(set(mine)) == 10
        begun = sorted((one.at, server is quick) for server in (quick, slow) for one in server.seen)
        assert [first for _, first in begun] == [True] * 5 + [False] * 10 + [True] * 5


def test_equal_servers_are_even() -> None:
    row = Row("requests/s", "request_throughput", (2.0, 1.0, 1.0), (1.0, 1.0, 2.0), True)
    assert (row.ratios, row.verdict) == ((2.0, 1.0, 0.5), "even")
    assert Row("", "", (2.0, 3.0), (1.0, 1.0), True).verdict == "first"
    assert Row("", "", (2.0, 3.0), (1.0, 1.0), False).verdict == "second"
    assert Row("", "", (float("nan"),), (3.0,), False).verdict == "even"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--request-rate", "1,2"], "one request rate"),
        (["--plot"], "plot has no effect"),
        (["--compare-rounds", "0"], "at least 1"),
    ],
)
def test_what_a_comparison_refuses(flags: list[str], text: str) -> None:
    done = cellar("--base-url", "http://127.0.0.1:9", "--compare", "http://127.0.0.1:9", *flags)
    assert done.exit_code != 0
    assert text in " ".join(done.output.split())


# -- failures -------------------------------------------------------------------------------------


def test_failures_are_counted_and_told() -> None:
    with stub(status=lambda number: 503 if number % 3 == 2 else 200) as server:
        done = cellar("--base-url", server.url, *small(9), "--max-concurrency", "1")
        assert done.exit_code == 0
        found = json.loads(done.stdout.strip().splitlines()[-1])
        assert (found["completed"], found["failed"]) == (6, 3)
        assert "3 failed: HTTP 503: no, says the stub (503)" in done.stderr


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"break_after": 2}, "the stream ended before [DONE]"),
        ({"error_after": 1}, "the stub fell over"),
        ({"status": lambda number: 429}, "HTTP 429: no, says the stub (429)"),
    ],
)
def test_the_first_request_shows_what_is_wrong(how: dict[str, Any], text: str) -> None:
    with stub(**how) as server:
        done = cellar("--base-url", server.url, *small(2))
        assert done.exit_code == 2
        assert text in done.stderr
        assert len(server.seen) == 1


def test_a_turn_that_fails_ends_its_conversation() -> None:
    with stub(status=lambda number: 500 if number == 2 else 200) as server:
        options = ["--multi-turn", "--num-turns", "4", "--think-time", "0", "--max-concurrency", "1"]
        found, lines = bench(server.url, *small(2), *options)
        assert (found["completed"], found["failed"]) == (5, 1)
        assert "2 turns were not sent" in lines


def test_all_failing_is_an_error() -> None:
    with stub(status=lambda number: 500 if number else 200) as server:
        done = cellar("--base-url", server.url, *small(2))
        assert done.exit_code == 2
        assert "all requests failed" in done.stderr


def test_no_server(tmp_path: Path) -> None:
    done = cellar("--port", "9", *small(2), "--ready-check-timeout-sec", "0.2")
    assert done.exit_code == 2
    assert "does not answer" in done.stderr
    done = cellar("--port", "9", *small(2), "--model", "m")
    assert done.exit_code == 2
    assert "the first request" in done.stderr


def test_a_server_without_a_list_of_models() -> None:
    with stub(listed=False, usage=False) as server:
        assert "HTTP 404" in cellar("--base-url", server.url, *small(2)).stderr
        found, _ = bench(server.url, *small(2), "--model", "m")
        assert (found["total_input_tokens"], found["total_output_tokens"]) == (16, 8)  # by our own count


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--request-rate 0", "request_rate has '0'"),
        ("--request-rate x", "request_rate has 'x'"),
        ("--max-concurrency 1.5", "max_concurrency has '1.5'"),
        ("--request-rate 1,2 --max-concurrency 3,4", "sweep one of them"),
        ("--burstiness 0", "burstiness is 0"),
        ("--num-prompts 0", "num_prompts is 0"),
        ("--num-warmups -1", "num_warmups is -1"),
        ("--seed -1", "seed is -1"),
        ("--dataset-name trace", "give its dataset_path"),
        ("--dataset-path x.json", "leave dataset_path out"),
        ("--dataset-name prefix --multi-turn", "multi_turn is for"),
        ("--trace-speedup 2", "no effect without dataset trace"),
        ("--trace-speedup 0", "trace_speedup is 0"),
        ("--trace-copies 0", "trace_copies is 0"),
        ("--trace-copies 2", "trace_copies has no effect"),
        ("--vocab-size 0", "vocab_size is 0"),
        ("--random-prefix-len -1", "random_prefix_len is -1"),
        ("--random-input-len 0", "random_input_len is 0"),
        ("--random-range-ratio 1", "random_range_ratio is 1"),
        ("--multi-turn --num-turns 0", "num_turns is '0'"),
        ("--multi-turn --think-time -1", "think_time is -1"),
        ("--percentile-metrics ttft,latency", "percentile_metrics has 'latency'"),
        ("--metric-percentiles 101", "metric_percentiles has 101"),
        ("--metric-percentiles x", "metric_percentiles is 'x'"),
        ("--goodput itl:5", "goodput has 'itl:5'"),
        ("--goodput ttft", "goodput has ''"),
        ("--metadata a", "metadata is 'a'"),
        ("--header a", "header is 'a'"),
        ("--extra-body {", "extra_body is not JSON"),
        ("--extra-body []", "extra_body is not a JSON object"),
        ("--base-url localhost:8000", "base_url is 'localhost:8000'"),
        ("--endpoint v1", "endpoint is 'v1'"),
        ("--port 0", "port is 0"),
        ("--temperature -1", "temperature is -1"),
        ("--ready-check-timeout-sec -1", "ready_check_timeout_sec is -1"),
        ("--tokenizer /nowhere", "there is no tokenizer"),
        ("--dataset-name trace --dataset-path /nowhere.csv", "cannot be read"),
    ],
)
def test_what_is_refused(flags: str, text: str) -> None:
    done = cellar(*flags.split())
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("cellar: ")
    assert text in done.stderr


def test_a_command_line_of_vllm_s() -> None:
    with stub() as server:
        host, port = server.url.removeprefix("http://").split(":")
        done = cellar(
            *f"--backend vllm --model stub/model --host {host} --port {port} --endpoint /v1/completions --seed 1 "
            "--dataset-name prefix_repetition --prefix-repetition-prefix-len 4 --prefix-repetition-suffix-len 4 "
            "--prefix-repetition-num-prefixes 1 --prefix-repetition-output-len 2 --num-prompts 2 --request-rate inf "
            "--goodput ttft:60000 e2el:60000 --percentile-metrics ttft,tpot --metric-percentiles 50,99 --ignore-eos "
            "--burstiness 1.0 --max-concurrency 4 --num-warmups 1 --temperature 0 --label a --metadata b=c".split()
        )
        assert done.exit_code == 0, done.output
        assert "Request goodput (req/s):" in done.stdout
        assert "P50 TPOT (ms):" in done.stdout


def test_unknown_names_are_refused() -> None:
    assert "belongs to no option" in cellar("ttft:5").stderr
    for flags in (["--dataset-name", "sonnet"], ["--backend", "tgi"], ["--best-of", "2"]):
        assert cellar(*flags).exit_code == 2


def test_without_the_bench_extra_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    for name in ("cellar.bench.serve.command", "cellar.bench.serve.client"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    done = cellar()
    assert done.exit_code == 2
    assert done.stderr.strip().endswith("run " + command("bench"))


# -- pieces ---------------------------------------------------------------------------------------


def test_events_are_read_in_any_pieces() -> None:
    stream = (
        b': hello\r\n\r\ndata: {"choices": [{"text": "a", "finish_reason": null}]}\r\n\r\n'
        b'data:{"choices": [{"text": "", "finish_reason": null, "token_ids": [5, 6]}]}\n\n'
        b'event: x\ndata: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n'
        b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n'
    )
    for size in (1, 2, 7, 50, 1000):
        answer = Answer(0.0)
        reader = EventReader(answer)
        for k in range(0, len(stream), size):
            reader.feed(stream[k : k + size], float(k))
        assert reader.done
        assert (answer.text, answer.token_ids, answer.output_tokens) == (["a"], [5, 6], 3)
        assert len(answer.times) == 2
        assert answer.error is None
    bad = Answer(0.0)
    EventReader(bad).feed(b"data: {oops\n\n", 0.0)
    assert bad.error is not None
    assert "oops" in bad.error


def test_a_busy_client_says_so() -> None:
    load = Load(random_requests(6, 4, 3), np.zeros(6))

    async def run(url: str, block: float) -> Any:
        async with LoadClient.open(url, url + "/v1/completions", {}) as client:
            script = TokenScript(load, Vocabulary(0, 50), {"model": "m"}, False)
            return await run_load(client, load, script, on_answer=lambda answer: time.sleep(block))

    with stub(first=0.05, gap=0.02) as server:
        busy = asyncio.run(run(server.url, 0.15))

        def calm() -> None:
            assert asyncio.run(run(server.url, 0.0)).client.lags.mean() < busy.client.lags.mean() / 2

        undisturbed(calm)
    assert busy.client.lags.max() > 0.1
    (text,) = busy.client.warnings(ttft=0.05, paced=False)
    assert "bottleneck" in text
    assert not ClientLoad(0.1, np.full(50, 0.002), np.full(50, 0.002)).warnings(0.05, True)
    (text,) = ClientLoad(0.1, np.full(50, 0.002), np.full(50, 0.06)).warnings(5.0, True)
    assert "sent up to 60 ms late" in text
    (text,) = ClientLoad(0.9, np.zeros(50), np.zeros(50)).warnings(5.0, True)
    assert "90% of a core" in text
    assert {key for _, key, _ in busy.client.section().rows} >= {"client_cpu_percent", "p99_client_lag_ms"}


def test_bodies_of_long_loads_are_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import cellar.bench.serve.run as module

    monkeypatch.setattr(module, "PREPARED_TOKENS", 0)
    with stub() as server:
        found, _ = bench(server.url, *small(5))
        assert found["completed"] == 5


def test_the_measurement_of_the_client_itself(capsys: pytest.CaptureFixture[str]) -> None:
    main(Pace(streams=2, events=3, pause=0.001, rounds=1))
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) == {f"{client}, {loop}" for client in ("aiohttp", "httpx") for loop in ("asyncio", "uvloop")}
    assert all(cost > 0 for cost in found.values())


def test_special_tokens_are_not_drawn() -> None:
    assert choose_vocabulary(None, None, 3) == Vocabulary(125, 1000, 3)
    assert choose_vocabulary(None, 100_000, 0) == Vocabulary(256, 100_000)


def test_options_have_what_a_library_would_use() -> None:
    """Without the command line: the dataclasses and `build_load` are enough."""
    load = build_load(DatasetOptions(num_prompts=3, random_input_len=5, random_output_len=2))
    assert load.num_prompt_tokens == 15
    assert TargetOptions(base_url="http://x:1/v1/").url == "http://x:1/v1/completions"
    assert TargetOptions(host="::1", backend="openai-chat").url == "http://[::1]:8000/v1/chat/completions"
    assert TrafficOptions(request_rate="1,inf").rates == [1.0, float("inf")]
    assert ResultOptions(goodput=["ttft:200,tpot:50"]).bounds() == {"ttft": 0.2, "tpot": 0.05}
    with pytest.raises(ConfigError):
        ResultOptions(goodput=["ttft:-1"])


def test_report_says_what_the_server_found_of_the_prompts() -> None:
    def answer(cached: int | None) -> Answer:
        details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
        return Answer(0.0, usage={"prompt_tokens": 40, **details})

    (section,) = cache_section([answer(10), answer(30), answer(None), Answer(0.0)])
    assert [(key, figure) for _, key, figure in section.rows] == [
        ("cached_prompt_tokens", 40.0),
        ("cached_prompt_share", 50.0),
    ]
    assert cache_section([answer(None), Answer(0.0)]) == ()
