"""The ring gives each layer's own bytes, for as long as they are used, whatever the timing; planted bugs are found."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from cellar.core.errors import DeviceError, IntegrityError
from cellar.runtime.offload.mover import Fence, opened
from cellar.runtime.offload.ring import WeightRing
from tests.limits import until

LAYERS = 5
NUM_SLOTS = 2


class Slots:
    """Slots whose filling takes time, half by half. A slot that is filled while it is used shows."""

    def __init__(self, seed: int, shift: int = 0) -> None:
        self.held = np.full((NUM_SLOTS, 2), -1)
        self._random = np.random.default_rng(seed)
        self._shift = shift
        self.fail: set[int] = set()
        self.num_filled = 0

    def fill(self, slot: int, layer: int) -> Fence:
        if layer in self.fail:
            raise DeviceError(f"layer {layer} cannot be read")
        self.held[slot, 0] = (layer + self._shift) % LAYERS
        time.sleep(float(self._random.uniform(0, 5e-4)))
        self.held[slot, 1] = (layer + self._shift) % LAYERS
        self.num_filled += 1
        return opened


def passes(ring: WeightRing, slots: Slots, count: int, seed: int, stop: int = LAYERS) -> None:
    """Each layer's slot holds that layer from `take` to `give`. Raises AssertionError where one does not."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        ring.begin()
        for j in range(stop):
            slot = ring.take(j)
            try:
                assert slots.held[slot].tolist() == [j, j]
                time.sleep(float(random.uniform(0, 5e-4)))
                assert slots.held[slot].tolist() == [j, j]
            finally:
                ring.give(slot)


def test_each_layer_has_its_bytes_while_it_is_used() -> None:
    for seed in range(5):
        slots = Slots(seed)
        ring = WeightRing(range(LAYERS), NUM_SLOTS, slots.fill)
        passes(ring, slots, 4, seed)
        ring.close()
        assert slots.num_filled <= 4 * LAYERS + NUM_SLOTS, "a layer is loaded once a pass, and two ahead of the next"


def test_a_pass_that_ended_early_leaves_nothing_stale() -> None:
    slots = Slots(0)
    ring = WeightRing(range(LAYERS), NUM_SLOTS, slots.fill)
    for stop in (1, 3, LAYERS, 2, LAYERS, 4):
        passes(ring, slots, 1, stop, stop)
    passes(ring, slots, 2, 7)
    ring.close()


def test_what_the_loader_meets_ends_the_pass_and_the_next_one_tries_again() -> None:
    slots = Slots(1)
    ring = WeightRing(range(LAYERS), NUM_SLOTS, slots.fill)
    passes(ring, slots, 1, 0)
    slots.fail = {3}
    for _ in range(2):
        with pytest.raises(DeviceError, match="layer 3 cannot be read"):
            passes(ring, slots, 2, 0)
    slots.fail = set()
    passes(ring, slots, 3, 0)
    ring.close()


def test_a_closed_ring_lets_nobody_wait() -> None:
    gate = threading.Event()

    def stuck(slot: int, layer: int) -> Fence:
        gate.wait(120)
        return opened

    ring = WeightRing(range(LAYERS), NUM_SLOTS, stuck)
    found: list[BaseException] = []

    def take() -> None:
        try:
            ring.take(0)
        except DeviceError as error:
            found.append(error)

    waiting = threading.Thread(target=take)
    waiting.start()
    closing = threading.Thread(target=ring.close)
    closing.start()
    waiting.join(120)
    gate.set()
    closing.join(120)
    assert "the runtime is closed" in str(found[0])


def test_the_fence_of_a_slot_is_waited_for_before_it_is_filled() -> None:
    slots = Slots(2)
    ring = WeightRing(range(LAYERS), NUM_SLOTS, slots.fill)
    ring.begin()
    slot = ring.take(0)
    done, waited = threading.Event(), list[bool]()
    ring.give(slot, lambda: waited.append(done.wait(120)))
    ring.give(ring.take(1), opened)
    time.sleep(0.01)
    assert slots.held[slot].tolist() == [0, 0], "what computes on it has not ended"
    done.set()
    assert ring.take(2) == slot
    ring.give(slot)
    ring.close()


def test_the_next_slot_is_filled_while_bytes_of_this_one_are_on_their_way() -> None:
    """So a disk has the reads of two layers at once."""
    come, begun = threading.Event(), list[int]()

    def fill(slot: int, layer: int) -> Fence:
        begun.append(layer)
        return lambda: _within(come)

    ring = WeightRing(range(LAYERS), NUM_SLOTS, fill)
    until(lambda: begun == [0, 1])
    come.set()
    ring.begin()
    ring.give(ring.take(0))
    ring.close()


def test_bytes_that_do_not_come_end_the_pass_and_the_next_one_tries_again() -> None:
    bad = [3]

    def fill(slot: int, layer: int) -> Fence:
        def come() -> None:
            if layer in bad:
                raise DeviceError(f"layer {layer} cannot be read")

        return come

    ring = WeightRing(range(LAYERS), NUM_SLOTS, fill)
    for count in (1, 2):
        ring.begin()
        for j in range(3):
            ring.give(ring.take(j))
        with pytest.raises(DeviceError, match="layer 3 cannot be read"):
            ring.take(3)
        if count == 2:
            bad.clear()
    for _ in range(3):
        ring.begin()
        for j in range(LAYERS):
            ring.give(ring.take(j))
    ring.close()


def test_a_slot_that_nobody_wants_is_filled_again_only_when_its_bytes_have_come() -> None:
    """A pass ends early while the disk still writes into a slot; that what was read is bad does not matter."""
    come, filled = threading.Event(), list[int]()

    def fill(slot: int, layer: int) -> Fence:
        filled.append(layer)

        def late() -> None:
            _within(come)
            raise DeviceError("nobody wants it")

        return late if layer == 1 else opened

    ring = WeightRing(range(LAYERS), NUM_SLOTS, fill)
    ring.begin()
    ring.give(ring.take(0))
    until(lambda: filled == [0, 1, 2])
    ring.begin()
    time.sleep(0.01)
    assert filled == [0, 1, 2], "the first free slot is the one that is still written to"
    come.set()
    ring.give(ring.take(0))
    ring.close()


def _within(event: threading.Event) -> None:
    assert event.wait(120)


# -- planted bugs ---------------------------------------------------------------------------------


class GivesTooEarly(WeightRing):
    """A slot may be overwritten as soon as it is taken."""

    def take(self, layer: int) -> int:
        slot = super().take(layer)
        super().give(slot)
        return slot

    def give(self, slot: int, fence: Fence = opened) -> None:
        pass


class KeepsStale(WeightRing):
    """What a pass that ended early left is not let go of."""

    def begin(self) -> None:
        pass


def _early(seed: int) -> None:
    slots = Slots(seed)
    ring = GivesTooEarly(range(LAYERS), NUM_SLOTS, slots.fill)
    try:
        passes(ring, slots, 4, seed)
    finally:
        ring.close()


def _stale(seed: int) -> None:
    slots = Slots(seed)
    ring = KeepsStale(range(LAYERS), NUM_SLOTS, slots.fill)
    try:
        passes(ring, slots, 1, seed, 2)
        passes(ring, slots, 1, seed)
    finally:
        ring.close()


def _off_by_one(seed: int) -> None:
    slots = Slots(seed, shift=1)
    ring = WeightRing(range(LAYERS), NUM_SLOTS, slots.fill)
    try:
        passes(ring, slots, 1, seed)
    finally:
        ring.close()


@pytest.mark.parametrize("bug", [_early, _stale, _off_by_one])
def test_planted_bugs_are_found(bug: Callable[[int], None]) -> None:
    def often() -> None:
        for seed in range(10):
            bug(seed)

    with pytest.raises((AssertionError, IntegrityError)):
        often()
