"""A server for tests: the whole HTTP stack over FakeRuntime, in a thread, on a free port."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvicorn

from cellar import AsyncLLM
from cellar.engine.opened import Opened
from cellar.runtime.steps.fake import FakeRuntime
from cellar.server.app import build_app
from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.host import SameProcess, ServedModel
from cellar.server.serving import server_config
from cellar.server.tls import scheme_of
from cellar.text.grammar import GrammarCompiler
from cellar.text.masker import Masker
from cellar.text.tokenizer import Tokenizer
from tests.fake_front import TOKENIZER, continuation, engine_of, open_fake
from tests.limits import ROOT, SECONDS, asked, join_all, until

TEXT = Tokenizer.load(TOKENIZER)
VOCAB = TEXT.vocab_size
MODEL = "fake"


def plain(prompt: list[int], count: int) -> list[int]:
    """The fake's tokens, past end symbols."""
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += continuation(prompt + tokens, count - len(tokens), VOCAB)
    return tokens


def raw(
    url: str, body: dict[str, Any], path: str = "/v1/completions", headers: Mapping[str, str] | None = None
) -> socket.socket:
    """A request on a socket of its own; to close it is to hang up."""
    sent = json.dumps(body).encode()
    host, port = url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{more}"
        f"content-type: application/json\r\ncontent-length: {len(sent)}\r\n\r\n"
    )
    sock.sendall(head.encode() + sent)
    return sock


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
        return httpx.Client(base_url=self.url, timeout=SECONDS)

    def settle(self) -> None:
        """Wait until nothing runs; then the books must balance and no chunk be referenced."""
        engine = engine_of(self.opened)
        admission = self.app.state.api.desk.admission
        until(lambda: not engine.has_work() and not len(self.opened.front._outputs) and not admission.num_requests)
        asked(engine, engine.scheduler.check_integrity)
        stats = asked(engine, engine.stats)
        assert stats.free_chunks + stats.cached_chunks == stats.total_chunks
        assert (stats.running, stats.waiting) == (0, 0)
        assert (admission.num_requests, admission.num_tokens) == (0, 0)


@contextmanager
def serve(server: dict[str, Any] | None = None, limits: dict[str, Any] | None = None, **fake: Any) -> Iterator[Served]:
    """A server over the fake device."""
    opened, runtime = open_fake(masker=Masker(GrammarCompiler(TEXT, VOCAB, (2,))), **fake)
    llm = AsyncLLM.over(opened)
    app = build_app(
        SameProcess(llm),
        ServedModel.of(opened, (MODEL, "alias")),
        ServerConfig(**server or {}),
        LimitConfig(**limits or {}),
    )
    with running(app, LimitConfig(**limits or {})) as url:
        yield Served(url, opened, runtime, app)


@contextmanager
def running(app: Any, limits: LimitConfig | None = None, options: ServerConfig | None = None) -> Iterator[str]:
    """An application on a free port, in a thread; gives its address."""
    options = options or ServerConfig(log_level="warning")
    server = uvicorn.Server(server_config(app, options, limits or LimitConfig()))
    sock = socket.create_server(("127.0.0.1", 0), backlog=512)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield f"{scheme_of(options)}://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        join_all([thread])


@contextmanager
def running_demo(*options: str) -> Iterator[str]:
    """`cellar serve` in a process of its own, with the demo model; gives its address."""
    with demo_process(*options) as (_, url):
        yield url


@contextmanager
def demo_process(*options: str) -> Iterator[tuple[int, str]]:
    """The same; gives the id of its process, too."""
    command = [sys.executable, "-m", "cellar", "serve", "--port", "0", "--log-level", "warning", "--num-threads", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "is served at http://" in line
        yield process.pid, line.split(" at ")[1].strip().removesuffix("/v1")
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
