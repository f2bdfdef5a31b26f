"""Answers that end when the client goes: server-sent events, and waiting for a whole answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing, suppress
from time import perf_counter
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cellar.server.errors import ApiError, as_api_error, speaks_anthropic
from cellar.server.request_id import name_of
from cellar.server.waiting import before_waiting

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

RESPONSES = "/v1/responses"
"""Where OpenAI's responses are; their streams end with their last event."""

TURN_SECONDS = 0.005
"""How long a stream that has much to say keeps the event loop to itself."""

SENT = 2**16
"""Bytes that are sent in one go."""


GONE = Response(status_code=499)
"""Nobody reads it; it is what the log shows for a client that hung up."""


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def event(body: Any) -> bytes:
    """One server-sent event."""
    said = json.dumps(body, ensure_ascii=False, separators=(",", ":"), default=list)  # iterators become arrays
    return b"data: " + said.encode(errors="replace") + b"\n\n"


def named_event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event that has its type as its name, too: Anthropic's, and those of OpenAI's responses."""
    return f"event: {body['type']}\n".encode() + event(body)


def ending(path: str, error: ApiError | None = None) -> bytes:
    """What a route's stream ends with, after an error or without one."""
    if speaks_anthropic(path):
        return b"" if error is None else named_event(error.said_at(path))
    if path.startswith(RESPONSES):
        said = {} if error is None else error.body["error"]
        return b"" if error is None else named_event({**said, "type": "error"})
    return DONE if error is None else event(error.body) + DONE


async def until_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up. Raises ClientGone then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def unknown_usage(wanted: bool) -> str:
    """What ends each event before the last, if the client `wanted` the usage; the API has it there, too, as null."""
    return ',"usage":null' if wanted else ""


class EventStream(Response):
    """Server-sent events. The head is sent with the first event: what fails before it has a status of its own.

    Events that are there at the same time are sent in one go. An error after the first is an event in the words of the
    route's API. `deadline` is in seconds from now.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        names: Mapping[str, str] | None = None,
        deadline: float | None = None,
    ) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._events = events
        self._names = names
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until they end or the client goes."""
        writing = asyncio.ensure_future(self._write(scope, receive, send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait((writing, gone), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            gone.cancel()
            writing.cancel()
            await asyncio.gather(writing, gone, return_exceptions=True)

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, slept = False, perf_counter()
        parts, size = list[bytes](), 0

        async def flush() -> None:
            nonlocal begun, size
            if parts:
                data = b"".join(parts)
                parts.clear()
                size = 0
                if not begun:
                    begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            async with asyncio.timeout(self._deadline), aclosing(self._events) as events:
                with suppress(StopAsyncIteration):
                    while True:
                        data = await before_waiting(anext(events), flush)
                        parts.append(data)
                        size += len(data)
                        if size > SENT or perf_counter() > slept + TURN_SECONDS:  # others have events, too
                            await flush()
                            await asyncio.sleep(0)
                            slept = perf_counter()
        except Exception as error:
            failure = as_api_error(error, self._names, name_of(scope))
            if not (begun or parts):
                await failure.response(scope["path"])(scope, receive, send)
                return
            last = ending(scope["path"], failure)
        else:
            last = ending(scope["path"])
        await flush()
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
