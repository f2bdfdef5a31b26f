"""Steps as CUDA graphs: one per size, captured at start, replayed with no Python in between.

    host words -> [one small kernel] -> fixed words -> [graph: layers] -> hidden state of every token
    where loads come in parts:                         wait [graph: layers] wait [graph: layers] ... -> the same
    of decodes alone:                                  [graph: layers, head] -> logits -> [graph: best token] -> tokens

A step of n tokens takes the graph of the next larger size. The tokens it lacks are padding: they read a spare row's
last token, write K and V into a spare slot, and are in no attention work list; nothing looks at their results. What
changes from step to step lies at fixed addresses: the words of `_Stage` (rows, positions, slots, given tokens,
attention work lists), the slot table, the last tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.models.model import Hidden
from cellar.ops.attention import AttentionBuffers, AttentionShape, AttentionWork
from cellar.ops.attention.plan import (
    GRAPH_TILE,
    HEADER,
    HOPPER_TILE,
    ITEM_FIELDS,
    Captured,
    Items,
    default_programs,
    on_hopper,
    work_items,
)
from cellar.ops.sampling import Sampled, sample
from cellar.runtime.captured import recording
from cellar.runtime.steps.forward import Forward, Gate
from cellar.runtime.steps.inputs import StepInputs
from cellar.runtime.steps.layer_graphs import LayerGraphs
from cellar.runtime.steps.rows import DeviceRows
from cellar.runtime.transfer import pull

# Steps whose inputs may be on their way at once; more than any run-ahead in use.
_IN_FLIGHT = 4
_SMALL = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)

# Steps with prompts up to so many tokens are captured: in longer ones the device is slower than the launches.
MOST_PROMPT_TOKENS = 1024


def batch_sizes(most: int) -> tuple[int, ...]:
    """The numbers of decodes that get a graph: close together where padding costs most, then steps of 16, to `most`."""
    sizes = [*_SMALL, *range(80, most + 16, 16)]
    return (*(size for size in sizes if size < most), most)


def prompt_sizes(most: int) -> tuple[int, ...]:
    """The numbers of tokens of steps with prompts that get a graph: at most an eighth of a step is padding."""
    sizes = [*range(16, 128, 16), *range(128, 256, 32), *range(256, 512, 64), *range(512, MOST_PROMPT_TOKENS + 1, 128)]
    return tuple(size for size in sizes if size <= most)


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


@dataclass(frozen=True, slots=True)
class _Captured:
    """The graphs of one size, and where they leave their results. Steps with prompts have no logits, and may be in
    pieces.
    """

    size: int
    limits: Sequence[Captured]
    layers: LayerGraphs
    hidden: Hidden | None = None
    logits: Tensor | None = None
    best: torch.cuda.CUDAGraph | None = None
    chosen: Sampled | None = None


class StepGraphs:
    """Graphs for steps in which up to `most_rows` rows compute one token each, their last one, and all are sampled; and
    for other steps of up to `most_tokens` tokens.

    `parts` [layer]: the parts in which loads bring the layers' chunks, if they do: steps with prompts have a graph for
    each, and can wait before it. `ran`: graphs of the same sizes were captured before in this process, so all kernels
    are loaded.
    """

    def __init__(
        self,
        forward: Forward,
        rows: DeviceRows,
        most_rows: int,
        most_tokens: int,
        device: torch.device,
        *,
        parts: Sequence[int] = (),
        ran: bool = False,
    ) -> None:
        self._forward = forward
        self._parts = parts
        self._rows = rows
        self._device = device
        self._programs = default_programs(device)
        self._most_rows = most_rows
        self._spare_place = forward.arena.num_slots * forward.arena.chunk_size
        decodes, prompts = batch_sizes(most_rows), prompt_sizes(most_tokens)
        most = max([most_rows, *prompts])
        self._buffers = [
            AttentionBuffers.for_limits(shape, most, 2 * most_rows, self._programs, device) for shape in forward.shapes
        ]
        self._stage = _Stage(self._meta_at(most, len(forward.shapes)), device)
        self._ran = ran
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The largest first, so that the smaller ones find their memory in its pool.
        self._prompts = [self._capture_prompts(size) for size in reversed(prompts)][::-1]
        self._decodes = [self._capture_decodes(size) for size in reversed(decodes)][::-1]

    def serves(self, inputs: StepInputs) -> bool:
        """True for a step of decodes alone."""
        count = inputs.num_tokens
        return count == len(inputs.feed) and 0 < count <= self._most_rows and inputs.all_sampled

    def waits_in_pieces(self, inputs: StepInputs) -> bool:
        """Whether `hidden` has pieces for a step of this size, and it is none of decodes alone."""
        if not self._prompts or not 0 < inputs.num_tokens <= self._prompts[-1].size:
            return False
        return len(_of(self._prompts, inputs.num_tokens).layers) > 1 and not self.serves(inputs)

    def logits(self, inputs: StepInputs) -> Tensor:
        """Start a step of decodes; -> its logits [tokens, vocab], which the next step overwrites."""
        captured = _of(self._decodes, inputs.num_tokens)
        assert captured.logits is not None
        self._send(inputs, captured.size, self._lists(inputs))
        captured.layers.replay()
        return captured.logits[: inputs.num_tokens]

    def best(self, count: int) -> Sampled:
        """The best token of each of `count` rows after `logits`, remembered as their last."""
        captured = _of(self._decodes, count)
        assert captured.best is not None
        assert captured.chosen is not None
        captured.best.replay()
        return Sampled(captured.chosen.tokens[:count], captured.chosen.finite[:count])

    def hidden(self, inputs: StepInputs, gate: Gate | None = None) -> Hidden | None:
        """Start any step; -> the hidden state of its tokens, which the next step overwrites. `gate` is called before
        each piece, with its last layer.

        None if it is too large for a graph, or its graph is whole and there is a gate; then nothing was started.
        """
        if not self._prompts or not 0 < inputs.num_tokens <= self._prompts[-1].size:
            return None
        captured = _of(self._prompts, inputs.num_tokens)
        if gate is not None and len(captured.layers) == 1:
            return None
        lists = self._lists(inputs)
        room = zip(self._buffers, captured.limits, lists, strict=True)
        if not all(buffers.holds(items) and limit.holds(items) for buffers, limit, items in room):
            return None
        self._send(inputs, captured.size, lists)
        captured.layers.replay(gate)
        h, count = captured.hidden, inputs.num_tokens
        assert h is not None
        return Hidden(h.residual[:count], None if h.delta is None else h.delta[:count])

    # -- the words of a step: feed rows, positions, slots, given tokens (int64 each), then a work list per shape --

    def _meta_at(self, size: int, shape: int) -> int:
        return 8 * size + sum(HEADER + buffers.capacity[0] * ITEM_FIELDS for buffers in self._buffers[:shape])

    def _lists(self, inputs: StepInputs) -> list[Items]:
        offset = np.zeros(len(inputs.start) + 1, np.int32)
        np.cumsum(inputs.stop - inputs.start, out=offset[1:])
        return [
            work_items(
                shape, inputs.row, inputs.start, inputs.stop, offset, self._programs, wide_tile=self._tile(shape)
            )
            for shape in self._forward.shapes
        ]

    def _tile(self, shape: AttentionShape) -> int:
        return HOPPER_TILE if on_hopper(shape, self._device) else GRAPH_TILE

    def _send(self, inputs: StepInputs, size: int, lists: Sequence[Items]) -> None:
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

    # -- capture --------------------------------------------------------------------------------------------------

    def _layers(self, size: int, limits: Sequence[Captured], *, given_too: bool, gate: Gate | None = None) -> Hidden:
        feed, positions, slots, given = self._stage.there[: 8 * size].view(torch.int64).view(4, size)
        works = [
            AttentionWork.for_graph(shape, buffers.placed_at(self._stage.there[self._meta_at(size, k) :]), limit)
            for k, (shape, buffers, limit) in enumerate(zip(self._forward.shapes, self._buffers, limits, strict=True))
        ]
        tokens = self._rows.last.index_select(0, feed)
        if given_too:
            tokens = torch.where(given < 0, tokens, given)
        return self._forward.run(works, tokens, positions, slots, self._rows.table, gate=gate)

    def _clear(self, size: int) -> None:
        """Padding alone, which touches nobody's cache."""
        self._stage.there.zero_()
        feed, _, slots, given = self._stage.there[: 8 * size].view(torch.int64).view(4, size)
        feed.fill_(self._rows.spare)
        slots.fill_(self._spare_place)
        given.fill_(-1)

    def _recording(self, graph: torch.cuda.CUDAGraph) -> AbstractContextManager[None]:
        return recording(graph, self._pool, self._stream)

    def _capture_prompts(self, size: int) -> _Captured:
        self._clear(size)
        shapes, programs = self._forward.shapes, self._programs
        limits = [Captured.prompts(size, self._most_rows, shape, programs, self._tile(shape)) for shape in shapes]
        if not self._ran:
            self._layers(size, limits, given_too=True)
            torch.cuda.synchronize(self._device)
        pieces = LayerGraphs(self._parts)
        hidden = pieces.record(lambda gate: self._layers(size, limits, given_too=True, gate=gate), self._recording)
        return _Captured(size, limits, pieces, hidden)

    def _capture_decodes(self, size: int) -> _Captured:
        self._clear(size)
        shapes, programs = self._forward.shapes, self._programs
        limits = [Captured.decodes(size, shape, programs, self._tile(shape)) for shape in shapes]
        how = self._rows.plain(size)
        feed = self._stage.there[: 2 * size].view(torch.int64)

        def layers() -> Tensor:
            return self._forward.logits(self._layers(size, limits, given_too=False))

        def best(logits: Tensor) -> Sampled:
            chosen = sample(logits, how)
            self._rows.sampled(feed, chosen.tokens, how)
            return chosen

        if not self._ran:
            best(layers())
            torch.cuda.synchronize(self._device)
        first, second = LayerGraphs(), torch.cuda.CUDAGraph()
        logits = first.record(lambda _: layers(), self._recording)
        with self._recording(second):
            chosen = best(logits)
        return _Captured(size, limits, first, logits=logits, best=second, chosen=chosen)


def _of(captured: Sequence[_Captured], count: int) -> _Captured:
    """The smallest that holds `count` tokens."""
    return captured[bisect_left(captured, count, key=lambda c: c.size)]
