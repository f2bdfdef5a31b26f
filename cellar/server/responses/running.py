"""Making a response: the engine's news become events, and the last is told once the response is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from cellar.core.messages import RequestOutput
from cellar.server.desk import Session
from cellar.server.errors import ApiError, as_api_error
from cellar.server.responses.answer import Answer, Event

T = TypeVar("T")

Keep = Callable[[Event], Awaitable[None]]
"""Keeps the response before its last event is told."""


async def events_of(
    answer: Answer, session: Session, keep: Keep, deadline: float | None
) -> AsyncGenerator[Event, None]:
    """All that is told of an answer behind its beginning. `deadline` is in seconds from now.

    Raises whatever ends the answer before it is complete: then nothing was kept.
    """
    output: RequestOutput | None = None
    queued = answer.body["status"] == "queued"
    async with session, aclosing(_in_time(session.news(), deadline)) as news:
        async for _, one in news:
            if isinstance(one, RequestOutput):
                output = one
                continue
            if queued:
                queued = False
                for event in answer.started():
                    yield event
            for event in answer.push(one):
                yield event
    reason = None if output is None else output.outputs[0].finish_reason
    if output is None or reason not in ("stop", "length"):
        detail = None if output is None else output.outputs[0].stop_reason
        raise ApiError(500, f"the engine could not complete this request ({detail or reason}).")
    for event in answer.finish(output):
        yield event
    last = answer.last()
    await keep(last)
    yield last


async def _in_time(news: AsyncGenerator[T, None], deadline: float | None) -> AsyncGenerator[T, None]:
    """The same; raises TimeoutError when the time is over. It is counted while waiting alone: who reads may be slow."""
    end = None if deadline is None else asyncio.get_running_loop().time() + deadline
    async with aclosing(news):
        while True:
            try:
                async with asyncio.timeout_at(end):
                    one = await anext(news)
            except StopAsyncIteration:
                return
            yield one


def failed(answer: Answer, error: BaseException, name: str) -> ApiError:
    """The answer ends with an error; -> the same for the client. `name` is for the log."""
    found = as_api_error(error, None, name)
    code = "rate_limit_exceeded" if found.status in (429, 503) else "server_error"
    answer.stop("failed", {"code": code, "message": str(found)})
    return found
