"""Decode steps as CUDA graphs: one per batch size, captured at start, replayed with no Python in between.

    host arrays -> [one copy] -> fixed buffers -> [graph: layers, head] -> logits -> [graph: best token] -> tokens

A step of n rows takes the graph of the next larger size. The rows it lacks are padding: they read a spare row's token,
write K and V into a spare slot, and are in no attention work list; nothing looks at their results. What changes from
step to step lies at fixed addresses: the integers of `_Inputs`, attention work lists, the slot table, the last tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cellar.ops.attention_plan import NARROW_TILE, AttentionBuffers, AttentionWork, default_programs
from cellar.ops.sampling import Sampled, sample
from cellar.runtime.forward import Forward
from cellar.runtime.rows import Rows
from cellar.runtime.step_inputs import StepInputs

# Steps whose inputs may be on their way at once; more than any run-ahead in use.
_IN_FLIGHT = 4
_SMALL = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)


def batch_sizes(most: int) -> tuple[int, ...]:
    """The sizes that get a graph: close together where padding costs most, then steps of 16, up to `most`."""
    sizes = [*_SMALL, *range(80, most + 16, 16)]
    return (*(size for size in sizes if size < most), most)


class _Inputs:
    """Rows, positions and slots of a step's tokens: int64 [3, most] on the device, with pinned stages on the host."""

    def __init__(self, most: int, device: torch.device) -> None:
        self.device_side = torch.zeros((3, most), dtype=torch.int64, device=device)
        self._stages = [torch.zeros((3, most), dtype=torch.int64, pin_memory=True) for _ in range(_IN_FLIGHT)]
        self._copied: list[Any] = [torch.cuda.Event() for _ in range(_IN_FLIGHT)]  # type: ignore[no-untyped-call]
        self._next = 0

    def fill(self, inputs: StepInputs, size: int, spare_row: int, spare_place: int) -> None:
        """Put a step of at most `size` tokens there, padded to it, in stream order."""
        at = self._next
        self._next = (at + 1) % _IN_FLIGHT
        self._copied[at].synchronize()
        stage = self._stages[at]
        words = stage.numpy()
        count = inputs.num_tokens
        words[0, :count] = inputs.feed_rows
        words[1, :count] = inputs.positions
        words[2, :count] = inputs.slot_mapping
        words[0, count:size] = spare_row
        words[1, count:size] = 0
        words[2, count:size] = spare_place
        self.device_side.copy_(stage, non_blocking=True)
        self._copied[at].record()


@dataclass(frozen=True, slots=True)
class _Captured:
    """The two graphs of one batch size and where they leave their results."""

    layers: torch.cuda.CUDAGraph
    logits: Tensor
    best: torch.cuda.CUDAGraph
    chosen: Sampled


class DecodeGraphs:
    """Graphs for steps in which up to `most` rows compute one token each, their last one, and all are sampled."""

    def __init__(self, forward: Forward, rows: Rows, most: int, device: torch.device) -> None:
        self._forward = forward
        self._rows = rows
        self._device = device
        self._sizes = batch_sizes(most)
        self._spare_place = forward.arena.num_slots * forward.arena.chunk_size
        self._inputs = _Inputs(most, device)
        self._buffers = [
            AttentionBuffers.for_limits(shape, most, most, default_programs(device), device, _IN_FLIGHT)
            for shape in forward.shapes
        ]
        pool = torch.cuda.graph_pool_handle()
        # The largest first, so that the smaller ones find their memory in its pool.
        self._captured = {size: self._capture(size, pool) for size in reversed(self._sizes)}

    @staticmethod
    def possible(forward: Forward) -> bool:
        """False for models whose decodes do not fit the narrow tile (more than 16 heads per KV head)."""
        return all(shape.group <= NARROW_TILE for shape in forward.shapes)

    def serves(self, inputs: StepInputs) -> bool:
        """True for a step of decodes alone."""
        count = inputs.num_tokens
        return count == len(inputs.feed) and 0 < count <= self._sizes[-1] and inputs.all_sampled

    def logits(self, inputs: StepInputs) -> Tensor:
        """Start a step; -> its logits [tokens, vocab], which the next step overwrites."""
        captured = self._of(inputs.num_tokens)
        self._inputs.fill(inputs, captured.logits.shape[0], self._rows.spare, self._spare_place)
        self._forward.plan(inputs, self._buffers)  # on their way to the buffers when this returns
        captured.layers.replay()
        return captured.logits[: inputs.num_tokens]

    def best(self, count: int) -> Sampled:
        """The best token of each of `count` rows after `logits`, remembered as their last."""
        captured = self._of(count)
        captured.best.replay()
        return Sampled(captured.chosen.tokens[:count], captured.chosen.finite[:count])

    def _of(self, count: int) -> _Captured:
        return self._captured[self._sizes[bisect_left(self._sizes, count)]]

    def _capture(self, size: int, pool: Any) -> _Captured:
        """Warm up with padding alone, which touches nobody's cache, then record."""
        feed, positions, slots = self._inputs.device_side[:, :size]
        feed.fill_(self._rows.spare)
        slots.fill_(self._spare_place)
        works = [
            AttentionWork.captured(shape, buffers)
            for shape, buffers in zip(self._forward.shapes, self._buffers, strict=True)
        ]
        for buffers in self._buffers:
            buffers.meta.zero_()
        how = self._rows.plain(size)

        def layers() -> Tensor:
            tokens = self._rows.last.index_select(0, feed)
            h = self._forward.run(works, tokens, positions, slots, self._rows.table)
            return self._forward.logits(h)

        def best(logits: Tensor) -> Sampled:
            chosen = sample(logits, how)
            self._rows.sampled(feed, chosen.tokens, how)
            return chosen

        best(layers())
        torch.cuda.synchronize(self._device)
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first, pool=pool):
            logits = layers()
        with torch.cuda.graph(second, pool=pool):
            chosen = best(logits)
        return _Captured(first, logits, second, chosen)
