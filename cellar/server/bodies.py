"""Large bodies are read beside the event loop, one after another, and not at all if they hold too many values.

A parser in C keeps the interpreter until it is done, wherever it runs. So what one body may cost is bounded by what it
holds: 8 MB of text are 10 ms, 8 MB of empty lists were 1.4 s, nearly all of it Python's collector of cycles, which
looks through everything made so far again and again. It rests meanwhile: what is made of JSON has no cycles. And
numbers, which are what honest large bodies hold, are read by functions of Python's: 1 MB of them took 50 ms in one go,
and takes twice as long now, but other threads have their turns in between.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cellar.core.collector import collector_rests
from cellar.server.errors import ApiError, refused

LARGE = 2**16
"""Bytes of a body from which on it is read beside the loop: less takes about a millisecond."""

_SOME = b"{}"
"""Stands for a body that has been read: the framework asks whether there is one."""

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


def count_values(data: bytes, enough: int) -> int:
    """Values of a JSON text, about: its commas, lists and objects outside of strings. Stops counting after `enough`."""
    if (most := _marks(data, 0, len(data))) <= enough:
        return most
    count, end = 0, 0
    for string in _STRING.finditer(data):
        count += _marks(data, end, string.start())
        end = string.end()
        if count > enough:
            return count
    return count + _marks(data, end, len(data))


def _marks(data: bytes, begin: int, end: int) -> int:
    return sum(data.count(mark, begin, end) for mark in (b",", b"[", b"{"))


def check_values(data: bytes, most: int) -> None:
    """Raise ApiError for a JSON text of too many values."""
    if count_values(data, most) > most:
        raise refused(f"the body has more than {most} values (--max-body-values); send them in several requests.")


class _ReadRequest(Request):
    """A request whose body has been read. Its bytes are not kept: eight of 8 MB took as much memory as what they hold,
    and the system up to 17 ms for each, in which the interpreter waits.
    """

    def __init__(self, request: Request, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._body = _SOME
        self._value = value

    async def json(self) -> Any:
        """What the body holds, valid already."""
        return self._value


def large_bodies(reader: Executor, max_values: int) -> type[APIRoute]:
    """Routes whose large bodies `reader` reads; the framework does it itself with small ones, and what is no JSON."""

    class LargeBodies(APIRoute):
        """A route with a limit of values."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            """The framework's handler, which gets a large body as the endpoint's own type."""
            handle = super().get_route_handler()
            kind = None if self.body_field is None else self.body_field.field_info.annotation
            if not isinstance(kind, type) or not issubclass(kind, BaseModel):
                return handle
            model = kind

            async def handle_large(request: Request) -> Response:
                pieces = list[bytes]()
                try:
                    async for piece in request.stream():
                        pieces.append(piece)
                except ClientDisconnect:
                    raise HTTPException(400, "the client has gone.") from None
                if sum(map(len, pieces)) < LARGE or not _is_json(request):
                    request._body = b"".join(pieces)
                    return await handle(request)
                loop = asyncio.get_running_loop()
                value = await loop.run_in_executor(reader, _read, pieces, model, max_values)
                return await handle(_ReadRequest(request, value))

            return handle_large

    return LargeBodies


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _integer(digits: str) -> int:
    """Not `int` itself: the interpreter can go to another thread where a function begins."""
    return int(digits)


def _fraction(digits: str) -> float:
    """Likewise."""
    return float(digits)


def _read(pieces: list[bytes], model: type[BaseModel], max_values: int) -> BaseModel:
    """What a body holds, whose pieces are not kept. Raises ApiError, RequestValidationError."""
    data = b"".join(pieces)
    pieces.clear()
    check_values(data, max_values)
    with collector_rests():
        try:
            value = json.loads(data, parse_int=_integer, parse_float=_fraction)
        except json.JSONDecodeError as error:
            raise refused(f"the body is not valid JSON ({error.msg}).") from None
        except (ValueError, RecursionError):
            raise ApiError(400, "there was an error parsing the body.") from None
        try:
            return model.model_validate(value)
        except ValidationError as error:
            found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
            raise RequestValidationError(found) from None
