"""Chunks of an arena on their way through the host's memory, byte by byte."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from cellar.core.errors import CapacityError, ConfigError, DeviceError
from cellar.core.messages import CopyBatch, CopyResult, KeptChunk, Tier
from cellar.core.specs import KVGroup, KVSpec
from cellar.runtime.steps.arena import Arena
from cellar.runtime.tiers.arena import ArenaChunks
from cellar.runtime.tiers.copier import Copier
from cellar.runtime.tiers.host import HostTier
from tests.limits import SECONDS

CPU = torch.device("cpu")
GROUPS = (
    KVGroup("full", "full", (0, 2), 2, 8, "float32"),
    KVGroup("window", "window", (1,), 3, 16, "bfloat16", window=32),
)
SPEC = KVSpec(GROUPS, 16)


def arena_of(num_slots: int, device: torch.device = CPU) -> Arena:
    arena = Arena(SPEC, num_slots, device)
    for seed, buffer in enumerate(arena.buffers):
        generator = torch.Generator(device).manual_seed(seed)
        buffer.view(torch.uint8).random_(0, 255, generator=generator)
    return arena


def contents(arena: Arena, slot: int) -> list[torch.Tensor]:
    return [cache[slot].clone().view(torch.uint8) for cache in (*arena.k, *arena.v)]


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class World:
    """An arena of 6 slots, a host of 4, and the copier between them."""

    def __init__(self, device: torch.device = CPU, **more: Any) -> None:
        self.arena = arena_of(6, device)
        chunks = self.chunks = ArenaChunks(self.arena, device)
        self.host = HostTier(4, chunks.chunk_nbytes, device)
        self.results: SimpleQueue[CopyResult] = SimpleQueue()
        tiers = {Tier.HOST: self.host, **{Tier[name]: tier for name, tier in more.items()}}
        self.copier = Copier(chunks, tiers, self.results.put)
        self.number = 0

    def copy(self, source: Tier, sources: Sequence[int], target: Tier, targets: Sequence[int]) -> CopyResult:
        self.submit(source, sources, target, targets)
        return self.results.get(timeout=SECONDS)

    def submit(self, source: Tier, sources: Sequence[int], target: Tier, targets: Sequence[int], **more: Any) -> None:
        batch = CopyBatch(self.number, source, np.array(sources, np.int32), target, np.array(targets, np.int32), **more)
        self.number += 1
        self.copier.submit(batch)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.copier.close()


def test_chunk_comes_back_as_it_left_and_others_stay(world: World) -> None:
    before = [contents(world.arena, slot) for slot in range(6)]
    out = world.copy(Tier.DEVICE, [1, 4], Tier.HOST, [3, 0])
    assert out.ok.all()
    assert out.nbytes == 2 * SPEC.chunk_nbytes()
    assert out.seconds > 0
    assert world.copy(Tier.HOST, [0, 3], Tier.DEVICE, [1, 5]).ok.all()
    for slot, source in enumerate((0, 4, 2, 3, 4, 1)):
        assert same(contents(world.arena, slot), before[source]), f"slot {slot}"


def test_layout_outside_the_arena_is_the_same_for_every_device(world: World) -> None:
    """[layer][K/V][head][token][dim], group after group: what a file of chunks holds."""
    world.copy(Tier.DEVICE, [2], Tier.HOST, [1])
    wanted = b"".join(
        torch.stack([torch.stack((world.arena.k[j][2], world.arena.v[j][2])) for j in group.layers])
        .view(torch.uint8)
        .numpy()
        .tobytes()
        for group in GROUPS
    )
    assert world.host.chunks[1].tobytes() == wanted


def test_chunk_is_copied_within_the_device(world: World) -> None:
    before = contents(world.arena, 2)
    assert world.copy(Tier.DEVICE, [2], Tier.DEVICE, [0]).ok.all()
    assert same(contents(world.arena, 0), before)


def test_loads_go_before_stores(world: World) -> None:
    gate, seen = threading.Event(), []
    lane = world.copier._lanes[Tier.HOST]
    work = lane._work

    def slow(hand: Any, job: Any, part: range) -> None:
        gate.wait(SECONDS)
        seen.append(job.batch.number)
        work(hand, job, part)

    lane._work = slow  # type: ignore[method-assign]
    world.submit(Tier.DEVICE, [0], Tier.HOST, [0])
    while lane.waiting:
        pass
    world.submit(Tier.DEVICE, [1], Tier.HOST, [1])
    world.submit(Tier.DEVICE, [2], Tier.HOST, [2])
    world.submit(Tier.HOST, [3], Tier.DEVICE, [5])
    gate.set()
    for _ in range(4):
        world.results.get(timeout=SECONDS)
    assert seen == [0, 3, 1, 2]


class Broken:
    """A tier that has lost its odd slots."""

    num_slots = 8
    num_threads = 3

    def kept(self) -> Sequence[KeptChunk]:
        return ()

    def write(self, slot: int, chunk: Any, label: Any = None) -> None:
        if slot % 2:
            raise OSError("no space left")

    def read(self, slot: int, chunk: Any, label: Any = None) -> None:
        self.write(slot, chunk)

    def erase(self, slot: int) -> None:
        self.write(slot, None)

    def close(self) -> None: ...


def test_what_fails_is_said_chunk_by_chunk() -> None:
    world = World(DISK=Broken())
    result = world.copy(Tier.DEVICE, [0, 1, 2], Tier.DISK, [0, 1, 2])
    assert result.ok.tolist() == [True, False, True]
    assert result.error == "device to disk: no space left"
    assert result.nbytes == 2 * SPEC.chunk_nbytes()
    world.copier.close()


def test_a_defect_in_a_tier_loses_a_chunk_and_not_the_thread(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(slot: int, chunk: Any) -> None:
        raise ValueError("a tier was sad")

    with monkeypatch.context() as patch:
        patch.setattr(world.chunks, "read", explode)
        failed = world.copy(Tier.DEVICE, [0], Tier.HOST, [0])
    assert (failed.ok.tolist(), failed.error) == ([False], "device to host: a tier was sad")
    assert world.copy(Tier.DEVICE, [0], Tier.HOST, [0]).ok.all()


def test_what_is_not_there_is_refused(world: World) -> None:
    with pytest.raises(ConfigError, match="no tier disk"):
        world.submit(Tier.DEVICE, [0], Tier.DISK, [0])
    with pytest.raises(ConfigError, match="holds no step"):
        world.submit(Tier.HOST, [0], Tier.DEVICE, [0], before_step=3)
    world.copier.close()
    with pytest.raises(DeviceError, match="closed"):
        world.submit(Tier.HOST, [0], Tier.DEVICE, [0])


def test_more_memory_than_there_is_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellar.runtime.tiers.host.host_available", lambda: 1000)
    with pytest.raises(CapacityError, match=r"kv_offloading_size asks for 976 B .* but 1000 B are free"):
        HostTier(61, 16, CPU)
    HostTier(59, 16, CPU).close()


@pytest.mark.gpu
def test_chunk_comes_back_as_it_left_on_an_accelerator() -> None:
    device = torch.device("cuda", 0)
    world = World(device)
    before = [contents(world.arena, slot) for slot in range(6)]
    assert world.copy(Tier.DEVICE, [1, 4], Tier.HOST, [3, 0]).ok.all()
    assert world.copy(Tier.HOST, [0, 3], Tier.DEVICE, [1, 5]).ok.all()
    torch.cuda.synchronize(device)
    for slot, source in enumerate((0, 4, 2, 3, 4, 1)):
        assert same(contents(world.arena, slot), before[source]), f"slot {slot}"
    wanted = torch.stack([torch.stack((world.arena.k[j][2], world.arena.v[j][2])) for j in GROUPS[0].layers])
    world.copy(Tier.DEVICE, [2], Tier.HOST, [1])
    flat = wanted.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    assert world.host.chunks[1].tobytes()[: len(flat)] == flat
    world.copier.close()
    assert not world.host._registered, "what was registered is given back to the driver"
