"""The table of linear layers on the CPU: its shapes, its checks, its JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import linear
from benchmarks.linear import Line, ShapeBench, layers_of, verdicts
from cellar import demo
from cellar.ops.linear.choice import Shape


def test_every_layer_of_the_model_is_measured_and_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["--models", str(demo.path()), "--device", "cpu", "--tokens", "1,3", "--megabytes", "1"]
    assert linear.main([*arguments, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    shown = capsys.readouterr().out.splitlines()
    assert json.loads(shown[-1]) == report
    assert report["wrong"] == []
    lines = [Line(**line) for line in report["lines"]]
    assert {(line.n, line.k) for line in lines} == {(s.n, s.k) for s in layers_of([str(demo.path())], "float32")}
    assert [line.m for line in lines[:2]] == [1, 3]
    for line in lines:
        assert line.seconds > 0
        assert line.ratio == pytest.approx(line.library_seconds / line.seconds)
        assert line.bytes_per_second == pytest.approx(line.n * line.k * 4 / line.seconds)
        assert 0 <= line.error < 1e-4
    assert sum("of 4 layers" in row for row in shown) == 2


def test_shapes_come_from_the_models_specs() -> None:
    named = layers_of(["llama-2-7b", "llama-3-8b"], "bfloat16", head=False)
    assert [(shape.n, shape.k) for shape in named] == [
        (12288, 4096),
        (4096, 4096),
        (22016, 4096),
        (4096, 11008),
        (6144, 4096),
        (28672, 4096),
        (4096, 14336),
    ]
    assert named[Shape(4096, 4096)] == ("llama-2-7b: out", "llama-3-8b: out")
    assert Shape(128256, 4096) in layers_of(["llama-3-8b"], "bfloat16")


def test_a_wrong_result_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "linear", lambda x, weight, bias: x.new_zeros(x.shape[0], 1))
    arguments = ["--models", str(demo.path()), "--device", "cpu", "--tokens", "1", "--megabytes", "1", "--no-head"]
    assert linear.main(arguments) == 1


def test_verdicts_count_layers_per_model_without_heads_and_fusions() -> None:
    def line(m: int, ratio: float, *layers: str, fused: str = "") -> Line:
        return Line(layers, 8, 8, m, fused, "", 1.0, ratio, 1.0, 1.0, ratio, 0.5, 0.0)

    found = verdicts(
        [
            line(1, 1.2, "a: out", "b: out"),
            line(1, 1.05, "a: qkv"),
            line(1, 9.0, "a: lm_head"),
            line(1, 9.0, "a: qkv", fused="add, norm"),
            line(8, 0.9, "a: qkv"),
        ]
    )
    assert found == [
        "M = 1: of 3 layers 2 at least 1.1x the library, 3 at least even",
        "M = 8: of 1 layers 0 at least 1.1x the library, 0 at least even",
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device")
def test_on_the_device_with_and_without_fusions(tmp_path: Path) -> None:
    bench = ShapeBench(1024, 512, "bfloat16", torch.device("cuda"), None, 2**24)
    with torch.inference_mode():
        for fused in ("", *bench.fusions(("m: gate_up",), 1)):
            line = bench.line(("m: gate_up",), 1, fused, 4.65e12, 775e12)
            assert line.error < 2e-2
            assert 0 < line.seconds < 1e-3
