"""Bodies on the wire: JSON, or msgpack where the client says so."""

from __future__ import annotations

import json
from typing import Any

import msgpack
from starlette.requests import Request
from starlette.responses import Response

from cellar.server.errors import ApiError, refused

JSON, MSGPACK = "application/json", "application/msgpack"
_MSGPACK_TYPES = (MSGPACK, "application/x-msgpack", "application/vnd.msgpack")


async def read(request: Request) -> Any:
    """The body as plain data. Raises ApiError (400, 415)."""
    kind = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    body = await request.body()
    if kind in _MSGPACK_TYPES:
        try:
            return msgpack.unpackb(body, raw=False, strict_map_key=True)
        except (ValueError, msgpack.UnpackException) as error:
            raise refused(f"the body is not valid msgpack ({error or type(error).__name__}).") from None
    if kind != JSON:
        raise ApiError(415, f"a body of type {kind[:64]!r} cannot be read; send {JSON} or {MSGPACK}.", "content-type")
    try:
        return json.loads(body, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise refused("the body is not valid JSON (not UTF-8).") from None
    except ValueError as error:
        raise refused(f"the body is not valid JSON ({error}).") from None


def answer(request: Request, content: Any) -> Response:
    """Plain data in the form that the client accepts: what `Accept` names, else that of its body."""
    accepted = request.headers.get("accept", "")
    sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    by_accept = any(kind in accepted for kind in _MSGPACK_TYPES)
    if by_accept or (sent in _MSGPACK_TYPES and JSON not in accepted):
        return Response(msgpack.packb(content), media_type=MSGPACK)
    return Response(json.dumps(content, ensure_ascii=False, separators=(",", ":")), media_type=JSON)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON number")
