"""The engine as a process: the same answers, a restart when it is killed, and a clean end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from cellar import SamplingParams
from cellar.core.errors import CellarError
from cellar.core.messages import RequestOutput
from cellar.server.app import build_app
from cellar.server.host import ServedModel
from cellar.server.supervisor import MAX_LOST, Supervisor
from tests.fake_front import ENDLESS, ROOMY
from tests.limits import SECONDS, eventually, join_all, until
from tests.server.fake_process import children_of, open_nothing, started, supervise, wait_until_refused
from tests.server.served import TEXT, plain, running

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG: dict[str, Any] = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": ENDLESS, "ignore_eos": True}


@contextmanager
def supervised() -> Iterator[Supervisor]:
    found = supervise(latency=0.01, **ROOMY)
    yield found
    asyncio.run(found.close())
    assert found.llm is None


@pytest.fixture
def host() -> Iterator[Supervisor]:
    """For a test that kills it."""
    with supervised() as found:
        yield found


@pytest.fixture(scope="module")
def calm() -> Iterator[Supervisor]:
    """For those that let it live."""
    with supervised() as found:
        yield found


def test_the_same_tokens_as_in_one_process(calm: Supervisor) -> None:
    async def one(k: int) -> None:
        assert calm.llm is not None
        prompt = [k + 3, 5] * (1 + k % 9)
        stop = {"stop": TEXT.decode(plain(prompt, 12))[4:7]} if k % 3 == 0 else {}
        async for output in calm.llm.generate(prompt, GREEDY.clone(n=1 + k % 2, **stop)):
            last = output
        for made in last.outputs:
            if stop:
                assert made.finish_reason == "stop"
            else:
                assert made.token_ids == plain(prompt, 12)

    async def run() -> None:
        await asyncio.gather(*(one(k) for k in range(30)))
        assert calm.llm is not None
        # Nobody may wait for ever for an id in use or a prompt that never fits.
        first = calm.llm.generate([1], GREEDY.clone(max_tokens=ENDLESS), "same")
        await anext(first)
        with pytest.raises(CellarError, match="in use"):
            await anext(calm.llm.generate([1], GREEDY, "same"))
        await first.aclose()  # type: ignore[attr-defined]
        await eventually(lambda: (stats := calm.stats()) is not None and stats.running + stats.waiting == 0)
        stats = calm.stats()
        assert stats is not None
        assert stats.free_chunks + stats.cached_chunks == stats.total_chunks

    asyncio.run(run())


@pytest.mark.long
def test_streams_outlive_an_engine_that_is_killed_and_started_again(host: Supervisor) -> None:
    app = build_app(host, ServedModel.of(host.opened, ("fake",)))
    restarted, may_start, start = threading.Event(), threading.Event(), host._keeper._start
    host.on_restart(restarted.set)
    host._keeper._start = lambda: may_start.wait(SECONDS) and start()  # type: ignore[assignment, return-value]
    with running(app) as url, httpx.Client(base_url=url, timeout=SECONDS) as http:
        lines: list[str] = []
        answers: list[httpx.Response] = []
        body = {**LONG, "max_tokens": 300}

        def stream() -> None:
            with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                lines.extend(line for line in answer.iter_lines() if line)

        threads = [
            threading.Thread(target=stream),
            threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=body))),
        ]
        for thread in threads:
            thread.start()
        until(lambda: len(lines) >= 4 and (stats := host.stats()) is not None and stats.running == 2)
        assert host.pid is not None
        os.kill(host.pid, signal.SIGKILL)
        until(lambda: http.get("/health").status_code == 503)
        refused = http.post("/v1/completions", json=body)
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        may_start.set()
        assert restarted.wait(SECONDS)
        assert http.get("/health").status_code == 200
        join_all(threads)
        whole = TEXT.decode(plain([1, 2, 3], 300))
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
        assert "".join(event["choices"][0]["text"] for event in events) == whole
        assert lines[-1] == "data: [DONE]"
        assert answers[0].json()["choices"][0]["text"] == whole
        assert answers[0].json()["usage"]["completion_tokens"] == 300
        text = http.post("/v1/completions", json={**LONG, "max_tokens": 5}).json()["choices"][0]["text"]
        assert text == TEXT.decode(plain([1, 2, 3], 5))


def test_who_reads_the_log_of_a_killed_engine_learns_what_to_lower(
    host: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    """A system that has no memory left kills; of an engine that aborts nothing of the kind is said."""
    said: list[str] = []
    for number in (signal.SIGKILL, signal.SIGABRT):
        restarted = threading.Event()
        host.on_restart(restarted.set)
        caplog.clear()
        assert host.pid is not None
        os.kill(host.pid, number)
        assert restarted.wait(SECONDS)
        said += [message for record in caplog.records if "it is started" in (message := record.getMessage())]
    killed, aborted = said
    assert "by signal 9, as a system ends whoever takes the last of its memory: lower kv_offloading_size" in killed
    assert "kv_cache_memory_bytes" in killed
    assert "by signal 6; it is started again" in aborted


@pytest.mark.long
def test_a_request_under_which_the_only_engine_is_killed_twice_is_given_up(host: Supervisor) -> None:
    async def run() -> None:
        llm = host.llm
        assert llm is not None
        running = llm.generate([1, 2], GREEDY.clone(max_tokens=ENDLESS))
        await anext(running)
        gone = None
        for _ in range(MAX_LOST):
            await eventually(lambda: host.pid != gone and any(place.streams for place in host._pool.places))  # noqa: B023
            gone = host.pid
            assert gone is not None
            os.kill(gone, signal.SIGKILL)
            await eventually(lambda: not any(place.streams for place in host._pool.places))
        made = await anext(running)
        while not made.finished:
            made = await anext(running)
        assert (made.outputs[0].finish_reason, "lost 2 times" in str(made.outputs[0].stop_reason)) == ("error", True)
        assert list(made.outputs[0].token_ids) == plain([1, 2], len(made.outputs[0].token_ids))
        await eventually(lambda: host.llm is not None)
        async for output in llm.generate([3, 4], GREEDY):
            last = output
        assert list(last.outputs[0].token_ids) == plain([3, 4], 12)

    asyncio.run(run())


@pytest.mark.long
def test_an_engine_that_does_not_start_says_why() -> None:
    with pytest.raises(CellarError, match=r"no room; free some\."):
        Supervisor(open_nothing)


@pytest.mark.long
def test_sigterm_lets_every_accepted_request_finish() -> None:
    process, url = started(latency=0.02, limits={"shutdown_timeout": SECONDS}, **ROOMY)
    texts: list[str] = []
    began = threading.Semaphore(0)

    def stream(k: int) -> None:
        with httpx.stream(
            "POST",
            f"{url}/v1/completions",
            json={**LONG, "prompt": [k, 3], "stream": True, "max_tokens": 80},
            timeout=SECONDS,
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
        assert began.acquire(timeout=SECONDS)
    with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=SECONDS) as endless:
        lines = endless.iter_lines()  # held: a generator that is dropped closes the connection
        next(lines)
        process.send_signal(signal.SIGTERM)
        wait_until_refused(url)
        join_all(threads)
        assert process.poll() is None
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert sorted(texts) == sorted(TEXT.decode(plain([k, 3], 80)) for k in range(20))
    assert "Traceback" not in errors


@pytest.mark.long
def test_a_drain_has_an_end_and_leaves_no_process() -> None:
    process, url = started(latency=0.5, limits={"shutdown_timeout": 1}, **ROOMY)
    engines = children_of(process.pid)
    answers: list[httpx.Response] = []
    lines: list[str] = []

    def ask() -> None:
        answers.append(httpx.post(f"{url}/v1/completions", json=LONG, timeout=SECONDS))

    def stream() -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=SECONDS) as answer:
            lines.extend(line for line in answer.iter_lines() if line)

    threads = [threading.Thread(target=target) for target in (ask, stream)]
    for thread in threads:
        thread.start()
    metrics = httpx.Client(base_url=url, timeout=SECONDS)
    until(lambda: lines and 'num_requests_running{model_name="fake"} 2.0' in metrics.get("/metrics").text)
    metrics.close()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=SECONDS)  # the requests would take more than an hour
    assert process.returncode == 0
    assert "Traceback" not in errors
    join_all(threads)
    (whole,) = answers
    assert whole.status_code == 503
    assert "the server ends" in whole.json()["error"]["message"]
    *_, last, done = lines
    assert "the server ends" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert done == "data: [DONE]"
    assert not any(engine.exists() for engine in engines)


@pytest.mark.long
def test_an_engine_ends_when_its_server_is_killed() -> None:
    process, _ = started(latency=0.01)
    engines = children_of(process.pid)
    process.kill()
    process.wait(SECONDS)
    until(lambda: not any(engine.exists() for engine in engines))


def test_outputs_are_picklable_whatever_they_hold(calm: Supervisor) -> None:
    async def run() -> None:
        assert calm.llm is not None
        params = GREEDY.clone(logprobs=1, prompt_logprobs=1)
        (*_, last) = [o async for o in calm.llm.generate("Once upon a time", params)]
        assert isinstance(last, RequestOutput)
        assert last.outputs[0].logprobs is not None
        assert last.prompt_logprobs is not None

    asyncio.run(run())
