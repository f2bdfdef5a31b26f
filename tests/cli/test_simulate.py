"""`cellar simulate`: the report, files, checks against real runs, and one sentence for each bad wish."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from cellar.bench.measured_steps import main as measure
from cellar.bench.offline import Bench
from cellar.bench.sharegpt import MAX_CONTEXT, table_conversations
from cellar.bench.workload import LengthRange, random_workload
from cellar.cli.main import build
from cellar.core.config import CacheConfig, ScheduleConfig
from cellar.core.hardware import Device, Measure, Profile, Table
from cellar.planner.calibration import STEP_COLUMNS
from cellar.reports.machines import fast_bfloat16
from cellar.reports.simulate_check import read_measured
from cellar.reports.simulate_setup import open_setup
from tests.tiny_checkpoint import write_checkpoint

FEW = ["--num-prompts", "6", "--request-rate", "3", "--think-time", "2", "--max-seconds", "20"]


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(build(), ["simulate", *arguments])


def last(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.output.splitlines()[-1])


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A processor's profile, with steps of the demo model that take 5 ms and 1 ms a token."""
    rows = tuple((n, n, 100.0 * n, 100.0 * n, 0, 5e-3 + 1e-3 * n) for n in (1, 2, 4, 8, 16, 32))
    rows += tuple((n, 1, n * n / 2, float(n), 1, 5e-3 + 1e-3 * n) for n in (64, 128, 256, 512))
    cpu = Device(
        "cpu",
        "cpu",
        Measure(16e9, "bytes", "measured"),
        Measure(30e9, "bytes/s", "measured"),
        {"float32": Measure(50e9, "FLOP/s", "measured")},
        Measure(4e-6, "s", "measured"),
        2,
    )
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    Profile("some-cpu", (cpu,), tables={"steps.demo.float32": Table(STEP_COLUMNS, rows)}).save(path)
    return str(path)


@pytest.mark.long
def test_the_report_is_that_of_a_load_test(tmp_path: Path) -> None:
    result = simulate("llama-3.2-1b", "--machine", "h200", *FEW, "--output", str(tmp_path / "run.json"))
    figures = last(result)
    for word in ("Time to First Token", "Simulated engine", "Preemptions", "times as fast", "tokens of KV cache"):
        assert word in result.output
    assert figures["completed"] > 6
    assert figures["failed"] == 0
    saved = json.loads((tmp_path / "run.json").read_text())
    assert sum(saved["output_lens"]) == figures["total_output_tokens"]
    assert len(saved["start_times"]) == figures["completed"]
    assert last(simulate("llama-3.2-1b", "--machine", "h200", *FEW, "--json")) == figures  # its own line alone


@pytest.mark.long
def test_a_sweep_and_its_plots(tmp_path: Path) -> None:
    few = ["--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "16", "--num-prompts", "12"]
    arguments = ["qwen3-8b", "--machine", "2xA100", *few, "--request-rate", "5,50"]
    if find_spec("matplotlib") is None:
        assert "matplotlib" in simulate(*arguments, "--plots", str(tmp_path)).output
        return
    runs = last(simulate(*arguments, "--plots", str(tmp_path)))
    assert [run["request_rate"] for run in runs] == [5, 50]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"latencies.png", "sweep.png", "queues-rate-5.png", "queues-rate-50.png"}


def test_a_trace_shares_what_its_hashes_say(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 3]},
        {"timestamp": 9000, "input_length": 1500, "output_length": 20, "hash_ids": [1, 2, 4]},
        {"timestamp": 19000, "input_length": 700, "output_length": 20, "hash_ids": [7, 8]},
    ]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    arguments = ["llama-3-8b", "--dataset-name", "trace", "--dataset-path", str(trace)]
    figures = last(simulate(*arguments))
    assert figures["completed"] == 3
    assert figures["prefix_hit_percent"] == pytest.approx(100 * 1024 / 3300)
    assert last(simulate(*arguments, "--no-enable-prefix-caching"))["prefix_hit_percent"] == 0


def test_a_trace_has_a_figure_by_policy(tmp_path: Path) -> None:
    rows = [{"timestamp": 1000 * k, "input_length": 1024, "output_length": 5, "hash_ids": [1, k + 2]} for k in range(9)]
    (tmp_path / "trace.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    arguments = ["--dataset-name", "trace", "--dataset-path", str(tmp_path / "trace.jsonl")]
    result = simulate("--figures", str(tmp_path / "out"), *arguments)
    if find_spec("matplotlib") is None:
        assert "matplotlib" in result.output
        return
    assert {row["hit_share"] for row in last(result)} == {8 / 18}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"trace.png", "trace.json"}


@pytest.mark.long
def test_a_simulation_checked_against_itself_is_met(tmp_path: Path) -> None:
    """The load read back from a saved run gives that run again: arrivals, lengths, pauses, what is shared."""
    saved = str(tmp_path / "run.json")
    first = last(simulate("llama-3.2-1b", *FEW, "--metric-percentiles", "50,99", "--output", saved))
    again = simulate("llama-3.2-1b", "--check", saved, "--metric-percentiles", "50,99")
    found = last(again)["check"]
    assert found["output_throughput"]["measured"] == pytest.approx(first["output_throughput"])
    for key in ("duration", "output_throughput", "mean_ttft_ms", "median_tpot_ms", "mean_e2el_ms", "p99_itl_ms"):
        assert found[key]["simulated"] == pytest.approx(found[key]["measured"], rel=1e-6)
    assert "ratio" in again.output


def offline(path: Path, seconds: float, dtype: str = "float32") -> None:
    """What `cellar bench offline` prints last: 8 prompts of 16-64 tokens in, 4-32 out, all steps as the profile's."""
    work = random_workload(8, LengthRange(16, 64), LengthRange(4, 32), 100, 4096, 0)
    report = {
        "dtype": dtype,
        "num_prompts": 8,
        "prompt_tokens": work.num_prompt_tokens,
        "output_tokens": work.num_output_tokens,
        "seconds": seconds,
        "output_rate": work.num_output_tokens / seconds,
        "total_rate": (work.num_prompt_tokens + work.num_output_tokens) / seconds,
        "phases": [{"phase": "decode", "num_steps": 31, "seconds": 0.9 * seconds}],
    }
    path.write_text("8 prompts: words for people\n" + json.dumps(report) + "\n")


def test_an_offline_run_is_drawn_again_from_its_options(tmp_path: Path, profile: str) -> None:
    offline(tmp_path / "run.txt", 0.8)
    arguments = ["demo", "--machine", profile, "--check", str(tmp_path / "run.txt")]
    found = last(simulate(*arguments, "--input-len", "16-64", "--output-len", "4-32"))["check"]
    assert found["decode_steps"] == {"simulated": 31, "measured": 31}
    # 31 decode steps of 5 ms and 1 ms a token, and prompts of 1 ms a token: the fit to the profile's steps is near.
    assert 0.3 < found["duration"]["simulated"] < 0.9
    refused = simulate(*arguments, "--input-len", "16-65", "--output-len", "4-32")
    assert refused.exit_code == 2
    assert "--input-len" in refused.output


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_check_is_priced_in_the_dtype_of_the_run(tmp_path: Path, profile: str, dtype: str) -> None:
    """Not in one that this processor would choose: a plain profile has no steps of the model to hide the difference."""
    plain = Profile.load(Path(profile))
    rates = {"float32": Measure(5e10, "FLOP/s", "measured"), "bfloat16": Measure(2e11, "FLOP/s", "measured")}
    here = str(tmp_path / "plain.json")
    Profile("some-cpu", (replace(plain.devices[0], flops=rates),)).save(Path(here))
    offline(tmp_path / "run.txt", 0.8, dtype)
    lengths = ["--input-len", "16-64", "--output-len", "4-32", "--check", str(tmp_path / "run.txt")]
    form = "bf16" if dtype == "bfloat16" else dtype
    found = last(simulate("demo", "--machine", here, *lengths))
    assert found["check"] == last(simulate("demo", "--machine", here, *lengths, "--weights", form))["check"]
    other = last(simulate("demo", "--machine", here, *lengths, "--weights", "int8"))
    assert found["check"]["duration"] != other["check"]["duration"]


def test_a_processor_computes_in_what_it_is_fast_in() -> None:
    cpu = Device("cpu", "cpu", Measure(16e9, "bytes", "measured"), Measure(30e9, "bytes/s", "measured"))
    slow, fast = (
        {"float32": Measure(1e11, "FLOP/s", "measured"), "bfloat16": Measure(rate, "FLOP/s", "measured")}
        for rate in (5e10, 4e11)
    )
    assert fast_bfloat16(Profile("a", (replace(cpu, flops=slow),))) is False
    assert fast_bfloat16(Profile("b", (replace(cpu, flops=fast),))) is True
    assert fast_bfloat16(Profile("c", (cpu,))) is None  # asks the processor that is here


def test_a_real_run_is_met_step_by_step(tmp_path: Path) -> None:
    """A tiny model runs; its simulation, by the same scheduler, makes as many steps of each kind."""
    model, path = str(write_checkpoint(tmp_path / "tiny")), tmp_path / "profile.json"
    engine = {"model": model, "num_threads": 1, "device": "cpu", "max_num_seqs": 4, "kv_cache_memory_bytes": 4_000_000}
    engine["run_ahead"] = 1  # further ahead, what is planned depends on how soon results come
    cpu = Device(
        "cpu",
        "cpu",
        Measure(16e9, "bytes", "measured"),
        Measure(30e9, "bytes/s", "measured"),
        {"float32": Measure(50e9, "FLOP/s", "measured")},
        Measure(4e-6, "s", "measured"),
    )
    Profile("here", (cpu,)).save(path)
    assert measure(["--profile", str(path), "--model", model, "--num-threads", "1", "--device", "cpu"]) == 0
    assert "steps.tiny.float32" in Profile.load(path).tables
    bench = Bench(engine)
    try:
        work = bench.workload(9, LengthRange(4, 12), LengthRange(2, 8), 5)
        report = bench.report(work, Profile.load(path))
    finally:
        bench.close()
    (tmp_path / "run.json").write_text(report.to_json())
    lengths = ["--input-len", "4-12", "--output-len", "2-8", "--seed", "5"]
    small = ["--max-num-seqs", "4", "--kv-cache-memory-bytes", "4000000", "--run-ahead", "1"]
    small += ["--check", str(tmp_path / "run.json")]
    found = last(simulate(model, "--machine", str(path), *small, *lengths))["check"]
    for phase in {phase.phase for phase in report.phases}:
        assert found[f"{phase}_steps"]["simulated"] == found[f"{phase}_steps"]["measured"]
    # A busy machine slows the run down tenfold; steps, not seconds, are compared exactly.
    assert 0.005 < found["duration"]["simulated"] / found["duration"]["measured"] < 20


def test_measured_steps_decide_where_there_are_some(profile: str) -> None:
    setup = open_setup("demo", profile, CacheConfig(), ScheduleConfig())
    assert "fitted to 10 measured steps" in setup.about
    for batch in (1, 8, 32):
        work = setup.prices.decodes(np.full(batch, 100))
        assert setup.prices.seconds(work) == pytest.approx(5e-3 + 1e-3 * batch, rel=0.25)
    assert setup.schedule.max_num_batched_tokens == 2048
    assert setup.capacity.num_slots == 4e9 // setup.spec.kv.nbytes_per_token() // 32
    assert setup.spec.kv.groups[0].dtype == "float32"


def test_conversations_have_the_figures_of_pensieve() -> None:
    """Table 3.2 and §3.6.4; lengths have long tails, so 20,000 conversations are still some percent off."""
    talks = table_conversations(20_000)
    turns = np.array([len(t.turns) for t in talks])
    asked = [turn.num_tokens for t in talks for turn in t.turns]
    answered = [turn.output_tokens for t in talks for turn in t.turns]
    assert turns.mean() == pytest.approx(5.56, rel=0.04)
    assert (turns >= 5).mean() == pytest.approx(0.36, abs=0.015)
    assert np.mean(asked) == pytest.approx(37.77, rel=0.04)
    assert np.mean(answered) == pytest.approx(204.58, rel=0.04)
    assert max(t.contexts()[-1] + t.turns[-1].output_tokens for t in talks) <= MAX_CONTEXT
    assert table_conversations(10) == talks[:10]
    assert table_conversations(10, seed=1) != talks[:10]


def test_a_file_of_a_run_in_other_forms(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"output_throughput": 5.0, "mean_ttft_ms": 3.0, "backend": "openai"}))
    measured = read_measured(path, "1", "1", 0)
    assert measured.load is None
    assert measured.figures == {"output_throughput": 5.0, "mean_ttft_ms": 3.0}


@pytest.mark.long
def test_several_replicas_say_where_requests_went(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    options = ["--replicas", "3", "--judged", "4", "--kv-offloading-size", "1", "--output", str(path)]
    found = last(simulate(*FEW, *options))
    assert found["num_replicas"] == 3
    assert found["placed_new"] >= 1
    assert found["judged"] >= 4
    assert {"wrong_percent", "mean_lost_seconds", "device_hit_percent", "host_hit_percent"} <= set(found)
    assert set(json.loads(path.read_text())["replicas"]) <= {0, 1, 2}
    turns = last(simulate(*FEW, "--replicas", "3", "--routing", "round-robin"))
    assert turns["placed_rule"] == turns["completed"]
    assert turns["prefix_hit_percent"] <= found["prefix_hit_percent"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["opt-13b", "--kv-offloading-size", "99999"], "has 1717 GiB to give"),
        (["opt-13b", "--machine", "16xH200"], "8 or fewer"),
        (["opt-13b", "--machine", "laptop"], "GiB"),
        (["opt-13b", "--weights", "int5"], "int5"),
        (["gpt-9"], "gpt-9"),
        (["opt-13b", "--machine", "abacus"], "abacus"),
        (["opt-13b", "--dataset-path", "x.json"], "dataset chat is generated"),
        (["opt-13b", "--dataset-name", "trace", "--dataset-path", "nowhere.csv"], "nowhere.csv"),
        (["opt-13b", "--max-model-len", "3", "--num-prompts", "2"], "max_model_len"),
        (["opt-13b", "--max-model-len", "900000"], "--max-model-len"),
        (["opt-13b", "--check", "nowhere.json"], "nowhere.json"),
        (["opt-13b", "--max-num-seqs", "0"], "max_num_seqs"),
        (["opt-13b", "--figures", "here"], "so model has no effect"),
        (["--figures", "here", "--seed", "3"], "so seed has no effect"),
        (["--figures", "here", "--dataset-name", "trace"], "give its dataset_path"),
    ],
)
def test_bad_wishes_are_one_sentence(arguments: list[str], word: str) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert word in result.output
    assert "Traceback" not in result.output
