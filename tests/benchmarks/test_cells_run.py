"""`python -m benchmarks.cells`, whole: small systems over both clocks, files, and what it must do without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cells import caps
from benchmarks.cells.__main__ import main
from benchmarks.cells.arrivals import poisson
from benchmarks.cells.busy import covered
from benchmarks.cells.drive import all_at_once, one_at_a_time, open_loop
from benchmarks.cells.ours import CellSystem
from benchmarks.cells.run import CellsOptions, open_system, parse_rates, run, systems_of
from benchmarks.cells.setup import Setup
from benchmarks.cells.sweep import Schedule
from cellar.core.errors import ConfigError
from tests.limits import run_python

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, Any] = {"hidden": 16, "vocab": 50, "device": "cpu", "pool": 20, "max_batch": 8, "threads": 1}


@pytest.mark.long
@pytest.mark.parametrize("clock", ["wall", "work"])
@pytest.mark.parametrize(
    ("model", "data"), [("lstm", "wmt-50"), ("seq2seq", "wmt-50"), ("treelstm", "treebank"), ("treelstm", "fixed-4")]
)
def test_ours_and_merging_answer_every_request(model: Any, data: str, clock: Any) -> None:
    setup = Setup(model=model, data=data, clock=clock, **SMALL).resolved()
    for key in ("cellar", "merging", "cellar-3", "merging-3-ahead"):
        system = open_system(setup, key)
        assert system.name == key
        assert isinstance(system, CellSystem)
        for trace in (
            one_at_a_time(system, 5),
            all_at_once(system, 25),
            open_loop(system, poisson(300, 0.1, 1), grace=60.0),
        ):
            assert np.isfinite(trace.ended).all()
            assert (trace.ended >= trace.began).all()
            assert (trace.began >= trace.arrived).all()
        system.scheduler.check_integrity()
        assert not system.scheduler.has_work()
        system.arrive(range(30), 0.0)
        system.turn(0.0)
        system.drop()
        assert not system.scheduler.has_work()
        assert np.isfinite(all_at_once(system, 3).ended).all()
        system.close()


def test_merging_lets_nobody_join() -> None:
    setup = Setup(model="lstm", data="fixed-6", clock="work", **SMALL).resolved()
    system = open_system(setup, "merging")
    trace = open_loop(system, np.array([0.0, 1e-9, 2e-9, 1e-4]), grace=60.0)
    first = trace.ended[0]
    assert trace.began[3] >= first or trace.began[3] == trace.began[0]


def test_trees_of_ours_take_as_many_nodes_as_they_are_told() -> None:
    setup = Setup(model="treelstm", **SMALL).resolved()
    assert setup.tree_batch == 32  # four times the requests of a merged graph
    for given, most in ((None, 32), (5, 5)):
        system = open_system(replace(setup, tree_batch=given).resolved(), "cellar")
        assert isinstance(system, CellSystem)
        assert {cell.batch_sizes[-1] for cell in system.scheduler.models[0].cells} == {most}
        system.close()


def test_systems_of_a_setup() -> None:
    assert systems_of(Setup(model="treelstm", device="cpu").resolved()) == ("cellar", "merging")
    assert systems_of(Setup(model="lstm", data="fixed-24", device="cpu").resolved())[-1] == "ideal"
    with pytest.raises(ConfigError, match="system 'magic'"):
        open_system(Setup(device="cpu").resolved(), "magic")
    with pytest.raises(ConfigError, match="clock"):
        Setup(device="cpu", clock="sand").resolved()  # type: ignore[arg-type]
    assert parse_rates("100,2.5") == (100.0, 2.5)
    for wrong in ("a", "-1", "0"):
        with pytest.raises(ConfigError, match="rates"):
            parse_rates(wrong)


@pytest.mark.long
def test_a_sweep_leaves_its_files(tmp_path: Path) -> None:
    said: list[str] = []
    options = CellsOptions(
        Setup(model="lstm", data="wmt-50", clock="work", **SMALL),
        Schedule(0.2, 0.05, rounds=1, rates=(20.0, 100.0), refinements=1, unloaded_requests=5, saturating_requests=20),
        ("cellar", "padding-10", "library-10"),
        json=tmp_path / "found.json",
        png=tmp_path / "found.png",
    )
    run(options, said.append)
    found = json.loads((tmp_path / "found.json").read_text())
    assert [curve["system"] for curve in found["curves"]] == ["cellar", "padding-10", "library-10"]
    assert all(curve["points"] and curve["saturated"] > 0 for curve in found["curves"])
    assert [one["baseline"] for one in found["comparisons"]] == ["padding-10", "library-10"]
    assert json.loads(said[-1])["benchmark"] == "cells"
    assert (tmp_path / "found.png").stat().st_size > 10_000


def test_the_saturated_system_beside_the_ideal(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--model lstm --hidden 16 --vocab 50 --data fixed-6 --device cpu --threads 1 --max-batch 8"
    more = "--systems cellar,ideal --requests 30 --rounds 1 --seconds 0.1 --rates 100,200 --answer-tasks 1"
    assert main([*arguments.split(), *more.split(), "--load", "max", "--clock", "work"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found["systems"]) == {"cellar", "ideal"}
    assert found["systems"]["ideal"]["ours_by_this"] > 0
    assert found["systems"]["cellar"]["p90_at_half"]["latency"]["p90"] > 0
    assert found["systems"]["cellar"]["idle_share"] is None  # a CPU
    assert found["setup"]["answer_tasks"] == 1
    for figures in found["systems"].values():
        assert [one["rate"] for one in figures["p90_at"]] == [100.0, 200.0]
        assert all(one["late"] == 0 and one["latency"]["p90"] > 0 for one in figures["p90_at"])
    assert main(["--device", "cpu", "--rates", "x"]) == 2


def test_the_command_refuses_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--systems", "padding-10"]) == 2
    assert "first system must be cellar" in capsys.readouterr().err


def test_it_runs_where_torch_is_alone() -> None:
    """A GPU machine has none of the command line's and the server's packages."""
    code = (
        "import sys\n"
        "for name in ('pydantic', 'fastapi', 'typer', 'rich', 'matplotlib', 'uvicorn', 'msgpack', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "import benchmarks.cells.__main__, benchmarks.cells.ours, benchmarks.cells.baselines\n"
    )
    run_python(code)


def test_time_in_which_anything_runs_counts_once() -> None:
    assert covered([]) == 0
    assert covered([(5, 10), (7, 20), (30, 40)]) == 25
    assert covered([(0, 10), (2, 3), (10, 20)]) == 20


@pytest.mark.long
def test_caps_are_swept_and_the_best_of_each_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--hidden", "8", "--device", "cpu", "--threads", "1", "--pool", "10", "--requests", "12", "--rounds", "1"]
    assert (
        caps.main(
            [*small, "--seconds", "0.1", "--nodes", "2,64", "--merged", "64", "--json", str(tmp_path / "caps.json")]
        )
        == 0
    )
    *lines, last = capsys.readouterr().out.strip().splitlines()
    report = json.loads(last)
    assert report == json.loads((tmp_path / "caps.json").read_text())
    found = report["requests_per_second"]
    assert list(found) == list(caps.keys_of((2, 64), (64,)))
    assert found[report["best"]["ours"]] == max(found["cellar-2"], found["cellar-64"])
    assert found[report["best"]["merging"]] == max(rate for key, rate in found.items() if key.startswith("merging"))
    assert (report["paper"]["ours"], report["paper"]["merging"]) == caps.PAPER
    assert any(line.startswith("best: cellar-") for line in lines)
    assert caps.main(["--nodes", "none"]) == 2
