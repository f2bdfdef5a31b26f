"""How steps of captured sizes run: launched, then recorded, then replayed; never another size than the smallest."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellar.runtime.steps.graphs import Missing, batch_sizes, first_batch_sizes, first_prompt_sizes, prompt_sizes
from cellar.runtime.steps.ladder import How, Ladder

SIZES = (1, 2, 4, 8, 16, 24, 40)


class Device:
    """Runs sizes of a ladder as `StepGraphs` does, and refuses what a device could not do."""

    def __init__(self, ladder: Ladder[str]) -> None:
        self.ladder = ladder
        self.did: list[tuple[How, int]] = []
        self.loaded: set[int] = set()

    def step(self, count: int) -> int | None:
        """-> the size that it took."""
        size = self.ladder.size(count)
        if size is None:
            return None
        how = self.ladder.take(size)
        self.did.append((how, size))
        if how is How.LAUNCH:
            self.loaded.add(size)
        elif how is How.RECORD:
            assert size in self.loaded, "a kernel that was never launched cannot be recorded"
            self.ladder.put(size, f"graph of {size}")
        else:
            assert self.ladder.captured(size) == f"graph of {size}", "nothing to replay"
        return size


@given(st.lists(st.integers(1, 48), max_size=60))
def test_the_history_of_steps_changes_how_they_run_and_nothing_else(counts: list[int]) -> None:
    device = Device(Ladder(SIZES))
    for count in counts:
        expected = next((size for size in SIZES if size >= count), None)
        assert device.step(count) == expected, "sums depend on a step's own size, not on what ran before"
    seen: Counter[int] = Counter()
    for how, size in device.did:
        assert how is (How.LAUNCH, How.RECORD, How.REPLAY)[min(seen[size], 2)]
        seen[size] += 1
    assert device.ladder.missing == tuple(size for size in SIZES if seen[size] < 2)


class Hasty(Ladder[str]):
    def take(self, size: int) -> How:
        how = super().take(size)
        return How.RECORD if how is How.LAUNCH else how


class Padding(Ladder[str]):
    """Takes what is captured rather than what fits."""

    def size(self, count: int) -> int | None:
        fits = [size for size in self.sizes if size >= count]
        captured = [size for size in fits if self.captured(size)]
        return (captured or fits or [None])[0]


@pytest.mark.parametrize("planted", [Hasty, Padding])
def test_a_planted_defect_is_found(planted: type[Ladder[str]]) -> None:
    device = Device(planted(SIZES))
    with pytest.raises(AssertionError):
        assert [device.step(count) for count in (16, 16, 3, 3, 3)] == [16, 16, 4, 4, 4]


def test_what_cannot_be_recorded_is_launched_for_ever() -> None:
    ladder: Ladder[str] = Ladder(SIZES)
    assert ladder.take(4) is How.LAUNCH
    assert ladder.take(4) is How.RECORD
    ladder.give_up()
    assert [ladder.take(4) for _ in range(3)] == [How.LAUNCH] * 3
    assert ladder.missing == ()


def test_a_start_captures_what_the_first_requests_need_and_the_largest() -> None:
    assert first_batch_sizes(batch_sizes(256)) == (1, 2, 4, 8, 256)
    assert first_batch_sizes(batch_sizes(3)) == (1, 2, 3)
    assert first_prompt_sizes(prompt_sizes(8192)) == (1024,)
    assert first_prompt_sizes(prompt_sizes(8)) == ()


def test_memory_for_what_is_missing() -> None:
    assert Missing(6, 37, 100).nbytes(600) == 100 + 3700
    assert Missing(3, 1, 0).nbytes(100) == 34, "rather more than less"
    assert Missing(0, 0, 0).nbytes(5) == 0
