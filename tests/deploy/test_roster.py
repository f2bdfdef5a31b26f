"""The roster: who is on duty, for how long, and how soon fronts hear of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellar.deploy import roster as module
from cellar.deploy.roster import Member, Roster, RosterKeeper
from cellar.server.endpoint import Endpoint
from tests.limits import SECONDS


def member(name: str, port: int = 1) -> Member:
    return Member(name, Endpoint("127.0.0.1", port, b"k" * 16))


def test_an_entry_lasts_for_a_lease() -> None:
    roster = Roster(10.0)
    roster.write_in(member("a"), 0.0)
    roster.write_in(member("b"), 4.0)
    assert roster.expire(9.9) == 10.0
    assert [one.name for one in roster.members] == ["a", "b"]
    roster.write_in(member("a"), 9.9)
    assert roster.expire(14.0) == pytest.approx(19.9)
    assert [one.name for one in roster.members] == ["a"]
    assert roster.expire(20.0) is None
    assert not roster.members


def test_the_version_changes_with_the_members_only() -> None:
    roster = Roster(10.0, version=5)
    roster.write_in(member("a"), 0.0)
    assert roster.version == 6
    roster.write_in(member("a"), 1.0)
    roster.strike("unknown")
    assert roster.version == 6
    roster.write_in(member("a", port=2), 2.0)
    roster.strike("a")
    assert roster.version == 8


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["in", "strike", "wait"]))))
def test_members_are_those_of_a_plain_list(steps: list[tuple[str, str]]) -> None:
    roster, until, now = Roster(3.0), dict[str, float](), 0.0
    for name, step in steps:
        before, version = {one.name for one in roster.members}, roster.version
        if step == "in":
            roster.write_in(member(name), now)
            until[name] = now + 3.0
        elif step == "strike":
            roster.strike(name)
            until.pop(name, None)
        else:
            now += 1.0
            roster.expire(now)
            until = {name: end for name, end in until.items() if end > now}
        after = {one.name for one in roster.members}
        assert after == until.keys()
        assert (roster.version == version) == (before == after)


def test_fronts_hear_at_once_and_a_lost_engine_is_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEASE_SECONDS", SECONDS)

    async def run() -> None:
        keeper = RosterKeeper()
        known, found = await keeper.members(-1)  # another roster's version: told at once
        assert not found
        waiting = [asyncio.create_task(keeper.members(known)) for _ in range(3)]
        await asyncio.sleep(0)
        await keeper.write_in(member("a"))
        answers = await asyncio.wait_for(asyncio.gather(*waiting), SECONDS)
        assert all([one.name for one in members] == ["a"] for _, members in answers)
        known = answers[0][0]
        keeper._roster.lease = 0.05
        await keeper.write_in(member("a"))
        known, found = await asyncio.wait_for(keeper.members(known), SECONDS)
        assert not found  # its lease has passed while somebody waited
        await keeper.write_in(member("b"))
        known, _ = await keeper.members(known)
        await keeper.write_in(replace(member("b"), draining=True))
        assert [one.draining for one in (await keeper.members(known))[1]] == [True]

    asyncio.run(run())


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NEWS_SECONDS", 0.05)

    async def run() -> None:
        keeper = RosterKeeper()
        known, _ = await keeper.members(-1)
        assert await asyncio.wait_for(keeper.members(known), SECONDS) == (known, ())

    asyncio.run(run())


def test_two_rosters_are_told_apart() -> None:
    """A front that knows a lost roster's version hears of the new one at once."""
    assert RosterKeeper()._roster.version != RosterKeeper()._roster.version
