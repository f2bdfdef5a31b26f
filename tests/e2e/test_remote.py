"""Conversations in a Redis server: whoever comes next finds them, whatever becomes of the server, and tokens stay."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cellar import LLM, AsyncLLM
from cellar.core.messages import SchedulerStats, Tier, TierStats
from cellar.runtime.tiers import remote as remote_module
from tests.conformance.test_models import Case, saved_model
from tests.e2e.test_restart import TURNS, histories, turn
from tests.e2e.test_tiers import FAMILIES, GREEDY, TALKS, Tokens, small_options
from tests.e2e.test_tiers import opened as opened_engine
from tests.limits import SECONDS, until
from tests.redis_server import RedisServer, SlowRedis, redis_server

pytestmark = pytest.mark.long  # they need Debian's redis-server, see scripts/setup-system

SIZE = 0.02  # GiB
KEY = "0123456789abcdef" * 2
LOOKUP_SECONDS = remote_module._LOOKUP_SECONDS


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    """One that may take long to answer, as on a busy machine."""
    monkeypatch.setattr(remote_module, "_LOOKUP_SECONDS", SECONDS / 4)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CELLAR_KV_REMOTE_KEY", KEY)
    with redis_server() as server:
        yield server


def remote(stats: SchedulerStats) -> TierStats:
    return next(tier for tier in stats.tiers if tier.tier is Tier.REMOTE)


def opened(folder: Path, url: str | None, chunks: int, **options: object) -> LLM:
    if url is not None:
        options |= {"kv_remote": url, "kv_remote_size": SIZE}
    return opened_engine(folder, **small_options(folder, chunks), **options)


def nothing() -> None:
    """Done between two engines."""


def run(
    folder: Path, chunks: int, url: str | None = None, between: Callable[[], None] = nothing, **options: object
) -> tuple[list[Tokens], list[SchedulerStats]]:
    """TURNS turns, each by an engine of its own if there is a server; -> answers, and the figures of each engine."""
    talks, said = histories()
    if url is None:
        with opened(folder, None, chunks, **options) as llm:
            return [turn(llm, talks, said, number) for number in range(TURNS)], [llm.stats()]
    answers, figures = [], []
    for number in range(TURNS):
        with opened(folder, url, chunks, **options) as llm:
            answers.append(turn(llm, talks, said, number))
            figures.append(llm.stats())
        between()
    return answers, figures


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    saved_model(FAMILIES[0], tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_every_turn_by_an_engine_of_its_own(case: Case, tmp_path: Path, server: RedisServer) -> None:
    (tmp_path / "model").mkdir()
    saved_model(case, tmp_path / "model")
    plenty, _ = run(tmp_path / "model", 400)
    answers, figures = run(tmp_path / "model", 24, server.url)
    assert answers == plenty
    for stats in figures[1:]:
        assert remote(stats).loaded > TALKS, "the conversations were found"
        assert remote(stats).failed == 0


def test_with_host_and_disk_before_it(model: Path, tmp_path: Path, server: RedisServer) -> None:
    options: dict[str, object] = {"kv_offloading_size": 0.002, "kv_disk_path": tmp_path / "kv", "kv_disk_size": 0.0003}
    answers, figures = run(model, 12, server.url, **options)
    assert answers == run(model, 400)[0]
    assert [stats.tier for stats in figures[-1].tiers] == list(Tier)
    assert sum(remote(stats).saved for stats in figures) > 0, "what the disk has no room for"


def _dropped(server: RedisServer, which: Callable[[int], bool]) -> Callable[[], None]:
    """Entries whose place in the list of all is wanted are gone."""

    def drop() -> None:
        with server.client as client:
            for number, name in enumerate(server.chunks()):
                if which(number):
                    client.delete(name)

    return drop


def _scrambled(server: RedisServer) -> None:
    with server.client as client:
        for name in server.chunks()[::3]:
            entry = bytearray(client.get(name))
            entry[len(entry) // 2] ^= 1
            client.set(name, bytes(entry))


HOLES: dict[str, Callable[[RedisServer], Callable[[], None]]] = {
    "every other": lambda server: _dropped(server, lambda k: k % 2 == 0),
    "most": lambda server: _dropped(server, lambda k: k % 8 > 0),
    "all": lambda server: _dropped(server, lambda k: True),
    "damaged": lambda server: lambda: _scrambled(server),
    "restarted": lambda server: lambda: (server.kill(), server.start(), None)[-1],
}


@pytest.mark.parametrize("name", HOLES)
def test_holes_are_computed_again(name: str, model: Path, server: RedisServer) -> None:
    answers, figures = run(model, 12, server.url, HOLES[name](server))
    assert answers == run(model, 400)[0]
    assert (remote(figures[-1]).failed > 0) == (name == "damaged"), "what is damaged is counted"
    assert (remote(figures[-1]).loaded > 0) == (name not in ("all", "restarted"))


def test_another_model_or_chunk_size_finds_nothing(model: Path, tmp_path: Path, server: RedisServer) -> None:
    run(model, 24, server.url)
    (tmp_path / "other").mkdir()
    saved_model(FAMILIES[1], tmp_path / "other")
    for folder, options in ((tmp_path / "other", {}), (model, {"block_size": 32, "kv_cache_memory_bytes": 2**22})):
        talks, said = histories()
        settings = small_options(folder, 24) | options
        with opened_engine(folder, kv_remote=server.url, kv_remote_size=SIZE, **settings) as llm:
            turn(llm, talks, said, 0)
            assert remote(llm.stats()).loaded == 0


def test_two_engines_find_what_the_other_writes(model: Path, server: RedisServer) -> None:
    """The conversations move at each turn, between engines that both run all the time."""
    plenty, _ = run(model, 400)
    talks, said = histories()
    with opened(model, server.url, 24) as one, opened(model, server.url, 24) as two:
        for number, llm in zip(range(TURNS), (one, two, one), strict=True):
            before = len(server.chunks())
            assert turn(llm, talks, said, number) == plenty[number]
            # It writes what has come to rest within seconds, if somebody keeps its loop going.
            until(lambda before=before, llm=llm: _idles(llm) and len(server.chunks()) >= before + TALKS)  # type: ignore[misc]
        assert remote(two.stats()).loaded >= TALKS
        assert remote(one.stats()).loaded >= TALKS
        assert remote(one.stats()).failed == remote(two.stats()).failed == 0


def _idles(llm: LLM) -> bool:
    """A moment passes."""
    llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    return True


FAULTS: dict[str, Callable[[RedisServer, SlowRedis], object]] = {
    "killed": lambda server, slow: (server.kill(), server.start()),
    "hung": lambda server, slow: server.signal(signal.SIGSTOP),
    "awake": lambda server, slow: server.signal(signal.SIGCONT),
    "slow": lambda server, slow: slow.__dict__.update(piece=512, pause=0.005),
    "fast": lambda server, slow: slow.__dict__.update(piece=2**16, pause=0.0),
    "emptied": lambda server, slow: server.signal(signal.SIGCONT) or server.client.flushall(),
    "small": lambda server, slow: (
        server.signal(signal.SIGCONT) or server.client.config_set("maxmemory-policy", "allkeys-lru"),
        server.client.config_set("maxmemory", "1200kb"),
    ),
}


@pytest.mark.parametrize("seed", range(3))
def test_random_faults_while_conversations_go_on(
    seed: int, model: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, hung, slow, emptied, short of memory, in any order, in the middle of loads; everybody is answered."""
    monkeypatch.setattr(remote_module, "_LOOKUP_SECONDS", LOOKUP_SECONDS)
    plenty, _ = run(model, 400)
    rng, slow, over = random.Random(seed), SlowRedis(server), threading.Event()

    def trouble() -> None:
        while not over.wait(rng.uniform(0.0, 0.4)):
            FAULTS[rng.choice(list(FAULTS))](server, slow)

    for number in range(2):
        thread = threading.Thread(target=trouble)
        thread.start()
        try:
            answers, _ = run(model, 12, slow.url, kv_eviction_policy=("value", "lru")[number])
        finally:
            over.set()
            thread.join()
            over.clear()
            server.signal(signal.SIGCONT)
            FAULTS["fast"](server, slow)
        assert answers == plenty
    slow.close()


async def _forgets(folder: Path, server: RedisServer) -> None:
    """What a named conversation left is gone from Redis when the answer comes, and what others left is not."""
    options = small_options(folder, 60) | {"kv_remote": server.url, "kv_remote_size": SIZE}
    llm = AsyncLLM(str(folder), **options)  # type: ignore[arg-type]
    try:
        for name, start in (("mine", 3), ("other", 40)):
            prompt = list(range(start, start + 40))
            async for _ in llm.deltas(prompt, GREEDY, conversation=name):
                pass
        for _ in range(1200):
            if len(server.chunks()) >= 6:
                break
            await asyncio.sleep(0.1)
        names = set(server.chunks())
        assert len(names) >= 6
        await llm.memory("mine", forget=True)
        left = set(server.chunks())
        assert 0 < len(left) < len(names)
        server.kill()
        await llm.memory("other", forget=True)
    finally:
        await asyncio.to_thread(llm.close)


def test_forgotten_conversations_leave_the_server(model: Path, server: RedisServer) -> None:
    asyncio.run(_forgets(model, server))
