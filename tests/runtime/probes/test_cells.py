"""The probe of cells: every batch size is timed, and the best one is where the rate stops rising."""

from __future__ import annotations

from pathlib import Path

import torch

from cellar.cells.heads import ClassifierHead
from cellar.cells.lstm import TokenLSTMCell
from cellar.cells.sequence import classifier
from cellar.core.hardware import Profile, Table
from cellar.runtime.probes import cells
from cellar.runtime.probes.context import ProbeContext

COLUMNS = cells.COLUMNS


def empty() -> Profile:
    return Profile(machine="m", devices=())


def test_a_step_of_an_lstm(tmp_path: Path) -> None:
    context = ProbeContext(None, tmp_path, seconds=0.01)
    profile = cells.probe(context, empty())
    rows = profile.tables["cells"].rows
    assert [row[:4] for row in rows] == [("cpu", "lstm-256", "step", batch) for batch in cells.SIZES]
    assert all(1e-6 < float(row[4]) < 10 for row in rows)
    assert cells.best_batch(profile.tables["cells"], "cpu", "lstm-256", "step") in cells.SIZES[3:]


def test_models_of_the_users_beside_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = classifier(TokenLSTMCell(20, 4, 8), ClassifierHead(8, 3), batch_sizes=(1, 4, 16))
    context = ProbeContext(None, tmp_path, seconds=0.01)
    known = empty().merged(
        tables={"cells": Table(COLUMNS, (("cpu", "other", "x", 1, 1.0), ("cpu", model.name, "old", 1, 1.0)))}
    )
    table = cells.cells_probe([(model.spec, model.modules)])(context, known).tables["cells"]
    measured = [row[:4] for row in table.rows]
    assert measured[0] == ("cpu", "other", "x", 1)
    assert measured[1:4] == [("cpu", model.name, "step", batch) for batch in (1, 4, 16)]
    assert {row[2] for row in measured[4:]} == {"head"}
    tuned = cells.tuned(model.spec, table, "cpu")
    assert tuned.cells[0].batch_sizes[-1] == cells.best_batch(table, "cpu", model.name, "step")
    assert cells.tuned(model.spec, table, "gpu") == model.spec


def test_the_best_batch_is_the_smallest_that_is_good_enough() -> None:
    times = {1: 1.0, 2: 1.0, 4: 1.1, 8: 2.0, 16: 3.9, 32: 8.0}  # 4.1 a second at 8 and 16, 4 at 32 and 8
    table = Table(COLUMNS, tuple(("gpu", "m", "c", batch, seconds) for batch, seconds in times.items()))
    assert cells.best_batch(table, "gpu", "m", "c") == 8
    assert cells.best_batch(table, "cpu", "m", "c") is None
