"""Steps as CUDA graphs: one per size, captured once, replayed with no Python in between.

    host words -> [one small kernel] -> fixed words -> [graph: layers] -> hidden state of every token
    where loads come in parts:                         wait [graph: layers] wait [graph: layers] ... -> the same
    of decodes alone:                                  [graph: layers, head] -> logits -> [graph: best token] -> tokens

A step of n tokens takes the graph of the next larger size. The tokens it lacks are padding: they read a spare row's
last token, write K and V into a spare slot, and are in no attention work list; nothing looks at their results. What
changes from step to step lies at fixed addresses: `FixedInputs` (rows, positions, slots, given tokens, attention work
lists), the slot table, the last tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cellar.models.model import Hidden
from cellar.ops.attention.plan import Captured
from cellar.ops.sampling import Sampled, sample
from cellar.runtime.captured import recording
from cellar.runtime.steps.fixed_inputs import FixedInputs
from cellar.runtime.steps.forward import Forward, Gate
from cellar.runtime.steps.inputs import StepInputs
from cellar.runtime.steps.ladder import Ladder
from cellar.runtime.steps.layer_graphs import LayerGraphs
from cellar.runtime.steps.rows import DeviceRows

_FIRST_ROWS = 8
# The allocator's large blocks lie in segments of this many bytes.
_SEGMENT = 2**21
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


def first_batch_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Of these, what the first requests need, and the largest one, whose memory the others use."""
    return tuple(size for size in sizes if size <= _FIRST_ROWS or size == sizes[-1])


def first_prompt_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Of these the largest one: a prompt that is launched kernel by kernel takes little longer."""
    return tuple(sizes[-1:])


@dataclass(frozen=True, slots=True)
class _Captured:
    """The graphs of one size, and where they leave their results. Steps with prompts have no logits, and may be in
    pieces.
    """

    layers: LayerGraphs
    hidden: Hidden | None = None
    logits: Tensor | None = None
    best: torch.cuda.CUDAGraph | None = None
    chosen: Sampled | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the results, which stay where they are as long as the graphs."""
        kept = [self.logits] if self.hidden is None else [self.hidden.residual, self.hidden.delta]
        return sum(tensor.nbytes for tensor in kept if tensor is not None)


@dataclass(frozen=True, slots=True)
class Missing:
    """How many sizes have graphs and how many have none, whose results will take so many bytes, in whole segments of
    the allocator. What they need while they run is found where the largest one has it.
    """

    there: int
    missing: int
    results: int

    @classmethod
    def of(cls, *kinds: tuple[Ladder[Any], int]) -> Missing:
        """Of several kinds: each a ladder, and the bytes of its largest size's results, in proportion to the size."""
        there = missing = results = 0
        for ladder, nbytes in kinds:
            there, missing = there + len(ladder.recorded), missing + len(ladder.missing)
            results += sum(-(-nbytes * size // (ladder.sizes[-1] * _SEGMENT)) * _SEGMENT for size in ladder.missing)
        return cls(there, missing, results)

    def nbytes(self, driver: int) -> int:
        """What recording the rest takes, if the driver took `driver` bytes for what is there; rather more than less."""
        return self.results + -(-driver * self.missing // max(1, self.there))


class StepGraphs:
    """Graphs for steps in which up to `most_rows` rows compute one token each, their last one, and all are sampled; and
    for other steps of up to `most_tokens` tokens.

    Those of `first_batch_sizes` and `first_prompt_sizes` are captured at once, or all if `whole`; the others by
    `prepare`, or when steps meet them (see `Ladder`). A step without a graph has its kernels launched one by one, with
    the same padding, so its sums are the same. `parts` [layer]: the parts in which loads bring the layers' chunks, if
    they do: steps with prompts have a graph for each, and can wait before it. `ran`: graphs of the first sizes were
    captured before in this process, so all that they need is loaded.
    """

    def __init__(
        self,
        forward: Forward,
        rows: DeviceRows,
        most_rows: int,
        most_tokens: int,
        device: torch.device,
        *,
        whole: bool = False,
        parts: Sequence[int] = (),
        ran: bool = False,
    ) -> None:
        self._forward = forward
        self._parts = parts
        self._rows = rows
        self._device = device
        self._most_rows = most_rows
        decodes, prompts = batch_sizes(most_rows), prompt_sizes(most_tokens)
        most = max([most_rows, *prompts])
        self._inputs = FixedInputs(forward, rows, most_rows, most, device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._prompts: Ladder[_Captured] = Ladder(prompts)
        self._decodes: Ladder[_Captured] = Ladder(decodes)
        # The largest first, so that the smaller ones find their memory in its pool.
        for size in reversed(prompts if whole else first_prompt_sizes(prompts)):
            if not ran:
                self._pad_prompts(size)
                torch.cuda.synchronize(device)
            self._prompts.put(size, self._record_prompts(size))
        for size in reversed(decodes if whole else first_batch_sizes(decodes)):
            if not ran:
                self._pad_decodes(size)
                torch.cuda.synchronize(device)
            self._decodes.put(size, self._record_decodes(size))

    def serves(self, inputs: StepInputs) -> bool:
        """True for a step of decodes alone."""
        count = inputs.num_tokens
        return count == len(inputs.feed) and 0 < count <= self._most_rows and inputs.all_sampled

    def waits_in_pieces(self, inputs: StepInputs) -> bool:
        """Whether the layers of a step of this size wait in `hidden`, and it is none of decodes alone."""
        size = self._prompts.size(inputs.num_tokens) if inputs.num_tokens else None
        return size is not None and len(LayerGraphs(self._parts)) > 1 and not self.serves(inputs)

    def logits(self, inputs: StepInputs) -> tuple[Tensor, Callable[[], Sampled]]:
        """Start a step of decodes; -> its logits [tokens, vocab], which the next step overwrites, and what chooses the
        best token of each row from them, remembered as its last.
        """
        count = inputs.num_tokens
        size = self._decodes.size(count)
        assert size is not None, "asked by `serves`"
        self._inputs.send(inputs, size, self._inputs.lists(inputs))
        captured = self._decodes.take(size, self._record_decodes)
        if captured is None:
            logits = self._decode(size)
            return logits[:count], lambda: _first(self._best(size, logits), count)
        assert captured.logits is not None
        assert captured.best is not None
        assert captured.chosen is not None
        replay, chosen = captured.best.replay, captured.chosen
        captured.layers.replay()

        def best() -> Sampled:
            replay()
            return _first(chosen, count)

        return captured.logits[:count], best

    def hidden(self, inputs: StepInputs, gate: Gate | None = None) -> Hidden | None:
        """Start any step; -> the hidden state of its tokens, which the next step overwrites. `gate` is called before
        each piece, with its last layer.

        None if it is too large for a graph, or its graph is whole and there is a gate; then nothing was started.
        """
        count = inputs.num_tokens
        size = self._prompts.size(count) if count else None
        if size is None:
            return None
        if gate is not None and len(LayerGraphs(self._parts)) == 1:
            return None
        limits, lists = self._inputs.prompt_limits(size), self._inputs.lists(inputs)
        if not self._inputs.holds(limits, lists):
            return None
        self._inputs.send(inputs, size, lists)
        captured = self._prompts.take(size, self._record_prompts)
        if captured is None:
            h = self._layers(size, limits, given_too=True, gate=gate)
        else:
            captured.layers.replay(gate)
            assert captured.hidden is not None
            h = captured.hidden
        return h.first(count)

    def prepare(self) -> bool:
        """Launch or record one size that is missing, while no step is under way; -> whether there was one."""
        for size in self._decodes.missing[:1]:
            if self._decodes.take(size, self._record_decodes) is None:
                self._pad_decodes(size)
            return True
        for size in self._prompts.missing[:1]:
            if self._prompts.take(size, self._record_prompts) is None:
                self._pad_prompts(size)
            return True
        return False

    def missing(self) -> Missing:
        """What is left to be recorded."""
        largest = [kind.recorded[kind.sizes[-1]].nbytes if kind.sizes else 0 for kind in (self._prompts, self._decodes)]
        return Missing.of((self._prompts, largest[0]), (self._decodes, largest[1]))

    # -- capture --------------------------------------------------------------------------------------------------

    def _layers(self, size: int, limits: Sequence[Captured], *, given_too: bool, gate: Gate | None = None) -> Hidden:
        return self._forward.run(*self._inputs.placed(size, limits, given_too=given_too), gate=gate)

    def _recording(self, graph: torch.cuda.CUDAGraph) -> AbstractContextManager[None]:
        return recording(graph, self._pool, self._stream)

    def _decode(self, size: int) -> Tensor:
        return self._forward.logits(self._layers(size, self._inputs.decode_limits(size), given_too=False))

    def _best(self, size: int, logits: Tensor) -> Sampled:
        feed, how = self._inputs.feed(size), self._rows.plain(size)
        chosen = sample(logits, how)
        self._rows.sampled(feed, chosen.tokens, how)
        return chosen

    def _pad_prompts(self, size: int) -> None:
        self._inputs.clear(size)
        self._layers(size, self._inputs.prompt_limits(size), given_too=True)

    def _pad_decodes(self, size: int) -> None:
        self._inputs.clear(size)
        self._best(size, self._decode(size))

    def _record_prompts(self, size: int) -> _Captured:
        limits, pieces = self._inputs.prompt_limits(size), LayerGraphs(self._parts)
        hidden = pieces.record(lambda gate: self._layers(size, limits, given_too=True, gate=gate), self._recording)
        return _Captured(pieces, hidden)

    def _record_decodes(self, size: int) -> _Captured:
        self._rows.plain(size)  # whose zeros and ones are no part of the recording
        first, second = LayerGraphs(), torch.cuda.CUDAGraph()
        logits = first.record(lambda _: self._decode(size), self._recording)
        with self._recording(second):
            chosen = self._best(size, logits)
        return _Captured(first, logits=logits, best=second, chosen=chosen)


def _first(chosen: Sampled, count: int) -> Sampled:
    """Without the padding."""
    return Sampled(chosen.tokens[:count], chosen.finite[:count])
