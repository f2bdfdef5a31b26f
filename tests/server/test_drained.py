"""A replica that drains: streams go on elsewhere, and conversations find their memory in Redis, or their tokens."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cellar import LLM, SamplingParams
from cellar.core.config import EngineConfig
from cellar.core.messages import RequestOutput, Tier
from cellar.server.endpoint import Address, Endpoint
from cellar.server.engine_process import EngineProcess
from cellar.server.engine_start import open_config
from cellar.server.pool.host import PoolHost
from tests.limits import SECONDS, eventually, until
from tests.redis_server import redis_server

pytestmark = pytest.mark.long  # one of them needs Debian's redis-server, see scripts/setup-system

TALKS = 6
CHUNK = 16
WHOLE = 20 * CHUNK
"""Tokens of a conversation's first prompt, in whole chunks."""

CHOSEN: dict[str, Any] = {
    "kv_cache_memory_bytes": 256 << 20,
    "num_threads": 1,
    "dtype": "float32",
    "block_size": CHUNK,
}
FIRST = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=1.0, seed=5, max_tokens=400, ignore_eos=True)


@dataclass
class Replicas:
    """Two engines with the demo model, as processes, and what a front keeps of them."""

    engines: list[EngineProcess]
    host: PoolHost

    async def ask(self, prompt: Sequence[int], params: SamplingParams, talk: int) -> RequestOutput:
        """A whole answer."""
        llm = self.host.llm
        assert llm is not None
        async for delta in llm.deltas(list(prompt), params, conversation=f"talk {talk}"):
            last = delta
        assert isinstance(last, RequestOutput)
        return last

    def running(self, engine: EngineProcess) -> int:
        """Requests that the front has there."""
        return next((len(one.streams) for one in self.host._pool.places if one.address == engine.address), 0)

    def where(self, talk: str) -> Address | None:
        """The engine that has a request of that conversation."""
        for place in self.host._pool.places:
            if any(stream.request.conversation == talk for stream in list(place.streams.values())):
                return place.address
        return None

    def asked(self, engine: EngineProcess) -> int:
        """Tokens of prompts that were looked up there so far."""
        stats = self.host._pool.stats_at(engine.address)
        assert stats is not None
        return stats.prefix_queries

    def loaded(self) -> int:
        """Chunks that came from Redis."""
        stats = self.host.stats()
        assert stats is not None
        return sum(tier.loaded for tier in stats.tiers if tier.tier is Tier.REMOTE)

    async def drain(self, engine: EngineProcess) -> None:
        """As Ray has it done: no new requests, what runs goes on elsewhere, and it ends when it is empty."""
        self.host.drain(engine.address)
        await eventually(lambda: not self.running(engine))
        await asyncio.to_thread(engine.close)
        await eventually(lambda: len(self.host.addresses()) == 1)


@contextmanager
def two(at_first: int = 2, **options: Any) -> Iterator[Replicas]:
    """`at_first` of them are the front's."""
    config = EngineConfig.of(**CHOSEN, **options).serving()
    with ExitStack() as ending:
        engines = []
        for _ in range(2):
            process = EngineProcess(
                partial(open_config, config, SECONDS), Endpoint("127.0.0.1", 0, os.urandom(32)), persist_seconds=SECONDS
            )
            ending.callback(process.close)
            engines.append(process)
        host = PoolHost()
        ending.callback(host.leave)
        for engine in engines[:at_first]:
            host.add(engine.address)
        until(lambda: len(host.addresses()) == at_first)
        yield Replicas(engines, host)


async def drained(replicas: Replicas) -> tuple[list[list[int]], list[RequestOutput], list[bool], int]:
    """Six conversations, then six streams at two engines of which one drains, then the next turns of all conversations.

    -> the prompts of these, the answers, which of them had been at the engine that drained, and the chunks that came
    from Redis.
    """
    gone, stays = replicas.engines
    histories, were = [], []
    for talk in range(TALKS):
        prompt = [talk + 300, *range(100, 100 + WHOLE)]
        before = replicas.asked(gone)
        answer = await replicas.ask(prompt, FIRST, talk)
        were.append(replicas.asked(gone) > before)
        histories.append([*prompt, *answer.outputs[0].token_ids, 7, 8])
    undisturbed = await asyncio.gather(*(replicas.ask([talk + 3, 5], LONG, 100 + talk) for talk in range(TALKS)))
    streams = [asyncio.create_task(replicas.ask([talk + 3, 5], LONG, 200 + talk)) for talk in range(TALKS)]
    await eventually(lambda: all(replicas.running(one) for one in replicas.engines))
    await replicas.drain(gone)
    for stream, whole in zip(streams, undisturbed, strict=True):
        assert (await stream).outputs[0].token_ids == whole.outputs[0].token_ids
    loaded = replicas.loaded()
    turns = [await replicas.ask(history, FIRST, talk) for talk, history in enumerate(histories)]
    assert stays.process.is_alive()
    return histories, turns, were, replicas.loaded() - loaded


@pytest.mark.parametrize("remote", [True, False])
def test_conversations_of_a_replica_that_drains(remote: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Redis the one that stays loads what the other had; without it, it computes all of it, to the same tokens."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("CELLAR_KV_REMOTE_KEY", "0123456789abcdef" * 2)
    with ExitStack() as ending:
        there = {"kv_remote": ending.enter_context(redis_server()).url, "kv_remote_size": 0.1} if remote else {}
        replicas = ending.enter_context(two(**there))
        prompts, turns, were, loaded = asyncio.run(drained(replicas))
    assert 0 < sum(were) < TALKS
    found = [turn.num_cached_tokens for turn in turns]
    assert all(found[k] >= WHOLE for k in range(TALKS) if not were[k])
    first = were.index(True)  # nothing is known of Redis yet, so all is loaded; then what takes less time
    assert (found[first] >= WHOLE) == remote
    assert (loaded >= WHOLE // CHUNK) == remote
    if not remote:
        assert not any(found[k] for k in range(TALKS) if were[k])
    with LLM(**CHOSEN) as llm:
        expected = llm.generate(prompts, FIRST)
    assert [turn.outputs[0].token_ids for turn in turns] == [output.outputs[0].token_ids for output in expected]
