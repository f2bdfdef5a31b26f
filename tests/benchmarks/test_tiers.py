"""The benchmark of host memory below the device, on the demo model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tiers
from cellar import demo


@pytest.mark.long
def test_a_turn_is_timed_by_where_its_past_lies(tmp_path: Path) -> None:
    found = tmp_path / "out.json"
    model = ["--model", str(demo.path()), "--dtype", "float32", "--device", "cpu", "--context", "128", "--new", "8"]
    load = ["--kv", "0.01", "--host", "0.06", "--rounds", "1", "--rows", "2", "--prompts", "8", "--answer", "4"]
    tiers.main([*model, *load, "--json", str(found)])
    report = json.loads(found.read_text(encoding="utf-8"))
    (turn,) = report["turns"]
    assert (turn["context"], turn["new"]) == (128, 8)
    assert 0 < turn["device"] < turn["computed"]  # 8 tokens instead of 136
    assert all(rate > 0 for rate in (turn["bytes_per_second"], report["saved"], report["with"], report["without"]))
    copying = report["copying"]
    assert all(copying[name] > 0 for name in ("nbytes", "quiet", "copying"))
