"""ChunkPool: the slots of one tier. Who references each, which chunk it holds, which may be taken.

A slot is in exactly one of three states:

    free        no reference, no identity       taken first
    cached      no reference, an identity       taken next, least recently used first
    referenced  one reference or more, with or without an identity
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError

Slots = NDArray[np.int32]


class ChunkPool:
    """`num_slots` slots, numbered from 0; each holds one chunk."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._references = np.zeros(num_slots, np.int32)
        self._identity: list[bytes | None] = [None] * num_slots
        self._slot: dict[bytes, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Slots that hold a chunk which nobody references."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Slots that `take` could hand out."""
        return len(self._free) + len(self._cached)

    def find(self, identities: Sequence[bytes]) -> Slots:
        """Slot of each chunk, or -1. Does not count as a use."""
        slot = self._slot
        return np.fromiter((slot.get(i, -1) for i in identities), np.int32, len(identities))

    def num_unreferenced(self, slots: Slots) -> int:
        """How many of `slots` nobody references."""
        return int(np.count_nonzero(self._references[slots] == 0))

    def take(self, count: int) -> Slots | None:
        """`count` slots with one reference each, or None (and no change) if fewer are available.

        Free slots go first, then cached chunks in order of last use, which are lost.
        """
        if count > self.num_available:
            return None
        split = max(0, len(self._free) - count)
        slots = self._free[split:]
        slots.reverse()
        del self._free[split:]
        for _ in range(count - len(slots)):
            slot, _none = self._cached.popitem(last=False)
            self._unname(slot)
            slots.append(slot)
        taken = np.array(slots, np.int32)
        self._references[taken] = 1
        return taken

    def hold(self, slots: Slots) -> None:
        """One reference more for each of `slots` (distinct), which hold chunks."""
        if np.count_nonzero(self._references[slots] == 0):
            for slot in slots.tolist():
                self._cached.pop(slot, None)
        self._references[slots] += 1

    def drop(self, slots: Slots) -> None:
        """One reference less for each of `slots` (distinct).

        Those that nobody references any more become cached, the first of `slots` as the oldest, or free
        if they have no identity. Raises IntegrityError for a slot that was not referenced.
        """
        left = self._references[slots] - 1
        if slots.size and left.min() < 0:
            raise IntegrityError(f"slots {slots[left < 0].tolist()} were released more often than taken")
        self._references[slots] = left
        for slot in slots[left == 0].tolist():
            if self._identity[slot] is None:
                self._free.append(slot)
            else:
                self._cached[slot] = None

    def name(self, slot: int, identity: bytes) -> bool:
        """Give a referenced slot its identity. False if it has one, or another slot holds an equal chunk."""
        if identity in self._slot or self._identity[slot] is not None:
            return False
        self._identity[slot] = identity
        self._slot[identity] = slot
        return True

    def forget(self, slots: Slots) -> None:
        """Take the identity from those of `slots` that are referenced exactly once."""
        for slot in slots[self._references[slots] == 1].tolist():
            if self._identity[slot] is not None:
                self._unname(slot)

    def check(self, references: NDArray[np.int32] | None = None) -> None:
        """Raise IntegrityError unless every slot is in one state and, if given, `references` [num_slots] are true."""
        held = self._references
        if held.size and held.min() < 0:
            raise IntegrityError(f"slots {np.flatnonzero(held < 0).tolist()} have negative references")
        if references is not None and not np.array_equal(held, references):
            wrong = np.flatnonzero(held != references)
            raise IntegrityError(
                f"slots {wrong.tolist()} have {held[wrong].tolist()} references, but {references[wrong].tolist()} users"
            )
        free, cached, used = set(self._free), set(self._cached), set(np.flatnonzero(held).tolist())
        if len(free) != len(self._free):
            raise IntegrityError("a slot stands twice in the free list")
        if free & cached or free & used or cached & used or len(free) + len(cached) + len(used) != self.num_slots:
            raise IntegrityError(
                f"free {len(free)} + cached {len(cached)} + referenced {len(used)} do not part {self.num_slots} slots"
            )
        named = {slot: identity for slot, identity in enumerate(self._identity) if identity is not None}
        if {identity: slot for slot, identity in named.items()} != self._slot or len(named) != len(self._slot):
            raise IntegrityError("identities and slots do not map one to one")
        if free & named.keys() or not cached <= named.keys():
            raise IntegrityError("a free slot has an identity, or a cached one has none")

    def _unname(self, slot: int) -> None:
        identity = self._identity[slot]
        if identity is None:
            raise IntegrityError(f"slot {slot} has no identity to lose")
        del self._slot[identity]
        self._identity[slot] = None
