"""What a slot of a tier may hold, and how that may change.

    free ----------> private           a row writes it; it has no identity yet
     |                  |  ^
     v                  v  |
    loading -------> resident <------> saving
    target of a copy     holds the chunk of its identity      resident, and copied to a slower tier

A failed or forgotten load that a sequence waits for becomes private: a hole. A forgotten chunk that a sequence or a
copy still uses becomes private, too, and its slot is free when the last of them lets go. In a tier that outlives the
process a forgotten chunk is erased first: until the tier has said so its slot is erasing.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class State(IntEnum):
    """Of one slot."""

    FREE = 0
    PRIVATE = 1
    LOADING = 2
    RESIDENT = 3
    SAVING = 4
    ERASING = 5


# As plain numbers, for arrays: a member of an enum costs more to look up than all else that is done for one chunk.
FREE, PRIVATE, LOADING, RESIDENT, SAVING, ERASING = (int(state) for state in State)

LEGAL_CHANGES: frozenset[tuple[State, State]] = frozenset(
    {
        (State.FREE, State.PRIVATE),  # taken by a row
        (State.FREE, State.LOADING),  # taken by a copy
        (State.PRIVATE, State.RESIDENT),  # its tokens are final: it gets its identity
        (State.PRIVATE, State.FREE),  # released without one
        (State.LOADING, State.RESIDENT),  # arrived
        (State.LOADING, State.PRIVATE),  # failed, forgotten, or one row's own
        (State.LOADING, State.FREE),  # failed or forgotten, and nobody waits
        (State.RESIDENT, State.SAVING),  # a copy to a slower tier begins
        (State.SAVING, State.RESIDENT),  # and ends, well or not
        (State.RESIDENT, State.FREE),  # evicted or forgotten
        (State.RESIDENT, State.PRIVATE),  # forgotten by all but its users
        (State.SAVING, State.PRIVATE),
        (State.RESIDENT, State.ERASING),  # forgotten, in a tier that outlives the process
        (State.PRIVATE, State.ERASING),
        (State.LOADING, State.ERASING),
        (State.ERASING, State.FREE),
    }
)

LEGAL: NDArray[np.bool_] = np.zeros((len(State), len(State)), np.bool_)
"""LEGAL[before, after]."""
for _before, _after in LEGAL_CHANGES:
    LEGAL[_before, _after] = True
