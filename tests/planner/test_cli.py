"""`cellar plan`: the table, the files, plots where matplotlib is, and one sentence for each bad wish."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cellar.cli.main import build
from cellar.models.registry import shipped_names
from cellar.planner import models
from cellar.planner.cost import dimensions
from cellar.planner.integer import row_classes
from cellar.planner.machines import machine
from cellar.planner.offload import Job
from cellar.planner.saved import read_plan
from cellar.planner.search import find
from cellar.reports.models import model_spec
from cellar.reports.plan import layout_curves


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(build(), ["plan", *arguments])


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


def test_json() -> None:
    result = plan("llama-3-70b", "--machine", "4xH200", "--objective", "latency", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["latency_seconds"] == min(one["latency_seconds"] for one in data["pareto"])


def test_a_config_file_is_a_model(tmp_path: Path) -> None:
    from cellar.models.registry import shipped_config

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
        (("opt-30b", "--formats", "bf16,int3"), "format 'int3' is unknown; use bf16, int8, int4, int4+kv4, float32"),
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
