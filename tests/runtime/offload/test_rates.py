"""Rates that a plan is made with, measured."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cellar.core.errors import DeviceError
from cellar.models.registry import open_model
from cellar.ops.linear.dense import DenseWeight
from cellar.runtime.offload import rates
from cellar.runtime.offload.file import WeightFile
from cellar.runtime.offload.rates import (
    CHAINED,
    MeasuredRates,
    chosen,
    fill_with_ones,
    matrices,
    measured_left,
    measured_rates,
    settled,
    shares_of,
    usual_seconds,
)
from cellar.runtime.offload.reads import DiskReads
from cellar.runtime.offload.signal import WaitingSignal
from tests.limits import until
from tests.tiny_checkpoint import CONFIG

BIG = CONFIG | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 64, "vocab_size": 500}


@pytest.mark.parametrize("config", [BIG, BIG | {"num_key_value_heads": 4}, BIG | {"intermediate_size": 40_000}])
def test_rates_are_measured_with_the_models_own_shapes(config: dict[str, object]) -> None:
    found = measured_rates(open_model(config, "float32", 16, 256).spec, torch.device("cpu"), 2**24, 0.02)
    for rate in (found.multiply, found.attention, found.flops):
        assert rate > 1e6
    assert found.alone == found.link == found.disk == 0, "nothing goes on beside a processor without a disk"


def test_a_processors_rates_are_measured_while_the_disk_is_read(tmp_path: Path) -> None:
    with DiskReads(tmp_path, 2**20 + 1) as reads:
        spec = open_model(BIG, "float32", 16, 256).spec
        found = measured_rates(spec, torch.device("cpu"), 2**24, 0.02, reads=reads)
    assert found.disk > 1e5
    assert found.multiply > 1e6
    assert found.link == 0
    assert not list(tmp_path.iterdir())


def test_the_disks_rate_is_of_what_came_while_something_went_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that takes 10 ms a record of 4 KiB, asked for two at once, brings 800 KB/s at most."""
    plain, numbers = WeightFile._pread, list[int]()

    def slow(self: WeightFile, part: Any, offset: int) -> int:
        time.sleep(0.01)
        numbers.append(offset)
        return plain(self, part, offset)

    monkeypatch.setattr(WeightFile, "_pread", slow)
    with DiskReads(tmp_path, 4096) as reads:
        rate, had = reads.rate_while(lambda: until(lambda: len(numbers) >= 6) or 7.0)
        assert 0 < rate <= 2 * 4096 / 0.01
        assert had == 7.0
        assert set(numbers) == {0, 4096}
        monkeypatch.setattr(WeightFile, "_pread", lambda *_: 7)
        with pytest.raises(DeviceError, match="cut short"):
            reads.rate_while(lambda: None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_multiplied_and_attended_to_are_ones(dtype: torch.dtype) -> None:
    """Any bytes will not do: subnormal numbers take a processor many times as long."""
    memory = torch.zeros(1027, dtype=torch.uint8)
    fill_with_ones(memory, dtype)
    numbers = memory[: 1027 // dtype.itemsize * dtype.itemsize].view(dtype)
    assert torch.equal(numbers, torch.ones_like(numbers))


def test_a_call_that_stood_still_does_not_make_all_of_them_long() -> None:
    calls = iter([0.0, 0.002, 0.3, *[0.002] * 1000])
    assert 0.002 <= usual_seconds(lambda: time.sleep(next(calls)), 0.4) < 0.02


class LateSignal(WaitingSignal):
    """What the CPU has made comes to the device so many seconds later."""

    late = 0.0

    def hold(self, value: int) -> None:
        super().hold(value)
        time.sleep(self.late)


@pytest.mark.parametrize("late", [0.0, 0.02])
def test_what_is_left_to_the_cpu_has_a_rate_and_seconds_between(late: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of 10 ms each, of one matrix after another, each of the device's x; what passes between them is not
    theirs.
    """
    spec, cpu = open_model(BIG, "bfloat16", 16, 256).spec, torch.device("cpu")
    memory = torch.zeros(2**22, dtype=torch.uint8)
    fill_with_ones(memory, torch.bfloat16)
    weights, seen = matrices(spec, memory), list[int]()
    plain = DenseWeight.multiply

    def slow(self: DenseWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        time.sleep(0.01)
        seen.append(id(self))
        return plain(self, x, bias)

    monkeypatch.setattr(DenseWeight, "multiply", slow)
    signal = LateSignal(cpu)
    signal.late = late
    found = measured_left(weights, torch.bfloat16, cpu, 1, 0.05, signal)
    assert len(weights) > 1
    assert set(seen[:CHAINED]) == {id(weight) for weight in weights[:CHAINED]}
    assert 0.3 < found.multiply / (weights[0].nbytes / 0.01) <= 1
    assert late <= found.exchange < late + 0.01
    assert not found.runs_ahead


def test_beside_an_accelerator_each_rate_is_of_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine that says its rates: 8 of its threads, by what these and the link have, once they have settled."""
    made: list[str] = []

    class Link:
        def __init__(self, memory: torch.Tensor, devices: list[torch.device]) -> None:
            assert [device.type for device in devices] == ["cuda"]

        def close(self) -> None:
            made.append("closed")

        def rate_while(self, work: Any) -> tuple[float, Any]:
            found = work()
            return (60e9, None) if found is None else (50e9, found)

    def left(weights: Any, dtype: Any, device: Any, threads: int, seconds: float) -> rates.Left:
        made.append(f"{threads} threads")
        return rates.Left({4: 40e9, 6: 60e9, 8: 70e9}[threads], 1e-4, True)

    def attention(*_: Any, alone: bool) -> float:
        assert alone
        made.append("attention")
        return {1: 30e9, 2: 55e9}.get(made.count("attention"), 56e9)

    monkeypatch.setattr(rates, "_Link", Link)
    monkeypatch.setattr(rates, "measured_left", left)
    monkeypatch.setattr(rates, "_attention", attention)
    monkeypatch.setattr(rates, "_flops", lambda *_: 1e12)
    monkeypatch.setattr(rates, "_products", lambda spec, memory, seconds, tokens: {6: 35e9}[tokens])
    monkeypatch.setattr(rates, "threads_beside", lambda _: 8)
    monkeypatch.setattr(rates, "use_threads", lambda count: made.append(f"{count} used"))
    monkeypatch.setattr(rates.HeldMemory, "register", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    spec, gpu = open_model(BIG, "bfloat16", 16, 256).spec, torch.device("cuda")
    found = measured_rates(spec, gpu, 2**22, 0.01, few=6)
    assert found == MeasuredRates(
        alone=60e9,
        link=50e9,
        disk=0.0,
        multiply=70e9,
        attention=56e9,
        flops=1e12,
        exchange=1e-4,
        runs_ahead=True,
        threads=8,
        few_multiply=35e9,
    )
    assert made == [
        *("4 threads", "6 threads", "8 threads"),
        *("8 threads", "8 threads", "8 used"),
        *["attention"] * 3,
        "closed",
    ]
    assert measured_rates(spec, gpu, 2**22, 0.01, few=1).few_multiply == 0, "that is `multiply`"


@pytest.mark.parametrize(
    ("seen", "taken", "windows"),
    [
        ([60.0, 59.0], 59.0, 2),
        ([26.0, 38.0, 64.0, 66.0], 66.0, 4),
        ([54.0, 45.0, 46.0], 46.0, 3),
        ([10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0], 50.0, 9),
    ],
)
def test_a_rate_is_taken_when_it_has_settled(seen: list[float], taken: float, windows: int) -> None:
    """The second was an H200's host behind another program, the third one that others used as well; GB/s."""
    left = iter([*seen, *[0.0] * 9])
    calls: list[tuple[str, float]] = []

    def window() -> tuple[str, float]:
        calls.append((f"window {len(calls)}", next(left)))
        return calls[-1]

    found = settled(window, lambda one: one[1])
    assert found[1] == taken
    assert found in calls
    assert len(calls) == windows


@pytest.mark.parametrize(
    ("rates", "threads"),
    [({7: 117.0, 11: 130.0, 15: 138.0}, 15), ({7: 60.0, 11: 82.0, 15: 80.0}, 15), ({7: 90.0, 11: 70.0, 15: 50.0}, 7)],
)
def test_fewer_threads_are_taken_where_they_read_more(rates: dict[int, float], threads: int) -> None:
    """The first are GB/s of an H200's host, with the link's."""
    assert shares_of(15) == list(rates)
    assert chosen(rates) == threads
    assert shares_of(1) == [1]
