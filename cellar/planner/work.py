"""What a step of the engine works on, in four counts, and what that costs: figures small enough for a plan's file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellar.core.loops import loop_chunks
from cellar.core.micro_batches import MicroBatchSizes

Positions = NDArray[np.integer]


FEW_TOKENS = 192
"""Of a product that has a kernel of its own, which reads codes as they lie where a matrix is quantized."""


class StepWork(NamedTuple):
    """Counts of one step, positions averaged over the layers where some have windows.

    `attended` sums over the tokens the positions that each attends to, `resident` over the spans those whose K and V
    are read. `prompts` says that some tokens are a prompt's; so many others are `decodes`, alone in their spans.
    """

    tokens: int
    sampled: int
    attended: float
    resident: float
    prompts: bool = False
    decodes: int = 0


def step_work(start: Positions, stop: Positions, sampled: int, windows: tuple[int | None, ...] = ()) -> StepWork:
    """The counts of spans [start, stop) of positions, prompts among them.

    `windows` are as in `Dimensions`: one for each layer, or none if all layers see everything.
    """
    a, b = start.astype(np.int64), stop.astype(np.int64)
    new = b - a
    tokens, decodes = int(new.sum()), int((new == 1).sum())
    if not windows:
        return StepWork(tokens, sampled, float((new * (a + b + 1)).sum()) / 2, int(b.sum()), True, decodes)
    attended = resident = 0.0
    for window in set(windows):
        share = windows.count(window) / len(windows)
        limit = _ALL if window is None else window
        whole = np.clip(np.minimum(b, limit) - a, 0, None)  # tokens that see all that is before them
        attended += share * float((whole * (2 * a + whole + 1) / 2 + (new - whole) * limit).sum())
        resident += share * float(np.minimum(b, limit + new - 1).sum())
    return StepWork(tokens, sampled, attended, resident, True, decodes)


_ALL = 1 << 40  # a window that no context reaches


def coming(streamed: float, computing: float, idle: float) -> float:
    """Seconds in which comes what takes `streamed` beside a computation: behind it, it comes `idle` times as fast."""
    return streamed if streamed <= computing else computing + (streamed - computing) / idle


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of any step of one model on one machine, as figures that a plan can carry.

    Products take the longest of `token_flops` and `token_bytes` a token and `weights` once (or `gathers`, of weights
    from other devices), and `unhidden` of the shorter; logits likewise of `sampled` a row and `head` once. Attention
    takes the longer of `attended` and `resident` a position. `launches` pass in every step, `talk` and `token_talk` in
    collectives, or others in larger steps (`talk_spans`: of more than how many tokens, and both); a step with prompts
    lasts `eager` at least. `windows` are as in `Dimensions`. Weights that lie elsewhere come in `streamed` seconds,
    while all else goes on, and `idle` times as fast behind it: no step is shorter, but one of up to `few` tokens, whose
    weights a CPU multiplies in part, lasts `few_streamed` at least, and the CPU's `few_rows` with `few_each` for each
    token but the first, and with its attention. With `loop_cut` a step with prompts is cut into chunks of its tokens /
    `loop_cut` (`core/loops.py`): n of them hide (1 - 1/n) of `loop_hidden` a token, and each more takes `loop_chunk` in
    collectives and reads `loop_weights` again. Decodes that are not `captured` last `eager` as well. With `part_most` a
    step is cut into micro-batches of `part_least` to so many tokens (`core/micro_batches.py`): each reads the weights
    and is launched, and collectives take `part_adding` a token, and what products do not hide of `part_copying`.
    `beside`: a processor attends to decodes while an accelerator computes the prompts beside them. These have products
    of their own then: `weights` are read once more, and each of them takes `apart` longer than a token of a prompt, as
    in a step of up to `FEW_TOKENS` without one.
    """

    token_flops: float
    token_bytes: float
    weights: float
    attended: float
    resident: float
    sampled: float
    head: float
    launches: float
    eager: float
    gathers: float = 0.0
    unhidden: float = 0.0
    talk: float = 0.0
    token_talk: float = 0.0
    talk_spans: tuple[tuple[float, float, float], ...] = ()
    windows: tuple[int | None, ...] = ()
    streamed: float = 0.0
    idle: float = 1.0
    few: int = 0
    few_streamed: float = 0.0
    few_rows: float = 0.0
    few_each: float = 0.0
    loop_cut: int = 0
    loop_hidden: float = 0.0
    loop_chunk: float = 0.0
    loop_weights: float = 0.0
    captured: bool = True
    part_least: int = 0
    part_most: int = 0
    part_copying: float = 0.0
    part_adding: float = 0.0
    beside: bool = False
    apart: float = 0.0

    def parts(self, tokens: int) -> int:
        """Into how many micro-batches a step is cut."""
        return MicroBatchSizes(self.part_least, self.part_most).count(tokens) if self.part_most else 1

    def chunks(self, work: StepWork) -> int:
        """Into how many a step is cut."""
        return loop_chunks(work.tokens // self.loop_cut) if self.loop_cut and work.prompts else 1

    def looped(self, work: StepWork) -> tuple[float, float]:
        """Seconds of collectives that a loop hides, and that its chunks add."""
        count = self.chunks(work)
        return self.loop_hidden * work.tokens * (1 - 1 / count), self.loop_chunk * (count - 1)

    def talked(self, tokens: int) -> float:
        """Seconds of collectives of a step of so many tokens that is not cut."""
        fixed, each = self.talk, self.token_talk
        for above, start, more in self.talk_spans:
            if tokens > above:
                fixed, each = start, more
        return fixed + each * tokens

    def seconds(self, work: StepWork) -> float:
        """Seconds of a step."""
        weights, talk, parts = self.weights, self.talked(work.tokens), self.parts(work.tokens)
        if parts > 1:
            weights *= parts
        if self.loop_cut:
            hidden, more = self.looped(work)
            weights += (self.chunks(work) - 1) * self.loop_weights
            talk += more - hidden
        flops, nbytes = self.token_flops * work.tokens, weights + self.token_bytes * work.tokens
        if not work.prompts and work.tokens <= FEW_TOKENS:
            flops += self.apart * work.tokens
        products = max(flops, nbytes, self.gathers) + self.unhidden * min(flops, nbytes)
        attention = max(self.attended * work.attended, self.resident * work.resident)
        if parts > 1:
            talk = self.part_adding * work.tokens + max(0.0, self.part_copying * work.tokens - products - attention)
        head = 0.0
        if work.sampled:
            flops = self.sampled * work.sampled
            head = max(flops, self.head) + self.unhidden * min(flops, self.head)
        if self.beside and work.prompts:
            more = weights + self.apart * work.decodes if 0 < work.decodes < work.tokens else 0.0
            both = max(products + more, attention)
        else:
            both = products + attention
        found = both + head + self.launches + talk
        if work.tokens <= self.few:
            # Rows and attention are the same processor's, one after the other.
            rows = self.few_rows + self.few_each * (work.tokens - 1)
            streamed = max(self.few_streamed, rows + (attention if self.beside else 0.0))
        else:
            streamed = coming(self.streamed, found, self.idle)
        return max(found, streamed, parts * self.eager if work.prompts or not self.captured else 0.0)
