"""A step's inputs at fixed addresses of a device, where graphs find them.

    host words -> [one small kernel] -> feed rows, positions, slots, given tokens (int64 each), a work list per shape

A step of n tokens takes the room of a larger size. The tokens it lacks are padding: they read a spare row's last token,
write K and V into a spare slot, and are in no attention work list; nothing looks at their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.ops.attention import AttentionBuffers, AttentionWork
from cellar.ops.attention.plan import (
    GRAPH_TILE,
    HEADER,
    HOPPER_TILE,
    ITEM_FIELDS,
    AttentionShape,
    Captured,
    Items,
    default_programs,
    narrow_rows,
    on_hopper,
    work_items,
)
from cellar.runtime.steps.forward import Forward
from cellar.runtime.steps.inputs import StepInputs
from cellar.runtime.steps.rows import DeviceRows
from cellar.runtime.transfer import pull

# Steps whose inputs may be on their way at once; more than any run-ahead in use.
_IN_FLIGHT = 4


class _Stage:
    """int32 words at fixed addresses on the device, each step's filled from pinned memory by one kernel."""

    def __init__(self, words: int, device: torch.device) -> None:
        self.there = torch.zeros(words, dtype=torch.int32, device=device)
        self._rings = [torch.zeros(words, dtype=torch.int32, pin_memory=True) for _ in range(_IN_FLIGHT)]
        self._read: list[Any] = [torch.cuda.Event() for _ in range(_IN_FLIGHT)]  # type: ignore[no-untyped-call]
        self._next = 0

    def open(self) -> NDArray[np.int32]:
        """Where to write the next step's words."""
        self._read[self._next].synchronize()
        words: NDArray[np.int32] = self._rings[self._next].numpy()
        return words

    def send(self, count: int) -> None:
        """Bring the first `count` words to the device, in stream order."""
        at = self._next
        self._next = (at + 1) % _IN_FLIGHT
        pull(self._rings[at], self.there, count)
        self._read[at].record()


class Placed(NamedTuple):
    """What `Forward.run` takes of a step, all of it at fixed addresses."""

    works: list[AttentionWork]
    tokens: Tensor
    positions: Tensor
    slot_mapping: Tensor
    table: Tensor


class FixedInputs:
    """Inputs of steps of up to `most_tokens` tokens, in which up to `most_rows` rows take part."""

    def __init__(
        self, forward: Forward, rows: DeviceRows, most_rows: int, most_tokens: int, device: torch.device
    ) -> None:
        self._shapes = forward.shapes
        self._rows = rows
        self._most_rows = most_rows
        self._device = device
        self._programs = default_programs(device)
        self._spare_place = forward.arena.num_slots * forward.arena.chunk_size
        self._buffers = [
            AttentionBuffers.for_limits(shape, most_tokens, 2 * most_rows, self._programs, device)
            for shape in self._shapes
        ]
        self._stage = _Stage(self._meta_at(most_tokens, len(self._shapes)), device)

    def lists(self, inputs: StepInputs) -> list[Items]:
        """The attention work of a step, one list for each shape."""
        offset = np.zeros(len(inputs.start) + 1, np.int32)
        np.cumsum(inputs.stop - inputs.start, out=offset[1:])
        return [
            work_items(
                *(shape, inputs.row, inputs.start, inputs.stop, offset, self._programs),
                wide_tile=self._tile(shape),
                most_narrow=narrow_rows(shape, self._device),
            )
            for shape in self._shapes
        ]

    def prompt_limits(self, size: int) -> list[Captured]:
        """What is attended to at most in any step of so many tokens."""
        return [
            Captured.prompts(size, self._most_rows, shape, self._programs, self._tile(shape)) for shape in self._shapes
        ]

    def decode_limits(self, size: int) -> list[Captured]:
        """The same of so many decodes."""
        return [Captured.decodes(size, shape, self._programs, self._tile(shape)) for shape in self._shapes]

    def holds(self, limits: Sequence[Captured], lists: Sequence[Items]) -> bool:
        """Whether there is room for these lists, and graphs of these limits compute all of them."""
        room = zip(self._buffers, limits, lists, strict=True)
        return all(buffers.holds(items) and limit.holds(items) for buffers, limit, items in room)

    def send(self, inputs: StepInputs, size: int, lists: Sequence[Items]) -> None:
        """Bring a step's inputs to their places, in stream order."""
        words = self._stage.open()
        count = inputs.num_tokens
        feed, positions, slots, given = words[: 8 * size].view(np.int64).reshape(4, size)
        feed[:] = self._rows.spare
        feed[inputs.feed] = inputs.feed_rows
        positions[:count], positions[count:] = inputs.positions, 0
        slots[:count], slots[count:] = inputs.slot_mapping, self._spare_place
        given[:count], given[count:] = inputs.tokens, -1
        given[inputs.feed] = -1
        used = 8 * size
        for k, items in enumerate(lists):
            at = self._meta_at(size, k)
            used = at + items.write(words[at:])
        self._stage.send(used)

    def clear(self, size: int) -> None:
        """Padding alone, which touches nobody's cache."""
        self._stage.there.zero_()
        feed, _, slots, given = self._words(size)
        feed.fill_(self._rows.spare)
        slots.fill_(self._spare_place)
        given.fill_(-1)

    def feed(self, size: int) -> Tensor:
        """The row whose last token each token is: int64 [size]."""
        return self._stage.there[: 2 * size].view(torch.int64)

    def placed(self, size: int, limits: Sequence[Captured], *, given_too: bool) -> Placed:
        """A step of this size. `given_too`: some of its tokens are given, and not last tokens of rows."""
        feed, positions, slots, given = self._words(size)
        works = [
            AttentionWork.for_graph(shape, buffers.placed_at(self._stage.there[self._meta_at(size, k) :]), limit)
            for k, (shape, buffers, limit) in enumerate(zip(self._shapes, self._buffers, limits, strict=True))
        ]
        tokens = self._rows.last.index_select(0, feed)
        if given_too:
            tokens = torch.where(given < 0, tokens, given)
        return Placed(works, tokens, positions, slots, self._rows.table)

    def _words(self, size: int) -> Tensor:
        return self._stage.there[: 8 * size].view(torch.int64).view(4, size)

    def _meta_at(self, size: int, shape: int) -> int:
        return 8 * size + sum(HEADER + buffers.capacity[0] * ITEM_FIELDS for buffers in self._buffers[:shape])

    def _tile(self, shape: AttentionShape) -> int:
        return HOPPER_TILE if on_hopper(shape, self._device) else GRAPH_TILE
