"""Layout of the KV arena, and how many slots memory allows."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from cellar.core.config import CacheConfig
from cellar.core.errors import CapacityError, ConfigError
from cellar.core.specs import KVGroup, KVSpec
from cellar.runtime.memory import GIB, host_available, host_total, human, is_out_of_memory
from cellar.runtime.steps.arena import Arena, cpu_cache_nbytes, device_cache_nbytes, num_slots, what_decides

CPU, META = torch.device("cpu"), torch.device("meta")
SPEC = KVSpec(
    (
        KVGroup("full", "full", (0, 2), 3, 8, "float32"),
        KVGroup("window", "window", (1,), 2, 4, "bfloat16", window=9),
    ),
    chunk_size=16,
)


@pytest.mark.parametrize("device", [CPU, META], ids=["cpu", "accelerator"])
def test_layers_have_views_of_their_groups_buffer(device: torch.device) -> None:
    arena = Arena(SPEC, 5, device)
    there = 5 if device == CPU else 6  # an accelerator has a spare slot
    assert arena.num_slots == 5
    assert arena.nbytes == there * SPEC.chunk_nbytes()
    assert [tuple(k.shape) for k in arena.k] == [(there, 3, 16, 8), (there, 2, 16, 4), (there, 3, 16, 8)]
    assert [v.dtype for v in arena.v] == [torch.float32, torch.bfloat16, torch.float32]
    for cache in (*arena.k, *arena.v):
        assert cache.stride()[1:] == torch.empty(cache.shape).stride()[1:]


def test_a_slot_is_contiguous_on_an_accelerator_and_a_layer_on_the_cpu() -> None:
    slot = 2 * 2 * 3 * 16 * 8
    there = Arena(SPEC, 5, META)
    assert there.k[0].stride(0) == slot
    assert there.v[2].storage_offset() == 3 * 3 * 16 * 8
    here = Arena(SPEC, 5, CPU)
    assert all(cache.is_contiguous() for cache in (*here.k, *here.v))


def test_an_accelerators_buffers_fill_segments_of_the_allocator() -> None:
    for slots in (1, 5, 1000, 12_345):
        for buffer in Arena(SPEC, slots, META).buffers:
            whole = buffer.untyped_storage().nbytes()
            assert whole % 2**21 == 0
            assert buffer.nbytes <= whole < buffer.nbytes + 2**21


def test_a_new_arena_is_zero_and_its_views_do_not_overlap() -> None:
    arena = Arena(SPEC, 3, CPU)
    caches = [*arena.k, *arena.v]
    assert not any(cache.any() for cache in caches)
    for n, cache in enumerate(caches):
        cache.fill_(n + 1)
    assert [float(cache.float().mean()) for cache in caches] == [1, 2, 3, 4, 5, 6]


def test_groups_that_need_another_arena_are_refused() -> None:
    with pytest.raises(ConfigError, match="state"):
        Arena(KVSpec((KVGroup("s", "state", (0,), 1, 8, "float32"),)), 1, CPU)
    with pytest.raises(ConfigError, match="no group"):
        Arena(KVSpec((KVGroup("full", "full", (1,), 1, 8, "float32"),)), 1, CPU)


def test_a_large_arena_takes_no_memory_before_it_is_used() -> None:
    before = _resident()
    arena = Arena(SPEC, 2 * GIB // SPEC.chunk_nbytes(), CPU)
    assert arena.nbytes > 1.9 * GIB
    assert _resident() - before < 2**28


def test_the_cpu_gets_what_was_asked_for_or_a_quarter_of_what_is_free() -> None:
    assert cpu_cache_nbytes(CacheConfig(), 8 * GIB) == 2 * GIB
    assert cpu_cache_nbytes(CacheConfig(), 80 * GIB) == 4 * GIB
    assert cpu_cache_nbytes(CacheConfig(kv_cache_memory_bytes=6 * GIB), 8 * GIB) == 6 * GIB
    with pytest.raises(CapacityError, match="only 8 GiB of memory are free; lower it"):
        cpu_cache_nbytes(CacheConfig(kv_cache_memory_bytes=9 * GIB), 8 * GIB)


def test_an_accelerator_gets_its_share_less_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellar.runtime.steps.arena.device_total", lambda device: 100 * GIB)
    assert device_cache_nbytes(CacheConfig(gpu_memory_utilization=0.5), 20 * GIB, META) == 30 * GIB
    asked = CacheConfig(kv_cache_memory_bytes=70 * GIB)
    assert device_cache_nbytes(asked, 20 * GIB, META) == 70 * GIB
    with pytest.raises(CapacityError, match="only 20 GiB are free"):
        device_cache_nbytes(asked, 80 * GIB, META)
    with pytest.raises(CapacityError, match=r"gpu_memory_utilization 0\.5 allows 50 GiB"):
        device_cache_nbytes(CacheConfig(gpu_memory_utilization=0.5), 50 * GIB, META)
    with pytest.raises(CapacityError, match=r"raise it above 0\.60, lower max_num_batched_tokens, end other"):
        device_cache_nbytes(CacheConfig(gpu_memory_utilization=0.5), 60 * GIB, META)
    with pytest.raises(CapacityError, match=r"with the KV cache; lower max_num_batched_tokens, end other"):
        device_cache_nbytes(CacheConfig(gpu_memory_utilization=0.5), 99 * GIB, META)  # no share would be enough


@pytest.mark.parametrize(
    ("device", "asked", "option"),
    [
        ("cpu", None, "kv_cache_memory_bytes"),
        ("cpu", 2**20, "kv_cache_memory_bytes"),
        ("meta", None, "gpu_memory_utilization"),
        ("meta", 2**20, "kv_cache_memory_bytes"),
    ],
)
def test_the_option_is_named_that_helps(device: str, asked: int | None, option: str) -> None:
    decides = what_decides(CacheConfig(kv_cache_memory_bytes=asked), torch.device(device))
    assert decides == option
    chunk = SPEC.chunk_nbytes()
    for nbytes in (10 * chunk, chunk - 1):
        with pytest.raises(CapacityError, match=rf"raise {option}\.$"):
            num_slots(SPEC, nbytes, 10_000, decides)


def test_slots_must_hold_the_longest_request() -> None:
    chunk = SPEC.chunk_nbytes()
    assert num_slots(SPEC, 10 * chunk + 5, 160, "x") == 10
    with pytest.raises(CapacityError, match="lower max_model_len to at most 160,"):
        num_slots(SPEC, 10 * chunk + 5, 161, "x")
    with pytest.raises(CapacityError, match=r"one chunk .*, but there are"):
        num_slots(SPEC, chunk - 1, 161, "x")


def test_memory_of_this_host(tmp_path: Path) -> None:
    assert 0 < host_available() <= host_total()
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 100 kB\nMemAvailable:   3 kB\n")
    assert host_available(info) == 3072
    assert host_total(info) == 102400
    assert host_total(tmp_path / "none") > 2**20
    assert [human(n) for n in (5, 2048, 3 * 2**20, 1.5 * GIB)] == ["5 B", "2 KiB", "3 MiB", "1.5 GiB"]


def _resident() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.EACCES, "Permission denied"), False),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_what_says_that_there_is_no_more_memory(error: Exception, says: bool) -> None:
    assert is_out_of_memory(error) is says
