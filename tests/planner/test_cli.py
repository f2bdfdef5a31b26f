"""`cellar plan`: the table, the files, plots where matplotlib is, and one sentence for each bad wish."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from cellar import LLM, SamplingParams
from cellar.cli.main import build
from cellar.core.errors import CapacityError, ConfigError
from cellar.core.hardware import Device, Measure, Profile, Table
from cellar.models.registry import shipped_config, shipped_names
from cellar.planner import models
from cellar.planner.calibration import STEP_COLUMNS, table_name
from cellar.planner.cost import dimensions
from cellar.planner.integer import row_classes
from cellar.planner.machines import machine
from cellar.planner.offload import Job
from cellar.planner.partition import Formats
from cellar.planner.plans import Plan
from cellar.planner.saved import read_plan
from cellar.planner.search import find
from cellar.reports.models import model_spec
from cellar.reports.plan import layout_curves, print_answer
from cellar.reports.plan_formats import compared
from tests.tiny_checkpoint import write_checkpoint


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(build(), ["plan", *arguments])


def profile(path: Path, **tables: Table) -> None:
    """A processor that multiplies in float32."""
    known = (Measure(1e9, "bytes", "measured"), Measure(1e10, "bytes/s", "measured"))
    speed = {"float32": Measure(5e10, "FLOP/s", "measured")}
    cpu = Device("cpu", "cpu", *known, speed, Measure(1e-6, "s", "measured"), 1)
    Profile("some-cpu", (cpu,), tables=tables).save(path)


@pytest.mark.parametrize("name", [*shipped_names(), *models.NAMES])
def test_every_named_model_has_its_dimensions(name: str) -> None:
    spec = model_spec(name)
    d = dimensions(spec)
    positions = sum(t.shape[0] * t.shape[1] for t in spec.embedding if t.axes[0] == "position")
    assert d.parameters == pytest.approx(spec.num_parameters() - positions, rel=2e-3)  # norms and biases are left out
    matrices = [(t.name, t.shape[0], 2.0 * t.shape[1]) for t in spec.layers[0].tensors if len(t.shape) == 2]
    assert [(c.name, c.rows, c.row_bytes) for c in row_classes(d, 2.0)] == matrices


def test_the_table_says_what_goes_where() -> None:
    result = plan("opt-30b", "--machine", "t4", "--sources")
    assert result.exit_code == 0, result.output
    for word in (
        "weights", "KV", "activations", "attention", "block", "throughput", "latency", "lower bound", "binds",
        "Busy per channel", "host to device", "Frontier", "fitted", "datasheet", "of device memory buys",
        "next best: ", "GB/s",
    ):  # fmt: skip
        assert word in " ".join(result.output.split()), word


def test_without_a_model_it_is_the_demo_model() -> None:
    result = plan("--machine", "laptop", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["model"] == "demo"


def test_files_and_comparison(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    result = plan("llama-3-8b", "--machine", "t4", "--output", str(saved))
    assert result.exit_code == 0, result.output
    data = json.loads(saved.read_text())
    assert data["model"] == "llama-3-8b"
    assert read_plan(saved.read_text()).placement.kind == "offload"
    for other in (str(saved), "t4"):
        result = plan("llama-3-8b", "--machine", "h200", "--compare", other)
        assert result.exit_code == 0, result.output
        assert "Compared" in result.output
        assert "tokens per second" in result.output


def test_quantized_kv_leaves_room_for_more_sequences(tmp_path: Path) -> None:
    options = ("llama-2-7b", "--machine", "h200", "--prompt", "1024", "--generate", "128")
    found, saved = {}, tmp_path / "plan.json"
    for name in ("auto", "fp8", "int4"):
        result = plan(*options, "--kv-cache-dtype", name, "--json", "--output", str(saved))
        assert result.exit_code == 0, result.output
        found[name] = json.loads(result.stdout)["tokens_per_second"]
        assert read_plan(saved.read_text()).kv_cache_dtype == name
    assert found["auto"] < found["fp8"] < found["int4"]
    assert plan(*options, "--kv-cache-dtype", "fp8_e5m2").exit_code != 0


def test_other_formats_are_listed_and_none_is_chosen_unasked() -> None:
    options = ("llama-3-8b", "--machine", "h200", "--prompt", "1024", "--generate", "128", "--json")
    found = json.loads(plan(*options).stdout)
    assert ", bf16, " in found["plan"]
    rows = {row["option"]: row for row in found["formats"]}
    kept = ["--kv-cache-dtype fp8", "--kv-cache-dtype int4"]
    assert list(rows) == [
        "as it runs", "--formats int8", "--formats fp8", "--formats int4", "--formats int4+kv4", *kept
    ]  # fmt: skip
    assert rows["as it runs"]["tokens_per_second"] == found["tokens_per_second"]
    for option in list(rows)[1:]:
        asked = json.loads(plan(*options, *option.split()).stdout)
        assert asked["tokens_per_second"] == rows[option]["tokens_per_second"] > found["tokens_per_second"], option
        listed = [row["option"] for row in asked["formats"]]
        assert listed == ([] if "--formats" in option else ["as it runs", *list(rows)[1:4]]), option
    assert rows["--formats int8"]["weight_nbytes"] < 0.6 * rows["as it runs"]["weight_nbytes"]
    assert rows["--formats int4+kv4"]["kv_nbytes_per_token"] == 32 * 2 * 8 * 72
    shown = " ".join(plan(*options[:-1]).output.split())
    assert "In other formats" in shown
    assert all(option in shown for option in rows)


def test_a_format_without_a_plan_is_a_row_without_figures() -> None:
    spec = model_spec("llama-3-8b")
    answer = find(dimensions(spec), machine("h200"), Job(64, 32))

    def none(form: Formats) -> Plan:
        raise CapacityError(form.name)

    first, *rest = compared(spec, answer.chosen, none)
    assert first.tokens_per_second == answer.chosen.tokens_per_second
    assert {(row.tokens_per_second, row.latency_seconds) for row in rest} == {(None, None)}
    console = Console(record=True, width=120)
    print_answer(answer, "title", formats=(first, *rest), console=console)
    assert console.export_text().count("no such plan") == len(rest) == 6


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def test_a_quantized_checkpoint_is_priced_by_its_own_bytes(tmp_path: Path) -> None:
    config = shipped_config("llama-3-8b")
    assert config is not None
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": AWQ}))
    options = ("--machine", "h200", "--objective", "latency", "--json")
    found = json.loads(plan(str(tmp_path), *options, "-o", str(tmp_path / "plan.json")).stdout)
    plain, four = (json.loads(plan("llama-3-8b", *options, "--formats", f).stdout) for f in ("bf16", "int4"))
    assert ", int4, " in found["plan"]
    assert found["seconds_per_token"] == pytest.approx(four["seconds_per_token"], rel=0.05)
    assert found["seconds_per_token"] < 0.6 * plain["seconds_per_token"]
    assert [row["option"] for row in found["formats"]] == [
        "as it runs",
        "--kv-cache-dtype fp8",
        "--kv-cache-dtype int4",
    ]
    placed = {p.tensor: p.format for p in read_plan((tmp_path / "plan.json").read_text()).placement.weights}
    assert (placed["layers.0.down"], placed["lm_head"], placed["layers.0.input_norm"]) == ("int4", *["bfloat16"] * 2)
    refused = plan(str(tmp_path), *options, "--formats", "int8")
    assert "formats is int8, but the checkpoint is quantized already (int4); leave formats out" in refused.output


@pytest.mark.parametrize(
    ("asked", "quantization", "kept"),
    [
        ("--formats int8", "int8", "auto"),
        ("--formats fp8", "fp8", "auto"),
        ("--formats int4+kv4", "int4", "int4"),
        ("--formats int8 --kv-cache-dtype fp8", "int8", "fp8"),
    ],
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_plan_in_fewer_bits_is_run_by_an_engine_with_them_alone(
    asked: str, quantization: str, kept: str, tied: bool, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": tied}
    model = write_checkpoint(tmp_path / "model", **sizes)
    profile(tmp_path / "machine.json")
    saved = tmp_path / "plan.json"
    lengths = ("--prompt", "32", "--generate", "16")
    result = plan(str(model), "--machine", str(tmp_path / "machine.json"), *lengths, *asked.split(), "-o", str(saved))
    assert result.exit_code == 0, result.output
    written = read_plan(saved.read_text())
    assert (written.dtype, written.kv_cache_dtype) == ("float32", kept), "what products are in stays"
    options = {"model": str(model), "plan": str(saved), "device": "cpu", "num_threads": 1}
    with LLM(**options, quantization=quantization) as llm:
        assert llm.stats().total_chunks == written.placement.num_chunks
        assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    why = "the plan is for" if tied else rf"the placement has .* in {quantization} of "
    with pytest.raises(ConfigError, match=why):
        LLM(**options)


def test_other_formats_are_priced_by_steps_measured_in_the_models_own(tmp_path: Path) -> None:
    """Where memory is what a step waits for, half the bytes take less time than was measured."""
    steps = [[1, 1, 32.0 * k, 32.0 * k, 0, 2e-3 * (1 + 0.01 * k)] for k in range(1, 9)]
    table = Table(STEP_COLUMNS, tuple(tuple(row) for row in steps))
    profile(tmp_path / "machine.json", **{table_name("demo", "float32"): table})
    options = ("--machine", str(tmp_path / "machine.json"), "--prompt", "8", "--objective", "latency", "--json")
    found = {form: json.loads(plan(*options, "--formats", form).stdout) for form in ("float32", "int8")}
    assert found["int8"]["seconds_per_token"] < 0.75 * found["float32"]["seconds_per_token"]


def test_json() -> None:
    result = plan("llama-3-70b", "--machine", "4xH200", "--objective", "latency", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["latency_seconds"] == min(one["latency_seconds"] for one in data["pareto"])


def test_a_config_file_is_a_model(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(shipped_config("llama-3.2-1b")))
    for name in (config, tmp_path):
        result = plan(str(name), "--machine", "laptop", "--schedule", "best")
        assert result.exit_code == 0, result.output


def test_plots_or_the_sentence_that_says_what_is_missing(tmp_path: Path) -> None:
    """Both ends are real: with matplotlib the files are PNGs, without it the command says how to get it."""
    result = plan("llama-3-70b", "--machine", "8xh200", "--plots", str(tmp_path))
    if find_spec("matplotlib") is None:
        assert result.exit_code == 2
        assert "plots need matplotlib; install it" in result.output
        return
    assert result.exit_code == 0, result.output
    names = {"pareto.png", "layouts.png", "busy.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_curves_of_the_layouts_cross_as_in_pope_et_al() -> None:
    """Few tokens: weight-stationary is least; many: XYZ, which costs the same whatever the tokens."""
    spec = model_spec("palm-540b")
    answer = find(dimensions(spec), machine("64xtpuv4"), Job(1984, 64), "latency")
    curves = layout_curves(answer.chosen)
    assert set(curves) == {"1D", "2D", "X", "XY", "XYZ"}

    def least(at: int) -> str:
        return min(curves, key=lambda name: curves[name][at][1])

    order = [least(at) for at in range(len(curves["1D"]))]
    assert list(dict.fromkeys(order)) == ["2D", "X", "XY", "XYZ"]
    assert len({seconds for _, seconds in curves["XYZ"]}) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("foo",), "model 'foo' is unknown; give a directory, its config.json, a hub name, or one of"),
        (("opt-30b", "--machine", "abacus"), "machine 'abacus' is unknown"),
        (("opt-30b", "--objective", "joy"), "use throughput, latency, cost"),
        (
            ("opt-30b", "--formats", "bf16,int3"),
            "format 'int3' is unknown; use bf16, int8, fp8, int4, int4+kv4, float32",
        ),
        (("opt-30b", "--prompt", "2040"), "2040 + 32 tokens are more than the 2048"),
        (("mt-nlg-530b", "--machine", "laptop"), "take a machine with more memory a device"),
        (("palm-540b", "--machine", "t4"), "take --formats int4"),
        (("llama-3-8b", "--machine", "t4", "--latency", "0.01"), "ask for --latency"),
        (("llama-3-8b", "--latency", "nan"), "latency is nan; it must be a positive number of seconds"),
        (("llama-3-8b", "--latency", "inf"), "latency is inf; it must be a positive number of seconds"),
        (("llama-3-8b", "--latency", "-1"), "latency is -1; it must be a positive number of seconds"),
        (("llama-3-8b", "--latency", "0"), "latency is 0; it must be a positive number of seconds"),
    ],
)
def test_bad_wishes(arguments: tuple[str, ...], sentence: str) -> None:
    result = plan(*arguments)
    assert result.exit_code == 2
    assert sentence in result.output
    assert "Traceback" not in result.output
