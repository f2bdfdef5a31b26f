"""Whose a chunk is, and when they were last active: what a policy needs to know of the users.

A conversation is active when a turn of it is admitted and when it ends. An *audience* is the set of conversations that
share a chunk; most have one member. Beyond `MAX_MEMBERS` it becomes a *crowd*, which counts as so many conversations
that are all as active as the last of them: a system prompt that everybody shares costs O(1) and stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.kv.costs import Floats
from cellar.kv.identity import name_identity
from cellar.kv.turns import NextTurns

MAX_MEMBERS = 8

PINNED = 1e12
"""How much more a pinned conversation is worth. It is a factor, so that values order the pinned, too."""

MIN_IDLE_SECONDS = 1.0
"""Idle times below this are all alike: who wrote a moment ago is not worth a thousand of those before."""

PRESENT_SECONDS = 3600.0
"""A tenant that was active within this time has a share of its own."""


class Conversations:
    """Conversations and audiences, by number. Numbers are used again when nobody runs, and no chunk is left.

    `next_turns` is told when a turn ends with nothing else under way, and when the next begins. A tenant is whom
    conversations belong to, by name: an API key's.
    """

    def __init__(self, next_turns: NextTurns | None = None) -> None:
        self._next_turns = next_turns
        self._running: list[int] = []  # requests under way
        self._turns = np.zeros(64, np.int32)
        self._active = np.full(64, -np.inf)
        self._serial = np.zeros(64, np.int64)
        self._pinned = np.full(64, -np.inf)  # until when
        self._last_pin = -np.inf  # when the last of all pins ends
        self._tenant = np.full(64, -1, np.int64)
        self._tenants: dict[str, int] = {}
        self._seen: list[float] = []  # by tenant: when it was active last
        self._users: list[int] = []  # requests under way, and audiences
        self._name: list[bytes] = []  # of those that have one
        self._by_name: dict[bytes, int] = {}
        self._free: list[int] = []
        self._serials = 0
        self._members = np.full((64, MAX_MEMBERS), -1, np.int32)
        self._scale = np.ones(64)
        self._num_chunks: list[int] = []
        self._key: list[tuple[int, ...]] = []
        self._by_key: dict[tuple[int, ...], int] = {}
        self._crowd: dict[int, int] = {}  # full audience -> that of its crowd
        self._free_audiences: list[int] = []
        self._width = 1

    # -- conversations ----------------------------------------------------------------------------

    def join(self, name: bytes, inherited: int, now: float, tenant: str = "") -> int:
        """A request begins: it belongs to the conversation of that name (empty: none), else `inherited`, else (-1) to a
        new one. Names are owner identities; see `identity.py`. A new one is `tenant`'s (empty: nobody's), and nobody
        inherits another tenant's.
        """
        whose = self._present(tenant, now) if tenant else -1
        number = self._by_name.get(name, -1) if name else inherited
        if number < 0 or (number == inherited and 0 <= self._tenant[number] != whose):
            number = self._new(name)
        if self._tenant[number] < 0:
            self._tenant[number] = whose
        if self._next_turns is not None and not self._running[number]:
            self._next_turns.began(number, now)
        self._turns[number] += 1
        self._running[number] += 1
        self._users[number] += 1
        self.touch(number, now)
        return number

    def _present(self, tenant: str, now: float) -> int:
        """The tenant's number; it is active."""
        number = self._tenants.setdefault(tenant, len(self._tenants))
        if number == len(self._seen):
            self._seen.append(now)
        self._seen[number] = now
        return number

    def leave(self, number: int, now: float) -> None:
        """A request of the conversation has ended."""
        self.touch(number, now)
        self._running[number] -= 1
        if self._next_turns is not None and not self._running[number]:
            self._next_turns.ended(number, int(self._turns[number]), now)
        self._let_go(number)

    def restored(self, name: bytes, now: float) -> int:
        """A conversation of an earlier process, which was active last at `now`; one call more recent than the other."""
        number = self._by_name.get(name, -1) if name else -1
        if number < 0:
            number = self._new(name)
        self.touch(number, now)
        return number

    def owner(self, audience: int) -> bytes:
        """The name of the conversation of an audience that was active last; empty if it has none."""
        number = self.latest(audience)
        return self._name[number] if number >= 0 else b""

    def touch(self, number: int, now: float) -> None:
        """The conversation is active."""
        self._active[number] = now
        self._serials += 1
        self._serial[number] = self._serials

    def _new(self, name: bytes) -> int:
        if self._free:
            number = self._free.pop()
        else:
            number = len(self._users)
            self._users.append(0)
            self._running.append(0)
            self._name.append(b"")
            if number == len(self._active):
                self._active = np.concatenate((self._active, np.full(number, -np.inf)))
                self._serial = np.concatenate((self._serial, np.zeros(number, np.int64)))
                self._turns = np.concatenate((self._turns, np.zeros(number, np.int32)))
                self._pinned = np.concatenate((self._pinned, np.full(number, -np.inf)))
                self._tenant = np.concatenate((self._tenant, np.full(number, -1)))
        self._name[number] = name
        if name:
            self._by_name[name] = number
        return number

    def _let_go(self, number: int) -> None:
        self._users[number] -= 1
        if self._users[number] == 0:
            name = self._name[number]
            if name:
                del self._by_name[name]
                self._name[number] = b""
            if self._next_turns is not None:
                self._next_turns.forgotten(number)
            self._active[number] = -np.inf
            self._turns[number] = 0
            self._pinned[number] = -np.inf
            self._tenant[number] = -1
            self._free.append(number)

    def named(self, name: str) -> list[int]:
        """Conversations that their clients call so, each with a salt of its own."""
        ending = name_identity(name)
        return [number for known, number in self._by_name.items() if known.endswith(ending)]

    def pin(self, number: int, until: float) -> None:
        """What the conversation has goes after all that is not pinned, until then."""
        self._pinned[number] = until
        self._last_pin = max(self._last_pin, until)

    # -- audiences --------------------------------------------------------------------------------

    def audience(self, number: int) -> int:
        """The audience of one conversation alone."""
        return self._audience((number,))

    def shared(self, numbers: Sequence[int], now: float) -> int:
        """A new audience of several conversations, or that of one; more than MAX_MEMBERS are a crowd, active `now`."""
        if len(numbers) <= MAX_MEMBERS:
            return self._audience(tuple(sorted(numbers)))
        crowd = self._new(b"")
        self.touch(crowd, now)
        audience = self._audience((crowd,))
        self._scale[audience] = MAX_MEMBERS
        return audience

    def widened(self, audience: int, number: int, now: float) -> int:
        """The audience that `number` belongs to as well; the same one if it does already."""
        key = self._key[audience]
        if number in key:
            return audience
        if self._scale[audience] > 1:
            if self._tenant[number] != self._tenant[key[0]]:
                self._tenant[key[0]] = -1
            self.touch(key[0], now)
            return audience
        if len(key) < MAX_MEMBERS:
            return self._audience(tuple(sorted((*key, number))))
        if audience not in self._crowd:
            crowd = self._new(b"")
            self._crowd[audience] = self._audience((crowd,))
            self._scale[self._crowd[audience]] = MAX_MEMBERS
            self._tenant[crowd] = self.tenants(np.array([audience]))[0]
        if self._tenant[number] != self._tenant[self._key[self._crowd[audience]][0]]:
            self._tenant[self._key[self._crowd[audience]][0]] = -1
        self.touch(self._key[self._crowd[audience]][0], now)
        return self._crowd[audience]

    def shared_by(self, number: int) -> list[int]:
        """Audiences that the conversation belongs to; crowds are not among them, for they do not know their members."""
        return [audience for key, audience in self._by_key.items() if number in key]

    def narrowed(self, audience: int, number: int) -> int:
        """The audience without `number`; -1 if nobody is left."""
        key = tuple(member for member in self._key[audience] if member != number)
        return self._audience(key) if key else -1

    def latest(self, audience: int) -> int:
        """Its conversation that was active last; -1 for a crowd, which is none."""
        if self._scale[audience] > 1:
            return -1
        return max(self._key[audience], key=lambda number: int(self._serial[number]))

    def count(self, audience: int, more: int) -> None:
        """So many chunks more (or fewer) have this audience; without any it is gone."""
        self._num_chunks[audience] += more
        if self._num_chunks[audience] == 0:
            key = self._key[audience]
            del self._by_key[key]
            self._members[audience] = -1
            self._scale[audience] = 1.0
            self._crowd = {full: crowd for full, crowd in self._crowd.items() if audience not in (full, crowd)}
            self._free_audiences.append(audience)
            for number in key:
                self._let_go(number)

    def idle(self, audiences: NDArray[np.intp], now: float) -> Floats:
        """Seconds since each member was active, at least MIN_IDLE_SECONDS, inf where there is none: [n, k]."""
        members = self._members[audiences, : self._width]
        active = np.where(members < 0, -np.inf, self._active[members])
        return np.maximum(now - active, MIN_IDLE_SECONDS)

    def turns(self, audiences: NDArray[np.intp]) -> NDArray[np.int32]:
        """Turns that each member has begun, 0 where there is none, and for a crowd: [n, k]."""
        members = self._members[audiences, : self._width]
        found: NDArray[np.int32] = np.where(members < 0, np.int32(0), self._turns[members])
        return found

    def scale(self, audiences: NDArray[np.intp], now: float) -> Floats:
        """How many conversations like the given ones each stands for: 1, or that of a crowd; more for pinned ones."""
        scale = self._scale[audiences]
        if now < self._last_pin:
            members = self._members[audiences, : self._width]
            pinned = ((members >= 0) & (self._pinned[members] > now)).any(1)
            scale = np.where(pinned, scale * PINNED, scale)
        return scale

    def tenants(self, audiences: NDArray[np.intp]) -> NDArray[np.int64]:
        """Whose each is; -1 for nobody's, and what several share: [n]."""
        members = self._members[audiences, : self._width]
        found, first = self._tenant[members], self._tenant[members[:, 0]]
        alone = ((members < 0) | (found == first[:, None])).all(1)
        whose: NDArray[np.int64] = np.where(alone, first, -1)
        return whose

    @property
    def num_tenants(self) -> int:
        """Tenants that were ever here."""
        return len(self._seen)

    def num_present(self, now: float) -> int:
        """Tenants that were active within PRESENT_SECONDS."""
        return sum(now - seen <= PRESENT_SECONDS for seen in self._seen)

    def recency(self, audiences: NDArray[np.intp]) -> NDArray[np.int64]:
        """Grows with the moment at which its last member was active."""
        members = self._members[audiences, : self._width]
        found: NDArray[np.int64] = np.where(members < 0, -1, self._serial[members]).max(1)
        return found

    def _audience(self, key: tuple[int, ...]) -> int:
        audience = self._by_key.get(key, -1)
        if audience >= 0:
            return audience
        if self._free_audiences:
            audience = self._free_audiences.pop()
            self._key[audience] = key
        else:
            audience = len(self._key)
            self._key.append(key)
            self._num_chunks.append(0)
            if audience == len(self._members):
                self._members = np.concatenate((self._members, np.full_like(self._members, -1)))
                self._scale = np.concatenate((self._scale, np.ones(audience)))
        self._by_key[key] = audience
        self._members[audience, : len(key)] = key
        self._width = max(self._width, len(key))
        for number in key:
            self._users[number] += 1
        return audience

    def check(self, audiences: NDArray[np.int32]) -> None:
        """Raise IntegrityError unless the audiences of all chunks are counted."""
        counted = np.bincount(audiences, minlength=len(self._num_chunks))
        if counted.tolist() != self._num_chunks:
            raise IntegrityError("audiences count other chunks than there are")
        if sorted(self._by_key.values()) != np.flatnonzero(counted).tolist():
            raise IntegrityError("an audience without chunks is kept, or one with chunks is gone")
