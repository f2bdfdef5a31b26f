"""A model's layers while they are streamed: what a pass over them takes, one after another, from the ring."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor

from cellar.core.cpu_rows import most_tokens
from cellar.core.specs import LayerSpec, ModelSpec, TensorSpec
from cellar.models.loader import LoadedWeights
from cellar.ops.linear.dense import DenseWeight
from cellar.ops.linear.in_place import in_place
from cellar.ops.linear.weight import LinearWeight, Weight
from cellar.quant.pieces import weight_of
from cellar.quant.weight import StackedWeight
from cellar.runtime.offload.channels import Channels
from cellar.runtime.offload.cpu_jobs import CpuJobs
from cellar.runtime.offload.held import HeldMemory
from cellar.runtime.offload.homes import Homes
from cellar.runtime.offload.host_rows import Exchange, HostRows, SharedWeight, have_units
from cellar.runtime.offload.layout import PAGE, Copy, LayerLayout, PlacedRows, aligned
from cellar.runtime.offload.mover import Fence, Mover, opened
from cellar.runtime.offload.ring import WeightRing
from cellar.runtime.recorder import Between, at_once
from cellar.runtime.registered import mapped

NUM_SLOTS = 2
"""One layer computes while the next is on its way."""
MEASURED_NBYTES = 2**31


def _every(copy: Copy) -> bool:
    return True


class StreamedLayers:
    """Implements `Layers` (`runtime/steps/forward.py`) over `homes`. The ring is carved from `device`.

    Where moves are over when they return, slots are memory that the disk's reads go to. Where the device is the CPU,
    rows that it multiplies are multiplied as they lie in every pass. Layers that nothing has to be brought of pass no
    ring. `jobs`: of the CPU for an accelerator; `between`: see `Exchange`. Raises CapacityError if the ring does not
    fit.
    """

    def __init__(
        self,
        spec: ModelSpec,
        homes: Homes,
        device: HeldMemory,
        mover: Mover,
        channels: Channels | None = None,
        jobs: CpuJobs | None = None,
        between: Between = at_once,
    ) -> None:
        self._channels = channels = channels or Channels()
        self._spec = spec
        self._homes = homes
        self._mover = mover
        # What each buffer for records of the disk waits for before it is filled again.
        self._staged: list[Fence] = [opened] * len(homes.staging)
        self._turn = 0
        self._is_here = homes.device.type == "cpu"
        streamed = [layout for layout in homes.layouts if slot_nbytes(layout, homes.device)]
        size = aligned(ring_nbytes(homes.layouts, homes.device), PAGE)
        self._slots = [device.carve(size, PAGE) for _ in range(NUM_SLOTS if streamed else 0)]
        exchange = None if jobs is None else Exchange(homes.device, channels.rows, jobs, between)
        weights = LayerWeights(homes, exchange)
        self._weights: dict[tuple[int, int, bool], Mapping[str, Weight]] = {}
        for layer, layout in zip(spec.layers, homes.layouts, strict=True):
            for slot, there in enumerate(self._slots or (torch.empty(0, dtype=torch.uint8),)):
                for by_cpu in {self._is_here, any(area.source is not None for area in layout.areas)}:
                    self._weights[layer.index, slot, by_cpu] = weights.of(layer, layout, there, by_cpu=by_cpu)
        self._by_cpu = self._is_here
        areas = [area for layout in homes.layouts for area in layout.areas if area.source is not None]
        codes = any(area.rows.run.format.is_quantized for area in areas)
        self._most_by_cpu = most_tokens(codes=codes, units=have_units(spec.dtype))
        # Whether what a slot holds leaves rows to the CPU; the loader writes it, before the slot can be taken.
        self._left = [self._is_here] * len(self._slots)
        self._streamed = frozenset(layout.index for layout in streamed)
        self.host_rate = self._measured(streamed) if mover.is_asynchronous else None
        self._ring = WeightRing(sorted(self._streamed), NUM_SLOTS, self._fill) if streamed else None

    def __len__(self) -> int:
        return len(self._spec.layers)

    @property
    def pass_nbytes(self) -> dict[str, int]:
        """Bytes that each pass moves from host and disk; of many tokens, if some passes leave rows to the CPU."""
        layouts = self._homes.layouts
        found = {place: sum(layout.record_nbytes[place] for layout in layouts) for place in ("host", "disk")}
        found["host"] -= self.cpu_nbytes if self._is_here else 0
        return found

    @property
    def cpu_nbytes(self) -> int:
        """Bytes in host memory that the CPU multiplies there in a pass of few tokens; if it is the device, in any."""
        return sum(copy.nbytes for layout in self._homes.layouts for copy in layout.copies if copy.by_cpu)

    @property
    def wait_seconds(self) -> float:
        """How long the computation has waited for weights in all."""
        return self._ring.wait_seconds if self._ring is not None else 0.0

    def begin(self, num_tokens: int) -> None:
        """A pass over so many tokens begins."""
        self._by_cpu = self._is_here or num_tokens <= self._most_by_cpu
        if self._ring is not None:
            self._ring.begin()

    @contextmanager
    def at(self, j: int) -> Iterator[Mapping[str, Weight]]:
        """Layer j's weights, until the block ends. Layers come in ascending order.

        Raises DeviceError if they cannot be read.
        """
        if j not in self._streamed or self._ring is None:
            with self.computing():
                yield self._weights[j, 0, self._is_here]
            return
        slot = self._ring.take(j)
        try:
            if self._left[slot] and not self._by_cpu:
                self._bring_left(slot, j)
            with self.computing():
                yield self._weights[j, slot, self._left[slot]]
        finally:
            self._ring.give(slot, self._mover.computed())

    def computing(self) -> AbstractContextManager[None]:
        """While the head is computed, too."""
        return self._mover.computing(self._channels.device)

    def close(self) -> None:
        """End the loader and let go of the file. Nobody computes any more."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None  # it knows how to fill slots, and so holds all of this
        self._mover.over()()
        self._weights.clear()
        self._slots.clear()
        self._homes.close()

    def _fill(self, slot: int, layer: int) -> Fence:
        """The loader's thread: bring a layer's rows into a slot."""
        layout, begun = self._homes.layouts[layer], self._mover.mark()
        # As in the pass that is under way; the next one will mostly be like it, and either is right.
        left = self._left[slot] = self._is_here or (self._by_cpu and any(copy.by_cpu for copy in layout.copies))
        there, on_disk, arrived = self._slots[slot], layout.record_nbytes["disk"], opened
        if on_disk and not self._mover.is_asynchronous:
            arrived = self._homes.begin(layer, there[: aligned(on_disk, PAGE)], self._channels.disk)
        if layout.record_nbytes["host"]:
            wanted = (lambda copy: not copy.by_cpu) if left else _every
            self._move("host", layout, self._homes.source("host", layer), there, wanted)
        for move in layout.moves:
            if move.place == "device":
                source = self._homes.resident[f"layers.{layer}.{move.tensor}", move.start]
                self._mover.move(source, there[move.target : move.target + move.nbytes])
        if on_disk and self._mover.is_asynchronous:
            # The disk is read while what the host has is on its way.
            self._turn = (self._turn + 1) % len(self._staged)
            self._staged[self._turn]()
            record = self._homes.source("disk", layer, self._turn, self._channels.disk)
            self._move("disk", layout, record, there, _every)
            self._staged[self._turn] = self._mover.over()
        self._mover.count(self._channels.link, begun)
        return self._mover.moved() if arrived is opened else partial(self._arrive, arrived, layout, there)

    def _arrive(self, arrived: Fence, layout: LayerLayout, slot: Tensor) -> None:
        """A record has been read into its slot, all but vectors to where they belong."""
        arrived()
        for copy in layout.copies:
            if copy.place == "disk" and copy.source != copy.target:
                source = slot[copy.source : copy.source + copy.nbytes]
                self._mover.move(source, slot[copy.target : copy.target + copy.nbytes])

    def _move(
        self, place: str, layout: LayerLayout, record: Tensor, slot: Tensor, wanted: Callable[[Copy], bool]
    ) -> None:
        for copy in layout.copies:
            if copy.place == place and wanted(copy):
                source = record[copy.source : copy.source + copy.nbytes]
                self._mover.move(source, slot[copy.target : copy.target + copy.nbytes])

    def _bring_left(self, slot: int, layer: int) -> None:
        """A slot that was filled for a pass of few tokens is taken by one of many: bring the rest, too."""
        record = self._homes.source("host", layer)
        self._move("host", self._homes.layouts[layer], record, self._slots[slot], lambda copy: copy.by_cpu)
        self._mover.moved()()
        self._left[slot] = False

    def _measured(self, layouts: Sequence[LayerLayout]) -> float | None:
        """Bytes/s from host memory to the slots, of a second of copies at most."""
        nbytes, begin = 0, time.perf_counter()
        for layout in layouts:
            if nbytes < MEASURED_NBYTES and layout.record_nbytes["host"]:
                self._move("host", layout, self._homes.source("host", layout.index), self._slots[0], _every)
                nbytes += layout.record_nbytes["host"]
        self._mover.over()()
        return nbytes / (time.perf_counter() - begin) if nbytes else None


def slot_nbytes(layout: LayerLayout, device: torch.device) -> int:
    """Bytes of a layer's slot."""
    return layout.left_nbytes if device.type == "cpu" else layout.slot_nbytes


def ring_nbytes(layouts: list[LayerLayout], device: torch.device) -> int:
    """Bytes of one slot: those of the largest layer."""
    return max((slot_nbytes(layout, device) for layout in layouts), default=0)


class LayerWeights:
    """From bytes in their places to the weights that a model's functions take. Nothing is copied. `exchange`: for rows
    that a CPU multiplies beside an accelerator.
    """

    def __init__(self, homes: Homes, exchange: Exchange | None = None) -> None:
        self._homes = homes
        self._exchange = exchange

    def of(self, layer: LayerSpec, layout: LayerLayout, slot: Tensor, *, by_cpu: bool = False) -> dict[str, Weight]:
        """A layer's weights while `slot` holds its other rows; `by_cpu`: but for those that the CPU multiplies."""
        found: dict[str, Weight] = {}
        for tensor in layer.tensors:
            name = f"layers.{layer.index}.{tensor.name}"
            pieces: list[tuple[PlacedRows, Tensor]] = []
            for area in layout.areas:
                if area.tensor == tensor.name:
                    there, start = slot, area.offset
                    if by_cpu and area.source is not None:
                        there, start = self._homes.source("host", layout.index), area.source
                    pieces.append((area.rows, there[start : start + area.rows.nbytes]))
            if len(tensor.shape) == 1 and pieces:
                found[tensor.name] = _typed(pieces[0][1], tensor)
                continue
            found[tensor.name] = self._joined(name, tensor, [*pieces, *self._resident(name)])
        return found

    def whole(self, name: str, tensor: TensorSpec) -> Weight:
        """A tensor that lies on the device, all of it: a plain one as it is, a quantized one to multiply by; or a table
        in host memory, of which the device's kernels read rows over the link.
        """
        table = self._homes.tables.get((name, 0))
        if table is not None:
            return mapped(_typed(table, tensor), self._homes.device)
        there = self._resident(name)
        if not tensor.formats:
            ((_, rows),) = there
            return _typed(rows, tensor)
        return self._joined(name, tensor, there)

    def _resident(self, name: str) -> list[tuple[PlacedRows, Tensor]]:
        homes = self._homes.resident
        return [(self._homes.part(name, start), home) for (owner, start), home in homes.items() if owner == name]

    def _joined(self, name: str, tensor: TensorSpec, pieces: list[tuple[PlacedRows, Tensor]]) -> Weight:
        """Pieces under one another: a matrix multiplied piece by piece; a vector on the device is one, or put
        together.
        """
        pieces.sort(key=lambda piece: piece[0].start)
        if len(tensor.shape) == 1:
            vectors = [_typed(there, tensor) for _, there in pieces]
            return vectors[0] if len(vectors) == 1 else torch.cat(vectors)
        matrices = [self._matrix(name, tensor, rows, there) for rows, there in pieces]
        if len(matrices) == 1:
            return matrices[0]
        return (SharedWeight if any(isinstance(one, HostRows) for one in matrices) else StackedWeight)(matrices)

    def _matrix(self, name: str, tensor: TensorSpec, rows: PlacedRows, there: Tensor) -> LinearWeight:
        """Rows multiplied where they are."""
        away = there.device.type != self._homes.device.type
        if rows.run.format.is_quantized:
            shape, scales = (rows.stop - rows.start, tensor.shape[1]), self._homes.scales(name, rows)
            weight = weight_of(there, shape, rows.run.format, rows.kind, scales)
        else:
            weight = DenseWeight(_typed(there, tensor)) if away else in_place(_typed(there, tensor))
        if not away:
            return weight
        assert self._exchange is not None, "an accelerator has jobs for its CPU"
        return HostRows(weight, self._exchange)


def loaded_ends(spec: ModelSpec, homes: Homes) -> LoadedWeights:
    """Embedding and head, as they lie; layers come from elsewhere."""
    weights = LayerWeights(homes)
    embedding = {
        tensor.name: _multiplied(weights.whole(tensor.name, tensor), tensor.name == "project_in")
        for tensor in spec.embedding
    }
    head: dict[str, Weight] = {}
    for tensor in spec.head:
        name = "embed" if spec.tied_head and tensor.name == "lm_head" else tensor.name
        head[tensor.name] = _multiplied(weights.whole(name, tensor), len(tensor.shape) == 2)
    return LoadedWeights(embedding, [], head)


def _multiplied(weight: Weight, is_matrix: bool) -> Weight:
    """A plain matrix that is multiplied by as it lies, tables and vectors as they are."""
    return in_place(weight) if is_matrix and isinstance(weight, Tensor) else weight


def _typed(there: Tensor, tensor: TensorSpec) -> Tensor:
    """Bytes as rows of the tensor."""
    return there.view(getattr(torch, tensor.dtype)).view(-1, *tensor.shape[1:])
