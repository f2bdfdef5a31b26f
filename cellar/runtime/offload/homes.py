"""Where weights live: rows on the device, in host memory and on disk, put there once and read back."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_intdigest

from cellar.core.errors import IntegrityError
from cellar.core.specs import ModelSpec, TensorSpec
from cellar.models.loader import Make
from cellar.ops.linear.weight import Weight
from cellar.quant.pieces import piece_of
from cellar.runtime.offload.channels import Channel
from cellar.runtime.offload.file import WeightFile
from cellar.runtime.offload.held import HOST, NUM_THREADS, HeldMemory
from cellar.runtime.offload.layout import (
    PAGE,
    PLACES,
    LayerLayout,
    PlacedRows,
    aligned,
    layer_layout,
    planned_nbytes,
)
from cellar.runtime.offload.mover import Fence

_LOG = logging.getLogger(__name__)

_DIGESTED_AT_ONCE = 2**25


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Bytes of weights found in each place, equal to what was planned and placed, and the rates that reading them had.

    `rates`: bytes/s by place; a place without bytes has none.
    """

    nbytes: Mapping[str, int]
    rates: Mapping[str, float] = field(default_factory=dict)


class Homes:
    """The weights of a model in their places.

    `memory` is that of `device`; what lies in host memory and in a file of `directory` gets its room here, where the
    copy engines of an accelerator read it. `staging` are buffers for a record on its way from or to the disk: while
    weights are placed and read back, then the loader's. Raises CapacityError if something does not fit.
    """

    def __init__(
        self,
        spec: ModelSpec,
        rows: Mapping[str, tuple[PlacedRows, ...]],
        memory: HeldMemory,
        directory: Path | None,
        device: torch.device = HOST,
    ) -> None:
        self._spec = spec
        self._rows = rows
        self._tensors = dict(spec.named_tensors())
        self.device = device
        self._memory = memory
        self.layouts = [
            layer_layout(layer, {t.name: rows[f"layers.{layer.index}.{t.name}"] for t in layer.tensors})
            for layer in spec.layers
        ]
        self._host = HeldMemory("host", sum(aligned(lay.record_nbytes["host"]) for lay in self.layouts))
        self._records = [self._host.carve(lay.record_nbytes["host"]) for lay in self.layouts]
        away = [part.nbytes for t in spec.tables for part in rows[t.name] if part.place == "host"]
        self._tables = HeldMemory("host", sum(map(aligned, away)))
        sizes = [lay.record_nbytes["disk"] for lay in self.layouts]
        self.file = WeightFile(directory, sizes) if any(sizes) else None
        size = aligned(max(sizes, default=0), PAGE)
        # While a copy engine takes one, the disk fills the other.
        count = 1 if device.type == "cpu" else 2
        self._buffers = HeldMemory("host", count * size)
        self.staging = [self._buffers.carve(size, PAGE) for _ in range(count)]
        if device.type != "cpu":
            if away:  # first: of the others copies would only be slower
                self._tables.share(device, "tables")
            self._host.register(device)
            self._buffers.register(device)
        # One thread reads a tenth of what the link brings; a processor's rate is that of its loader, which is one.
        self._threads = ThreadPoolExecutor(1 if device.type == "cpu" else NUM_THREADS, "cellar-digest")
        self._digests: dict[tuple[str, int], Future[int]] = {}
        self.resident: dict[tuple[str, int], Tensor] = {}
        self.tables: dict[tuple[str, int], Tensor] = {}
        self._scales: dict[tuple[str, int], torch.dtype] = {}

    def close(self) -> None:
        """Let go of the file, and of registered memory. Nobody copies any more."""
        self._threads.shutdown(cancel_futures=True)
        if self.file is not None:
            self.file.close()
        self._host.close()
        self._buffers.close()
        self._tables.close()
        self.resident.clear()
        self.tables.clear()

    def place(self, make: Make) -> None:
        """Make the tensors one by one and put their rows where they belong; of each no more is kept.

        Raises CapacityError or DeviceError.
        """
        for tensor in self._spec.embedding:
            self._place(tensor.name, tensor, make(tensor), None)
        for layer, layout in zip(self._spec.layers, self.layouts, strict=True):
            for tensor in layer.tensors:
                self._place(f"layers.{layer.index}.{tensor.name}", tensor, make(tensor), layout)
            if self.file is not None and layout.record_nbytes["disk"]:
                self.file.write(layer.index, self.staging[0].numpy())
        for tensor in self._spec.head:
            if tensor.name in self._tensors:  # a tied one is the embedding
                self._place(tensor.name, tensor, make(tensor), None)

    def _place(self, name: str, tensor: TensorSpec, made: Weight, layout: LayerLayout | None) -> None:
        for part in self._rows[name]:
            rows = self._bytes(name, part, made)
            if part.place == "device":
                home = self.resident[name, part.start] = self._memory.carve(len(rows))
            elif layout is None:  # a table
                home = self.tables[name, part.start] = self._tables.carve(len(rows))
            else:
                home = self._record(layout, part, tensor.name)
            if rows.is_cpu and home.is_cpu:
                np.copyto(home.numpy(), rows.numpy())
            else:
                home.copy_(rows)
            # Of what was made on a device, the bytes that came here.
            digest = self._threads.submit(_digest, rows if rows.is_cpu else home)
            self._digests[name, part.start] = digest
            if part.place == "disk" or rows.is_cpu:
                digest.result()  # its room is the next layer's, or of what was made no more is kept

    def _bytes(self, name: str, part: PlacedRows, made: Weight) -> Tensor:
        """Rows of a tensor as they are placed, uint8; plain ones where they are, quantized ones put together."""
        span = range(part.start, part.stop)
        if isinstance(made, Tensor):
            return made[part.start : part.stop].contiguous().view(-1).view(torch.uint8)
        if not part.run.format.is_quantized:
            plain = made.slice(0, span).dense().to(getattr(torch, self._tensors[name].dtype))
            return plain.contiguous().view(-1).view(torch.uint8)
        # A GPU puts codes in its order faster than the host does, a piece at a time; what a CPU multiplies has none.
        where = None if part.kind == "cpu" else self.device
        rows, self._scales[name, part.start] = piece_of(made, span, part.run.format, part.kind, where)
        return rows

    def scales(self, name: str, part: PlacedRows) -> torch.dtype:
        """The type of the scales of quantized rows."""
        return self._scales[name, part.start]

    def part(self, name: str, start: int) -> PlacedRows:
        """The rows of a tensor that begin there."""
        return next(part for part in self._rows[name] if part.start == start)

    def _record(self, layout: LayerLayout, part: PlacedRows, tensor: str) -> Tensor:
        """Where rows that are away stand in the record of their layer; one on disk is being put together."""
        move = next(m for m in layout.moves if (m.tensor, m.start, m.place) == (tensor, part.start, part.place))
        record = self._records[layout.index] if part.place == "host" else self.staging[0]
        return record[move.source : move.source + move.nbytes]

    def source(self, place: str, layer: int, buffer: int = 0, channel: Channel | None = None) -> Tensor:
        """A layer's record in `place`; one on disk is read into a buffer of `staging`. Raises DeviceError."""
        if place == "host":
            return self._records[layer]
        self.begin(layer, self.staging[buffer], channel)()
        return self.staging[buffer]

    def begin(self, layer: int, there: Tensor, channel: Channel | None = None) -> Fence:
        """Queue the reads of a layer's record on disk, which fill `there`: aligned to pages, whole pages long. The
        fence behind them raises DeviceError.
        """
        assert self.file is not None
        return self.file.begin(layer, there.numpy(), channel)

    def read_back(self) -> ReadBack:
        """Read all that was placed from where it lies. Raises IntegrityError if rows, bytes or places are not as
        planned, DeviceError if the disk fails.
        """
        planned = planned_nbytes(self._rows)
        found, seconds = dict.fromkeys(PLACES, 0), dict.fromkeys(PLACES, 0.0)
        begin = time.perf_counter()
        found["device"] = self._compare(self.resident)
        seconds["device"] = time.perf_counter() - begin
        found["host"] = tables = self._compare(self.tables)
        for layout in self.layouts:
            for place in ("host", "disk"):
                if not layout.record_nbytes[place]:
                    continue
                begin = time.perf_counter()
                record = self.source(place, layout.index)
                if place == "disk":  # its rate is the disk's, not that of comparing
                    seconds[place] += time.perf_counter() - begin
                found[place] += self._compare(
                    {
                        (f"layers.{layout.index}.{m.tensor}", m.start): record[m.source : m.source + m.nbytes]
                        for m in layout.moves
                        if m.place == place
                    }
                )
                if place == "host":
                    seconds[place] += time.perf_counter() - begin
        if found != planned:
            raise IntegrityError(f"weights lie in {found} bytes, but the plan says {planned}")
        read = found | {"host": found["host"] - tables}  # its rate is that of what every pass reads
        return ReadBack(found, {place: n / seconds[place] for place, n in read.items() if n and seconds[place] > 0})

    def _compare(self, homes: Mapping[tuple[str, int], Tensor]) -> int:
        """Bytes of pieces that are what was placed, all of them."""
        for (name, start), digest in zip(homes, self._threads.map(_digest, homes.values()), strict=True):
            placed = self._digests.get((name, start))
            if placed is None or digest != placed.result():
                raise IntegrityError(f"row {start} of {name} and those after it are not what was placed there")
        return sum(home.nbytes for home in homes.values())


def _digest(there: Tensor) -> int:
    return xxh3_64_intdigest(there.numpy().data) if there.is_cpu else digest_by_pieces(there, _DIGESTED_AT_ONCE)


def digest_by_pieces(there: Tensor, nbytes: int) -> int:
    """The digest of bytes on any device, so many at a time. Copies from an accelerator go to pinned memory, which is
    taken once: to memory of their own they went at 1.4 GB/s.
    """
    here = torch.empty(min(nbytes, len(there)), dtype=torch.uint8, pin_memory=there.is_cuda)
    found = xxh3_64()
    for part in there.split(nbytes):  # type: ignore[no-untyped-call]
        found.update(here[: len(part)].copy_(part).numpy().data)
    return int(found.intdigest())


def opened_homes(
    spec: ModelSpec,
    rows: Mapping[str, tuple[PlacedRows, ...]],
    memory: HeldMemory,
    directory: Path | None,
    make: Make,
    device: torch.device = HOST,
) -> tuple[Homes, ReadBack]:
    """Homes with the weights in them, read back."""
    ends = [time.perf_counter()]
    homes = Homes(spec, rows, memory, directory, device)
    try:
        ends.append(time.perf_counter())
        homes.place(make)
        ends.append(time.perf_counter())
        read = homes.read_back()
        ends.append(time.perf_counter())
        taken = [after - before for before, after in pairwise(ends)]
        _LOG.info("room for weights was taken in %.1f s, they were placed in %.1f and read back in %.1f.", *taken)
        return homes, read
    except BaseException:
        homes.close()
        raise
