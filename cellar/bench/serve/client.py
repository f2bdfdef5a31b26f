"""The client of the load test: sends one request, reads its stream, notes when each token came.

aiohttp over uvloop: of the clients that were measured it costs this process the least per event (docs/bench.md).
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from cellar.core.errors import ConfigError
from cellar.reports.load import RequestTiming

# Servers close idle connections after some seconds (uvicorn: 5); one that is closed while we send would be a failure.
KEEPALIVE_SECONDS = 2.0


@dataclass(slots=True)
class Answer:
    """What came of one request. Times are those of the client's clock, in seconds; `usage` is the server's account."""

    sent: float
    times: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    error: str | None = None
    ended: float = 0.0

    @property
    def output_tokens(self) -> int:
        """By the server's account; without one, the number of token events."""
        told = (self.usage or {}).get("completion_tokens")
        return int(told) if told is not None else len(self.times)

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the server found in its cache, in whichever tier; None if it does not say."""
        told = ((self.usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
        return None if told is None else int(told)

    def timing(self, origin: float, asked_tokens: int, conversation: int, turn: int, delay: float) -> RequestTiming:
        """Its place in a report, with times from `origin` on."""
        told = (self.usage or {}).get("prompt_tokens")
        times = np.asarray(self.times)
        return RequestTiming(
            arrival=self.sent - origin,
            first_token=self.times[0] - origin if self.times else float("nan"),
            finish=(self.times[-1] if self.times and self.error is None else self.ended) - origin,
            prompt_tokens=int(told) if told is not None else asked_tokens,
            output_tokens=self.output_tokens,
            gaps=np.diff(times),
            error=self.error,
            conversation=conversation,
            turn=turn,
            delay=delay,
        )


class EventReader:
    """Reads server-sent events as they come in, in any pieces, into an Answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._rest = b""
        self.done = False

    def feed(self, data: bytes, now: float) -> None:
        """More bytes, which came at `now`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        answer = self._answer
        try:
            body = json.loads(data)
            if body.get("error") is not None:
                answer.error = _message(body)
                return
            if body.get("usage"):
                answer.usage = body["usage"]
            for choice in body.get("choices") or ():
                self._choice(choice, now)
        except (ValueError, TypeError, AttributeError, KeyError):
            answer.error = f"the stream has an event that is not OpenAI's: {data[:80]!r}"

    def _choice(self, choice: Mapping[str, Any], now: float) -> None:
        """A token has come if there is text, or ids, or anything but the end in a completion: a token may have no
        text of its own, but a chat's first chunk may have no token."""
        answer = self._answer
        delta = choice.get("delta")
        ids = choice.get("token_ids")
        if delta is None:
            text = choice.get("text") or ""
            came = bool(text) or choice.get("finish_reason") is None
        else:
            text = delta.get("content") or ""
            came = bool(text or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls"))
        if text:
            answer.text.append(text)
        if ids:
            answer.token_ids += ids
        if came or ids:
            answer.times.append(now)


class LoadClient:
    """Connections to one server, as many as there are requests at a time."""

    def __init__(self, session: aiohttp.ClientSession, root: str, url: str, headers: Mapping[str, str]) -> None:
        self._session = session
        self._root = root
        self._url = url
        self._headers = {"content-type": "application/json", **headers}

    @classmethod
    @asynccontextmanager
    async def open(cls, root: str, url: str, headers: Mapping[str, str]) -> AsyncIterator[LoadClient]:
        """A client, closed at the end of the block."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=60)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
            yield cls(session, root, url, headers)

    async def ask(self, body: bytes, headers: Mapping[str, str] | None = None) -> Answer:
        """Send a request and read its stream to the end. Failures stand in the answer."""
        everything = self._headers if not headers else {**self._headers, **headers}
        answer = Answer(sent=time.perf_counter())
        reader = EventReader(answer)
        try:
            async with self._session.post(self._url, data=body, headers=everything) as response:
                if response.status != 200:
                    answer.error = f"HTTP {response.status}: {_text_of(await response.read())}"
                else:
                    async for data in response.content.iter_any():
                        reader.feed(data, time.perf_counter())
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.perf_counter()
        if answer.error is None and not answer.times:
            answer.error = "no token came"
        elif answer.error is None and not reader.done:
            answer.error = "the stream ended before [DONE]"
        return answer

    async def get(self, path: str) -> Any:
        """JSON at a path of the server. Raises ConfigError."""
        return await self._json("GET", path, None)

    async def post(self, path: str, body: Any) -> Any:
        """JSON that the server answers to JSON. Raises ConfigError."""
        return await self._json("POST", path, body)

    async def _json(self, method: str, path: str, body: Any) -> Any:
        try:
            async with self._session.request(method, self._root + path, json=body, headers=self._headers) as response:
                data = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ConfigError(
                f"the server at {self._root} does not answer ({error}); start it, or give another base_url."
            ) from error
        if response.status != 200:
            raise ConfigError(f"{self._root}{path} answers HTTP {response.status}: {_text_of(data)}.")
        try:
            return json.loads(data)
        except ValueError as error:
            raise ConfigError(f"{self._root}{path} does not answer with JSON; is this an OpenAI server?") from error


def _text_of(data: bytes) -> str:
    """What an error answer says, shortly."""
    try:
        return _message(json.loads(data))
    except (ValueError, AttributeError):
        return data[:200].decode(errors="replace").strip()


def _message(body: Mapping[str, Any]) -> str:
    error = body.get("error", body)
    message = error.get("message", error) if isinstance(error, Mapping) else error
    return str(message)[:300].rstrip(".")
