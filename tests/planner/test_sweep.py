"""Latency against cost over numbers of chips: the shape of Pope et al.'s figure 1, and what the command writes."""

from __future__ import annotations

import itertools
import json
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cellar.cli.main import build
from cellar.core.errors import CapacityError
from cellar.planner.cost import dimensions
from cellar.planner.machines import tpu_v4
from cellar.planner.models import known_spec
from cellar.planner.offload import Job
from cellar.planner.partition import BF16, INT8
from cellar.planner.sweep import Point, frontier, sweep

COUNTS = (8, 16, 32, 64)


@lru_cache(maxsize=1)
def palm_62b() -> tuple[Point, ...]:
    spec = known_spec("palm-62b")
    assert spec is not None
    return sweep(dimensions(spec), tpu_v4(), COUNTS, Job(2048, 64), (BF16, INT8))


def test_the_frontier_goes_from_many_chips_to_large_batches() -> None:
    """Fast and expensive on many chips with few sequences, slow and cheap on few with many, as in the figure."""
    best = frontier(palm_62b(), "decode")
    assert best[-1].chips < best[0].chips
    assert best[-1].batch > best[0].batch
    assert all(a.seconds < b.seconds and a.chip_seconds > b.chip_seconds for a, b in itertools.pairwise(best))
    for point in palm_62b():
        beaten = any(p.seconds <= point.seconds and p.chip_seconds <= point.chip_seconds for p in best)
        assert beaten or point.phase == "prefill"


def test_figures_are_the_papers() -> None:
    """Table 3: PaLM 62B on 16 chips, int8, batch 32: 0.73 s for 64 tokens; its cost in chip-seconds follows."""
    (point,) = (
        p
        for p in palm_62b()
        if (p.phase, p.chips, p.batch, p.formats) == ("decode", 16, 32, "int8") and p.split.startswith("16 x 1")
    )
    assert point.seconds == pytest.approx(0.73 / 64, rel=0.08)
    assert point.chip_seconds == pytest.approx(16 * point.seconds / 32)
    assert point.dollars == pytest.approx(point.chip_seconds * 3.22 / 3600 * 1e6)


def test_no_utilization_passes_the_whole() -> None:
    assert all(0 < point.utilization < 1 for point in palm_62b())
    assert max(p.utilization for p in palm_62b() if p.phase == "prefill") > 0.6


def test_what_fits_none_is_refused() -> None:
    spec = known_spec("palm-540b")
    assert spec is not None
    with pytest.raises(CapacityError, match="none of 1, 2 such devices"):
        sweep(dimensions(spec), tpu_v4(), (1, 2), Job(2048, 64), (BF16,))


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(build(), ["plan", *arguments])


def test_the_command_prints_and_draws(tmp_path: Path) -> None:
    arguments = ("llama-3-8b", "--machine", "h200", "--chips", "1,2,4")
    result = plan(*arguments, "--plots", str(tmp_path))
    if find_spec("matplotlib") is None:
        assert "plots need matplotlib; install it" in result.output
        return
    assert result.exit_code == 0, result.output
    for word in ("Prompts", "Generated tokens", "chip-ms", "MFU %"):
        assert word in " ".join(result.output.split()), word
    assert (tmp_path / "chips.png").stat().st_size > 10_000
    result = plan(*arguments, "--json")
    assert {point["chips"] for point in json.loads(result.output)["chips"]} == {1, 2, 4}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--chips", "0,2"), "must be numbers from 1"),
        (("--chips", "nan"), "must be numbers from 1"),
        (("--chips", "4", "--latency", "3"), "latency is of one plan"),
    ],
)
def test_bad_wishes(arguments: tuple[str, ...], said: str) -> None:
    result = plan("llama-3-8b", *arguments)
    assert result.exit_code != 0
    assert said in " ".join((result.output + str(result.exception)).split())
