"""The benchmark of a start: phases add up, each start has caches of its own, the last line is JSON."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import start
from cellar.runtime.steps import local

SECONDS = {
    "import": 1.0,
    "load": 2.25,
    "compile": 0.5,
    "rehearse": 0.5,
    "capture": 0.5,
    "memory": 0.0,
    "rest": 0.25,
    "ready": 5.0,
    "behind": 0.0,
}


def test_phases_add_up_to_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    left = [2, 1, 0]
    executor = SimpleNamespace(missing=lambda: SimpleNamespace(missing=left.pop(0)))
    runtime = SimpleNamespace(close=lambda: closed.append(True), executor=executor)
    times = {"load": 0.0, "compile": 0.0, "rehearse": 0.0, "capture": 0.0, "memory": 0.0}
    opened = SimpleNamespace(start_seconds=times, runtime=runtime)
    monkeypatch.setattr(local, "open_local", lambda config: opened)
    found = start.start("llama-3.2-1b", "cpu", 64)
    assert found.keys() == SECONDS.keys()
    assert sum(found[phase] for phase in start.PHASES) == pytest.approx(found["ready"])
    assert left == [], "sizes were left to be captured"
    assert closed == [True]


def test_both_starts_share_a_home_that_was_empty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    homes: list[tuple[str, str]] = []

    def run(command: list[str], env: dict[str, str], **_: Any) -> SimpleNamespace:
        homes.append((env["HOME"], env["TRITON_CACHE_DIR"]))
        assert "--child" in command
        assert not any(Path(env["HOME"]).iterdir())
        return SimpleNamespace(stdout="a word from a library\n" + json.dumps(SECONDS) + "\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert start.main(["--model", "llama-3.2-1b", "--json", str(tmp_path / "r.json")]) == 0
    assert homes[0] == homes[1]
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert report == json.loads((tmp_path / "r.json").read_text())
    assert report["cold"]["ready"] == report["warm"]["ready"] == 5.0
    assert [line.split()[0] for line in lines[:3]] == ["seconds", "cold", "warm"]
