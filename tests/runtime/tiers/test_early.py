"""Loads that are answered before they end: who uses their slots gets every byte, and waits no longer than it must."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from cellar.core.errors import DeviceError
from cellar.core.messages import CopyBatch, CopyResult, IntArray, Tier
from cellar.runtime.steps.arena import Arena
from cellar.runtime.tiers.arena import ArenaChunks, parted
from cellar.runtime.tiers.arrivals import Arrival, Arrivals, EventMark
from cellar.runtime.tiers.copier import Copier
from cellar.runtime.tiers.early import EarlyLoads
from cellar.runtime.tiers.host import HostTier
from cellar.runtime.tiers.storage import Bytes
from tests.limits import SECONDS, until
from tests.runtime.tiers.test_host import CPU, arena_of, contents, same

NUM_LAYERS = 3
AGES = 1e9


class World:
    """An arena of 6 slots whose chunks come in three parts, and a host of 6; parts wait at `gates`."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.arena = arena_of(6, device)
        self.chunks = ArenaChunks(self.arena, device, part_nbytes=1)
        self.host = HostTier(6, self.chunks.chunk_nbytes, device)
        self.arrivals = Arrivals()
        self.results: SimpleQueue[CopyResult] = SimpleQueue()
        self.copier = Copier(self.chunks, {Tier.HOST: self.host}, self.results.put, self.arrivals)
        self.gates = [threading.Event() for _ in range(NUM_LAYERS)]
        self.errors: dict[int, Exception] = {}
        self.number = 0
        for gate in self.gates:
            gate.set()
        write = self.chunks.write_part

        def write_part(part: int, slots: IntArray, memory: Bytes, places: IntArray) -> None:
            assert self.gates[part].wait(SECONDS)
            if part in self.errors:
                raise self.errors[part]
            write(part, slots, memory, places)

        if device.type == "cpu":
            self.chunks.write_part = write_part  # type: ignore[method-assign]

    def submit(self, source: Tier, sources: Sequence[int], target: Tier, targets: Sequence[int], lead: float) -> None:
        slots = (np.array(slots, np.int32) for slots in (sources, targets))
        self.copier.submit(CopyBatch(self.number, source, next(slots), target, next(slots), lead=lead))
        self.number += 1

    def copy(self, *batch: Any, lead: float = 0.0) -> CopyResult:
        self.submit(*batch, lead=lead)
        return self.results.get(timeout=SECONDS)

    def arriving(self, *slots: int) -> list[Arrival]:
        return self.arrivals.touching(np.array(slots, np.int32))


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for gate in made.gates:
        gate.set()
    made.copier.close()


def test_parts_are_runs_of_layers_of_some_size() -> None:
    arena = arena_of(2)
    size = ArenaChunks(arena, CPU).chunk_nbytes
    assert ArenaChunks(arena, CPU).num_parts == 1, "of small chunks all layers come at once"
    assert ArenaChunks(arena, CPU, size // 2).part_of_layer == [0, 0, 1]
    assert ArenaChunks(arena, CPU, 1).part_of_layer == [0, 1, 2]


@pytest.mark.parametrize(
    ("layers", "chunk_kib", "part_kib", "wanted"),
    [
        (32, 4096, 256, [3, 3, 2, 3, 3, 2, 3, 3, 2, *[1] * 8]),  # Llama-3-8B
        (80, 10_240, 256, [7, 7, 6, 7, 7, 6, 7, 7, 6, *[3] * 6, 2]),
        (16, 1024, 256, [4, 4, 4, 2, 2]),
        (28, 1568, 256, [5, 5, 4, 5, 2, 3, 3, 1]),
        (32, 512, 256, [16, 8, 8]),
        (32, 256, 256, [32]),  # small chunks come whole
    ],
)
def test_parts_are_runs_of_layers_and_the_last_are_shorter(
    layers: int, chunk_kib: int, part_kib: int, wanted: list[int]
) -> None:
    parts = parted(layers, chunk_kib * 1024, part_kib * 1024)
    assert parts == sorted(parts)
    assert [parts.count(part) for part in range(parts[-1] + 1)] == wanted


def test_all_of_a_load_is_asked_for_at_once_until_its_rate_is_known(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After that a part that is far ahead of what is copied is asked for when those before it have come."""
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr("cellar.runtime.tiers.early._AHEAD_SECONDS", 1e-9)
    early, events = EarlyLoads(world.chunks, world.arrivals), list[str]()
    write, join = world.chunks.write_part, EventMark.join
    monkeypatch.setattr(world.chunks, "write_part", lambda *a: (events.append("asked"), write(*a)))
    monkeypatch.setattr(EventMark, "join", lambda mark: (events.append("came"), join(mark)))
    batch = CopyBatch(1, Tier.HOST, np.array([0], np.int32), Tier.DEVICE, np.array([4], np.int32), lead=AGES)
    for _ in range(2):
        early._in_queue(batch, world.host.chunks, lambda seconds: None)
    assert events == ["asked"] * 3 + ["came"] * 3 + ["asked", "came"] * 3


@pytest.mark.parametrize("part_nbytes", [1, 2000, 10**9])
def test_all_parts_together_are_the_chunk(part_nbytes: int) -> None:
    arena = arena_of(6)
    chunks = ArenaChunks(arena, CPU, part_nbytes)
    held = np.zeros((5, chunks.chunk_nbytes), np.uint8)
    places = np.array([3, 0], np.int32)
    for slot, place in zip((1, 4), places, strict=True):
        chunks.read(slot, torch.from_numpy(held[place]))
    before = [contents(arena, slot) for slot in range(6)]
    for part in range(chunks.num_parts):
        chunks.write_part(part, np.array([5, 0], np.int32), held, places)
    for slot, source in enumerate((4, 1, 2, 3, 4, 1)):
        assert same(contents(arena, slot), before[source]), f"slot {slot}"


def test_an_answered_load_lets_layers_through_one_by_one(world: World) -> None:
    before = contents(world.arena, 1)
    world.copy(Tier.DEVICE, [1], Tier.HOST, [3])
    world.gates[1].clear()
    # Nothing is known of the link yet: it is answered when the first part has come.
    assert world.copy(Tier.HOST, [3], Tier.DEVICE, [5], lead=AGES).ok.all()
    assert not world.arriving(0, 1, 2, 3, 4)
    (arrival,) = world.arriving(4, 5)
    arrival.before(0)
    passed = threading.Event()

    def second_layer() -> None:
        arrival.before(1)
        passed.set()

    thread = threading.Thread(target=second_layer, daemon=True)
    thread.start()
    assert not passed.wait(0.05), "layer 1 is not there"
    world.gates[1].set()
    assert passed.wait(SECONDS)
    arrival.follow()
    assert same(contents(world.arena, 5), before)
    until(lambda: not world.arrivals)
    assert not world.arriving(5), "all of it has come"


def test_a_load_is_answered_when_the_rest_takes_no_longer_than_the_lead(world: World) -> None:
    world.copy(Tier.DEVICE, [0, 1], Tier.HOST, [0, 1])
    world.gates[2].clear()
    world.submit(Tier.HOST, [0], Tier.DEVICE, [4], lead=1e-12)
    with pytest.raises(Empty):
        world.results.get(timeout=0.05)
    world.gates[2].set()
    assert world.results.get(timeout=SECONDS).ok.all()
    # The rate is known now, so one with a long lead is answered before anything has come.
    world.gates[0].clear()
    assert world.copy(Tier.HOST, [1], Tier.DEVICE, [5], lead=AGES).ok.all()
    assert world.arriving(5)


def test_without_a_lead_nothing_is_answered_early(world: World) -> None:
    world.copy(Tier.DEVICE, [0], Tier.HOST, [0])
    for gate in world.gates:
        gate.clear()  # loads without a lead are not written in parts
    assert world.copy(Tier.HOST, [0], Tier.DEVICE, [4]).ok.all()


def test_copies_wait_for_all_of_what_arrives_in_their_slots(world: World) -> None:
    before = contents(world.arena, 0)
    world.copy(Tier.DEVICE, [0], Tier.HOST, [0])
    world.gates[1].clear()
    world.copy(Tier.HOST, [0], Tier.DEVICE, [4], lead=AGES)
    world.submit(Tier.DEVICE, [4], Tier.DEVICE, [5], lead=0.0)
    with pytest.raises(Empty):
        world.results.get(timeout=0.05)
    world.gates[1].set()
    assert world.results.get(timeout=SECONDS).ok.all()
    assert same(contents(world.arena, 5), before)


def test_what_fails_before_the_answer_is_a_failed_load(world: World) -> None:
    world.copy(Tier.DEVICE, [0, 1], Tier.HOST, [0, 1])
    world.errors[0] = OSError("the link is down")
    result = world.copy(Tier.HOST, [0, 1], Tier.DEVICE, [4, 5], lead=AGES)
    assert (result.ok.tolist(), result.error) == ([False, False], "host to device: the link is down")
    assert not world.arrivals
    world.errors.clear()
    assert world.copy(Tier.HOST, [0], Tier.DEVICE, [4], lead=AGES).ok.all(), "the thread lives"


def test_what_fails_after_the_answer_fails_who_waits_for_it(world: World) -> None:
    world.copy(Tier.DEVICE, [0], Tier.HOST, [0])
    world.gates[1].clear()
    world.errors[1] = OSError("the link is down")
    assert world.copy(Tier.HOST, [0], Tier.DEVICE, [4], lead=AGES).ok.all()
    (arrival,) = world.arriving(4)
    world.gates[1].set()
    arrival.before(0)
    for layer in (1, 2):
        with pytest.raises(DeviceError, match="have not come: the link is down"):
            arrival.before(layer)
    until(lambda: not world.arrivals)


class _Event:
    """An accelerator's event, in a queue that is always empty."""

    def __init__(self, blocking: bool) -> None:
        self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded

    def synchronize(self) -> None:
        assert self.recorded, "an event that nobody recorded is reached at once"


class _LateEvent(_Event):
    """One that is reached a millisecond after somebody waits for it."""

    reached = False

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        time.sleep(0.001)
        self.reached = True


class _Queue:
    def wait_event(self, event: _Event) -> None:
        event.synchronize()


def test_a_load_is_answered_while_it_is_still_asked_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who launches a layer waits until its copies stand in the device's queue, and hears if they never will."""
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: _Queue())
    early, answers = EarlyLoads(world.chunks, world.arrivals), SimpleQueue[float]()
    slots = np.array([4], np.int32)
    batch = CopyBatch(1, Tier.HOST, np.array([0], np.int32), Tier.DEVICE, slots, lead=AGES)
    memory = world.host.chunks
    early._in_queue(batch, memory, answers.put)
    assert answers.get(timeout=SECONDS) > 0
    world.gates[1].clear()
    with ThreadPoolExecutor(2) as pool:
        load = pool.submit(early._in_queue, batch, memory, answers.put)
        answers.get(timeout=SECONDS)
        (arrival,) = world.arriving(4)
        arrival.before(0)
        waits = pool.submit(arrival.before, 1)
        with pytest.raises(TimeoutError):
            waits.result(timeout=0.05)
        world.errors[2] = OSError("the device is lost")
        world.gates[1].set()
        waits.result(timeout=SECONDS)
        with pytest.raises(OSError, match="the device is lost"):
            load.result(timeout=SECONDS)
    with pytest.raises(DeviceError, match="have not come: the device is lost"):
        arrival.before(2)
    arrival.join()
    assert not world.arrivals


@pytest.mark.parametrize(("event", "pauses"), [(_Event, (0.03, 0.03, 0.03)), (_LateEvent, (0.09, 0.0, 0.0))])
def test_a_load_that_is_asked_for_slowly_says_no_more_than_it_took(
    world: World, event: type[_Event], pauses: Sequence[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking waits for the interpreter or the driver; copies take no longer for that, but several times as long was
    said of the first load after the first of its parts, and then all was computed again.
    """
    monkeypatch.setattr(torch.cuda, "Event", event)
    early, answers = EarlyLoads(world.chunks, world.arrivals), SimpleQueue[float]()
    write = world.chunks.write_part

    def slowly(part: int, slots: IntArray, memory: Bytes, places: IntArray) -> None:
        time.sleep(pauses[part])
        write(part, slots, memory, places)

    monkeypatch.setattr(world.chunks, "write_part", slowly)
    batch = CopyBatch(1, Tier.HOST, np.array([0], np.int32), Tier.DEVICE, np.array([4], np.int32), lead=AGES)
    begin = time.perf_counter()
    early._in_queue(batch, world.host.chunks, answers.put)
    assert 0.09 <= answers.get(timeout=SECONDS) < 2 * (time.perf_counter() - begin)
    assert answers.empty()


@pytest.mark.parametrize("first", [1, 2])
def test_parts_that_are_asked_for_at_once_are_those_of_their_chunks(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Addresses alone, with a copy by hand in place of the driver's. `first` of the first part have a call of their
    own.
    """
    arena = SimpleNamespace(buffers=[torch.zeros(6, NUM_LAYERS, 2, 2, 4, 8)], layers=[list(range(NUM_LAYERS))])
    chunks = ArenaChunks(cast(Arena, arena), torch.device("cuda", 0), part_nbytes=1)
    calls: list[int] = []

    def by_hand(targets: Any, sources: Any, nbytes: int, stream: int) -> None:
        calls.append(len(targets))
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            ctypes.memmove(target, source, nbytes)

    class Queue:
        cuda_stream = 7

    monkeypatch.setattr("cellar.runtime.tiers.arena.copy_at_once", by_hand)
    monkeypatch.setattr("cellar.runtime.tiers.arena._FIRST", first)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Queue())
    monkeypatch.setattr(chunks, "_at_once", True)
    kept = torch.randint(0, 255, (3, chunks.chunk_nbytes), dtype=torch.uint8)
    for part in range(chunks.num_parts):
        chunks.write_part(part, np.array([4, 1], np.int32), kept.numpy(), np.array([2, 0], np.int32))
    (there,) = arena.buffers
    assert same([there[slot].view(torch.uint8).flatten() for slot in (4, 1)], [kept[2], kept[0]])
    assert not there[[0, 2, 3, 5]].any()
    assert calls == ([1, 1] if first == 1 else [2]) + [2] * (NUM_LAYERS - 1)


@pytest.mark.gpu
@pytest.mark.parametrize("lead", [1e-12, 1e-5, AGES])
def test_layers_on_an_accelerator_find_what_they_wait_for(lead: float) -> None:
    """Each layer is read in the queue right behind its wait: what it reads has come."""
    device = torch.device("cuda", 0)
    world = World(device)
    before = [contents(world.arena, slot) for slot in range(6)]
    for turn in range(20):
        order: list[int] = np.random.default_rng(turn).permutation(6).tolist()
        assert world.copy(Tier.DEVICE, list(range(6)), Tier.HOST, order).ok.all()
        for buffer in world.arena.buffers:
            buffer.zero_()
        torch.cuda.synchronize(device)
        assert world.copy(Tier.HOST, order, Tier.DEVICE, list(range(6)), lead=lead).ok.all()
        found = _read_by_layer(world)
        for slot in range(6):
            assert same([part[slot] for part in found], before[slot]), f"turn {turn}, slot {slot}"
        until(lambda: not world.arrivals)
    world.copier.close()


def _read_by_layer(world: World) -> list[torch.Tensor]:
    """Copies of all keys, then of all values, each taken as soon as its layer may be read."""
    arrivals = world.arriving(*range(6))
    keys, values = [], []
    for layer in range(NUM_LAYERS):
        for arrival in arrivals:
            arrival.before(layer)
        keys.append(world.arena.k[layer][:6].clone().view(torch.uint8))
        values.append(world.arena.v[layer][:6].clone().view(torch.uint8))
    return keys + values
