"""Decodes over KV in host memory, divided between the CPU and the device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from cellar.core.specs import KVGroup, KVSpec
from cellar.ops.attention import AttentionWork
from cellar.ops.kv_format import as_bytes
from cellar.runtime.offload.host_kv import Divided, Staged, divided, wait_for_each_other
from cellar.runtime.offload.staged import CopiedChunks, Run, StagedChunks, Stores, runs_of
from cellar.runtime.steps.arena import Arena

SIZE = 16
IntArray = NDArray[np.int32]


def parts(spans: list[tuple[int, int]], over_link: float, *, by_cpu: bool = True, brings: bool = False) -> Divided:
    """Of spans [start, stop), each in a row of its own."""

    def plan(row: IntArray, start: IntArray, stop: IntArray, device: torch.device) -> list[AttentionWork]:
        return []

    row = np.arange(len(spans), dtype=np.int32)
    start, stop = np.array(spans, np.int32).T
    table = np.arange(len(spans) * 8, dtype=np.int32).reshape(len(spans), 8)
    return divided(row, start, stop, table, SIZE, plan, torch.device("cpu"), by_cpu, over_link, brings)


def staged(found: Divided) -> Staged | None:
    """Of what the device attends to, if it is one part."""
    (part,) = found.parts
    assert part.tokens.tolist() == list(range(len(found.rest)))
    return part.staged


def test_the_device_attends_to_a_share_of_the_positions() -> None:
    decodes = [(29, 30), (9, 10), (39, 40), (19, 20)]
    for share, by_cpu in ((0.0, [0, 1, 2, 3]), (0.05, [0, 1, 2, 3]), (0.2, [0, 1, 2]), (0.5, [0, 1]), (0.9, [])):
        found = parts(decodes, share)
        assert found.tokens.tolist() == by_cpu
        assert found.rest.tolist() == [n for n in range(4) if n not in by_cpu]
        assert [part.staged for part in found.parts] == [None] * (len(by_cpu) < 4)
    assert parts(decodes, 0.5, by_cpu=False).tokens.tolist() == []


def test_beside_fresh_prompts_the_cpu_attends_to_all_decodes() -> None:
    """The prompts are staged on the device, and what lies in host memory is not; one that goes on is not staged."""
    found = parts([(29, 30), (9, 10), (0, 20)], 0.5)
    assert found.tokens.tolist() == [0, 1]
    assert (brought := staged(found)) is not None
    assert brought.slots.tolist() == [16, 17]
    found = parts([(29, 30), (9, 10), (5, 20)], 0.5)
    assert found.tokens.tolist() == [0]
    assert found.rest.tolist() == list(range(1, 17))
    assert staged(found) is None


def test_prompts_that_go_on_are_apart_from_fresh_ones() -> None:
    """What goes on reads chunks of before in host memory; the others need none, and are staged."""
    found = parts([(29, 30), (16, 20), (0, 20), (0, 3), (40, 41)], 0.5)
    assert found.tokens.tolist() == [0, 28]
    assert found.rest.tolist() == list(range(1, 28))
    fresh, going = found.parts
    assert fresh.tokens.tolist() == list(range(4, 27))
    assert fresh.staged is not None
    assert fresh.staged.slots.tolist() == [16, 17, 24]
    assert fresh.staged.table.tolist() == [[0, 1], [2, -1]]
    assert going.tokens.tolist() == [0, 1, 2, 3]
    assert going.staged is None


def test_what_decodes_of_the_device_attend_to_is_brought() -> None:
    """All chunks of their rows, numbered anew; the last one of each is written. Not beside anything else."""
    found = parts([(29, 30), (9, 10), (39, 40), (16, 17)], 0.75, brings=True)
    assert found.tokens.tolist() == [0]
    assert (brought := staged(found)) is not None
    assert brought.slots.tolist() == [8, 16, 17, 18, 24, 25]
    assert brought.table.tolist() == [[0, -1, -1], [1, 2, 3], [4, 5, -1]]
    assert brought.grown is not None
    assert brought.grown.tolist() == [0, 3, 5]
    assert brought.mapping.tolist() == [9, 16 + 39, 4 * 16 + 16]
    assert staged(parts([(29, 30), (9, 10)], 0.5, by_cpu=False, brings=True)) is None
    assert staged(parts([(29, 30), (9, 10), (5, 20)], 0.5, brings=True)) is None


def test_staged_chunks_are_brought_and_those_that_grew_go_back() -> None:
    spec = KVSpec((KVGroup("all", "full", (0, 1), 2, 16, "int4"),), SIZE)
    arena = Arena(spec, 6, torch.device("cpu"))
    for n, buffer in enumerate(arena.buffers):
        as_bytes(buffer).copy_(torch.randint(0, 255, as_bytes(buffer).shape, dtype=torch.uint8).add_(n))
    before = [as_bytes(x).clone() for x in (*arena.k, *arena.v)]
    chunks = StagedChunks(arena, torch.tensor([4, 1, 5]), torch.tensor([0, 2]))
    chunks.bring(1)
    assert torch.equal(as_bytes(chunks.k[1]), before[1][[4, 1, 5]])
    assert torch.equal(as_bytes(chunks.v[1]), before[3][[4, 1, 5]])
    for cache in (chunks.k[1], chunks.v[1]):
        as_bytes(cache).fill_(7)
    chunks.keep(1)
    for found, kept in zip((*arena.k, *arena.v), before, strict=True):
        written = found is arena.k[1] or found is arena.v[1]
        assert torch.equal(as_bytes(found)[[0, 1, 2, 3]], kept[[0, 1, 2, 3]])
        assert bool((as_bytes(found)[[4, 5]] == 7).all()) == written


def test_chunks_of_prompts_go_to_host_memory_by_runs() -> None:
    """In every format, and no chunk but theirs is touched."""
    for dtype in ("bfloat16", "int4"):
        spec = KVSpec((KVGroup("all", "full", (0, 1), 2, 16, dtype),), SIZE)
        arena, cpu = Arena(spec, 8, torch.device("cpu")), torch.device("cpu")
        slots = np.array([2, 3, 4, 0, 6, 7])
        runs = runs_of(slots)
        assert runs == [Run(2, 0, 3), Run(0, 3, 1), Run(6, 4, 2)]
        chunks = CopiedChunks(arena, torch.from_numpy(slots), Stores(arena, cpu), runs, soon=False)
        for j in (0, 1):
            chunks.bring(j)
            for n, cache in enumerate((chunks.k[j], chunks.v[j])):
                as_bytes(cache).copy_(torch.arange(1, 7, dtype=torch.uint8).add_(10 * n + 20 * j).view(-1, 1, 1, 1))
            chunks.keep(j)
        for j in (0, 1):
            for n, found in enumerate((arena.k[j], arena.v[j])):
                written = as_bytes(found).flatten(1)
                assert bool((written == written[:, :1]).all())
                each = written[:, 0].tolist()
                add = 10 * n + 20 * j
                assert each == [4 + add, 0, 1 + add, 2 + add, 3 + add, 0, 5 + add, 6 + add]


def test_runs_of_one_slot_and_of_all() -> None:
    assert runs_of(np.array([5])) == [Run(5, 0, 1)]
    assert runs_of(np.arange(3, 9)) == [Run(3, 0, 6)]
    assert runs_of(np.array([3, 2, 1])) == [Run(3, 0, 1), Run(2, 1, 1), Run(1, 2, 1)]


def test_a_pass_that_reads_what_it_stages_waits_for_it() -> None:
    """A prompt that goes on beside fresh ones reads its own chunks, unless it shares some of theirs."""
    fresh, going = parts([(0, 20), (0, 3), (20, 40)], 0.0).parts
    assert fresh.staged is not None
    assert fresh.staged.slots.tolist() == [0, 1, 8]
    assert going.reads is not None
    assert going.reads.tolist() == [16, 17, 18]
    apart = parts([(0, 20), (0, 3), (20, 40)], 0.0)
    assert not wait_for_each_other([apart])
    assert not wait_for_each_other([parts([(0, 20)], 0.0), parts([(0, 30)], 0.0)]), "nobody reads host memory"
    assert wait_for_each_other([parts([(0, 20)], 0.0), parts([(5, 30)], 0.0)]), "of another batch, the same slots"
    brought = parts([(29, 30)], 0.9, brings=True)
    assert staged(brought) is not None
    assert wait_for_each_other([parts([(0, 20)], 0.0), brought]), "what decodes need is brought from there"
    assert not wait_for_each_other([])


def test_slots_that_were_given_back_are_copied_together() -> None:
    """They are taken again the other way round."""
    row, start, stop = np.array([0, 1], np.int32), np.zeros(2, np.int32), np.array([40, 20], np.int32)
    table = np.array([[9, 8, 7, -1], [6, 5, -1, -1]], np.int32)
    found = divided(row, start, stop, table, SIZE, lambda *_: [], torch.device("cpu"), True)
    made = staged(found)
    assert made is not None
    assert made.slots.tolist() == [5, 6, 7, 8, 9]
    assert runs_of(made.slots) == [Run(5, 0, 5)]
    assert made.table.tolist() == [[4, 3, 2], [1, 0, -1]]
    numbers = [made.slots[n // SIZE] for n in made.mapping.tolist()]
    assert numbers == [9] * 16 + [8] * 16 + [7] * 8 + [6] * 16 + [5] * 4
    assert [n % SIZE for n in made.mapping.tolist()] == [k % 16 for k in range(40)] + [k % 16 for k in range(20)]
