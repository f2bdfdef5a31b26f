"""Collectives of real gloo processes, measured, written to a profile, read back, and priced."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cellar.core.collectives import COLUMNS, OURS, SEND, TABLE, sent_nbytes
from cellar.core.errors import ConfigError, DeviceError
from cellar.core.hardware import Device, Link, Measure, Profile
from cellar.planner.collectives import KINDS, Collectives, Line, read
from cellar.planner.cost import dimensions
from cellar.planner.machines import from_profile
from cellar.planner.steps import StepPrices
from cellar.planner.work import StepWork
from cellar.reports.models import model_spec
from cellar.reports.profile import collective_rows
from cellar.runtime.probes import collectives, exchanges
from cellar.runtime.probes.context import ProbeContext
from tests.limits import SECONDS, until

EMPTY = Profile("m", ())


def context(directory: Path, ranks: int) -> ProbeContext:
    return ProbeContext(None, directory, nbytes=2**17, seconds=0.004, ranks=ranks)


def with_gpus(measured: Profile) -> Profile:
    """The same network between devices that a planner cuts a model over."""

    def rate(value: float) -> Measure:
        return Measure(value, "bytes/s", "measured")

    gpu = Device("gpu", "gpu", Measure(141e9, "bytes", "datasheet"), rate(4e12), {"bfloat16": rate(7e14)})
    cpu = Device("cpu", "cpu", Measure(5e11, "bytes", "measured"), rate(2e11))
    return measured.merged([cpu, gpu], [Link("cpu", "gpu", rate(5e10)), Link("gpu", "cpu", rate(4e10))])


def hundredth(measured: Collectives) -> Collectives:
    """The same, each line a hundredth of itself."""

    def of(line: Line) -> Line:
        return replace(line, start=line.start / 100, each=line.each / 100)

    return replace(measured, fits=tuple(replace(fit, lines=tuple(map(of, fit.lines))) for fit in measured.fits))


@pytest.mark.long
def test_two_ranks_are_measured_kept_and_priced(tmp_path: Path) -> None:
    found = collectives.probe(context(tmp_path, 2), EMPTY)
    found.save(tmp_path / "p.json")
    kept = Profile.load(tmp_path / "p.json")
    assert kept == found
    rows = kept.tables[TABLE].rows
    seen = {(row[0], row[1]) for row in rows}
    assert seen == {(OURS, kind) for kind in KINDS} | {("gloo", kind) for kind in KINDS - {SEND}}
    assert {row[2] for row in rows} == {2}
    for _, kind, ranks, whole, sent, seconds, fitted in rows:
        assert sent == sent_nbytes(str(kind), int(whole), int(ranks))
        assert 1e-7 < float(seconds) < 10, "of one call, and in seconds"
        assert fitted in (0, 1)
    fits = read(kept.tables[TABLE])
    assert all(fit.missed is not None and fit.lines for fit in fits), "each is judged on sizes that it did not see"
    assert len(collective_rows(kept)) == sum(len(fit.lines) for fit in fits)
    # What they took is what is charged: a network that took a hundredth of it makes a step cheaper.
    d, work = dimensions(model_spec("llama-3-8b", "cuda")), StepWork(8, 8, 8000, 8000)
    slow = from_profile(with_gpus(kept))
    assert slow.num_devices == 2
    network = slow.networks[0]
    assert network.measured is not None
    quick = replace(slow, networks=(replace(network, measured=hundredth(network.measured)),))
    assert StepPrices(d, slow).seconds(work) > StepPrices(d, quick).seconds(work)


@pytest.mark.long
def test_groups_of_two_and_of_four_are_apart(tmp_path: Path) -> None:
    rows = collectives.probe(context(tmp_path, 4), EMPTY).tables[TABLE].rows
    assert {(row[1], row[2]) for row in rows if row[0] == OURS} == {
        *((kind, ranks) for kind in KINDS - {SEND} for ranks in (2, 4)),
        (SEND, 2),
    }


def setup(path: Path, kind: str = "cpu", seconds: float = 0.001) -> exchanges.Setup:
    return exchanges.Setup(2, str(path / "meeting"), kind, 2**14, seconds, 1, 20.0)


def ranks_left() -> list[str]:
    return [process.name for process in multiprocessing.active_children() if process.name.startswith("cellar-rank")]


@pytest.mark.long
def test_a_rank_that_fails_is_said_and_none_is_left(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"collectives were not measured: rank \d: .*abacus.*; start again\.$"):
        collectives._measured(setup(tmp_path, "abacus"))
    assert not ranks_left()


@pytest.mark.long
def test_a_rank_that_is_killed_is_said_and_none_is_left(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as thread:
        measuring = thread.submit(collectives._measured, setup(tmp_path, seconds=2.0))
        until(lambda: len(ranks_left()) == 2)
        next(p for p in multiprocessing.active_children() if p.name == "cellar-rank-1").kill()
        with pytest.raises(DeviceError, match="rank 1: its process has ended; start again"):
            measuring.result(SECONDS)
    assert not ranks_left()


def test_one_rank_and_more_ranks_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="ranks is 1; collectives are among 2 or more"):
        collectives.probe(context(tmp_path, 1), EMPTY)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    many = replace(context(tmp_path, 4), accelerator=torch.device("cuda"))
    with pytest.raises(ConfigError, match="ranks is 4, but this machine has 2 GPUs; set it to at most 2"):
        collectives.probe(many, EMPTY)


def test_sizes_between_are_those_that_prices_are_judged_by() -> None:
    found = exchanges.sizes(2**16)
    fitted, judged = ([n for n, f in found if f is wanted] for wanted in (True, False))
    assert fitted == [2**k for k in range(10, 17)]
    assert judged == [1.5 * 2**11, 1.5 * 2**13, 1.5 * 2**15]
    assert not set(fitted) & set(judged)
    assert len(COLUMNS) == 7
