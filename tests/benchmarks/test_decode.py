from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import decode
from cellar import demo


def test_prints_and_writes_one_figure_per_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode.seconds_per_step, "__defaults__", (1, 4))
    out = tmp_path / "out.json"
    arguments = ["--model", str(demo.path()), "--device", "cpu", "--dtype", "float32", "--max-model-len", "256"]
    decode.main([*arguments, "--shapes", "1x8,3x16", "--prompts", "20", "--offline", "3x9x4", "--json", str(out)])
    found = json.loads(out.read_text())
    assert list(found) == ["seconds to ready", "1x8", "3x16", "prompt 20", "offline 3x9x4"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    assert found["prompt 20"] > 0
    assert found["offline 3x9x4"] > 0
