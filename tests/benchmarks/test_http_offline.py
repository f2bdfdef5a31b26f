"""The command that runs a batch offline and over HTTP: real processes, a small model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import http_offline
from cellar import demo


@pytest.mark.long
def test_both_sides_run_and_the_ratio_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "r.json"
    options = ["--model", str(demo.path()), "--load-format", "auto", "--device", "cpu", "--max-model-len", "128"]
    sizes = ["--num-prompts", "4", "--input-len", "16", "--output-len", "8", "--rounds", "2"]
    http_offline.main([*options, *sizes, "--json", str(report)])
    found = json.loads(report.read_text())
    shown = capsys.readouterr().out
    assert json.loads(shown.splitlines()[-1]) == found
    assert len(found["http"]) == len(found["offline"]) == 2
    assert found["ratio"] == pytest.approx(max(found["http"]) / max(found["offline"]))
    assert f"ratio {found['ratio']:.3f}" in shown
    serve, load = found["commands"]
    assert serve.startswith("cellar serve ")
    assert "--skip-tokenizer-init" in serve
    assert "--no-enable-prefix-caching" in serve
    assert load.startswith("cellar bench serve ")
    assert "--vocab-size 4096" in load
    assert f"$ {serve}\n$ {load}\n" in shown


@pytest.mark.long
def test_a_server_that_does_not_start_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(http_offline, "_offline", lambda options, engine: ([1.0], 100))
    with pytest.raises(SystemExit, match=r"`cellar serve` ended with status \d"):
        http_offline.main(["--model", str(tmp_path / "none"), "--device", "cpu", "--rounds", "1"])
    assert str(tmp_path / "none") in capfd.readouterr().err, "what the server said"


def test_a_server_that_is_never_ready_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_offline, "_offline", lambda options, engine: ([1.0], 100))
    monkeypatch.setattr(http_offline, "_READY_SECONDS", 1)
    monkeypatch.setattr(http_offline, "_CELLAR", (sys.executable, "-c", "import time; time.sleep(100)"))
    with pytest.raises(SystemExit, match="not ready after 1 s"):
        http_offline.main(["--model", str(tmp_path / "none"), "--device", "cpu", "--rounds", "1"])
