"""A server for tests: the whole HTTP stack over FakeRuntime, in a thread, on a free port."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvicorn

from cellar import AsyncLLM
from cellar.front import Opened
from cellar.runtime.fake import FakeRuntime
from cellar.server.app import build_app
from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.host import SameProcess, ServedModel
from cellar.text.grammar import GrammarCompiler
from cellar.text.masker import Masker
from cellar.text.tokenizer import Tokenizer
from tests.fake_front import TOKENIZER, continuation, open_fake

TEXT = Tokenizer.load(TOKENIZER)
VOCAB = TEXT.vocab_size
MODEL = "fake"


def plain(prompt: list[int], count: int) -> list[int]:
    """The fake's tokens, past end symbols."""
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += continuation(prompt + tokens, count - len(tokens), VOCAB)
    return tokens


@dataclass
class Served:
    """A server that runs, and what is inside it."""

    url: str
    opened: Opened
    runtime: FakeRuntime
    app: Any

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    def settle(self, seconds: float = 5.0) -> None:
        """Wait until nothing runs; then the books must balance and no chunk be referenced."""
        scheduler = self.opened.front.engine.scheduler
        end = time.monotonic() + seconds
        while scheduler.has_work() or len(self.opened.front._outputs):
            assert time.monotonic() < end, "requests still run"
            time.sleep(0.01)
        scheduler.check_integrity()
        stats = scheduler.stats()
        assert stats.free_chunks + stats.cached_chunks == stats.total_chunks
        assert (stats.running, stats.waiting) == (0, 0)
        desk = self.app.state.api.desk
        assert (desk.admission.num_requests, desk.admission.num_tokens) == (0, 0)


@contextmanager
def serve(server: dict[str, Any] | None = None, limits: dict[str, Any] | None = None, **fake: Any) -> Iterator[Served]:
    """A server over the fake device."""
    opened, runtime = open_fake(**fake)
    opened.front.engine.masker = Masker(GrammarCompiler(TEXT, VOCAB, (2,)))
    llm = AsyncLLM.over(opened)
    app = build_app(
        SameProcess(llm),
        ServedModel.of(opened, (MODEL, "alias")),
        ServerConfig(**server or {}),
        LimitConfig(**limits or {}),
    )
    with running(app) as url:
        yield Served(url, opened, runtime, app)


@contextmanager
def running(app: Any) -> Iterator[str]:
    """An application on a free port, in a thread; gives its address."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="on")
    server = uvicorn.Server(config)
    sock = socket.create_server(("127.0.0.1", 0), backlog=512)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
    thread.start()
    end = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < end
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
