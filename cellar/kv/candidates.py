"""Candidates: chunks that may leave a tier, and which of them are worth least at a moment.

Values change with time, and with it the order between conversations, so none is stored. Within one audience the order
is that of the context length, whatever the time: each audience has a heap, and a decision compares its heads.

Where there are several tenants, what one has beyond an equal share goes before all else (decision 0054).
"""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.kv.conversations import Conversations
from cellar.kv.directory import Directory
from cellar.kv.policy import Policy
from cellar.kv.pool import Chunks

_NONE = np.iinfo(np.int64).max
_CHUNK = (1 << 32) - 1


class Candidates:
    """A set of chunk numbers. Heaps hold `end << 32 | chunk`, and entries that have left until they reach the top."""

    def __init__(self, capacity: int, directory: Directory, conversations: Conversations, policy: Policy) -> None:
        self._directory = directory
        self._conversations = conversations
        self._policy = policy
        self._member = np.zeros(capacity, np.bool_)
        self._count = 0
        self._heaps: dict[int, list[int]] = {}
        self._sizes = np.zeros(64, np.int64)
        self._heads = np.full(64, _NONE)
        self._doubtful: set[int] = set()  # audiences whose head may have left
        self._costs = np.empty(0)  # by context length

    def __len__(self) -> int:
        return self._count

    def has(self, chunks: Chunks) -> NDArray[np.bool_]:
        """Which of `chunks` are in the set."""
        return self._member[chunks]

    def add(self, chunks: Chunks) -> None:
        """Chunks (distinct) that are not in the set."""
        self._member[chunks] = True
        self._count += len(chunks)
        if not len(chunks):
            return
        audiences = self._directory.audience[chunks]
        keys = ((self._directory.end[chunks].astype(np.int64) << 32) | chunks).tolist()
        first, last = int(audiences[0]), int(audiences.max())
        if last >= len(self._heads):
            more = max(last + 1, 2 * len(self._heads)) - len(self._heads)
            self._heads = np.concatenate((self._heads, np.full(more, _NONE)))
            self._sizes = np.concatenate((self._sizes, np.zeros(more, np.int64)))
        if (audiences == first).all():
            heap = self._heap(first, len(keys))
            heap += keys
            heapify(heap)
            self._heads[first] = heap[0]
            return
        for audience, key in zip(audiences.tolist(), keys, strict=True):
            heap = self._heap(audience, 1)
            heappush(heap, key)
            self._heads[audience] = heap[0]

    def _heap(self, audience: int, more: int) -> list[int]:
        """The heap of an audience that gets so many chunks more; it is rid of what has left when that is the most."""
        size = int(self._sizes[audience])
        self._sizes[audience] = size + more
        if not size:
            return self._heaps.setdefault(audience, [])
        heap = self._heaps[audience]
        if len(heap) > 2 * (size + more) + 16:
            heap[:] = [key for key in set(heap) if self._is_valid(audience, key)]
            heapify(heap)
        return heap

    def discard(self, chunks: Chunks) -> None:
        """Chunks (distinct) that are in the set."""
        self._member[chunks] = False
        self._count -= len(chunks)
        audiences = self._directory.audience[chunks].tolist()
        for audience, count in Counter(audiences).items():
            self._shrink(audience, count)

    def lowest(self, count: int, now: float) -> list[tuple[float, int]]:
        """The `count` chunks that are worth least, least first, with their values; they are in the set no more.

        Those beyond a tenant's share come first, and count as worth nothing. Raises IntegrityError, and changes
        nothing, if there are fewer.
        """
        if count > self._count:
            raise IntegrityError(f"{count} chunks are to leave, but only {self._count} may")
        if not count:
            return []
        self._settle_all()
        found = self._beyond_shares(count, now) if self._conversations.num_tenants > 1 else []
        if found:
            self._settle_all()
        return found + self._lowest(np.flatnonzero(self._heads != _NONE), count - len(found), now)

    def _settle_all(self) -> None:
        for audience in self._doubtful:
            self._settle(audience)
        self._doubtful.clear()

    def _beyond_shares(self, count: int, now: float) -> list[tuple[float, int]]:
        """At most `count` chunks of tenants that have more than an equal share of the set, of the largest first."""
        audiences = np.flatnonzero(self._heads != _NONE)
        tenants = self._conversations.tenants(audiences)
        owned = tenants >= 0
        if not owned.any():
            return []
        held = np.bincount(tenants[owned], self._sizes[audiences[owned]])
        excess = np.ceil(held - self._count / max(1, self._conversations.num_present(now))).astype(np.int64)
        found: list[tuple[float, int]] = []
        for tenant in np.argsort(-excess, kind="stable").tolist():
            wanted = min(int(excess[tenant]), count - len(found))
            if wanted <= 0:
                break
            found += [(0.0, chunk) for _, chunk in self._lowest(audiences[tenants == tenant], wanted, now)]
        return found

    def _lowest(self, audiences: NDArray[np.intp], count: int, now: float) -> list[tuple[float, int]]:
        """`lowest` of some audiences, whose heads are in the set and which have as many."""
        if not count:
            return []
        heads = self._heads[audiences]
        ends = heads >> 32
        talks = self._conversations
        weights = self._policy.weight(talks.idle(audiences, now), talks.turns(audiences)) * talks.scale(audiences, now)
        self._know_costs(int(ends.max()))
        values = self._costs[ends] * weights
        if count < len(values):  # no audience beyond the first `count` can be among the lowest; equal ones all stay
            low = np.flatnonzero(values <= np.partition(values, count - 1)[count - 1])
            values, heads, audiences, weights = values[low], heads[low], audiences[low], weights[low]
        recency = talks.recency(audiences)
        order = np.lexsort((heads, recency, values))[:count]
        columns = (values, recency, heads, audiences, weights)
        merged = list(zip(*(column[order].tolist() for column in columns), strict=True))
        found: list[tuple[float, int]] = []
        while len(found) < count:
            value, recent, key, audience, weight = merged[0]
            found.append((value, key & _CHUNK))
            self._member[key & _CHUNK] = False
            self._count -= 1
            self._shrink(audience, 1)
            following = self._settle(audience)
            if following == _NONE:
                heappop(merged)
            else:
                end = following >> 32
                self._know_costs(end)
                heapreplace(merged, (float(self._costs[end]) * weight, recent, following, audience, weight))
        return found

    def _know_costs(self, end: int) -> None:
        """Costs come from a table that is as long as the longest context so far."""
        if end >= len(self._costs):
            self._costs = self._policy.cost(np.arange(2 * end + 1))

    def check(self, members: NDArray[np.bool_]) -> None:
        """Raise IntegrityError unless exactly these chunks are in the set, and in the heaps."""
        if not np.array_equal(self._member, members) or self._count != int(members.sum()):
            raise IntegrityError("other chunks may leave a tier than those that nobody uses")
        valid = [key & _CHUNK for a, heap in self._heaps.items() for key in set(heap) if self._is_valid(a, key)]
        if sorted(valid) != np.flatnonzero(members).tolist():
            raise IntegrityError("a chunk that may leave is in no heap, or in two")

    def _shrink(self, audience: int, count: int) -> None:
        left = int(self._sizes[audience]) - count
        self._sizes[audience] = left
        if left:
            self._doubtful.add(audience)
        else:
            del self._heaps[audience]
            self._heads[audience] = _NONE

    def _settle(self, audience: int) -> int:
        """Drop what has left from the top of a heap; -> the head."""
        heap = self._heaps.get(audience)
        if heap is None:
            return _NONE
        while not self._is_valid(audience, heap[0]):
            heappop(heap)
        self._heads[audience] = heap[0]
        return heap[0]

    def _is_valid(self, audience: int, key: int) -> bool:
        chunk, directory = key & _CHUNK, self._directory
        return bool(self._member[chunk] and directory.audience[chunk] == audience and directory.end[chunk] == key >> 32)
