"""What is done before a coroutine has to wait, and events that are sent in one go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cellar.server.stream import EventStream
from cellar.server.waiting import before_waiting


async def _at_once() -> int:
    return 7


def test_what_is_there_needs_nothing_done() -> None:
    done: list[str] = []

    async def act() -> None:
        done.append("acted")

    assert asyncio.run(_awaited(_at_once(), act)) == 7
    assert not done


def test_it_is_done_once_and_before_the_first_of_several_waits() -> None:
    order: list[str] = []

    async def coming() -> str:
        for k in range(3):
            order.append(f"asks {k}")
            await asyncio.sleep(0.001 * k)
        return "there"

    async def act() -> None:
        await asyncio.sleep(0)
        order.append("acted")
        await asyncio.sleep(0.01)  # longer than what is waited for takes

    assert asyncio.run(_awaited(coming(), act)) == "there"
    assert order == ["asks 0", "acted", "asks 1", "asks 2"]


@pytest.mark.parametrize("ends", ["act fails", "cancelled in act", "cancelled later"])
def test_an_end_from_outside_meets_what_waits(ends: str) -> None:
    undone: list[str] = []

    async def coming() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)  # undoing may wait, too
            undone.append("undone")

    async def act() -> None:
        if ends == "act fails":
            raise OSError("the client has gone")
        if ends == "cancelled in act":
            await asyncio.sleep(60)

    async def run() -> None:
        task = asyncio.ensure_future(_awaited(coming(), act))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(OSError if ends == "act fails" else asyncio.CancelledError):
        asyncio.run(run())
    assert undone == ["undone"]


async def _awaited(coming: Any, act: Any) -> Any:
    return await before_waiting(coming, act)


def _sent(*groups: list[bytes] | Exception) -> list[dict[str, Any]]:
    """What a stream sends whose events come in groups, each after a wait."""
    sent: list[dict[str, Any]] = []

    async def events() -> AsyncIterator[bytes]:
        for group in groups:
            if isinstance(group, Exception):
                raise group
            for event in group:
                yield event
            await asyncio.sleep(0.001)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def run() -> None:
        await EventStream(events())({"type": "http", "path": "/v1/completions", "headers": []}, receive, send)  # type: ignore[arg-type]

    asyncio.run(run())
    return sent


def test_events_of_one_moment_are_sent_in_one_go() -> None:
    head, *bodies = _sent([b"a", b"b"], [], [b"c"])
    assert head["type"] == "http.response.start"
    assert [message["body"] for message in bodies] == [b"ab", b"c", b"data: [DONE]\n\n"]
    assert [message["more_body"] for message in bodies] == [True, True, False]


def test_much_of_one_moment_is_sent_in_several_goes() -> None:
    part = bytes(2**15)
    _, *bodies = _sent([part] * 7)
    assert b"".join(message["body"] for message in bodies) == part * 7 + b"data: [DONE]\n\n"
    assert max(len(message["body"]) for message in bodies) <= 2**16 + 2**15


def test_events_before_an_error_are_sent_before_it() -> None:
    """Of the same moment, too: they were there first, so that the status is theirs."""
    head, events, error = _sent([b"a"], RuntimeError("it broke"))
    assert (head["status"], events["body"]) == (200, b"a")
    assert error["body"].startswith(b'data: {"error"')
    assert error["body"].endswith(b"data: [DONE]\n\n")
    (status, _) = _sent(RuntimeError("it broke at once"))
    assert status["status"] == 500
