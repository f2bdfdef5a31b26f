"""The comparison of routings with real engines: what is sent is the load's, and a small run ends with its figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.routed import __main__ as routed
from benchmarks.routed.replica import CHUNK, LENGTHS, Measured, prices
from cellar.bench.workloads import Conversation, Load, Piece, Turn


def test_equal_beginnings_stay_equal_when_lengths_are_divided() -> None:
    load = Load((Conversation((Turn((Piece(7, 512), Piece(8, 500)), 130), Turn((Piece(9, 3),), 1))),), np.array([0.0]))
    (talk,) = routed.scaled(load, 64).conversations
    assert [turn.pieces for turn in talk.turns] == [(Piece(7, 8), Piece(8, 8)), (Piece(9, 1),)]
    assert [turn.output_tokens for turn in talk.turns] == [3, 1]


def test_slices_are_the_load_one_after_the_other() -> None:
    talks = tuple(Conversation((Turn((Piece(k, 4),), 1),)) for k in range(7))
    load = Load(talks, np.arange(7) * 2.0)
    parts = routed.slices(load, 3)
    assert [first for first, _ in parts] == [0, 2, 4]
    assert sum((part.conversations for _, part in parts), ()) == talks
    assert [part.arrivals.tolist() for _, part in parts] == [[0.0, 2.0], [0.0, 2.0], [0.0, 2.0, 4.0]]


def test_prices_are_what_was_measured() -> None:
    """A prompt of n tokens takes 0.01 + 0.001 n + 1e-7 n**2 / 2 seconds, a step of r rows 0.004 + 0.002 r."""
    seconds = tuple(0.01 + 0.001 * n + 1e-7 * n**2 / 2 for n in LENGTHS)
    found = prices([Measured(seconds, (0.006, 0.02))] * 2)
    assert found.compute[1024] == pytest.approx(CHUNK * (0.001 + 1e-7 * 1024), rel=1e-6)
    assert (found.step.fixed, found.step.per_row) == (pytest.approx(0.004), pytest.approx(0.002))


@pytest.mark.long
def test_a_small_run_ends_with_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Conversations whose second turns find the first ones."""
    turns = [{"context_tokens": 200, "output_tokens": 20}, {"context_tokens": 260, "output_tokens": 20}]
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([{"turns": turns}]))
    options = ["--sharegpt", str(path), "--prompts", "6", "--scale", "2", "--rate", "5", "--think", "0.5"]
    options += ["--judged", "6", "--slices", "2", "--interval", "0.2", "--kv-tokens", "4096"]
    monkeypatch.setattr(sys, "argv", ["routed", *options, "--routings", "affinity"])
    routed.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["affinity"]
    assert found["turns"] == sum(found["reasons"].values()) == 12
    assert found["prompt_tokens"] == 6 * (100 + 130)
    assert found["found"] > 0.2
    assert found["judged"] == 6
    assert found["lost_mean"] >= 0
