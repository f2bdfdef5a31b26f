"""What a router is told of a scheduler: which prompts are to be computed, and what is kept."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cellar.core.messages import Outlook
from cellar.kv.store import KVStore
from cellar.schedule.steps.request import Phase, RequestState

MAX_LOOKED_UP = 64
"""Waiting prompts of which it is looked up what is cached; of later ones all counts as missing."""


def outlook(states: Iterable[RequestState], store: KVStore) -> Outlook:
    """Of all requests that have not ended."""
    pending: list[tuple[int, int]] = []
    requests = context = looked_up = 0
    for state in states:
        requests += 1
        context += len(state.known)
        if state.row >= 0:
            pending += state.todo
        elif state.reservation is not None:
            pending += state.reservation.compute
        elif state.phase is Phase.WAITING:
            cached = 0
            if looked_up < MAX_LOOKED_UP and not state.forgotten and not state.needs_all:
                looked_up += 1
                cached = store.find(state.chain, state.known).num_tokens
            pending.append((cached, len(state.known)))
    stats, size = store.stats(), store.chunk_size
    return Outlook(
        pending=np.array(pending, np.int32).reshape(-1, 2),
        requests=requests,
        context_tokens=context,
        free_tokens=stats.free * size,
        cached_tokens=stats.cached * size,
        total_tokens=stats.total * size,
        keys=store.keys(),
        rates=store.rates(),
    )
