"""SIGUSR1: the engines of `--replicas` end and start anew, one after another, with streams going on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cellar.server.renewal import Renewal
from tests.fake_front import ROOMY
from tests.limits import SECONDS, join_all, until
from tests.redis_server import redis_server
from tests.server.fake_process import children_of
from tests.server.served import demo_process
from tests.server.test_fronts import Streams, fronts, metrics
from tests.server.test_replicas import RUNNING, complete, engines_of, of_engine, restarts, told


class Keeper:
    """An engine's keeper that starts nothing; `starts` says whether the next one will be there."""

    def __init__(self, alive: bool = True, starts: bool = True) -> None:
        self.alive, self.starts, self.renewed = alive, starts, 0

    @property
    def process(self) -> Any:
        return self

    def is_alive(self) -> bool:
        return self.alive

    def renew(self) -> bool:
        self.renewed += 1
        self.alive = self.starts
        return self.starts


def renewed(*keepers: Keeper) -> list[int]:
    """-> the engines that fronts were told to leave."""
    left: list[int] = []
    renewal = Renewal(keepers, left.append)  # type: ignore[arg-type]
    renewal.begin()
    until(lambda: renewal._thread is None or not renewal._thread.is_alive())
    return left


def test_one_after_another() -> None:
    keepers = [Keeper(), Keeper(), Keeper()]
    assert renewed(*keepers) == [0, 1, 2]
    assert [keeper.renewed for keeper in keepers] == [1, 1, 1]


def test_a_single_engine_is_left_alone() -> None:
    keeper = Keeper()
    assert renewed(keeper) == []
    assert not keeper.renewed


def test_an_engine_that_does_not_start_is_the_last() -> None:
    keepers = [Keeper(), Keeper(starts=False), Keeper()]
    assert renewed(*keepers) == [0, 1]
    assert keepers[2].renewed == 0


def test_the_last_that_runs_is_not_ended() -> None:
    keepers = [Keeper(alive=False), Keeper()]
    assert renewed(*keepers) == [0, 1], "the first is there again when it is the other's turn"
    assert renewed(Keeper(), Keeper(alive=False)) == []


def renew(pid: int, count: int) -> None:
    """Have all engines renewed, and wait until others have taken their place."""
    before = {path.name for path in engines_of(pid, count)}
    os.kill(pid, signal.SIGUSR1)
    until(lambda: not before & {path.name for path in children_of(pid)})


@pytest.mark.long
def test_streams_go_on_through_a_renewal() -> None:
    """Of all engines, with two fronts; with one it is `cellar serve` below."""
    with fronts(2, replicas=2, latency=0.02, **ROOMY) as (process, url):
        streams = Streams(url, [[k + 3, 5, k] for k in range(12)], 600)
        until(lambda: min(of_engine(metrics(url), RUNNING)) > 0)
        renew(process.pid, 2)
        streams.join()
        assert not streams.broken
        for prompt in streams.texts:
            assert prompt in streams.ended
            streams.check(prompt)
        until(lambda: of_engine(metrics(url), "engine_up") == [1, 1])
        assert restarts(url) == 0, "nobody has died"
        assert metrics(url)['cellar:requests_migrated_total{model_name="fake"}'] > 0


@pytest.mark.long
def test_conversations_are_kept_through_a_renewal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cellar serve` as operators run it, with Redis: stories are told to their end, and conversations found."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("CELLAR_KV_REMOTE_KEY", "0123456789abcdef" * 2)
    with redis_server() as redis:
        options = ("--replicas", "2", "--kv-cache-memory-bytes", str(128 << 20), "--dtype", "float32")
        with demo_process(*options, "--kv-remote", redis.url, "--kv-remote-size", "0.1") as (pid, url):
            prompts = [f"Once upon a time there were {k} friends" for k in range(8)]
            wanted = [told(url, prompt) for prompt in prompts]
            history = [f"There were {k} cats and {k} dogs. " * 20 for k in range(6)]
            said = [talk(url, k, history[k]) for k in range(6)]
            stories: dict[str, str] = {}
            begun = threading.Semaphore(0)

            def tell(prompt: str) -> None:
                stories[prompt] = told(url, prompt, begun.release)

            threads = [threading.Thread(target=tell, args=(prompt,)) for prompt in prompts]
            for thread in threads:
                thread.start()
            for _ in prompts:
                assert begun.acquire(timeout=SECONDS)
            with asking(url) as refused:
                renew(pid, 2)
            assert refused == [], "there was an engine all the time"
            join_all(threads)
            assert [stories[prompt] for prompt in prompts] == wanted
            until(lambda: of_engine(metrics(url), "engine_up", "cellar-demo") == [1, 1])
            again = [talk(url, k, history[k]) for k in range(6)]
            assert [text for text, _ in again] == [text for text, _ in said]
            # How many is for what an engine has learned of its steps and of Redis, which a busy machine changes (0078).
            assert any(cached >= 64 for _, cached in again), "no engine has computed any of them; Redis had them"


def talk(url: str, k: int, history: str) -> tuple[str, int]:
    """A turn of conversation k -> its answer, and the tokens that were found."""
    answer = complete(url, history, {"x-session-id": f"c{k}"}, model="cellar-demo")
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@contextmanager
def asking(url: str) -> Iterator[list[int]]:
    """Short requests all the time; gives the answers that were no 200."""
    refused: list[int] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            body = {"model": "cellar-demo", "prompt": "Hello", "max_tokens": 2}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS)
            if answer.status_code != 200:
                refused.append(answer.status_code)
            time.sleep(0.05)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield refused
    finally:
        ended.set()
        join_all([thread])
