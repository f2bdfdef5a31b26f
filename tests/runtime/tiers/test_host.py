"""Chunks of an arena on their way through the host's memory, byte by byte."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cellar import demo
from cellar.core.config import CacheConfig, EngineConfig
from cellar.core.errors import CapacityError, ConfigError, DeviceError
from cellar.core.messages import CopyBatch, CopyResult, KeptChunk, Tier
from cellar.core.specs import KVGroup, KVSpec
from cellar.runtime.memory import host_available, resident
from cellar.runtime.steps.arena import Arena
from cellar.runtime.steps.local import open_local
from cellar.runtime.tiers.arena import ArenaChunks
from cellar.runtime.tiers.copier import Copier
from cellar.runtime.tiers.host import HostTier
from cellar.runtime.tiers.opened import close_tiers, open_tiers
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


def test_memory_asked_for_is_memory_taken(caplog: pytest.LogCaptureFixture) -> None:
    """The plan is in the log, what the system has given beside it, and what is written meanwhile stays."""
    before = resident()
    with caplog.at_level(logging.INFO, "cellar.runtime.tiers"):
        tiers = open_tiers(CacheConfig(kv_offloading_size=0.125), SPEC, 6, CPU, None)
        host, nbytes = tiers[Tier.HOST], SPEC.chunk_nbytes()
        assert isinstance(host, HostTier)
        chunk = np.random.default_rng(0).integers(0, 255, nbytes, dtype=np.uint8)
        written = range(0, host.num_slots, 7)
        for slot in written:
            host.write(slot, chunk)
        asked, taken = 2**27, host.taken()
    assert taken is not None
    assert abs(taken - asked) < 0.02 * asked
    assert resident() - before > 0.9 * asked
    assert all(np.array_equal(host.chunks[slot], chunk) for slot in written)
    plan, found = (record.getMessage() for record in caplog.records)
    assert f"host 128 MiB ({asked // nbytes:,} chunks)" in plan
    assert "host memory of KV: 128 MiB asked for, 128 MiB taken after" in found
    close_tiers(tiers)


def test_memory_that_the_system_has_not_given_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cellar.runtime.tiers.host.take", lambda part: False)
    with caplog.at_level(logging.INFO, "cellar.runtime.tiers"):
        host = HostTier(64, 2**20, CPU)
        taken = host.taken()
    assert taken is not None
    assert taken < 2**21
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "64 MiB asked for, 0 B taken" in record.getMessage()
    host.write(3, np.full(2**20, 7, np.uint8))
    assert host.chunks[3].min() == 7
    host.close()


class Driver:
    """Registers so many bytes of host memory, as under a limit of locked memory, and no more."""

    def __init__(self, limit: int) -> None:
        self.left = limit
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if nbytes > self.left:
            return 2
        self.left -= nbytes
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.left += self.registered.pop(address)


def test_a_driver_that_registers_less_than_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest is there all the same; copies of it are slower, which the log says once."""
    driver = Driver(limit=20 * 2**20)
    cuda = SimpleNamespace(cudart=lambda: driver, device=nullcontext, is_initialized=lambda: False)
    monkeypatch.setattr("cellar.runtime.registered.torch.cuda", cuda)
    monkeypatch.setattr("cellar.runtime.tiers.host._REGISTERED_AT_ONCE", 8 * 2**20)
    with caplog.at_level(logging.INFO, "cellar.runtime"):
        host = HostTier(48, 2**20, torch.device("cuda", 0))
        taken = host.taken()
    assert sum(driver.registered.values()) == 16 * 2**20
    assert taken is not None
    assert taken >= 48 * 2**20, "what the driver refused as well as what it registered"
    refused, *_ = (record.getMessage() for record in caplog.records)
    assert refused == "the driver did not register 8 MiB of host memory (error 2); copies of it are slower"
    assert sum("did not register" in record.getMessage() for record in caplog.records) == 1
    host.close()
    assert not driver.registered


@pytest.mark.parametrize("settles", ["never", "in time", "too late"])
def test_a_driver_that_registers_is_left_to_those_who_run_requests(
    settles: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who asks it for something waits for one range. It is free half of the time beside a start, which waits for what
    is left, for some time; then it is free under requests; and pages are there before it is asked.
    """
    driver, events = Driver(limit=2**30), list[tuple[str, float]]()
    register = driver.cudaHostRegister

    def slowly(address: int, nbytes: int, flags: int) -> int:
        events.append(("begin", time.perf_counter()))
        time.sleep(0.05)
        events.append(("end", time.perf_counter()))
        return register(address, nbytes, flags)

    def asked(part: np.ndarray[Any, Any]) -> bool:
        events.append(("taken", time.perf_counter()))
        opened.wait()
        return True

    driver.cudaHostRegister = slowly  # type: ignore[method-assign]
    monkeypatch.setattr(
        "cellar.runtime.registered.torch.cuda", SimpleNamespace(cudart=lambda: driver, device=nullcontext)
    )
    monkeypatch.setattr("cellar.runtime.tiers.host.take", asked)
    monkeypatch.setattr("cellar.runtime.tiers.host._REGISTERED_AT_ONCE", 4 * 2**20)
    monkeypatch.setattr("cellar.runtime.tiers.host._TAKEN_AT_ONCE", 2**20)
    opened = threading.Event()
    monkeypatch.setattr("cellar.runtime.tiers.host._UNDER_REQUESTS", 9)
    monkeypatch.setattr("cellar.runtime.tiers.host._PATIENCE_SECONDS", 0.08 if settles == "too late" else 10.0)
    host = HostTier(19, 2**20, torch.device("cuda", 0))
    opened.set()
    with caplog.at_level(logging.INFO):
        if settles != "never":
            host.settle()
            assert (len(driver.registered) == 5) == (settles == "in time")
        host.taken()
    assert ("the rest comes slowly" in caplog.text) == (settles == "too late")
    assert sorted(driver.registered.values()) == [3 * 2**20, *[4 * 2**20] * 4]
    begun, ended = ([at for name, at in events if name == kind] for kind in ("begin", "end"))
    free = sum(later - before for before, later in zip(ended, begun[1:], strict=False))
    assert free >= {"never": 4 * 0.05, "in time": 0.0, "too late": 2 * 9 * 0.05}[settles]
    assert free < {"never": 4 * 9 * 0.05, "in time": 0.05 + 0.1, "too late": math.inf}[settles]
    names = [name for name, _ in events]
    for k, at in enumerate(k for k, name in enumerate(names) if name == "begin"):
        assert names[:at].count("taken") >= min(19, 4 * (k + 1))
    host.close()
    assert not driver.registered


GROUP_FILES = {
    "v2": ("0::/system.slice/cellar.service\n", "system.slice", ("memory.max", "memory.current", "inactive_file")),
    "v1": (
        "5:cpu:/\n4:cpu,memory:/jobs/one\n0::/\n",
        "memory/jobs",
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ),
}


@pytest.mark.parametrize("version", GROUP_FILES)
@pytest.mark.parametrize("above", [False, True])
def test_a_control_group_with_less_memory_than_was_asked_for(
    version: str, above: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own limit counts, and that of a group above it; files that it has read and nobody uses do not."""
    own, folder, (limit, used, spare) = GROUP_FILES[version]
    (tmp_path / "own").write_text(own)
    (tmp_path / "meminfo").write_text("MemAvailable: 1000000 kB\n")
    name = own.splitlines()[-2 if version == "v1" else 0].rpartition("/")[2]
    group = tmp_path / folder / name
    group.mkdir(parents=True)
    limited = group.parent if above else group
    for part, text in ((limit, "50000000\n"), (used, "40000000\n"), ("memory.stat", f"cache 1\n{spare} 20000000\n")):
        (limited / part).write_text(text)
    available = partial(host_available, tmp_path / "meminfo", tmp_path, tmp_path / "own")
    assert available() == 30_000_000
    monkeypatch.setattr("cellar.runtime.tiers.host.host_available", available)
    with pytest.raises(CapacityError, match=r"asks for 38.1 MiB of host memory, but 28.6 MiB are free; ask for 0.0"):
        HostTier(40, 1_000_000, CPU)
    HostTier(28, 1_000_000, CPU).close()
    (limited / limit).write_text("max\n")
    assert available() == 1_024_000_000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device")
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


def test_memory_is_taken_before_the_weights_and_given_back_if_they_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = list[str]()

    def unreadable(*_: object) -> None:
        events.append("weights")
        raise OSError("made to fail")

    class Watched(HostTier):
        def __init__(self, *arguments: Any) -> None:
            events.append("taken")
            super().__init__(*arguments)

        def close(self) -> None:
            events.append("given back")
            super().close()

    monkeypatch.setattr("cellar.runtime.tiers.opened.HostTier", Watched)
    monkeypatch.setattr("cellar.runtime.steps.local.loader.assembled", unreadable)
    with pytest.raises(OSError, match="made to fail"):
        open_local(EngineConfig.of(model=str(demo.path()), device="cpu", kv_offloading_size=0.01))
    assert events == ["taken", "weights", "given back"]


def test_a_start_waits_for_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[HostTier]()
    monkeypatch.setattr(HostTier, "settle", lambda tier: called.append(tier))
    opened = open_local(EngineConfig.of(model=str(demo.path()), device="cpu", kv_offloading_size=0.01))
    try:
        assert len(called) == 1
    finally:
        opened.runtime.close()
