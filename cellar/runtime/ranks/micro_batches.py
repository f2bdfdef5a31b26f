"""Micro-batches of long steps: parts of a step's tokens pass the layers side by side, so that the sums of one are on
their way while products of another run (docs/decisions/0089-micro-batches.md).

    lane 0  products | pieces | sum, norm | rows | products ...
    lane 1             products ...                         | pieces | sum, norm | rows | products ...

Products take all of a GPU, and a kernel that sums takes a share of it; copy engines take none. So a rank's engine
copies pieces of its part of a sum to those who add them, and the rows that it has added and normed to everyone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from cellar.core.micro_batches import LANES, MicroBatchSizes
from cellar.core.specs import ModelSpec
from cellar.models.model import Hidden, NormedSums
from cellar.ops.added import added, added_rms_norm, joined
from cellar.ops.cuda.copies import copy_far
from cellar.ops.cuda.waits import wait_for, write
from cellar.runtime.ranks.part_boxes import PIECES, SUMS, PartBoxes

Noted = Callable[[int, int], None]
"""Told of a collective that begins: the bytes of the sum, and those that this rank gets from others."""


def sizes_of(spec: ModelSpec, ranks: int, least: int | None = None) -> MicroBatchSizes:
    """Of micro-batches of a whole model that so many ranks share; `least`: instead of what its layers ask for."""
    layer = max(sum(prod(tensor.shape) for tensor in layer.tensors) for layer in spec.layers)
    sizes = MicroBatchSizes.of(layer, spec.hidden_size * getattr(torch, spec.dtype).itemsize, ranks)
    return sizes if least is None else replace(sizes, least=least)


class CopiedSums:
    """Implements `Comm` for the layers of one lane's micro-batches, in the lane's stream. Sums are in the order of
    ranks, rounded once, as everywhere.

    A rank adds some rows for all: their pieces come from the others, and the sums go to them. A norm that follows is
    applied in between, and the residual stream is kept by rows: each rank has its own.
    """

    loop = None

    def __init__(self, lane: int, boxes: PartBoxes, device: torch.device, noted: Noted) -> None:
        self._lane = lane
        self._boxes = boxes
        self._device = device
        self._noted = noted
        self._calls = 0
        ranks = boxes.sizes.ranks
        # From the next rank on, so that not all send to one first.
        self._to = [(boxes.rank + k) % ranks for k in range(1, ranks)]
        self._engine = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._ready, self._sent = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def normed_sums(self) -> NormedSums:
        """All sums that a norm follows."""
        return self

    def take(self, like: Tensor, apart: bool = True) -> bool:
        """All of them."""
        return True

    def add_rms_norm(self, part: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Implements `NormedSums`. residual: all rows [t, d], or those that this rank adds; -> (all rows of the norm,
        in the box until the lane's next sum; the new residual of this rank's).
        """
        rows = self._boxes.sizes.rows(self._boxes.rank, len(part))
        if len(residual) == len(part):
            residual = residual[rows.start : rows.stop]
        own, others, normed = self._pieces(part)
        _, total = added_rms_norm(own, others, self._boxes.rank, residual, norm, eps, normed[rows.start : rows.stop])
        return self._everywhere(normed), total

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks."""
        rows = self._boxes.sizes.rows(self._boxes.rank, len(x))
        own, others, sums = self._pieces(x)
        sums[rows.start : rows.stop] = added(joined(own, others, self._boxes.rank))
        return self._everywhere(sums).clone()

    def all_gather(self, x: Tensor) -> Tensor:
        """Raises AssertionError: layers gather nothing, and micro-batches end behind the last one."""
        raise AssertionError("layers gather nothing")

    def whole(self, h: Hidden) -> Hidden:
        """The hidden state behind the last layer, with all rows and nothing left to be added up."""
        if h.part is None:
            return h
        rows = self._boxes.sizes.rows(self._boxes.rank, len(h.part.x))
        residual = h.residual if len(h.residual) < len(h.part.x) else h.residual[rows.start : rows.stop]
        own, others, sums = self._pieces(h.part.x)
        torch.add(residual, added(joined(own, others, self._boxes.rank)), out=sums[rows.start : rows.stop])
        return Hidden(self._everywhere(sums).clone())

    def _pieces(self, part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> (this rank's piece of its rows, the others' [ranks - 1, ...], room for all rows of the sum)."""
        boxes, sizes, lane = self._boxes, self._boxes.sizes, self._lane
        part = part.contiguous()
        row = part[:1].nbytes
        assert row == sizes.row, "rows of the hidden size"
        assert part.nbytes <= sizes.nbytes, "as many tokens as boxes have room for"
        self._calls += 1
        own = sizes.rows(boxes.rank, len(part))
        self._noted(part.nbytes, (sizes.ranks - 1) * len(own) * row + part.nbytes - len(own) * row)
        place = [sizes.piece_of(lane, boxes.rank, to) for to in self._to]
        theirs = [sizes.rows(to, len(part)) for to in self._to]
        sources = [part.data_ptr() + rows.start * row for rows in theirs]
        self._send(PIECES, place, sources, [len(rows) * row for rows in theirs])
        piece = part[own.start : own.stop]
        return piece, boxes.pieces(lane, piece), boxes.sums(lane, part)

    def _everywhere(self, sums: Tensor) -> Tensor:
        """The rows, once this rank's are with all others, and theirs here."""
        boxes, sizes, lane = self._boxes, self._boxes.sizes, self._lane
        own, row = sizes.rows(boxes.rank, len(sums)), sums.nbytes // len(sums)
        place, source = sizes.sums(lane) + own.start * row, sums.data_ptr() + own.start * row
        others = len(self._to)
        self._send(SUMS, [place] * others, [source] * others, [len(own) * row] * others)
        return sums

    def _send(self, phase: int, places: Sequence[int], sources: Sequence[int], nbytes: Sequence[int]) -> None:
        """From `sources` to `places` in the others' boxes. What is launched next finds what they send, and may write
        where the sources lie.
        """
        boxes, sizes = self._boxes, self._boxes.sizes
        stream = torch.cuda.current_stream(self._device)
        engine = self._engine.cuda_stream
        own, number = boxes.addresses[boxes.rank], sizes.number(self._lane, phase, boxes.rank)
        self._ready.record(stream)
        self._engine.wait_event(self._ready)
        for to, place, source, size in zip(self._to, places, sources, nbytes, strict=True):
            if size:
                copy_far(boxes.addresses[to] + place, source, size, engine)
            write(engine, boxes.addresses[to] + number, self._calls)
        self._sent.record(self._engine)
        for rank in self._to:
            wait_for(stream.cuda_stream, own + sizes.number(self._lane, phase, rank), self._calls)
        stream.wait_event(self._sent)


class MicroBatches:
    """Implements `Lanes` on a GPU, among ranks that all cut their steps alike.

    The first lane goes first wherever both could: so its products run while the second one's sums are on their way, and
    the second one's fill what is left. Memory that a lane made is used in its stream, and by the caller's once all have
    ended; each step's lanes wait for all that the caller has begun.
    """

    def __init__(self, sizes: MicroBatchSizes, boxes: PartBoxes, device: torch.device, noted: Noted) -> None:
        assert boxes.sizes.lanes == LANES
        self._sizes = sizes
        self._device = device
        self._comms = [CopiedSums(lane, boxes, device, noted) for lane in range(LANES)]
        self._streams = [torch.cuda.Stream(device, priority=lane - 1) for lane in range(LANES)]  # type: ignore[no-untyped-call]
        self._attended = [torch.cuda.Event() for _ in range(LANES)]  # type: ignore[no-untyped-call]

    def sizes(self, tokens: int) -> list[int]:
        """See `Lanes`."""
        return [tokens] if torch.cuda.is_current_stream_capturing() else self._sizes.cut(tokens)

    def comm(self, k: int) -> CopiedSums:
        """See `Lanes`."""
        return self._comms[k % LANES]

    def whole(self, k: int, h: Hidden) -> Hidden:
        """See `Lanes`."""
        return self.comm(k).whole(h)

    @contextmanager
    def step(self) -> Iterator[None]:
        """See `Lanes`."""
        caller = torch.cuda.current_stream(self._device)
        for stream in self._streams:
            stream.wait_stream(caller)
        try:
            yield
        finally:
            for stream in self._streams:
                caller.wait_stream(stream)

    @contextmanager
    def at(self, k: int) -> Iterator[None]:
        """See `Lanes`."""
        with torch.cuda.stream(self._streams[k % LANES]):
            yield

    def await_turn(self, k: int) -> None:
        """See `Lanes`."""
        if k:
            torch.cuda.current_stream(self._device).wait_event(self._attended[(k - 1) % LANES])

    def end_turn(self, k: int) -> None:
        """See `Lanes`."""
        self._attended[k % LANES].record(torch.cuda.current_stream(self._device))
