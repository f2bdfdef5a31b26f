"""Several fronts over one engine: one port, one set of limits and metrics, and each may be lost."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cellar.core.errors import IntegrityError
from cellar.server.admission import SharedWaiting
from cellar.server.shared import Shared
from cellar.server.tally import Tally, summed
from tests.fake_front import ENDLESS, ROOMY
from tests.limits import SECONDS, join_all, until
from tests.server.fake_process import children_of, started, wait_until_refused
from tests.server.served import TEXT, plain

BODY: dict[str, Any] = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True}


@contextmanager
def fronts(count: int = 2, **options: Any) -> Iterator[tuple[Any, str]]:
    process, url = started(fronts=count, **options)
    try:
        yield process, url
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors, errors
    finally:
        process.kill()
        process.wait(SECONDS)


def metrics(url: str) -> dict[str, float]:
    """Those of one of the fronts. Of the engine it knows what it was last told."""
    with httpx.Client(base_url=url, timeout=SECONDS) as http:
        return metrics_by(http)


def metrics_by(http: httpx.Client) -> dict[str, float]:
    """Those of the front to which the client is connected."""
    lines = http.get("/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def of(found: dict[str, float], stem: str) -> float:
    return found[f'cellar:{stem}{{model_name="fake"}}']


class Streams:
    """Streams read by threads: text, and whether each came to its end. `leave` hangs up."""

    def __init__(self, url: str, prompts: list[list[int]], count: int = ENDLESS) -> None:
        self.texts = {tuple(prompt): "" for prompt in prompts}
        self.ended: set[tuple[int, ...]] = set()
        self.broken: set[tuple[int, ...]] = set()
        self.count = count
        self._leaving = False
        self.threads = [threading.Thread(target=self._read, args=(url, prompt)) for prompt in prompts]
        for thread in self.threads:
            thread.start()
        until(lambda: all(self.texts.values()))

    def _read(self, url: str, prompt: list[int]) -> None:
        body = {**BODY, "prompt": prompt, "stream": True, "max_tokens": self.count}
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=SECONDS) as answer:
                for line in answer.iter_lines():
                    if self._leaving:
                        return
                    if line.startswith('data: {"id'):
                        self.texts[tuple(prompt)] += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    elif line == "data: [DONE]":
                        self.ended.add(tuple(prompt))
        except httpx.TransportError:
            self.broken.add(tuple(prompt))

    def join(self) -> None:
        join_all(self.threads)

    def leave(self) -> None:
        self._leaving = True
        self.join()

    def check(self, prompt: tuple[int, ...]) -> None:
        assert self.texts[prompt] == TEXT.decode(plain(list(prompt), self.count))

    def check_beginning(self, prompt: tuple[int, ...]) -> None:
        said, count = self.texts[prompt], 64
        while len(wanted := TEXT.decode(plain(list(prompt), count))) < len(said) + 8:
            count *= 2
        assert wanted.startswith(said)


@pytest.mark.long
def test_one_set_of_metrics_and_a_drain() -> None:
    with fronts(2, latency=0.005, limits={"shutdown_timeout": SECONDS}, **ROOMY) as (process, url):
        engine, *both = children_of(process.pid)
        assert len(both) == 2
        for k in range(24):  # a connection each
            prompt = [k + 3, 5]
            body = {**BODY, "prompt": prompt, "max_tokens": 4}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS)
            assert answer.json()["choices"][0]["text"] == TEXT.decode(plain(prompt, 4))
        for _ in range(6):  # whoever is asked
            with httpx.Client(base_url=url, timeout=SECONDS) as http:
                until(lambda http=http: of(metrics_by(http), "num_requests_running") == 0)  # type: ignore[misc]
                found = metrics_by(http)
            assert of(found, "e2e_request_latency_seconds_count") == 24
            assert of(found, "request_generation_tokens_sum") == 96
            assert of(found, "generation_tokens_total") == 96
            assert of(found, "num_requests_running") == 0
            assert found['cellar:http_responses_total{model_name="fake",route="/v1/completions",status="200"}'] == 24
        prompts = [[k, 3] for k in range(16)]
        streams = Streams(url, prompts, 150)
        endless = Streams(url, [[50, 3]])
        process.send_signal(signal.SIGTERM)
        wait_until_refused(url)
        streams.join()
        for prompt in streams.texts:
            streams.check(prompt)
        assert process.poll() is None
        endless.leave()
        process.wait(SECONDS)
        until(lambda: not any(path.exists() for path in (engine, *both)))


@pytest.mark.long
def test_a_signal_that_another_thread_takes_ends_the_server() -> None:
    """The system gives it to any that is awake, as when a server that was stopped goes on."""
    process, _ = started(fronts=2, **ROOMY)
    try:
        others = sorted({int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir()} - {process.pid})
        assert ctypes.CDLL(None).tgkill(process.pid, others[-1], signal.SIGTERM) == 0
        _, errors = process.communicate(timeout=SECONDS)
        assert (process.returncode, "Traceback" in errors) == (0, False), errors
    finally:
        process.kill()
        process.wait(SECONDS)


@pytest.mark.long
def test_the_limit_is_that_of_all_fronts_and_nothing_is_left_of_a_killed_server() -> None:
    process, url = started(fronts=2, latency=0.05, num_rows=1, limits={"max_queued_requests": 3}, **ROOMY)
    try:
        all_of_them = children_of(process.pid)
        assert len(all_of_them) == 3
        first = Streams(url, [[9]])
        statuses: list[int] = []
        threads = [
            threading.Thread(
                target=lambda: statuses.append(
                    httpx.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 1}, timeout=SECONDS).status_code
                )
            )
            for _ in range(12)
        ]
        for thread in threads:
            thread.start()
        until(lambda: len(statuses) == 9)
        assert Counter(statuses) == {503: 9}
        first.leave()
        join_all(threads)
        assert Counter(statuses) == {200: 3, 503: 9}
        streams = Streams(url, [[5, 3]])
    finally:
        process.kill()
        process.communicate(timeout=SECONDS)
    until(lambda: not any(path.exists() for path in all_of_them))
    streams.join()


@pytest.mark.long
def test_a_killed_front_is_started_again_and_its_requests_are_dropped() -> None:
    with fronts(2, latency=0.02, **ROOMY) as (process, url):
        _, one, _ = children_of(process.pid)
        for _ in range(10):
            httpx.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 2}, timeout=SECONDS)
        streams = Streams(url, [[k, 7] for k in range(24)])
        until(lambda: of(metrics(url), "num_requests_running") == 24)
        os.kill(int(one.name), signal.SIGKILL)
        until(
            lambda: of(retry(lambda: metrics(url)), "num_requests_running") < 24, SECONDS / 2
        )  # none would end by then
        until(lambda: streams.broken)
        lengths = {prompt: len(text) for prompt, text in streams.texts.items()}
        until(lambda: all(len(streams.texts[p]) > n for p, n in lengths.items() if p not in streams.broken))
        streams.leave()
        assert 0 < len(streams.broken) < 24  # the system dealt them out by a hash of their ports
        assert not streams.ended
        for prompt in streams.texts:
            streams.check_beginning(prompt)
        until(lambda: of(retry(lambda: metrics(url)), "front_restarts_total") == 1)
        until(lambda: len(children_of(process.pid)) == 3)
        for _ in range(8):
            body = {**BODY, "max_tokens": 2}
            answer = retry(lambda body=body: httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS))
            assert answer.status_code == 200
        until(lambda: of(metrics(url), "num_requests_running") == 0)
        assert of(metrics(url), "e2e_request_latency_seconds_count") == 10 + 8  # nothing was forgotten
        until(lambda: of(metrics(url), "kv_cache_usage_perc") == 0)


@pytest.mark.long
def test_a_killed_engine_is_down_at_every_front_and_back_at_every_front(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with fronts(2, latency=0.02, gate=str(gate), **ROOMY) as (process, url):
        engine, front, _ = children_of(process.pid)
        streams = Streams(url, [[k, 7] for k in range(8)], 200)
        gate.touch()
        os.kill(int(engine.name), signal.SIGKILL)

        def are(status: int) -> bool:
            """Of both fronts, for who of them is asked is decided each time."""
            return all(httpx.get(f"{url}/health", timeout=SECONDS).status_code == status for _ in range(20))

        until(lambda: are(503))
        gate.unlink()
        until(lambda: are(200))
        streams.join()
        assert streams.ended == streams.texts.keys()
        assert streams.texts == {prompt: TEXT.decode(plain(list(prompt), 200)) for prompt in streams.texts}
        for _ in range(8):
            answer = httpx.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 2}, timeout=SECONDS)
            assert answer.json()["choices"][0]["text"] == TEXT.decode(plain([1, 2, 3], 2))
        found = metrics(url)
        assert of(found, "engine_restarts_total") == 1
        assert of(found, "front_restarts_total") == 0
        os.kill(int(front.name), signal.SIGKILL)
        until(lambda: of(retry(lambda: metrics(url)), "front_restarts_total") == 1)
        assert of(retry(lambda: metrics(url)), "engine_restarts_total") == 1


def retry(ask: Callable[[], Any]) -> Any:
    """A connection that lay in the queue of a killed front is lost."""
    for _ in range(20):
        try:
            return ask()
        except httpx.TransportError:
            time.sleep(0.05)
    return ask()


def test_tallies_add_up_and_survive_their_writers(tmp_path: Path) -> None:
    first = Tally(tmp_path / "a")
    first.add("x", 2)
    place = first.places(["h/0", "h/1"])
    first.values[place + 1] += 1
    assert first.counts() == {"x": 2, "h/0": 0, "h/1": 1}
    with pytest.raises(IntegrityError, match="open already"):
        Tally(tmp_path / "a")
    del first
    again, other = Tally(tmp_path / "a"), Tally(tmp_path / "b")
    again.add("x")
    assert again.places(["h/0", "h/1"]) == place
    other.add("y")
    other.add("x", 10)
    (tmp_path / "b.names").write_text("y\nx\nhalf a na")
    assert summed([tmp_path / "a", tmp_path / "b", tmp_path / "c"]) == {"x": 13, "h/0": 0, "h/1": 1, "y": 1}
    assert Tally().counts() == {}


def test_who_waits_is_counted_together(tmp_path: Path) -> None:
    one, two = (Shared(tmp_path, k, 2).waiting() for k in range(2))
    assert isinstance(one, SharedWaiting)
    one.add(2, 50)
    two.add(1, 7)
    assert one.totals() == two.totals() == (3, 57)
    with one.locked():
        seen = threading.Event()

        def enter() -> None:
            with two.locked():
                seen.set()

        thread = threading.Thread(target=enter)
        thread.start()
        assert not seen.wait(0.1)
    join_all([thread])
    assert seen.is_set()
    one.clear()
    assert two.totals() == (1, 7)


def test_what_waits_of_one_key_is_counted_at_all_fronts(tmp_path: Path) -> None:
    one, two = (Shared(tmp_path, k, 2, ("a", "b")).waiting() for k in range(2))
    one.add(2, 50, "a")
    two.add(1, 7, "a")
    two.add(4, 9, "b")
    one.add(1, 1)
    assert one.of("a") == two.of("a") == (3, 57)
    assert one.of("b") == (4, 9)
    assert one.totals() == (8, 67)
    two.clear()
    assert (one.of("a"), one.of("b"), one.totals()) == ((2, 50), (0, 0), (3, 51))
