"""Looped collective products: a step's tokens in chunks, one of which is sent while the next is multiplied.

Pope et al. (§3.5) loop over the pieces of a ring; here chunks are runs of tokens, so that every row's sum is what it is
without a loop: the same products, the same parts in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from cellar.core.loops import LOOP_TOKENS, chunk_sizes

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Send: TypeAlias = Callable[[], Tensor]
"""A collective, ready to be called."""

Steps: TypeAlias = Generator[Send, Tensor, T]
"""A computation that hands out each of its collectives and takes what comes of it."""


class Ahead(Protocol[T_co]):
    """Work that goes on beside what the caller does."""

    def result(self) -> T_co:
        """What came of it, for the caller to use from here on. Raises what the work raised."""


class Lane(Protocol):
    """A line of work beside the caller's, done in the order in which it is given."""

    def run(self, work: Callable[[], T]) -> Ahead[T]:
        """Begin it once all that the caller has begun before is done."""

    def open(self) -> bool:
        """Whether work may be given now: not while a step is recorded as a graph."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Chunks of `tokens` at least, whose collectives take `lane`. Every rank cuts alike."""

    lane: Lane
    tokens: int = LOOP_TOKENS

    def sizes(self, tokens: int) -> list[int]:
        """Tokens of each chunk of a step with so many."""
        return chunk_sizes(tokens, self.tokens) if self.lane.open() else [tokens]


def looped(loop: Loop | None, steps: Callable[..., Steps[T]], *rows: Tensor | None) -> T:
    """What `steps(*rows)` returns, a tensor [n, ...] or a tuple of them, computed in chunks of the n rows if `loop`
    makes several. The collectives go in one order on all ranks: chunk by chunk, each as soon as it is known.
    """
    count = next(len(x) for x in rows if x is not None)
    sizes = [count] if loop is None else loop.sizes(count)
    if loop is None or len(sizes) == 1:
        return alone(steps(*rows))
    cut = [[None] * len(sizes) if x is None else x.split_with_sizes(sizes) for x in rows]
    found = _interleaved([steps(*part) for part in zip(*cut, strict=True)], loop.lane)
    if isinstance(found[0], Tensor):
        return torch.cat(found)  # type: ignore[return-value, arg-type]
    return type(found[0])(torch.cat(parts) for parts in zip(*found, strict=True))  # type: ignore[call-arg]


def alone(steps: Steps[T]) -> T:
    """The computation with each collective where it stands."""
    try:
        send = next(steps)
        while True:
            send = steps.send(send())
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _interleaved(chunks: Sequence[Steps[T]], lane: Lane) -> list[T]:
    """All to their first collective, then in turn from one to the next."""
    found: dict[int, T] = {}
    waiting: deque[tuple[int, Ahead[Tensor]]] = deque()

    def go_on(k: int, value: Tensor | None) -> None:
        try:
            send = next(chunks[k]) if value is None else chunks[k].send(value)
        except StopIteration as end:
            found[k] = end.value
        else:
            waiting.append((k, lane.run(send)))

    for k in range(len(chunks)):
        go_on(k, None)
    while waiting:
        k, ahead = waiting.popleft()
        go_on(k, ahead.result())
    return [found[k] for k in range(len(chunks))]
