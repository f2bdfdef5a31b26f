"""X-Request-Id: the name that a client, or a proxy before it, gives a request; else the request's own id.

Every answer has it, so that a complaint leads to the lines of the log. What may be in it is bounded: it goes into the
log and into the answer's head.
"""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cellar.core.errors import RequestError

HEADER = "x-request-id"

_ALLOWED = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


def new_id(prefix: str, given: str | None, request: Request) -> str:
    """The id of a request: by the body if it gives one, else a new one, which begins with the client's name for it.

    Proxies repeat the header when they try again, so it alone would not be unique. Raises RequestError.
    """
    if given is not None and not _ALLOWED.fullmatch(given):
        raise RequestError("request_id may have letters, digits and . _ : - only, at most 128.", "request_id")
    header = _named(request.scope)
    name = given if given is not None else f"{header}-{uuid.uuid4().hex}" if header else uuid.uuid4().hex
    id = f"{prefix}-{name}"
    take_id(id, request)
    return id


def take_id(id: str, request: Request) -> None:
    """This is the id of a request."""
    request.scope.setdefault("state", {})["request_id"] = id


def name_of(scope: Scope) -> str:
    """What the answer calls the request: the client's name for it, else its id; a new one, if it never got any."""
    state = scope.setdefault("state", {})
    name = _named(scope) or state.get("request_id")
    if name is None:
        name = state["request_id"] = uuid.uuid4().hex
    return str(name)


class RequestIds:
    """Puts the header into every answer. Plain ASGI."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and name the answer as it begins."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (HEADER.encode(), name_of(scope).encode())]
            await send(message)

        await self._app(scope, receive, named)


def _named(scope: Scope) -> str:
    """The client's name for a request; "" if it gives none that may be repeated."""
    given = Headers(scope=scope).get(HEADER, "")
    return given if _ALLOWED.fullmatch(given) else ""
