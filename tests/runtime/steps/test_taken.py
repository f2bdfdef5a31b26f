"""Pages of a CPU's KV cache are there before steps write to them, and not all of them at once."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time

import numpy as np
import pytest
import torch

from cellar import LLM, SamplingParams
from cellar.core.specs import KVGroup, KVSpec
from cellar.runtime.pages import take
from cellar.runtime.steps import taken
from cellar.runtime.steps.arena import Arena
from cellar.runtime.steps.taken import TakenPages
from tests.limits import SECONDS, run_python, until

SPEC = KVSpec((KVGroup("full", "full", (0, 1), 4, 64, "float32"), KVGroup("w", "window", (2,), 2, 64, "bfloat16")), 32)

IS_GIVEN = sys.platform == "linux" and take(np.zeros(2**22, np.uint8))
"""Elsewhere, and before Linux 5.14, pages are given when they are touched, and not before."""


def resident(arena: Arena) -> int:
    """Bytes of the arena that the system has given. (Its mappings may be one with a neighbour's.)"""
    found = 0
    for buffer in arena.buffers:
        first = buffer.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        size = buffer.data_ptr() + buffer.nbytes - first
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        asked = ctypes.c_void_p(first), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        assert ctypes.CDLL(None).mincore(*asked) == 0
        found += int((pages & 1).sum()) * mmap.PAGESIZE
    return found


FREE_HEAP = """
import ctypes

import torch

from cellar.runtime.steps.arena import Arena
from tests.runtime.steps.test_taken import SPEC, resident

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.free(libc.malloc(30 * 2**20))  # what is smaller comes from the heap now
pieces, last = [libc.malloc(16 * 2**20) for _ in range(40)], libc.malloc(2**20)
for piece in pieces:
    ctypes.memset(piece, 1, 16 * 2**20)
    libc.free(piece)
arena = Arena(SPEC, 2000, torch.device("cpu"))
print(resident(arena), arena.nbytes)
"""


def test_a_new_arena_is_not_made_of_what_the_heap_has_free() -> None:
    """640 MB of it, behind which something lies: an arena of 300 MB would have all of its pages from the start."""
    there, nbytes = map(int, run_python(FREE_HEAP).split())
    assert nbytes > 250e6
    assert there < 0.1 * nbytes


def test_what_steps_will_use_is_taken_and_no_more() -> None:
    arena = Arena(SPEC, 2000, torch.device("cpu"))  # 300 MB
    slot = arena.nbytes // arena.num_slots
    pages = TakenPages(arena, ahead_nbytes=100 * slot)
    try:
        if not IS_GIVEN:
            until(lambda: not pages._thread.is_alive())
            pages.begins(np.array([1500], np.int32))
            pages.ended()
            assert not pages.num_taken
            return
        until(lambda: pages.num_taken >= 100)
        time.sleep(0.05)
        assert pages.num_taken < 400, "some more than is used"
        assert 0.9 * 100 * slot <= resident(arena) < 0.5 * arena.nbytes
        pages.begins(np.array([3, 1500, 7], np.int32))
        pages.begins(np.empty(0, np.int32))
        pages.ended()
        time.sleep(0.05)
        assert pages.num_taken < 400, "it rests while there is a step"
        pages.ended()
        until(lambda: pages.num_taken >= 1600)
        pages.begins(np.array([1999], np.int32))
        pages.ended()
        until(lambda: pages.num_taken == 2000)
        assert not any(buffer.any() for buffer in arena.buffers), "what is taken is zero, as it was"
    finally:
        pages.close()


def test_what_steps_have_written_stays() -> None:
    arena = Arena(SPEC, 500, torch.device("cpu"))
    for buffer in arena.buffers:
        buffer.fill_(3.0)
    pages = TakenPages(arena)
    until(lambda: pages.num_taken == (500 if IS_GIVEN else 0))
    pages.close()
    assert all(bool((buffer == 3.0).all()) for buffer in arena.buffers)


def test_it_ends_while_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(memory: object) -> bool:
        time.sleep(0.01)
        return True

    monkeypatch.setattr(taken, "take", slow)
    pages = TakenPages(Arena(SPEC, 20_000, torch.device("cpu")), ahead_nbytes=2**40)
    begin = time.perf_counter()
    pages.close()
    assert time.perf_counter() - begin < SECONDS / 10
    assert pages.num_taken < 20_000


def test_an_engine_tells_of_its_steps_and_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    begins, ended, steps = TakenPages.begins, TakenPages.ended, [0, 0]

    def seen(pages: TakenPages, slots: np.ndarray) -> None:
        told.extend(slots.tolist())
        steps[0] += 1
        begins(pages, slots)

    def seen_ended(pages: TakenPages) -> None:
        steps[1] += 1
        ended(pages)

    monkeypatch.setattr(TakenPages, "begins", seen)
    monkeypatch.setattr(TakenPages, "ended", seen_ended)
    with LLM(device="cpu", kv_cache_memory_bytes=2**26) as llm:
        llm.generate([{"prompt_token_ids": list(range(5, 105))}], SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(set(told)) == -(-101 // 32)
    assert steps[0] == steps[1] > 0
