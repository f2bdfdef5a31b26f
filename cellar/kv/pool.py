"""SlotPool: the slots of one tier. What each holds, who uses it, and which are free."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.core.messages import Tier
from cellar.kv.states import ERASING, FREE, LEGAL, LOADING, PRIVATE, RESIDENT, SAVING, State

Slots = NDArray[np.int32]
Chunks = NDArray[np.int32]
"""Numbers of chunks in the directory."""


class SlotPool:
    """`num_slots` slots, numbered from 0; each holds one chunk.

    state [slot]       see `states.py`; `move` is the only way to change it
    references [slot]  sequences that use it (of the device's tier alone)
    pins [slot]        copies under way that read or write it
    chunk [slot]       what it holds or is going to hold, -1: nothing with an identity
    """

    def __init__(self, tier: Tier, num_slots: int) -> None:
        self.tier = tier
        self.num_slots = num_slots
        self.state = np.zeros(num_slots, np.int8)
        self.references = np.zeros(num_slots, np.int32)
        self.pins = np.zeros(num_slots, np.int32)
        self.chunk = np.full(num_slots, -1, np.int32)
        self.num_referenced = 0  # slots that sequences use
        self.to_erase: list[int] = []  # ERASING, and nobody has been told
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def move(self, slots: Slots, to: int) -> None:
        """Change the state of slots. Raises IntegrityError for a change that the table does not allow."""
        legal = LEGAL[self.state[slots], to]
        if not legal.all():
            at = int(slots[int(np.argmin(legal))])
            raise IntegrityError(
                f"slot {at} of tier {self.tier.name} cannot go from {State(self.state[at]).name} to {State(to).name}"
            )
        self.state[slots] = to

    def take(self, count: int, state: int) -> Slots:
        """`count` free slots, at most `num_free`."""
        split = len(self._free) - count
        if split < 0:
            raise IntegrityError(f"{count} slots of tier {self.tier.name} were counted as free, but are not")
        taken = self._free[split:]
        taken.reverse()
        del self._free[split:]
        slots = np.array(taken, np.int32)
        self.move(slots, state)
        return slots

    def occupy(self, slots: Slots, chunks: Chunks) -> None:
        """Free slots hold these chunks from before this process. Raises IntegrityError for a slot that is not free."""
        self.move(slots, LOADING)
        self.move(slots, RESIDENT)
        self.chunk[slots] = chunks
        self._free = np.flatnonzero(self.state == FREE)[::-1].tolist()

    def give_back(self, slots: Slots) -> None:
        """Slots that nobody uses and that hold nothing are free again."""
        if not len(slots):
            return
        self.move(slots, FREE)
        self.chunk[slots] = -1
        self._free += slots.tolist()

    def vacate(self, slots: Slots) -> None:
        """Slots whose chunk was forgotten and that nobody uses: free, once a tier that outlives the process has erased
        them.
        """
        if self.tier.persistent and len(slots):
            self.move(slots, ERASING)
            self.chunk[slots] = -1
            self.to_erase += slots.tolist()
        else:
            self.give_back(slots)

    def hold(self, slots: Slots) -> None:
        """One reference more for each of `slots` (distinct)."""
        before = self.references[slots]
        self.num_referenced += int(np.count_nonzero(before == 0))
        self.references[slots] = before + 1

    def drop(self, slots: Slots) -> None:
        """One reference less for each of `slots` (distinct). Raises IntegrityError for one that had none."""
        left = self.references[slots] - 1
        if slots.size and left.min() < 0:
            raise IntegrityError(f"slots {slots[left < 0].tolist()} were released more often than taken")
        self.num_referenced -= int(np.count_nonzero(left == 0))
        self.references[slots] = left

    def unused(self, slots: Slots) -> NDArray[np.bool_]:
        """Which of `slots` no sequence and no copy uses."""
        found: NDArray[np.bool_] = (self.references.take(slots) | self.pins.take(slots)) == 0
        return found

    def check(self, references: NDArray[np.int32] | None, pins: NDArray[np.int32]) -> None:
        """Raise IntegrityError unless users and copies are as given, and free are those that hold nothing."""
        name = self.tier.name
        if self.num_referenced != int(np.count_nonzero(self.references)):
            raise IntegrityError(f"the slots of tier {name} that sequences use are miscounted")
        for what, counted, true in (("references", self.references, references), ("pins", self.pins, pins)):
            if true is not None and not np.array_equal(counted, true):
                wrong = np.flatnonzero(counted != true)
                raise IntegrityError(
                    f"slots {wrong.tolist()} of tier {name} have {counted[wrong].tolist()} {what}, "
                    f"but {true[wrong].tolist()} users"
                )
        free = np.zeros(self.num_slots, np.bool_)
        free[self._free] = True
        if len(self._free) != int(free.sum()):
            raise IntegrityError(f"a slot of tier {name} stands twice in the free list")
        if not np.array_equal(free, self.state == FREE):
            raise IntegrityError(f"free list and states of tier {name} differ")
        used = (self.references > 0) | (self.pins > 0)
        if (free & used).any() or (free & (self.chunk >= 0)).any():
            raise IntegrityError(f"a free slot of tier {name} is used, or holds a chunk")
        named = (self.state == RESIDENT) | (self.state == SAVING)
        if (named & (self.chunk < 0)).any() or ((self.state == PRIVATE) & (self.chunk >= 0)).any():
            raise IntegrityError(f"identities and states of tier {name} differ")
        erasing = self.state == ERASING
        if (erasing & (used | (self.chunk >= 0))).any() or not erasing[self.to_erase].all():
            raise IntegrityError(f"a slot of tier {name} is being erased, but is used")
        if ((self.state == PRIVATE) & ~used).any() or ((self.state == LOADING) & (self.pins == 0)).any():
            raise IntegrityError(f"a slot of tier {name} is kept, but nobody uses it")
