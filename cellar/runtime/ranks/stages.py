"""Stages: what a rank with some of a model's layers hands to the next one, and how sampled tokens come back.

    first stage: embed, layers --hidden rows--> layers ... --hidden rows--> last stage: layers, head, sampling
         ^-------------------------------------- tokens -------------------------------------------'

Everything goes in the order of plans. What is sent is not waited for; tokens are waited for when a step is to be fed
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.models.model import Hidden
from cellar.runtime.ranks.comm import gone

Rows = NDArray[np.int64]

MOST_PENDING = 64
"""Steps whose tokens the first stage may leave unread, as nobody is fed them."""


class Coming(Protocol):
    """A message on its way."""

    def wait(self) -> object:
        """Until it is there: on a GPU the current stream waits, on a CPU the caller. Raises RuntimeError."""


class Way(Protocol):
    """One direction between stages: messages to each of the others arrive in the order in which they are sent."""

    def send(self, x: Tensor, to: int) -> None:
        """Never waits for who takes it. `x` is contiguous, and is not changed any more."""

    def receive(self, x: Tensor, source: int) -> Coming:
        """The next message of that stage, which comes into `x`, of the same shape."""


class Stages:
    """Stage `index` of `count`, of `layers`: its ends of both ways. `count` > 1.

    `exchanged` grows with every message: while it stands still, this step has begun nothing that others wait for.
    Raises DeviceError if another rank has gone.
    """

    def __init__(self, index: int, count: int, layers: range, width: int, dtype: torch.dtype, onward: Way, back: Way):
        self.index = index
        self.count = count
        self.layers = layers
        self.exchanged = 0
        self._width = width
        self._dtype = dtype
        self._onward = onward
        self._back = back
        self._pending: deque[tuple[Rows, Tensor, Coming]] = deque()  # rows and tokens of steps, not read yet

    @property
    def is_first(self) -> bool:
        """It embeds, and is told tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """It samples."""
        return self.index == self.count - 1

    def receive(self, num_tokens: int, device: torch.device) -> Hidden:
        """Hidden rows of a step from the stage before."""
        self.exchanged += 1
        whole = torch.empty((2, num_tokens, self._width), dtype=self._dtype, device=device)
        with gone():
            self._onward.receive(whole, self.index - 1).wait()
        return Hidden(whole[0], whole[1])

    def send(self, h: Hidden) -> None:
        """Hidden rows of a step to the stage after: both parts, since their sum would be rounded once more."""
        self.exchanged += 1
        delta = torch.zeros_like(h.residual) if h.delta is None else h.delta
        assert h.residual.dtype == self._dtype, "stages agree upon what they send"
        self._onward.send(torch.stack((h.residual, delta)), self.index + 1)

    def give(self, tokens: Tensor) -> None:
        """The last stage: what the rows of a step got, int64 [n], in the order of its sampled spans."""
        self.exchanged += 1
        self._back.send(tokens, 0)

    def expect(self, rows: Rows, device: torch.device) -> None:
        """The first stage: a step samples these rows, further on."""
        if len(rows):
            self.exchanged += 1
            tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
            self._pending.append((rows, tokens, self._back.receive(tokens, self.count - 1)))

    def told(self, fed: Rows) -> Iterator[tuple[Rows, Tensor]]:
        """The first stage, before a step that is fed these rows: rows and their tokens of all steps up to the last one
        that samples any of them, as soon as they are there.
        """
        latest = next((k for k in range(len(self._pending), 0, -1) if np.isin(self._pending[k - 1][0], fed).any()), 0)
        for _ in range(max(latest, len(self._pending) - MOST_PENDING)):
            rows, tokens, coming = self._pending.popleft()
            self.exchanged += 1
            with gone():
                coming.wait()
            yield rows, tokens

    def greet(self, device: torch.device) -> None:
        """Meet the neighbours, before anything else: a library opens its connections when they are first used."""
        h = torch.zeros((1, self._width), dtype=self._dtype, device=device)
        if not self.is_first:
            self.receive(1, device)
        if not self.is_last:
            self.send(Hidden(h))
        one: Rows = np.zeros(1, np.int64)
        if self.is_first:
            self.expect(one, device)
            for _, tokens in self.told(one):
                tokens.tolist()  # the last one has been there
        elif self.is_last:
            self.give(torch.zeros(1, dtype=torch.int64, device=device))


class GroupWay:
    """Implements `Way` over a process group of torch.distributed that carries nothing else. At most `ahead` messages
    are kept for who has not taken them: the oldest one is waited for then.
    """

    def __init__(self, group: Any, ahead: int) -> None:
        self._group = group
        self._ahead = ahead
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def send(self, x: Tensor, to: int) -> None:
        """See `Way`."""
        with gone():
            self._sent.append((self._group.send([x], to, 0), x))
            while len(self._sent) > self._ahead:
                self._sent.popleft()[0].wait()

    def receive(self, x: Tensor, source: int) -> Coming:
        """See `Way`."""
        with gone():
            coming: Coming = self._group.recv([x], source, 0)
        return coming
