"""Errors on the wire: OpenAI's error object, and which status each error of ours has."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from cellar.conversations.errors import ConversationLocked, Duplicate, Ended, NotFound, StoreError, TooLarge
from cellar.core.errors import CapacityError, CellarError, IntegrityError, RequestError
from cellar.server.request_id import HEADER, name_of

logger = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


MESSAGES = "/v1/messages"
"""Routes from here on speak as Anthropic's do."""

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer other than success. `retry_after` is in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        parameter: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(_sayable(message))
        self.status = status
        self.parameter = None if parameter is None else _sayable(parameter)
        self.code = code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "server_error"),
                "param": self.parameter,
                "code": self.code,
            }
        }

    def said_at(self, path: str) -> dict[str, Any]:
        """The error in the words of the API that has this route."""
        if not speaks_anthropic(path):
            return self.body
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.body["error"]["message"]}}

    def response(self, path: str = "") -> Response:
        """The error as a whole HTTP answer of a route."""
        headers: dict[str, str] = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.said_at(path), self.status, headers)


def speaks_anthropic(path: str) -> bool:
    """True for routes of Anthropic's API."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def _sayable(text: str) -> str:
    """What can be sent of a text that may quote a client: half a surrogate pair becomes a question mark."""
    return text.encode(errors="replace").decode()


def refused(message: str, parameter: str | None = None, code: str | None = None) -> ApiError:
    """The client must change its request."""
    return ApiError(400, message, parameter, code)


def unavailable(message: str, retry_after: int = 1) -> ApiError:
    """The same request may succeed later."""
    return ApiError(503, message, code="unavailable", retry_after=retry_after)


def over_quota(message: str, retry_after: int = 2) -> ApiError:
    """The client has enough on its way; the same request may succeed later."""
    return ApiError(429, message, code="rate_limit_exceeded", retry_after=retry_after)


def whole_characters(text: str) -> str:
    """The text itself. Raises ApiError for half a surrogate pair: JSON allows it, no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise refused("a text holds half of a surrogate pair, which is not a character; send valid Unicode.") from None
    return text


def as_api_error(error: BaseException, names: Mapping[str, str] | None = None, request: str = "") -> ApiError:
    """Any error as one for the client. `names` maps fields of ours to those of the API; `request` is for the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        parameter = error.parameter
        return refused(str(error), (names or {}).get(parameter, parameter) if parameter else None, error.code)
    if isinstance(error, CapacityError):
        return refused(str(error))
    if isinstance(error, StoreError):
        return _of_store(error)
    if isinstance(error, RecursionError):
        return refused("the request is nested too deeply; flatten it.")
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than this server allows; ask for fewer tokens.", code="timeout")
    if isinstance(error, CellarError) and not isinstance(error, IntegrityError):
        return unavailable(f"the engine is not available ({error}); try again.", retry_after=5)
    logger.error("request %s failed by a defect", request or "of an unknown name", exc_info=error)
    return ApiError(500, "the server failed on this request by a defect of its own; its log says more.")


def _of_store(error: StoreError) -> ApiError:
    match error:
        case NotFound():
            return ApiError(404, str(error))
        case ConversationLocked():
            return refused(str(error), "conversation", "conversation_locked")
        case Duplicate() | Ended() | TooLarge():
            return refused(str(error))
    return unavailable(str(error), retry_after=5)


def install(app: FastAPI) -> None:
    """Have every error of the app answered with OpenAI's error object."""

    async def ours(request: Request, error: Exception) -> Response:
        return as_api_error(error, None, name_of(request.scope)).response(request.url.path)

    async def defect(request: Request, error: Exception) -> Response:
        """The framework answers these outside of all that we put around the routes."""
        response = await ours(request, error)
        response.headers[HEADER] = name_of(request.scope)
        response.headers["connection"] = "close"  # as the server does behind a defect: a next request would be lost
        return response

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _invalid(error).response(request.url.path)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code in (404, 405) and error.detail in ("Not Found", "Method Not Allowed"):
            return _no_route(app, request)
        return ApiError(error.status_code, f"{error.detail}.".replace("..", ".")).response(request.url.path)

    app.add_exception_handler(ApiError, ours)
    app.add_exception_handler(CellarError, ours)
    app.add_exception_handler(TimeoutError, ours)
    app.add_exception_handler(RecursionError, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, defect)


def _no_route(app: FastAPI, request: Request) -> Response:
    """What is there instead of what was asked for."""
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema]
    path, method = request.url.path[:128], request.method[:16]
    allowed = sorted(
        {m for route in routes if route.matches(request.scope)[0] != Match.NONE for m in route.methods or ()}
    )
    if allowed:
        error = ApiError(405, f"{path} does not take {method}; it takes {' and '.join(allowed)}.")
        response = error.response(path)
        response.headers["allow"] = ", ".join(allowed)
        return response
    known = sorted({route.path for route in routes})
    near = difflib.get_close_matches(path, known, 1, 0.75)
    hint = f"did you mean {near[0]}? There" if near else "there"
    return ApiError(404, f"there is no {path} on this server; {hint} are {', '.join(known)}.").response(path)


def _invalid(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body. What the client sent is not repeated: it may be private."""
    errors = error.errors()
    first = errors[0]
    place = [str(part) for part in first["loc"][1:]]
    # A field of several types has an error for each of them.
    reasons = dict.fromkeys(str(one["msg"]) for one in errors if one["loc"][:2] == first["loc"][:2])
    message = " or ".join(reason[0].lower() + reason[1:] for reason in reasons)
    if first["type"] == "json_invalid":
        return refused(f"the body is not valid JSON ({first.get('ctx', {}).get('error', message)}).")
    if not place:
        return refused(f"the body must be a JSON object sent as application/json ({message}).")
    return refused(f"{place[0]} is not as it should be: {message}.", place[0])
