"""Users whose salts differ share no KV, in whatever tier it lies: what another wrote is not found."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cellar import AsyncLLM
from cellar.core.config import EngineConfig
from cellar.core.messages import SchedulerStats, Tier
from cellar.engine.opened import open_front
from cellar.engine.outputs import RequestOutput
from cellar.kv.store import KVStore
from cellar.runtime.tiers import remote
from tests.conformance.test_models import saved_model
from tests.e2e.test_tiers import CHUNK, FAMILIES, GREEDY, Tokens, small_options
from tests.limits import SECONDS
from tests.redis_server import redis_server

PROMPTS = [list(range(first, first + 3 * CHUNK + 5)) for first in range(3, 45, 7)]
SIZE = 0.02  # GiB


async def _asked(llm: AsyncLLM, salt: bytes) -> tuple[Tokens, list[int]]:
    """One prompt after the other; -> answers, and how many tokens of each were found."""
    answers, found = Tokens(), list[int]()
    for prompt in PROMPTS:
        async for news in llm.deltas(prompt, GREEDY, salt=salt):
            if isinstance(news, RequestOutput):
                answers.append(news.outputs[0].token_ids)
                found.append(news.num_cached_tokens or 0)
    return answers, found


def engine(
    folder: Path, options: dict[str, object], *salts: bytes
) -> tuple[list[tuple[Tokens, list[int]]], SchedulerStats]:
    """All prompts for each salt in turn, by one engine with little memory; and its figures."""

    async def all_of_them() -> tuple[list[tuple[Tokens, list[int]]], SchedulerStats]:
        config = EngineConfig.of(model=str(folder), **small_options(folder, 12), **options)
        llm = AsyncLLM.over(open_front(config, recovery="load"))
        try:
            return [await _asked(llm, salt) for salt in salts], llm.stats()
        finally:
            await asyncio.to_thread(llm.close)

    return asyncio.run(all_of_them())


def check(folder: Path, options: dict[str, object], last: Tier) -> None:
    """Mine are found again by me alone, by this engine and by the next one, as far as they had come to rest when their
    memory was needed; all get the same answers.
    """
    ((right, _),), _ = engine(folder, {}, b"")
    results, stats = engine(folder, options, b"mine", b"other", b"", b"mine")
    for answers, _ in results:
        assert answers == right
    for _, found in results[:3]:
        assert found == [0] * len(PROMPTS)
    assert sum(results[3][1]) > CHUNK
    assert sum(tier.hit_tokens for tier in stats.tiers[1:]) > 0
    results, stats = engine(folder, options, b"third", b"mine")
    assert [answers for answers, _ in results] == [right, right]
    assert results[0][1] == [0] * len(PROMPTS)
    assert sum(results[1][1]) > CHUNK
    assert next(tier for tier in stats.tiers if tier.tier is last).hit_tokens > 0


def host_and_disk(folder: Path, disk: Path) -> dict[str, object]:
    nbytes = int(str(small_options(folder, 100)["kv_cache_memory_bytes"]))
    return {"kv_offloading_size": nbytes / 2**30, "kv_disk_path": str(disk), "kv_disk_size": SIZE}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    saved_model(FAMILIES[0], tmp_path / "model")
    return tmp_path / "model"


def test_nothing_of_others_is_found_in_host_and_disk(model: Path, tmp_path: Path) -> None:
    check(model, host_and_disk(model, tmp_path / "kv"), Tier.DISK)


def test_a_salt_that_is_ignored_is_found(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = KVStore.chain
    monkeypatch.setattr(KVStore, "chain", lambda store, salt=b"": chain(store))
    with pytest.raises(AssertionError):
        check(model, host_and_disk(model, tmp_path / "kv"), Tier.DISK)


@pytest.mark.long
def test_nothing_of_others_is_found_in_redis(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CELLAR_KV_REMOTE_KEY", "0123456789abcdef" * 2)
    monkeypatch.setattr(remote, "_LOOKUP_SECONDS", SECONDS / 4)
    with redis_server() as server:
        check(model, {"kv_remote": server.url, "kv_remote_size": SIZE}, Tier.REMOTE)
