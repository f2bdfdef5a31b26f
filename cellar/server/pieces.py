"""JSON of large answers, made and sent in pieces, so that no other request waits for all of one.

Whoever builds an answer gives iterators for its long arrays: their elements are made when they are written. Arrays of
NumPy stand for lists of whole numbers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cellar.server.stream import GONE, SENT, ClientGone, until_gone

T = TypeVar("T")

PIECE = 1000
"""Values that are written in one go: about a millisecond."""


def dumps(body: Any) -> str:
    """A small body as one piece; iterators become arrays."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_listed)


def _listed(value: Any) -> list[Any]:
    return value.tolist() if isinstance(value, np.ndarray) else list(value)


def pieces(body: Any) -> Iterator[str]:
    """A body as pieces of at most about PIECE values; elements of iterators are made one after another."""
    if isinstance(body, dict):
        yield from _joined("{", ((f"{dumps(str(key))}:", value) for key, value in body.items()), "}")
    elif isinstance(body, np.ndarray):
        for begin in range(0, len(body), PIECE):
            yield "[,"[begin > 0] + dumps(body[begin : begin + PIECE])[1:-1]
        yield "]" if len(body) else "[]"
    elif isinstance(body, (list, tuple, Iterator)):
        yield from _joined("[", (("", value) for value in body), "]")
    else:
        yield dumps(body)


def _joined(opening: str, members: Iterator[tuple[str, Any]], closing: str) -> Iterator[str]:
    """Members with what stands before them; small ones go together."""
    parts, count, separator = [opening], 0, ""
    for name, value in members:
        weight = _weight(value)
        if weight > PIECE:
            yield "".join((*parts, separator, name))
            yield from pieces(value)
            parts, count = [], 0
        else:
            parts += (separator, name, dumps(value))
            count += weight
            if count > PIECE:
                yield "".join(parts)
                parts, count = [], 0
        separator = ","
    yield "".join((*parts, closing))


def _weight(value: Any) -> int:
    """How many values there are in one, counted up to a little more than PIECE."""
    if isinstance(value, str):
        return 1 + len(value) // 64
    if isinstance(value, Iterator):
        return PIECE + 1
    if isinstance(value, np.ndarray):
        return 1 + len(value)
    if not isinstance(value, (dict, list, tuple)):
        return 1
    if len(value) > PIECE:
        return len(value)
    count = 1
    for member in value.values() if isinstance(value, dict) else value:
        count += _weight(member)
        if count > PIECE:
            break
    return count


class PiecedResponse(Response):
    """A JSON body that is made in threads while it is sent; nothing more is made once the client has gone."""

    media_type = "application/json"

    def __init__(self, body: Any) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._pieces = pieces(body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. What cannot be made any more ends the connection: its head is out."""
        with suppress(ClientGone):
            await until_gone(Request(scope, receive), self._write(send))

    async def _write(self, send: Send) -> None:
        data = await asyncio.to_thread(self._next)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while data:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            data = await asyncio.to_thread(self._next)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _next(self) -> bytes:
        parts, size = list[str](), 0
        while size < SENT and (piece := next(self._pieces, None)) is not None:
            parts.append(piece)
            size += len(piece)
        return "".join(parts).encode(errors="replace")


async def answered(request: Request, body: Awaitable[Any], deadline: float | None) -> Response:
    """A whole answer in JSON, unless the client hangs up before it is there. `deadline` is in seconds from now."""

    async def in_time() -> Any:
        async with asyncio.timeout(deadline):
            return await body

    try:
        return respond(await until_gone(request, in_time()))
    except ClientGone:
        return GONE


def respond(body: Any) -> Response:
    """The answer with this body: at once if it is small, else in pieces."""
    if _weight(body) > PIECE:
        return PiecedResponse(body)
    return Response(dumps(body).encode(errors="replace"), media_type="application/json")


def lazily(members: Iterator[T], count: int) -> list[T] | Iterator[T]:
    """An array of `count` values, made now if it is small, else when it is written."""
    return list(members) if count <= PIECE else members
