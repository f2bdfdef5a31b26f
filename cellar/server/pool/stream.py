"""A sequence on its way through engines: what it began with, and what it has become so far."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np

from cellar.core.messages import Logprobs, Request, StepOutput

PlaceT = TypeVar("PlaceT")


@dataclass(slots=True, eq=False)
class Stream(Generic[PlaceT]):
    """`place` is where it runs, None while there is nowhere. `tokens` were delivered, as far as the place's history has
    been dealt out; its frames from number `since` on tell of this stream.

    `scored` counts the prompt positions whose log-probability was delivered. `lost` says how many engines have gone
    down with it, `admitted` that it was delivered what the first engine had found of it and how long it waited there,
    and `begun` with which frame its answer began where it is now.
    """

    request: Request
    place: PlaceT | None = None
    tokens: list[int] = field(default_factory=list)
    since: int = 0
    scored: int = 0
    admitted: bool = False
    lost: int = 0
    begun: int | None = None

    def onward(self) -> Request:
        """What is to be asked of the next engine."""
        if not self.tokens:
            return self.request
        return replace(self.request, output=np.array(self.tokens, np.int32))

    def fresh(self, scored: Logprobs) -> Logprobs | None:
        """The log-probabilities of the prompt that were not delivered yet; an engine that starts anew brings all."""
        new = np.flatnonzero(scored.index >= self.scored)
        if not len(new):
            return None
        self.scored = int(scored.index[new[-1]]) + 1
        if len(new) == len(scored.index):
            return scored
        return Logprobs(
            scored.index[new], scored.logprob[new], scored.rank[new], scored.top_ids[new], scored.top_logprobs[new]
        )


def told_once(output: StepOutput, id: str, stream: Stream[PlaceT]) -> None:
    """Take out of an engine's output what of one stream was delivered before it came there."""
    if id in output.num_cached_tokens:
        if stream.admitted:
            del output.num_cached_tokens[id]
            output.queue_seconds.pop(id, None)
        stream.admitted = True
    if (scored := output.prompt_logprobs.get(id)) is not None:
        fresh = stream.fresh(scored)
        if fresh is None:
            del output.prompt_logprobs[id]
        else:
            output.prompt_logprobs[id] = fresh
