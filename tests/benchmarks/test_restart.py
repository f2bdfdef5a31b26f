"""The benchmark of a disk that survives a restart, on the demo model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import restart
from cellar import demo


@pytest.mark.long
def test_the_next_engine_finds_the_conversation(tmp_path: Path) -> None:
    found = tmp_path / "out.json"
    model = ["--model", str(demo.path()), "--dtype", "float32", "--device", "cpu", "--context", "128", "--new", "8"]
    restart.main([*model, "--kv", "0.01", "--size", "0.02", "--folder", str(tmp_path / "kv"), "--json", str(found)])
    report = json.loads(found.read_text(encoding="utf-8"))
    assert report["hit_tokens"] >= 112
    assert report["loaded"] > 0
    assert report["computed"] > 0
    assert report["bytes_per_second"] > 0
