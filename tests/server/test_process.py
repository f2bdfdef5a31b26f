"""The engine as a process: the same answers, a restart when it is killed, and a clean end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cellar import SamplingParams
from cellar.core.errors import CellarError
from cellar.core.messages import RequestOutput
from cellar.server.app import build_app
from cellar.server.host import ServedModel
from cellar.server.supervisor import Supervisor
from tests.limits import SECONDS
from tests.server.fake_process import children_of, open_nothing, started, supervise
from tests.server.served import TEXT, plain, running

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG: dict[str, Any] = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def host() -> Iterator[Supervisor]:
    found = supervise(latency=0.01)
    yield found
    asyncio.run(found.close())
    assert found.llm is None


def test_the_same_tokens_as_in_one_process(host: Supervisor) -> None:
    async def one(k: int) -> None:
        assert host.llm is not None
        prompt = [k + 3, 5] * (1 + k % 9)
        stop = {"stop": TEXT.decode(plain(prompt, 12))[4:7]} if k % 3 == 0 else {}
        async for output in host.llm.generate(prompt, GREEDY.clone(n=1 + k % 2, **stop)):
            last = output
        for made in last.outputs:
            if stop:
                assert made.finish_reason == "stop"
            else:
                assert made.token_ids == plain(prompt, 12)

    async def run() -> None:
        await asyncio.gather(*(one(k) for k in range(30)))
        assert host.llm is not None
        # Nobody may wait for ever for an id in use or a prompt that never fits.
        first = host.llm.generate([1], GREEDY.clone(max_tokens=100), "same")
        await anext(first)
        with pytest.raises(CellarError, match="in use"):
            await anext(host.llm.generate([1], GREEDY, "same"))
        await first.aclose()  # type: ignore[attr-defined]
        for _ in range(100):
            stats = host.stats()
            assert stats is not None
            if stats.running + stats.waiting == 0:
                break
            await asyncio.sleep(0.02)
        assert stats.running + stats.waiting == 0
        assert stats.free_chunks + stats.cached_chunks == stats.total_chunks

    asyncio.run(run())


def test_a_killed_engine_is_started_again(host: Supervisor) -> None:
    app = build_app(host, ServedModel.of(host.opened, ("fake",)))
    restarted = threading.Event()
    host.on_restart(restarted.set)
    with running(app) as url, httpx.Client(base_url=url, timeout=20) as http:
        lines: list[str] = []
        answers: list[httpx.Response] = []

        def stream() -> None:
            with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}) as answer:
                lines.extend(line for line in answer.iter_lines() if line)

        threads = [
            threading.Thread(target=stream),
            threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=LONG))),
        ]
        for thread in threads:
            thread.start()
        while len(lines) < 4 or (stats := host.stats()) is None or stats.running < 2:
            time.sleep(0.01)
        assert host.pid is not None
        os.kill(host.pid, signal.SIGKILL)
        for thread in threads:
            thread.join(10)
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["type"] == "service_unavailable_error"
        assert answers[0].status_code == 503
        assert "signal 9" in answers[0].json()["error"]["message"]
        assert "retry-after" in answers[0].headers
        assert http.get("/health").status_code == 503
        assert restarted.wait(20)
        assert http.get("/health").status_code == 200
        text = http.post("/v1/completions", json={**LONG, "max_tokens": 5}).json()["choices"][0]["text"]
        assert text == TEXT.decode(plain([1, 2, 3], 5))


def test_an_engine_that_does_not_start_says_why() -> None:
    with pytest.raises(CellarError, match=r"no room; free some\."):
        Supervisor(open_nothing)


def test_sigterm_lets_every_accepted_request_finish() -> None:
    process, url = started(latency=0.02, limits={"shutdown_timeout": 20})
    texts: list[str] = []
    began = threading.Semaphore(0)

    def stream(k: int) -> None:
        with httpx.stream(
            "POST",
            f"{url}/v1/completions",
            json={**LONG, "prompt": [k, 3], "stream": True, "max_tokens": 80},
            timeout=30,
        ) as a:
            text = ""
            for number, line in enumerate(a.iter_lines()):
                if number == 0:
                    began.release()
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            texts.append(text)

    threads = [threading.Thread(target=stream, args=(k,)) for k in range(20)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert began.acquire(timeout=10)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health", timeout=2)
    for thread in threads:
        thread.join(20)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    assert sorted(texts) == sorted(TEXT.decode(plain([k, 3], 80)) for k in range(20))
    assert "Traceback" not in errors


def test_a_drain_has_an_end_and_leaves_no_process() -> None:
    process, url = started(latency=0.5, limits={"shutdown_timeout": 1})
    engines = children_of(process.pid)
    answers: list[httpx.Response] = []

    def ask(stream: bool) -> None:
        answers.append(httpx.post(f"{url}/v1/completions", json={**LONG, "stream": stream}, timeout=60))

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    while 'num_requests_running{model_name="fake"} 2.0' not in httpx.get(f"{url}/metrics").text:
        time.sleep(0.05)
    time.sleep(1.2)  # the stream has begun
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert time.monotonic() - began < 20
    assert "Traceback" not in errors
    for thread in threads:
        thread.join(10)
    whole, stream = sorted(answers, key=lambda answer: answer.status_code, reverse=True)
    assert whole.status_code == 503
    assert "the server ends" in whole.json()["error"]["message"]
    *_, last, done = [line for line in stream.text.split("\n\n") if line]
    assert "the server ends" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert done == "data: [DONE]"
    assert not any(engine.exists() for engine in engines)


def test_an_engine_ends_when_its_server_is_killed() -> None:
    process, _ = started(latency=0.01)
    engines = children_of(process.pid)
    process.kill()
    process.wait(SECONDS)
    end = time.monotonic() + 10
    while any(engine.exists() for engine in engines):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_outputs_are_picklable_whatever_they_hold(host: Supervisor) -> None:
    async def run() -> None:
        assert host.llm is not None
        params = GREEDY.clone(logprobs=1, prompt_logprobs=1)
        (*_, last) = [o async for o in host.llm.generate("Once upon a time", params)]
        assert isinstance(last, RequestOutput)
        assert last.outputs[0].logprobs is not None
        assert last.prompt_logprobs is not None

    asyncio.run(run())
