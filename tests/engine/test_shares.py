"""A machine dealt out to several engines: nobody plans with what another has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cellar.core.config import EngineConfig
from cellar.core.errors import CapacityError, ConfigError
from cellar.engine import shares as module
from cellar.engine.shares import VISIBLE, Share, shares_of

GIB = 2**30


def cpu(count: int, **options: Any) -> list[Share]:
    return list(shares_of(EngineConfig.of(device="cpu", **options), count))


def test_a_processor_is_divided() -> None:
    shares = cpu(3, num_threads=8, kv_offloading_size=6, kv_cache_memory_bytes=3 * 2**20, max_num_seqs=10)
    assert [share.threads for share in shares] == [3, 3, 2]
    assert [share.config.device.num_threads for share in shares] == [3, 3, 2]
    for share in shares:
        cache = share.config.cache
        assert (cache.kv_cache_memory_bytes, cache.kv_offloading_size) == (2**20, 2)
        assert (share.config.schedule.max_num_seqs, share.gpus) == (10, ())


def test_threads_that_nobody_asked_for_stay_free_to_choose_within_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    shares = cpu(4, kv_cache_memory_bytes=4 * 2**20)
    assert [(share.threads, share.config.device.num_threads) for share in shares] == [(1, None)] * 4


def test_all_weights_leave_what_kv_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = module._spec(EngineConfig()).nbytes()
    monkeypatch.setattr(module, "host_available", lambda: 4 * weights + 4 * 2**20)
    assert [share.config.cache.kv_cache_memory_bytes for share in cpu(4)] == [2**18] * 4
    with pytest.raises(CapacityError, match=r"5 replicas take .* set replicas to at most 4\."):
        cpu(5)
    with pytest.raises(CapacityError, match="lower it"):
        cpu(2, kv_cache_memory_bytes=GIB)


def test_each_engine_has_a_directory_and_a_part_of_the_disk() -> None:
    shares = cpu(2, kv_disk_path="/somewhere", kv_disk_size=5, kv_remote="redis://x", kv_remote_size=3)
    caches = [share.config.cache for share in shares]
    assert [cache.kv_disk_path for cache in caches] == ["/somewhere/replica-0", "/somewhere/replica-1"]
    assert [(cache.kv_disk_size, cache.kv_remote_size) for cache in caches] == [(2.5, 1.5)] * 2


@pytest.mark.parametrize(("listed", "names"), [(None, "0123"), ("7, 3,2,5", "7325")])
def test_gpus_are_dealt_out(monkeypatch: pytest.MonkeyPatch, listed: str | None, names: str) -> None:
    monkeypatch.setattr(module, "resolve_device", lambda name: torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv(VISIBLE, raising=False)
    if listed is not None:
        monkeypatch.setenv(VISIBLE, listed)
    config = EngineConfig.of(tensor_parallel_size=2, kv_cache_memory_bytes=GIB, kv_offloading_size=8)
    shares = shares_of(config, 2)
    assert [share.gpus for share in shares] == [tuple(names[:2]), tuple(names[2:])]
    for share in shares:
        assert (share.config.cache.kv_cache_memory_bytes, share.config.cache.kv_offloading_size) == (GIB, 4)
    with pytest.raises(ConfigError, match=r"need 6 GPUs, but this machine has 4; set replicas to at most 2\."):
        shares_of(config, 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"plan": "a file"}, "plan"), ({"device_memory": 1.0}, "device_memory"), ({"device": "cuda:1"}, "cuda:1")],
)
def test_what_does_not_work_with_several(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shares_of(EngineConfig.of(**options), 2)
