"""A server for tests of the load client: OpenAI's API as somebody else might have written it, with a notebook."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.server.served import running

IDS = [1, 2, 3]


@dataclass
class Seen:
    """One request as it came in; times are those of perf_counter."""

    at: float
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    ended: float = 0.0


@dataclass
class Stub:
    """What the stub does, and what it has seen. `num_events` events come for each request, `asked` if None."""

    first: float = 0.0
    gap: float = 0.0
    num_events: int | None = None
    usage: bool = True
    ids: bool = True
    status: Callable[[int], int] = lambda number: 200
    break_after: int | None = None
    error_after: int | None = None
    listed: bool = True
    max_model_len: int | None = None
    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    now: int = 0
    most: int = 0

    def load(self) -> list[Seen]:
        """All requests but the first, which is the client's own trial."""
        return self.seen[1:]

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        number = len(self.seen)
        one = Seen(time.perf_counter(), request.url.path, dict(request.headers), body)
        self.seen.append(one)
        if (status := self.status(number)) != 200:
            return JSONResponse({"error": {"message": f"no, says the stub ({status})."}}, status)
        return StreamingResponse(self._events(one), media_type="text/event-stream")

    async def _events(self, one: Seen) -> AsyncIterator[bytes]:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            chat = "messages" in one.body
            count = self.num_events or one.body.get("max_tokens") or one.body["max_completion_tokens"]
            if chat:
                yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            yield b": a comment, to keep the connection alive\r\n\r\n"
            await asyncio.sleep(self.first)
            for k in range(count):
                if k:
                    await asyncio.sleep(self.gap)
                if k == self.error_after:
                    yield _event({"error": {"message": "the stub fell over."}})
                if k == self.break_after:
                    return
                said = {"delta": {"content": f"w{k} "}} if chat else {"text": f"w{k} "}
                choice = {"index": 0, "finish_reason": None, **said}
                if self.ids and one.body.get("return_token_ids"):
                    choice["token_ids"] = [IDS[k % len(IDS)]]
                yield _event({"choices": [choice]})
            last = {"delta": {}} if chat else {"text": ""}
            yield _event({"choices": [{"index": 0, "finish_reason": "length", **last}]})
            if self.usage:
                length = len(one.body.get("prompt", ())) or 77
                yield _event({"choices": [], "usage": {"prompt_tokens": length, "completion_tokens": count}})
            one.ended = time.perf_counter()
            yield b"data: [DONE]\n\n"
        finally:
            self.now -= 1

    async def models(self, request: Request) -> Response:
        if not self.listed:
            return PlainTextResponse("nothing here", 404)
        return JSONResponse({"data": [{"id": "stub/model", "max_model_len": self.max_model_len}]})

    async def detokenize(self, request: Request) -> Response:
        tokens = (await request.json())["tokens"]
        return JSONResponse({"prompt": " ".join(map(str, tokens))})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


@contextmanager
def stub(**options: Any) -> Iterator[Stub]:
    """A stub that runs."""
    made = Stub(**options)
    routes = [
        Route("/v1/completions", made.answer, methods=["POST"]),
        Route("/v1/chat/completions", made.answer, methods=["POST"]),
        Route("/elsewhere", made.answer, methods=["POST"]),
        Route("/v1/models", made.models),
        Route("/detokenize", made.detokenize, methods=["POST"]),
    ]
    with running(Starlette(routes=routes)) as url:
        made.url = url
        yield made
