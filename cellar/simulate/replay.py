"""A trace through the KV store alone: which of its prompts' blocks were there, by policy, and at best.

The store is the real one with one tier; a block of the trace is its chunk. Requests come one after another and last no
time, so nothing but what is kept decides. `optimum` knows the future.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import CapacityError
from cellar.core.messages import IntArray
from cellar.kv.policy import Policy
from cellar.kv.store import KVStore

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Replayed:
    """Of `blocks` blocks asked for `hits` were there; computing all takes `cost`, that of the hits `saved`."""

    blocks: int
    hits: int
    cost: float
    saved: float

    @property
    def hit_share(self) -> float:
        """Of the blocks."""
        return self.hits / self.blocks if self.blocks else 0.0

    @property
    def saved_share(self) -> float:
        """Of the cost."""
        return self.saved / self.cost if self.cost else 0.0


def replay(prompts: Sequence[IntArray], moments: Floats, num_blocks: int, policy: Policy, costs: Floats) -> Replayed:
    """Prompts as the ids of their blocks, equal for equal beginnings; costs[k] is that of the block at place k.

    Raises CapacityError if a prompt has more blocks than are kept.
    """
    store = KVStore(num_blocks, 1, policy=policy)
    found = [0, 0, 0.0, 0.0]
    for ids, now in zip(prompts, moments.tolist(), strict=True):
        if not len(ids):
            continue
        chain = store.chain(b"")
        residency = store.find(chain, np.append(ids, np.int32(-1))).first(len(ids))  # the last token is never looked up
        there = residency.tokens > 0
        held = store.reserve(residency, len(ids), now=now)
        if held is None:
            raise CapacityError(f"a prompt of {len(ids)} blocks does not fit {num_blocks}; give more.")
        store.names.commit(held.slots.tolist(), chain, 0, held.conversation)
        store.release(held.slots, held.conversation, now)
        found[0] += len(ids)
        found[1] += int(there.sum())
        found[2] += float(costs[: len(ids)].sum())
        found[3] += float(costs[: len(ids)][there].sum())
    return Replayed(int(found[0]), int(found[1]), found[2], found[3])


def optimum(prompts: Sequence[IntArray], num_blocks: int, costs: Floats) -> Replayed:
    """Most hits that any policy could have: what is asked for last goes first, and may go before it comes (Belady)."""
    sequence = np.concatenate(prompts) if len(prompts) else np.empty(0, np.int32)
    following = np.full(len(sequence), math.inf)
    seen: dict[int, int] = {}
    for at in range(len(sequence) - 1, -1, -1):
        following[at] = seen.get(int(sequence[at]), math.inf)
        seen[int(sequence[at])] = at
    each = np.concatenate([costs[: len(ids)] for ids in prompts]) if len(prompts) else np.empty(0)
    kept: dict[int, float] = {}  # block -> when it is asked for again
    latest: list[tuple[float, int]] = []
    hits, saved = 0, 0.0
    for at, (block, again) in enumerate(zip(sequence.tolist(), following.tolist(), strict=True)):
        if block in kept:
            hits += 1
            saved += float(each[at])
        if again == math.inf:
            kept.pop(block, None)
            continue
        kept[block] = again
        heapq.heappush(latest, (-again, block))
        while len(kept) > num_blocks:
            when, worst = heapq.heappop(latest)
            if kept.get(worst) == -when:
                del kept[worst]
    return Replayed(len(sequence), hits, float(each.sum()), saved)
