"""Placed bytes equal planned bytes, to the row; what is not a whole placement, or does not fit, is refused."""

from __future__ import annotations

import errno
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from cellar.core.errors import CapacityError, ConfigError, DeviceError, IntegrityError
from cellar.core.messages import Partition, Placed, PlacedUnits, Placement
from cellar.models.loader import dummy_reader
from cellar.models.registry import open_model
from cellar.runtime.offload.channels import Channel, Channels
from cellar.runtime.offload.file import WeightFile
from cellar.runtime.offload.held import HeldMemory
from cellar.runtime.offload.homes import Homes, digest_by_pieces, opened_homes
from cellar.runtime.offload.host_kv import HostKV
from cellar.runtime.offload.layout import PAGE, layer_layout, placed_rows, planned_nbytes
from cellar.runtime.offload.opened import check_host, check_offloaded, device_nbytes, open_offloaded
from tests.limits import until
from tests.runtime.offload.placements import random_placement
from tests.tiny_checkpoint import CONFIG

CPU = torch.device("cpu")
SMALL = CONFIG | {"vocab_size": 23, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
BIASED = SMALL | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
SPECS = [
    open_model(config | {"num_hidden_layers": n}, "float32", 16).spec for config in (SMALL, BIASED) for n in (1, 3)
]
SPEC = SPECS[-1]


@pytest.mark.parametrize("nbytes", [0, 1, 999, 1000, 1001, 2500])
def test_a_digest_by_pieces_is_that_of_the_whole(nbytes: int) -> None:
    there = torch.arange(nbytes, dtype=torch.int32).to(torch.uint8)
    assert digest_by_pieces(there, 1000) == xxh3_64_intdigest(there.numpy().data)


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_random_plans_are_placed_to_the_byte(tmp_path: Path, count: int) -> None:
    """Bytes by place as planned, and each row's content where it was planned, read back from there."""
    for seed in range(count):
        spec = SPECS[seed % len(SPECS)]
        placement = random_placement(spec, seed)
        rows = placed_rows(placement, spec)
        memory = HeldMemory("device", device_nbytes(spec, rows, 0))
        homes, found = opened_homes(spec, rows, memory, tmp_path, dummy_reader(CPU, seed))
        homes.close()
        planned, tensors = dict.fromkeys(("device", "host", "disk"), 0), dict(spec.named_tensors())
        for part in placement.weights:
            tensor = tensors[part.tensor]
            planned[part.device] += (part.stop - part.start) * tensor.nbytes // tensor.shape[0]
        assert dict(found.nbytes) == planned == planned_nbytes(rows)
        assert sum(planned.values()) == spec.nbytes()
    assert not list(tmp_path.iterdir()), "files have no names"


def test_a_slot_holds_each_row_that_is_away_once() -> None:
    for seed in range(300):
        spec = SPECS[seed % len(SPECS)]
        rows = placed_rows(random_placement(spec, seed), spec)
        for layer in spec.layers:
            of = {t.name: rows[f"layers.{layer.index}.{t.name}"] for t in layer.tensors}
            layout = layer_layout(layer, of)
            matrices = {t.name for t in layer.tensors if len(t.shape) > 1}
            taken = np.zeros(layout.slot_nbytes, np.int64)
            for move in layout.moves:
                taken[move.target : move.target + move.nbytes] += 1
            held = np.zeros(layout.slot_nbytes, np.int64)
            for area in layout.areas:
                held[area.offset : area.offset + area.rows.nbytes] += 1
            assert (taken == held).all()
            assert taken.max(initial=0) <= 1
            assert all(m.target == m.source for m in layout.moves if m.place == "disk" and m.tensor in matrices)
            ends = {area.offset + area.rows.nbytes for area in layout.areas if area.source is None}
            assert max(ends, default=0) <= layout.left_nbytes, "where the CPU is the device, these alone have room"
            if layout.record_nbytes["disk"]:
                whole = -(-layout.record_nbytes["disk"] // PAGE) * PAGE
                assert whole <= layout.left_nbytes
                assert all(m.target >= whole for m in layout.moves if m.place != "disk" or m.tensor not in matrices)
            moved = dict[int, tuple[str, int]]()
            for copy in layout.copies:
                assert copy.source + copy.nbytes <= layout.record_nbytes[copy.place]
                moved |= {copy.target + k: (copy.place, copy.source + k) for k in range(copy.nbytes)}
            for move in layout.moves:
                if move.place != "device":
                    for k in range(move.nbytes):
                        assert moved[move.target + k] == (move.place, move.source + k), "copies do what moves say"
            away = sum(p.stop - p.start for parts in of.values() for p in parts if p.place != "device")
            assert any(move.nbytes for move in layout.moves if move.place != "device") == (away > 0)


def changed(**values: Any) -> Placement:
    return replace(random_placement(SPEC, 1), **values)


def with_weight(*more: Placed, without: str = "") -> Placement:
    whole = random_placement(SPEC, 1)
    return replace(whole, weights=(*(p for p in whole.weights if p.tensor != without), *more))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (with_weight(Placed("layers.1.qkv", "disk", 3, 4, "float32")), "places row 3 of layers.1.qkv twice"),
        (with_weight(without="layers.1.qkv"), "places 0 rows of layers.1.qkv, but it has"),
        (
            with_weight(Placed("layers.1.qkv", "disk", 1, 24, "float32"), without="layers.1.qkv"),
            "places row 0 of layers.1.qkv nowhere",
        ),
        (with_weight(Placed("layers.9.qkv", "disk", 0, 24, "float32")), "layers.9.qkv, which this model does not have"),
        (with_weight(Placed("layers.1.qkv", "tape", 0, 24, "float32")), "on tape; places are device, host, disk"),
        (
            with_weight(Placed("layers.1.qkv", "disk", 0, 24, "float32", "host"), without="layers.1.qkv"),
            "layers.1.qkv on disk multiplied by host, but beside the device the host alone",
        ),
        (
            with_weight(Placed("layers.1.qkv", "disk", 0, 24, "int4")),
            "layers.1.qkv in int4, but the model has it in float32",
        ),
        (with_weight(Placed("embed", "disk", 0, 23, "float32"), without="embed"), "the head stays on the device yet"),
        (with_weight(Placed("lm_head", "host", 0, 23, "float32"), without="lm_head"), "lm_head on host, but the head"),
        (
            with_weight(
                Placed("embed", "host", 0, 20, "float32"), Placed("embed", "device", 20, 23, "float32"), without="embed"
            ),
            "cuts embed at rows 0 and 20, but a table lies in one place",
        ),
        (
            with_weight(Placed("embed", "host", 0, 23, "float32", "host"), without="embed"),
            "embed on host multiplied by host",
        ),
        (changed(kv=(PlacedUnits("disk", 9, "device"),)), "has KV in 1 ways .on disk, attended to by device."),
        (changed(kv=(PlacedUnits("device", 9, "host"),)), "has KV in 1 ways .on device, attended to by host."),
        (
            changed(kv=(PlacedUnits("device", 9, "device"), PlacedUnits("host", 9, "host"))),
            "all of it on the device, or all in host memory, yet",
        ),
        (changed(activations=(PlacedUnits("host", 9, "device"),)), "keeps activations outside the device"),
        (changed(partition=Partition()), "offloads on several devices"),
    ],
)
def test_what_does_not_run_is_refused_by_name(wrong: Placement, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_offloaded(wrong, SPEC, CPU)


def test_a_device_holds_no_byte_more_than_its_cap(tmp_path: Path) -> None:
    placement = random_placement(SPEC, 4)
    rows = placed_rows(placement, SPEC)
    exact = device_nbytes(SPEC, rows, placement.num_chunks)
    opened = open_offloaded(SPEC, placement, dummy_reader(), CPU, {"device": exact}, tmp_path)
    opened.memory.carve(placement.num_chunks * SPEC.kv.chunk_nbytes())
    assert opened.memory.used <= exact
    assert opened.report.device == exact
    with pytest.raises(CapacityError, match="more are needed; raise device_memory"):
        opened.memory.carve(64)
    opened.close()
    tight = exact - placement.num_chunks * SPEC.kv.chunk_nbytes() - 64
    with pytest.raises(CapacityError, match="more are needed; raise device_memory"):
        open_offloaded(SPEC, placement, dummy_reader(), CPU, {"device": tight}, tmp_path)
    for place, option in (("host", "host_memory"), ("disk", "disk")):
        with pytest.raises(CapacityError, match=f"in the place {place}, but {option} is 64 B; raise it"):
            open_offloaded(SPEC, placement, dummy_reader(), CPU, {place: 64}, tmp_path)


def test_host_memory_that_was_named_is_believed_beside_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cellar.runtime.offload.opened.host_available", lambda: 2**30)
    for device in (CPU, torch.device("cuda")):
        check_host(2**30, device, named=False)
        with pytest.raises(CapacityError, match="takes 2 GiB, but this machine has 1 GiB of memory free"):
            check_host(2**31, device, named=False)
    with pytest.raises(CapacityError, match="takes 2 GiB"):
        check_host(2**31, CPU, named=True)
    assert not caplog.records
    check_host(2**31, torch.device("cuda"), named=True)
    assert "takes 2 GiB, but this machine shows 1 GiB" in caplog.text


def test_memory_that_a_device_must_read_and_cannot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is only copied from may stay unregistered, tables and K and V may not."""
    asked: list[int] = []

    def refused(self: HeldMemory, device: torch.device) -> bool:
        asked.append(self.capacity)
        return False

    monkeypatch.setattr(HeldMemory, "register", refused)
    gpu, sizes = torch.device("cuda"), {}
    for seed in range(20):
        placement = random_placement(SPEC, seed, places=("device", "host"))
        rows = placed_rows(placement, SPEC, "gpu")
        there = rows["embed"][0].place
        sizes[there] = sizes.get(there, 0) + 1
        memory = HeldMemory("device", device_nbytes(SPEC, rows, 0))
        if there == "device":
            Homes(SPEC, rows, memory, None, gpu).close()
            continue
        with pytest.raises(CapacityError, match=r"cuda does not register the .* for tables, so the device"):
            Homes(SPEC, rows, memory, None, gpu)
    assert len(sizes) == 2
    with pytest.raises(CapacityError, match="for K and V, so the device cannot read them there; free host memory"):
        HostKV(SPEC.kv, 4, gpu, by_cpu=True, channel=Channel())
    assert asked[-1] >= 4 * SPEC.kv.chunk_nbytes()


def test_a_row_that_is_not_where_it_was_put_is_found(tmp_path: Path) -> None:
    rows = placed_rows(random_placement(SPEC, 5), SPEC)
    homes = Homes(SPEC, rows, HeldMemory("device", device_nbytes(SPEC, rows, 0)), tmp_path)
    homes.place(dummy_reader())
    homes.read_back()
    home = next(iter(homes.resident.values()))
    home[3] ^= 1
    with pytest.raises(IntegrityError, match="not what was placed there"):
        homes.read_back()
    homes.close()


def record(size: int) -> np.ndarray[Any, Any]:
    memory = HeldMemory("host", -(-size // PAGE) * PAGE)
    held = memory.carve(memory.capacity, PAGE).numpy()
    held[:size] = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    return held


def test_records_of_any_size_come_back(tmp_path: Path) -> None:
    sizes = [1, 4096, 5000, 3 * 2**20 + 17, 0]
    file = WeightFile(tmp_path, sizes)
    records = [record(size) for size in sizes]
    for number, held in enumerate(records[:4]):
        file.write(number, held)
    for number in (3, 0, 2, 1):
        again = record(sizes[number])
        again[:] = 0
        file.read(number, again)
        assert (again == records[number])[: sizes[number]].all()
    file.close()


def test_a_device_is_busy_while_layers_and_head_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on where the test says: what passes between layers, and the waits for them, do not count."""
    now = [0.0]
    monkeypatch.setattr("cellar.runtime.offload.opened.Channels", lambda: Channels(lambda: now[0]))
    opened = open_offloaded(SPEC, random_placement(SPEC, 2), dummy_reader(), CPU, {}, tmp_path)
    layers, seconds = opened.layers, opened.report.channels.seconds
    for _ in range(2):
        layers.begin(1)
        for j in range(len(layers)):
            now[0] += 100.0
            with layers.at(j):
                now[0] += 2.0
        with layers.computing():
            now[0] += 5.0
    assert seconds()["device"] == 2 * (2.0 * len(layers) + 5.0)
    assert seconds()["cpu"] == 0
    opened.close()


def test_records_are_queued_behind_one_another(tmp_path: Path) -> None:
    """The reads of the second begin while the first one's have not ended; the channel counts that time once."""
    file = Held(tmp_path, [PAGE, PAGE])
    records = [record(PAGE), record(PAGE - 1)]
    for number, held in enumerate(records):
        file.write(number, held)
    now, again = [0.0], [np.zeros_like(held) for held in records]
    channel = Channel(lambda: now[0])
    memory = HeldMemory("host", 2 * PAGE)
    again = [memory.carve(PAGE, PAGE).numpy() for _ in records]
    fences = [file.begin(number, there, channel) for number, there in enumerate(again)]
    until(lambda: file.num_at_disk == 2)
    now[0] = 5.0
    file.gate.set()
    for fence, there, held in zip(fences, again, records, strict=True):
        fence()
        assert (there == held).all()
    assert channel.seconds == 5.0
    file.close()


class Held(WeightFile):
    """A disk that answers once the gate is open."""

    def __init__(self, directory: Path, sizes: list[int]) -> None:
        super().__init__(directory, sizes)
        self.gate, self.num_at_disk = threading.Event(), 0
        self._lock = threading.Lock()

    def _pread(self, part: np.ndarray[Any, Any], offset: int) -> int:
        with self._lock:
            self.num_at_disk += 1
        assert self.gate.wait(120)
        return super()._pread(part, offset)


def test_a_fence_waits_for_all_reads_though_one_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gets the buffer next is not written over."""
    monkeypatch.setattr("cellar.runtime.offload.file.PIECE_NBYTES", PAGE)
    file, ended = WeightFile(tmp_path, [3 * PAGE]), []
    held = record(3 * PAGE)
    file.write(0, held)

    def read(part: np.ndarray[Any, Any], offset: int) -> int:
        if offset == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        time.sleep(0.05)
        ended.append(offset)
        return len(part)

    monkeypatch.setattr(file, "_pread", read)
    with pytest.raises(DeviceError, match="Input/output error"):
        file.read(0, held)
    assert sorted(ended) == [PAGE, 2 * PAGE]
    file.close()


class Faulty(WeightFile):
    """A disk with a fault."""

    fault = ""

    def _pread(self, part: np.ndarray[Any, Any], offset: int) -> int:
        if self.fault == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        count = super()._pread(part, offset)
        if self.fault == "damaged":
            part[100] ^= 4
        return count // 2 if self.fault == "short" else count


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [("error", "Input/output error"), ("damaged", "a checksum is another"), ("short", "cut short: 2048 of 4096 bytes")],
)
def test_a_disk_that_fails_is_named(tmp_path: Path, fault: str, sentence: str) -> None:
    file = Faulty(tmp_path, [4096])
    held = record(4096)
    file.write(0, held)
    file.fault = fault
    with pytest.raises(DeviceError, match=f"cannot be read .*{sentence}.*; check the disk"):
        file.read(0, held)
    file.fault = ""
    file.read(0, held)
    file.close()


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CapacityError, match=r"has no room for 8 KiB of weights .*; give another disk_path"):
        WeightFile(tmp_path, [8000])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["error", "short"])
def test_a_disk_that_fills_up_while_weights_are_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Where room cannot be taken in advance. Another error is the disk's."""
    file, held = WeightFile(tmp_path, [8000]), record(8000)

    def full(file: int, parts: list[memoryview], offset: int) -> int:
        if fault == "error":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return parts[0].nbytes // 2

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(CapacityError, match=r"has no room for 8 KiB of weights \(No space left on device\); give"):
        file.write(0, held)
    monkeypatch.setattr(os, "pwritev", broken)
    with pytest.raises(DeviceError, match=r"cannot be written to .* \(.*Input/output error\); check the disk"):
        file.write(0, held)
    file.close()


def test_a_file_system_without_direct_reads_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = os.open

    def without(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(path, flags, mode)

    monkeypatch.setattr(os, "open", without)
    with caplog.at_level("WARNING"):
        file = WeightFile(tmp_path, [5000])
    assert "takes no O_DIRECT; weights on disk go through the page cache" in caplog.text
    held = record(5000)
    file.write(0, held)
    file.read(0, held)
    file.close()
