"""The benchmark of the host's part serves requests that come and go, and its parts add up."""

from __future__ import annotations

import json

import pytest

from benchmarks.cell_host import PARTS, main


@pytest.mark.long
@pytest.mark.parametrize("options", [[], ["--per-task"], ["--alone"]])
def test_parts_add_up(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--batch", "32", "--hidden", "8", "--seconds", "0.1", *options]) == 0
    (cost,) = json.loads(capsys.readouterr().out.splitlines()[-1])["costs"]
    assert cost["parts"].keys() == set(PARTS)
    assert sum(cost["parts"].values()) == pytest.approx(cost["total"], rel=1e-6)
    assert cost["parts"]["plan"] > 0
    assert 10 < cost["nodes"] < 50
    assert 0 < cost["unfold"] < 1
