"""From a placement to a model whose weights lie where it says, with what was found when they were read back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from cellar.core.errors import CapacityError, ConfigError
from cellar.core.messages import Placement
from cellar.core.pieces import ALIGNMENT
from cellar.core.specs import KVSpec, ModelSpec
from cellar.models.loader import LoadedWeights, Make
from cellar.runtime.memory import host_available, human
from cellar.runtime.offload.channels import Channels
from cellar.runtime.offload.cpu_jobs import CpuJobs, threads_beside
from cellar.runtime.offload.held import HOST, HeldMemory
from cellar.runtime.offload.homes import opened_homes
from cellar.runtime.offload.host_kv import HostKV
from cellar.runtime.offload.layers import NUM_SLOTS, StreamedLayers, loaded_ends, ring_nbytes
from cellar.runtime.offload.layout import (
    PAGE,
    PLACES,
    PlacedRows,
    aligned,
    layer_layout,
    placed_rows,
    planned_nbytes,
)
from cellar.runtime.offload.mover import mover_for
from cellar.runtime.offload.signal import signal_for
from cellar.runtime.recorder import Recorder, at_once

_LOG = logging.getLogger(__name__)

KV_PLACES = {("device", "device"), ("host", "host"), ("host", "device")}
"""Where KV may lie, and who attends to it."""


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """What lies where, in bytes, and what every pass moves at which measured rates (bytes/s).

    `weights`: by place, as planned and as read back. `ring` lies on the device, whose memory may hold `device`; `kv`
    in `kv_place`. `by_cpu`: bytes in host memory that the CPU multiplies in passes of few tokens instead.
    `channels`: how long each way has been busy since, while the model runs.
    `direct`: reads of the disk pass the page cache by. `failure` says how they failed first, if they ever did.
    """

    weights: Mapping[str, int]
    kv: int
    ring: int
    device: int
    moved: Mapping[str, int]
    rates: Mapping[str, float]
    direct: bool
    kv_place: str = "device"
    by_cpu: int = 0
    channels: Channels = field(default_factory=Channels, compare=False)
    failure: Callable[[], str | None] = field(default=lambda: None, compare=False)

    def __reduce__(self) -> tuple[type[OffloadReport], tuple[Any, ...]]:
        """For another process: what was found at the start, and not what goes on here."""
        found = (self.weights, self.kv, self.ring, self.device, self.moved, self.rates, self.direct)
        return OffloadReport, (*found, self.kv_place, self.by_cpu)

    @property
    def seconds(self) -> dict[str, float]:
        """The least that a pass takes on each way, at the rate that reading back had."""
        return {place: n / self.rates[place] for place, n in self.moved.items() if n and place in self.rates}

    @property
    def limit(self) -> float:
        """The least seconds of a pass for the weights that it moves: the disk is read while those of the host move."""
        return max(self.seconds.values(), default=0.0)

    def line(self) -> str:
        """In one line, for people."""
        where = ", ".join(f"{human(n)} {'on the' if p != 'host' else 'in'} {p}" for p, n in self.weights.items())
        moved = ", ".join(f"{human(n)} from {place}" for place, n in self.moved.items() if n)
        said = f"; each pass moves {moved}, which takes {self.limit:.3g} s at the rates measured now" if moved else ""
        beside = f"ring {human(self.ring)} on the device, KV {human(self.kv)} in {self.kv_place} memory"
        return f"weights, read back: {where}; beside them {beside}{said}."


@dataclass(frozen=True)
class Offloaded:
    """A model's weights in their places, ready to be streamed. `memory`: of the device, for what is carved from it (on
    a CPU the KV cache, too); `capacity`: bytes that the device may hold in all, None if nobody says. `kv`: where the
    cache lies, and who attends to it; `over_link`: in host memory, the share that the device attends to. `jobs`: what
    the CPU does for an accelerator; `recorder`: for graphs of its layers, between which the CPU is told to.
    """

    weights: LoadedWeights
    layers: StreamedLayers
    memory: HeldMemory
    batch: int | None
    report: OffloadReport
    capacity: int | None = None
    kv: tuple[str, str] = ("device", "device")
    over_link: float = 0.0
    jobs: CpuJobs | None = None
    recorder: Recorder | None = None

    def host_kv(self, spec: KVSpec, num_slots: int, device: torch.device) -> HostKV | None:
        """A cache in host memory, if it lies there; whoever asks closes it. Raises CapacityError."""
        place, by = self.kv
        if place != "host":
            return None
        channel = self.report.channels.attention
        return HostKV(spec, num_slots, device, by_cpu=by == "host", channel=channel, over_link=self.over_link)

    def close(self) -> None:
        """End the CPU's work for the device and the loader, and let go of the disk."""
        if self.jobs is not None:
            self.jobs.close()
        self.layers.close()


def check_offloaded(placement: Placement, spec: ModelSpec, device: torch.device) -> dict[str, tuple[PlacedRows, ...]]:
    """Where rows lie. Raises ConfigError for a placement that does not run yet on `device`, or of another model."""
    if placement.partition is not None:
        raise ConfigError("the plan offloads on several devices, but one runs yet; plan for one device.")
    kv = {(part.device, part.compute) for part in placement.kv}
    if len({place for place, _ in kv}) != 1 or not kv <= KV_PLACES or not placement.num_chunks:
        raise ConfigError(
            f"the plan has KV in {len(kv)} ways ({', '.join(f'on {a}, attended to by {b}' for a, b in sorted(kv))}), "
            "but offloaded models keep all of it on the device, or all in host memory, yet; plan with a smaller batch, "
            "or with device_memory."
        )
    if {placement.activation_device, *(part.device for part in placement.activations)} != {"device"}:
        raise ConfigError(
            "the plan keeps activations outside the device, but offloaded models keep them there yet; plan with a "
            "smaller batch, or with device_memory."
        )
    return placed_rows(placement, spec, "cpu" if device.type == "cpu" else "gpu")


def open_offloaded(
    spec: ModelSpec,
    placement: Placement,
    make: Make,
    device: torch.device,
    capacity: Mapping[str, int | None] = MappingProxyType({}),
    directory: Path | None = None,
    num_threads: int | None = None,
) -> Offloaded:
    """Place a model's weights, read them back and start to stream them.

    `capacity`: bytes that each place may hold (None, or left out: as many as the placement needs); `directory`: for
    what lies on disk; `num_threads`: of what the CPU computes for an accelerator, see `threads_beside`. Raises
    ConfigError, CapacityError, DeviceError or IntegrityError.
    """
    rows = check_offloaded(placement, spec, device)
    for place, planned in planned_nbytes(rows).items():
        most = capacity.get(place)
        if most is not None and planned > most:
            option = "disk" if place == "disk" else f"{place}_memory"
            raise CapacityError(
                f"the plan has {human(planned)} of weights in the place {place}, but {option} is {human(most)}; raise "
                "it, or plan again."
            )
    kv = placement.num_chunks * spec.kv.chunk_nbytes()
    ways = {(part.device, part.compute) for part in placement.kv}
    way, over_link = max(ways), 0.0  # the CPU, if it attends to any
    if len(ways) > 1:
        over_link = sum(part.units for part in placement.kv if part.compute == "device") / placement.num_chunks
    memory = _device_memory(spec, rows, placement.num_chunks, way[0], device, capacity)
    homes, read = opened_homes(spec, rows, memory, directory, make, device)
    if device.type != "cpu":
        # What the device began to fill is there before another stream touches it.
        torch.cuda.synchronize(device)
    jobs: CpuJobs | None = None
    recorder = None if device.type == "cpu" else Recorder(device)
    try:
        before = memory.used
        channels, jobs = Channels(), jobs_for(device, num_threads)
        between = at_once if recorder is None else recorder.between
        layers = StreamedLayers(spec, homes, memory, mover_for(device), channels, jobs, between)
        rates = dict(read.rates)
        if device.type != "cpu":
            rates.pop("device", None)  # reading it back crossed the link
            if layers.host_rate is not None:
                rates["host"] = layers.host_rate
        held = capacity.get("device")
        file = homes.file  # all that the report may hold: who keeps it must not keep the weights
        report = OffloadReport(
            read.nbytes,
            kv,
            memory.used - before,
            memory.capacity if held is None else held,
            layers.pass_nbytes,
            rates,
            file is not None and file.direct,
            kv_place=way[0],
            by_cpu=layers.cpu_nbytes,
            channels=channels,
            failure=lambda: None if file is None else file.failure,
        )
        batch = placement.block.batch if placement.block is not None else None
        ends = loaded_ends(spec, homes)
        return Offloaded(ends, layers, memory, batch, report, held, way, over_link, jobs, recorder)
    except BaseException:
        if jobs is not None:
            jobs.close()
        homes.close()
        raise


def jobs_for(device: torch.device, num_threads: int | None) -> CpuJobs | None:
    """What the CPU does for an accelerator; None where it is the device itself."""
    return None if device.type == "cpu" else CpuJobs(signal_for(device), threads_beside(num_threads))


def _device_memory(
    spec: ModelSpec,
    rows: Mapping[str, tuple[PlacedRows, ...]],
    num_chunks: int,
    kv_place: str,
    device: torch.device,
    limits: Mapping[str, int | None],
) -> HeldMemory:
    """Room for rows and ring, and on a CPU for KV, whose memory is the host's: there is that much in all, or
    CapacityError.
    """
    held = limits.get("device")
    in_host, kv = planned_nbytes(rows)["host"], num_chunks * spec.kv.chunk_nbytes()
    if kv_place == "host":
        in_host, num_chunks, kv = in_host + kv, 0, 0
    if device.type == "cpu":
        here = device_nbytes(spec, rows, num_chunks, device)
        capacity, taken = here if held is None else held, here + in_host
    else:
        capacity, taken = device_nbytes(spec, rows, 0, device), in_host
        if held is not None and capacity + kv > held:
            raise CapacityError(
                f"rows, ring and KV of the plan take {human(capacity + kv)} of the device, but device_memory is "
                f"{human(held)}; raise it, or plan again."
            )
    check_host(taken, device, named=limits.get("host") is not None)
    return HeldMemory("device", capacity, device)


def check_host(taken: int, device: torch.device, *, named: bool) -> None:
    """The host has so many bytes free, or CapacityError. Beside an accelerator a size of host memory that was `named`
    is believed, and a warning is logged: some virtual machines show memory only once it has been used.
    """
    free = host_available()
    if taken <= free:
        return
    if named and device.type != "cpu":
        _LOG.warning(
            "what is not on disk takes %s, but this machine shows %s of memory free; host_memory is taken at its word.",
            human(taken),
            human(free),
        )
        return
    raise CapacityError(
        f"what is not on disk takes {human(taken)}, but this machine has {human(free)} of memory free; plan with "
        "less device_memory and host_memory, and more disk."
    )


def device_nbytes(
    spec: ModelSpec, rows: Mapping[str, tuple[PlacedRows, ...]], num_chunks: int, device: torch.device = HOST
) -> int:
    """Bytes that rows, ring and KV take of the device's memory, each piece aligned."""
    resident = sum(
        aligned(part.nbytes) for name, _ in spec.named_tensors() for part in rows[name] if part.place == PLACES[0]
    )
    layouts = [
        layer_layout(layer, {t.name: rows[f"layers.{layer.index}.{t.name}"] for t in layer.tensors})
        for layer in spec.layers
    ]
    ring = NUM_SLOTS * aligned(ring_nbytes(layouts, device), PAGE)
    return aligned(resident, PAGE if ring else ALIGNMENT) + ring + aligned(num_chunks * spec.kv.chunk_nbytes())
