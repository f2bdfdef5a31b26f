"""The benchmark of host memory below the device, on the demo model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tiers
from cellar import demo

OPTIONS = [
    *("--model", str(demo.path()), "--dtype", "float32", "--device", "cpu", "--context", "128", "--new", "8"),
    *("--kv", "0.01", "--host", "0.06", "--rounds", "1", "--rows", "2", "--prompts", "8", "--answer", "4"),
]


@pytest.mark.long
def test_a_turn_is_timed_by_where_its_past_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "out.json"
    assert tiers.main([*OPTIONS, "--json", str(found)]) == 0
    report = json.loads(found.read_text(encoding="utf-8"))
    turn = report["turn of 8"]
    assert (turn["context"], turn["new"]) == (128, 8)
    assert turn["device"] > 0
    assert turn["computed"] > 0
    assert turn["fewest_found"] >= 0.9 * 128
    nothing, copying = report["nothing known"], report["copying"]
    assert all(rate > 0 for rate in (turn["bytes_per_second"], nothing["saved"], nothing["with"], nothing["without"]))
    assert all(copying[name] > 0 for name in ("nbytes", "quiet", "copying"))
    assert "8 new tokens after 128, round 1 of 1: computed" in capsys.readouterr().out


@pytest.mark.long
def test_turns_alone_need_one_engine(tmp_path: Path) -> None:
    found = tmp_path / "out.json"
    assert tiers.main([*OPTIONS, "--turns-only", "--json", str(found)]) == 0
    report = json.loads(found.read_text(encoding="utf-8"))
    assert report["turn of 8"]["device"] > 0
    assert not {"copying", "nothing known", "failed"} & set(report)


@pytest.mark.long
def test_a_part_that_fails_keeps_no_other_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> dict[str, float]:
        raise RuntimeError("no room for it")

    monkeypatch.setattr(tiers, "copying", broken)
    found = tmp_path / "out.json"
    assert tiers.main([*OPTIONS, "--json", str(found)]) == 1
    report = json.loads(found.read_text(encoding="utf-8"))
    assert report["failed"] == {"copying": "RuntimeError: no room for it"}
    assert report["turn of 8"]["computed"] > 0
    assert report["nothing known"]["with"] > 0
    assert "copying FAILED: no room for it" in capsys.readouterr().out
