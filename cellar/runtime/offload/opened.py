"""From a placement to a model whose weights lie where it says, with what was found when they were read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from cellar.core.errors import CapacityError, ConfigError
from cellar.core.messages import Placement
from cellar.core.specs import ModelSpec
from cellar.models.loader import LoadedWeights, Make
from cellar.runtime.memory import host_available, human
from cellar.runtime.offload.held import HeldMemory
from cellar.runtime.offload.homes import opened_homes
from cellar.runtime.offload.layers import NUM_SLOTS, StreamedLayers, loaded_ends, ring_nbytes
from cellar.runtime.offload.layout import PLACES, Rows, aligned, layer_layout, placed_rows, planned_nbytes, row_nbytes
from cellar.runtime.offload.mover import mover_for


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """What lies where, in bytes, and what every pass moves at which measured rates (bytes/s).

    `weights`: by place, as planned and as read back. `kv` and `ring` lie on the device, whose memory may hold `device`.
    `direct`: reads of the disk pass the page cache by.
    """

    weights: Mapping[str, int]
    kv: int
    ring: int
    device: int
    moved: Mapping[str, int]
    rates: Mapping[str, float]
    direct: bool

    @property
    def seconds(self) -> dict[str, float]:
        """The least that a pass takes on each way, at the rate that reading back had."""
        return {place: n / self.rates[place] for place, n in self.moved.items() if n and place in self.rates}

    @property
    def limit(self) -> float:
        """The least seconds of a pass: one loader reads the disk, then moves what the host has."""
        return sum(self.seconds.values())

    def line(self) -> str:
        """In one line, for people."""
        where = ", ".join(f"{human(n)} {'on the' if p != 'host' else 'in'} {p}" for p, n in self.weights.items())
        moved = ", ".join(f"{human(n)} from {place}" for place, n in self.moved.items() if n)
        said = f"; each pass moves {moved}, which takes {self.limit:.3g} s at the rates measured now" if moved else ""
        beside = f"KV {human(self.kv)}, ring {human(self.ring)}"
        return f"weights, read back: {where}; beside them on the device {beside}{said}."


@dataclass(frozen=True)
class Offloaded:
    """A model's weights in their places, ready to be streamed. `memory`: what the KV cache is carved from, too."""

    weights: LoadedWeights
    layers: StreamedLayers
    memory: HeldMemory
    batch: int | None
    report: OffloadReport

    def close(self) -> None:
        """End the loader, and let go of the disk."""
        self.layers.close()


def check_offloaded(placement: Placement, spec: ModelSpec, device: torch.device) -> dict[str, tuple[Rows, ...]]:
    """Where rows lie. Raises ConfigError or DeviceError for a placement that does not run yet, or of another model."""
    mover_for(device)
    if placement.partition is not None:
        raise ConfigError("the plan offloads on several devices, but one runs yet; plan for one device.")
    kv = {(part.device, part.compute) for part in placement.kv} | {(placement.kv_device, "device")}
    if kv != {("device", "device")} or not placement.num_chunks:
        raise ConfigError(
            "the plan keeps KV outside the device, or attends to it on the CPU, but offloaded models keep all of it on "
            "the device yet; plan with a smaller batch, or with device_memory."
        )
    if {placement.activation_device, *(part.device for part in placement.activations)} != {"device"}:
        raise ConfigError(
            "the plan keeps activations outside the device, but offloaded models keep them there yet; plan with a "
            "smaller batch, or with device_memory."
        )
    if placement.block is not None and placement.block.order != "zigzag":
        raise ConfigError(
            f"the plan's block schedule is {placement.block.order}, but only zigzag runs yet; plan without --diagonal."
        )
    return placed_rows(placement, spec)


def open_offloaded(
    spec: ModelSpec,
    placement: Placement,
    make: Make,
    device: torch.device,
    capacity: Mapping[str, int | None] = MappingProxyType({}),
    directory: Path | None = None,
) -> Offloaded:
    """Place a model's weights, read them back and start to stream them.

    `capacity`: bytes that each place may hold (None, or left out: as many as the placement needs); `directory`: for
    what lies on disk. Raises ConfigError, CapacityError, DeviceError or IntegrityError.
    """
    rows = check_offloaded(placement, spec, device)
    for place, planned in planned_nbytes(rows, spec).items():
        most = capacity.get(place)
        if most is not None and planned > most:
            option = "disk" if place == "disk" else f"{place}_memory"
            raise CapacityError(
                f"the plan has {human(planned)} of weights in the place {place}, but {option} is {human(most)}; raise "
                "it, or plan again."
            )
    here = device_nbytes(spec, rows, placement.num_chunks)
    both, free = here + planned_nbytes(rows, spec)["host"], host_available()
    if both > free:
        raise CapacityError(
            f"what is not on disk takes {human(both)}, but this machine has {human(free)} of memory free; plan with "
            "less device_memory and host_memory, and more disk."
        )
    held = capacity.get("device")
    memory = HeldMemory("device", here if held is None else held)
    homes, read = opened_homes(spec, rows, memory, directory, make)
    try:
        before = memory.used
        layers = StreamedLayers(spec, homes, memory, mover_for(device))
        report = OffloadReport(
            read.nbytes,
            placement.num_chunks * spec.kv.chunk_nbytes(),
            memory.used - before,
            memory.capacity,
            layers.pass_nbytes,
            read.rates,
            homes.file is not None and homes.file.direct,
        )
        batch = placement.block.batch if placement.block is not None else None
        return Offloaded(loaded_ends(spec, homes), layers, memory, batch, report)
    except BaseException:
        homes.close()
        raise


def device_nbytes(spec: ModelSpec, rows: Mapping[str, tuple[Rows, ...]], num_chunks: int) -> int:
    """Bytes that rows, ring and KV take of the device's memory, each piece aligned."""
    resident = sum(
        aligned((part.stop - part.start) * row_nbytes(tensor))
        for name, tensor in spec.named_tensors()
        for part in rows[name]
        if part.place == PLACES[0]
    )
    layouts = [
        layer_layout(layer, {t.name: rows[f"layers.{layer.index}.{t.name}"] for t in layer.tensors})
        for layer in spec.layers
    ]
    return resident + NUM_SLOTS * aligned(ring_nbytes(layouts)) + aligned(num_chunks * spec.kv.chunk_nbytes())
