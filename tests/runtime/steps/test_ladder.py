"""Steps of captured sizes are launched, then recorded, then replayed; never in another size than the smallest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellar.runtime.steps.graphs import Missing, batch_sizes, first_batch_sizes, first_prompt_sizes, prompt_sizes
from cellar.runtime.steps.ladder import Ladder

SIZES = (1, 2, 4, 8, 16, 24, 40)


class Device:
    """Runs sizes of a ladder as `StepGraphs` does, and refuses what a device could not do."""

    def __init__(self, ladder: Ladder[str]) -> None:
        self.ladder = ladder
        self.did: list[tuple[str, int]] = []
        self.loaded: set[int] = set()

    def step(self, count: int) -> int | None:
        """-> the size that it took."""
        size = self.ladder.size(count)
        if size is not None:
            self.run(size)
        return size

    def idle(self) -> None:
        """A piece of what is missing."""
        for size in self.ladder.missing[:1]:
            self.run(size)

    def run(self, size: int) -> None:
        before = len(self.did)
        graph = self.ladder.take(size, self.record)
        if graph is None:
            self.loaded.add(size)
            self.did.append(("launch", size))
        else:
            assert graph == f"graph of {size}"
            if len(self.did) == before:
                self.did.append(("replay", size))

    def record(self, size: int) -> str:
        assert size in self.loaded, "a kernel that was never launched cannot be recorded"
        self.did.append(("record", size))
        return f"graph of {size}"


def ran(device: Device, counts: list[int]) -> None:
    """A number is a step of so many tokens, 0 an idle moment; what must hold, checked."""
    for count in counts:
        if count:
            expected = next((size for size in SIZES if size >= count), None)
            assert device.step(count) == expected, "sums depend on a step's own size, not on what ran before"
        else:
            device.idle()
    seen: Counter[int] = Counter()
    for how, size in device.did:
        assert how == ("launch", "record", "replay")[min(seen[size], 2)]
        seen[size] += 1
    assert device.ladder.missing == tuple(size for size in SIZES if seen[size] < 2)
    assert set(device.ladder.recorded) == set(SIZES) - set(device.ladder.missing)


@given(st.lists(st.integers(0, 48), max_size=60))
def test_the_history_of_steps_changes_how_they_run_and_nothing_else(counts: list[int]) -> None:
    ran(Device(Ladder(SIZES)), counts)


@given(st.lists(st.integers(0, 48), max_size=20))
def test_idle_moments_leave_nothing_missing(counts: list[int]) -> None:
    device = Device(Ladder(SIZES))
    ran(device, counts)
    for _ in range(2 * len(SIZES)):
        device.idle()
    assert device.ladder.missing == ()
    device.did.clear()
    for size in SIZES:
        device.step(size)
    assert device.did == [("replay", size) for size in SIZES]


class Hasty(Ladder[str]):
    """Records what never ran."""

    def take(self, size: int, record: Callable[[int], str]) -> str | None:
        self._launched.add(size)
        return super().take(size, record)


class Forgetful(Ladder[str]):
    """Launches for ever."""

    def take(self, size: int, record: Callable[[int], str]) -> str | None:
        self._launched.clear()
        return super().take(size, record)


class Padding(Ladder[str]):
    """Takes what is captured rather than what fits."""

    def size(self, count: int) -> int | None:
        fits = [size for size in self.sizes if size >= count]
        captured = [size for size in fits if size in self.recorded]
        return (captured or fits or [None])[0]


class Again(Ladder[str]):
    """Records each time."""

    def take(self, size: int, record: Callable[[int], str]) -> str | None:
        self._graphs.pop(size, None)
        return super().take(size, record)


@pytest.mark.parametrize("planted", [Hasty, Forgetful, Padding, Again])
def test_a_planted_defect_is_found(planted: type[Ladder[str]]) -> None:
    with pytest.raises(AssertionError):
        ran(Device(planted(SIZES)), [16, 16, 3, 3, 3, 0])


def test_what_cannot_be_recorded_is_launched_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []

    def record(size: int) -> str:
        tries.append(size)
        raise RuntimeError("no room for a graph")

    ladder: Ladder[str] = Ladder(SIZES)
    ladder.put(8, "graph of 8")
    assert [ladder.take(4, record) for _ in range(4)] == [None] * 4
    assert [ladder.take(2, record) for _ in range(4)] == [None] * 4
    assert tries == [4]
    assert ladder.missing == ()
    assert "no room for a graph" in caplog.text
    assert ladder.take(8, record) == "graph of 8"


def test_a_start_captures_what_the_first_requests_need_and_the_largest() -> None:
    assert first_batch_sizes(batch_sizes(256)) == (1, 2, 4, 8, 256)
    assert first_batch_sizes(batch_sizes(3)) == (1, 2, 3)
    assert first_prompt_sizes(prompt_sizes(8192)) == (1024,)
    assert first_prompt_sizes(prompt_sizes(8)) == ()


def test_memory_for_what_is_missing() -> None:
    assert Missing(6, 37, 100).nbytes(600) == 100 + 3700
    assert Missing(3, 1, 0).nbytes(100) == 34, "rather more than less"
    assert Missing(0, 0, 0).nbytes(5) == 0
    prompts: Ladder[str] = Ladder((16, 32, 64))
    prompts.put(64, "largest")
    megabyte = 2**20
    assert Missing.of((prompts, 16 * megabyte), (Ladder(()), 0)) == Missing(1, 2, 4 * megabyte + 8 * megabyte)
    assert Missing.of((prompts, megabyte)) == Missing(1, 2, 4 * megabyte), "whole segments"
