"""RequestState: one request on its way through the scheduler.

    waiting --admit--> [loading] --> running --end-------------> ended
       ^                  |             |                          ^
       +--a load failed---+          suspend                       |
       +--in_flight == 0----------------+ suspending --------------+
       +--resume-- parked <--in_flight == 0-- parking: its mask is late

A request whose chunks are on their way from another tier owns their slots and no row until they have come. A suspending
request is in no later plan, but what its plans in flight bring still counts; of a parking one it does not. Abort and
finish lead to `ended` from anywhere. Memory and row are given back when no plan in flight names the row.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from cellar.core.messages import IntArray, Request
from cellar.kv.identity import Chain
from cellar.kv.store import Reservation


class Phase(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    SUSPENDING = "suspending"
    PARKING = "parking"
    PARKED = "parked"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class RequestState:
    """`key` orders requests: (priority, turn). It stays once a row was given, so the suspended return to their place;
    only who makes room for another's first sequence gets a new one.

    `known` are the prompt and the output so far, as of the last time it was queued: what a row is to be
    opened with. `limit` is the longest that prompt and output may become. `todo` are the ranges of `known`
    not planned yet, ascending. `num_cached` counts the prompt tokens found at the first admission, -1
    before it; `arrived` says when it came, `queue_seconds` how long it waited until then. `num_scored` counts
    the prompt positions whose log-probability was delivered. While it owns memory `conversation` is whom that counts
    for; while it loads, `reservation` is that memory and `awaits` are the batches that have not come. `resumed` says of
    a parking one that it may go on, `late` that it was parked before. What is `forgotten` leaves nothing that others
    could find. Who `stopped` ended by a symbol that the next turn may write in another way. `total` is the sum so far
    of the hidden states that are pooled, float64 [hidden]. It may wait `put_off_until` then, so that what its memory
    holds can be copied out.
    """

    request: Request
    key: tuple[int, int]
    limit: int
    chain: Chain
    known: IntArray
    phase: Phase = Phase.WAITING
    row: int = -1
    todo: deque[tuple[int, int]] = field(default_factory=deque)
    num_cached: int = -1
    arrived: float = 0.0
    queue_seconds: float = 0.0
    num_scored: int = 1
    conversation: int = -1
    reservation: Reservation | None = None
    resumed: bool = False
    late: bool = False
    awaits: set[int] = field(default_factory=set)
    forgotten: bool = False
    stopped: bool = False
    total: NDArray[np.float64] | None = None
    put_off_until: float = math.inf

    @property
    def owner(self) -> str:
        """Who takes turns."""
        return self.request.owner or self.request.id

    @property
    def tenant(self) -> str:
        """Whose owners share turns; "" without tenants."""
        return self.request.tenant

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.request.prompt)

    @property
    def num_output(self) -> int:
        """Output tokens of `known`."""
        return len(self.known) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Known tokens that are to be computed, as far as it is known."""
        spans = self.todo if self.reservation is None else self.reservation.compute
        return sum(stop - start for start, stop in spans) if self.row >= 0 or self.reservation else len(self.known)

    @property
    def scores_prompt(self) -> bool:
        """True if log-probabilities of the prompt are asked for and not all delivered.

        They are complete with the first output token, since both come from the last prompt chunk.
        """
        return self.request.params.prompt_logprobs is not None and self.num_output == 0

    @property
    def pools(self) -> bool:
        """True if its answer is a vector of its prompt: it never makes a token."""
        return self.request.params.pooling is not None

    @property
    def needs_all(self) -> bool:
        """True if something is asked of every position of the prompt, which no cache can give."""
        return self.scores_prompt or self.request.params.pooling == "mean"
