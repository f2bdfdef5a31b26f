"""Loops do not wait for threads to start."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel
from starlette.requests import Request

from cellar.server.bodies import large_bodies
from cellar.server.threads import ready_loop, ready_threads


def _starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that are started from now on."""
    found, start = list[str](), threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        found.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    return found


@pytest.mark.parametrize("is_ready", [False, True])
def test_work_beside_a_ready_loop_starts_no_thread(is_ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> list[str]:
        if is_ready:
            ready_loop()
        starts, several = _starts(monkeypatch), threading.Barrier(5)
        await asyncio.gather(*(asyncio.to_thread(several.wait, 10) for _ in range(5)))
        return list(starts)  # the loop starts another to end

    assert len(asyncio.run(work())) == (0 if is_ready else 5)


def test_ready_threads_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(3) as executor:
        ready_threads(executor, 3)
        starts, together = _starts(monkeypatch), threading.Barrier(3)
        assert sorted(executor.map(lambda _: together.wait(10), range(3))) == [0, 1, 2]
        assert not starts


class _Text(BaseModel):
    text: str


def test_a_large_bodys_bytes_are_not_kept() -> None:
    """What they hold is enough: eight of 8 MB took as much again while they were tokenized."""
    seen: list[tuple[int, int]] = []
    with ThreadPoolExecutor(1) as reader:
        app = FastAPI()
        app.router.route_class = large_bodies(reader, 1000)

        @app.post("/")
        async def there(body: _Text, request: Request) -> dict[str, Any]:
            seen.append((len(body.text), len(await request.body())))
            return {}

        with TestClient(app) as client:
            for size in (10, 10**6):
                assert client.post("/", json={"text": "a" * size}).status_code == 200
    assert seen[0] == (10, len('{"text":"' + "a" * 10 + '"}'))
    assert seen[1][0] == 10**6
    assert seen[1][1] < 100
