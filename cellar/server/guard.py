"""What stands before the routes: API keys, the size of bodies, and the count of answers. Plain ASGI, so that a
client that hangs up is seen at once."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
from collections.abc import Callable, Iterable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cellar.server.errors import ApiError, unavailable
from cellar.server.keys import digest_of, set_owner
from cellar.server.page import PREFIX
from cellar.server.stream import ending

OPEN_PATHS = frozenset(
    {"/health", "/ping", "/load", "/metrics", "/version", "/engine/status", "/", "/docs", "/openapi.json"}
)
"""What probes and scrapers ask for, and the page, which asks for the key itself: it tells nothing of anybody's
requests."""


class ApiKeys:
    """Lets through who presents one of the keys, and says who it is: see `owner_of`.

    A key comes as a bearer token, or in x-api-key. Every key is compared, in constant time.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        encoded = [os.fsencode(key) for key in keys]
        self._owners = [(_digest(key), digest_of(key)) for key in encoded]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        path, owner = scope.get("path", ""), self._owner(scope)
        set_owner(scope, owner or "")
        public = path in OPEN_PATHS or path.startswith(PREFIX)
        if public or scope.get("method") == "OPTIONS" or owner is not None:
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "there is no valid API key; send one as Authorization: Bearer KEY, or as x-api-key: KEY.",
            code="invalid_api_key",
        )
        await error.response(path)(scope, receive, send)

    def _owner(self, scope: Scope) -> str | None:
        """Whose key was presented; None if it is nobody's."""
        headers = dict(reversed(scope["headers"]))  # the first of each name counts
        kind, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = [token] if kind.lower() == b"bearer" else []
        found = None
        for key in (*given, headers.get(b"x-api-key", b"")):
            presented = _digest(key.strip())
            for digest, owner in self._owners:
                if hmac.compare_digest(presented, digest):
                    found = found or owner
        return found


class BodyLimit:
    """Refuses bodies of more than `max_bytes` with 413: by their length if they say it, else while they come."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, counting."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            await self._refuse(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                raise HTTPException(413, self._message())  # the framework lets only its own errors through here
            return message

        await self._app(scope, counted, send)

    def _message(self) -> str:
        return f"the body is larger than {self._max_bytes} bytes; send less."

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer at once, and close when the body has come or its time is over: a connection that is closed before may
        take the answer with it, since what comes then is answered with a reset.
        """
        response = ApiError(413, self._message()).response(scope["path"])
        response.headers["connection"] = "close"

        async def then(message: Message) -> None:
            if message["type"] == "http.response.body" and not expects:
                await send({**message, "more_body": True})
                while (await receive()).get("more_body"):
                    pass
                message = {"type": "http.response.body"}
            await send(message)

        expects = any(name == b"expect" for name, _ in scope["headers"])  # who asks first sends no body now
        await response(scope, receive, then)


class AnswerCount:
    """Counts answers by route and status; a defect is a 500, which is answered outside of this."""

    def __init__(self, app: ASGIApp, count: Callable[[str, int], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and see the status go by."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        begun = False

        def count(status: int) -> None:
            self._count(getattr(scope.get("route"), "path", "other"), status)

        async def seen(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                count(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, seen)
        except Exception:
            if not begun:
                count(500)
            raise


class LastWords:
    """Tells clients whose requests outlast the time for a drain that the server ends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; a request that the server itself cancels gets an error, as an answer or as a stream's last event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = streams = complete = False

        async def seen(message: Message) -> None:
            nonlocal begun, streams, complete
            if message["type"] == "http.response.start":
                begun = True
                streams = (b"content-type", b"text/event-stream; charset=utf-8") in message["headers"]
            else:
                complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, seen)
        except asyncio.CancelledError:
            if complete:
                return
            error = unavailable("the server ends, and the time for running requests is over; try again.", retry_after=5)
            if not begun:
                await error.response(scope["path"])(scope, receive, send)
                return
            last = ending(scope["path"], error) if streams else b""
            await send({"type": "http.response.body", "body": last, "more_body": False})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
