"""Who is on duty: engines write themselves in and go on doing so, fronts read whom they may call.

A roster is not asked who lives. Who is written in can be called; that an engine is dead is seen by the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cellar.server.endpoint import Endpoint

LEASE_SECONDS = 10.0
"""An engine that has not written itself in for so long is called no more."""

NEWS_SECONDS = 15.0
"""How long a front waits for news before it asks again."""


@dataclass(frozen=True, slots=True)
class Member:
    """An engine, by a name that no other ever has, and where it listens. One that drains is to be called no more."""

    name: str
    endpoint: Endpoint
    draining: bool = False


class Roster:
    """The engines that have written themselves in within the last `lease` seconds.

    `version` grows whenever the members change; whoever reads it elsewhere is told apart from an earlier roster by
    where it begins. No clock: `now` in seconds is an argument and never falls.
    """

    def __init__(self, lease: float, version: int = 0) -> None:
        self.lease = lease
        self.version = version
        self._members: dict[str, Member] = {}
        self._until: dict[str, float] = {}

    def write_in(self, member: Member, now: float) -> None:
        """A member is on duty for another lease."""
        if self._members.get(member.name) != member:
            self._members[member.name] = member
            self.version += 1
        self._until[member.name] = now + self.lease

    def strike(self, name: str) -> None:
        """A member goes; unknown names are ignored."""
        if self._members.pop(name, None) is not None:
            del self._until[name]
            self.version += 1

    def expire(self, now: float) -> float | None:
        """Strike those whose lease has passed; -> when the next one may pass, None if nobody is on duty."""
        for name in [name for name, until in self._until.items() if until <= now]:
            self.strike(name)
        return min(self._until.values(), default=None)

    @property
    def members(self) -> Sequence[Member]:
        """Who is on duty, in the order of writing in."""
        return tuple(self._members.values())


class RosterKeeper:
    """The deployment `Roster`: one replica that keeps a `Roster`, for engines and fronts to call."""

    def __init__(self) -> None:
        self._roster = Roster(LEASE_SECONDS, time.time_ns())
        self._news = asyncio.Condition()

    async def write_in(self, member: Member) -> None:
        """An engine is on duty for another lease."""
        before = self._roster.version
        self._roster.write_in(member, time.monotonic())
        await self._tell(before)

    async def members(self, known: int) -> tuple[int, Sequence[Member]]:
        """Version and members, as soon as the version is another one than `known`, or after `NEWS_SECONDS`."""
        end = time.monotonic() + NEWS_SECONDS
        async with self._news:
            while True:
                now = time.monotonic()
                expires = self._roster.expire(now)
                if self._roster.version != known or now >= end:
                    return self._roster.version, self._roster.members
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(end, end if expires is None else expires) - now):
                        await self._news.wait()

    async def _tell(self, before: int) -> None:
        if self._roster.version != before:
            async with self._news:
                self._news.notify_all()
