"""Sessions: where the last turn of each named conversation went, the least recently used forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_SESSIONS = 65_536


@dataclass(frozen=True, slots=True)
class Session:
    """`life` is that of the replica, which no other has; it had `tokens` of context when the turn ended.

    From its report number `until` on digests say what there is of it.
    """

    life: int
    tokens: int
    until: int


class Sessions:
    """At most `capacity` of them."""

    def __init__(self, capacity: int = MAX_SESSIONS) -> None:
        self._capacity = capacity
        self._known: OrderedDict[bytes, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, name: bytes | None) -> Session | None:
        """The session of that name, if it is remembered."""
        return None if name is None else self._known.get(name)

    def note(self, name: bytes, session: Session) -> None:
        """A turn has ended."""
        self._known[name] = session
        self._known.move_to_end(name)
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)
