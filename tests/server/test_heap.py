"""What the engine's process takes from the system at its start, it keeps."""

from __future__ import annotations

import json
import sys

import pytest

from cellar.server.heap import SpareMemory
from tests.limits import run_python

CODE = """
import json, sys
from dataclasses import replace
from cellar.models.registry import open_model, shipped_config
from cellar.server.heap import one_heap, reserve_steps

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

spec = open_model(shipped_config("llama-3.2-1b"), "float32").spec
spec = replace(spec, hidden_size=384, num_heads=6, num_kv_heads=2, head_dim=64, intermediate_size=1024, vocab_size=4096)
one_heap()
sizes = [resident()]
for tokens, rows in ((2048, 256), (2048, 256), (10**6, 256)):
    reserve_steps(spec, tokens, rows)
    sizes.append(resident())
print(json.dumps(sizes))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_what_steps_will_use_is_taken_once_and_kept() -> None:
    before, first, again, most = json.loads(run_python(CODE))
    kernels = 64 * 2**20
    nbytes = 2 * 4 * (2048 * (4 * 384 + 2 * 10 * 64 + 3 * 1024) + 3 * 256 * 4096) + kernels
    assert first - before == pytest.approx(nbytes, abs=20 * 2**20)
    assert abs(again - first) < 4 * 2**20  # it is there already
    assert most - before == pytest.approx(256 * 2**20 + kernels, abs=20 * 2**20)


def test_spare_memory_is_returned_once_nobody_asks_for_more() -> None:
    sizes = [100, 100, 400, 600, 600, 150, 150, 150, 300, 301, 290, 295]
    mebibytes = iter(sizes)
    given: list[int] = []
    spare = SpareMemory(lambda: next(mebibytes) * 2**20, lambda: given.append(1))
    looks = [spare.look() for _ in range(9)]
    # at first; it grows, twice; it rests: returned, 150 are left and are used; again; it grows for good
    assert looks == [False, False, False, True, False, False, False, True, False]
    assert len(given) == 2
    assert next(mebibytes, None) is None


HOLES = """
import json
from cellar.core.memory import resident_bytes
from cellar.server.heap import SpareMemory, one_heap

one_heap()
spare = SpareMemory()
sizes = [resident_bytes()]
blocks = [b"x" * (4000 + k % 2) for k in range(50_000)]  # more than Python keeps itself, in pieces of the heap
kept = blocks[::100]
del blocks
spare.look()
sizes.append(resident_bytes())
spare.look()
sizes.append(resident_bytes())
print(json.dumps(sizes))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_what_lies_between_pieces_that_stay_is_returned() -> None:
    before, holes, after = json.loads(run_python(HOLES))
    assert holes - before > 150e6
    assert after - before < 20e6


WALKS = """
import gc, time, weakref
from cellar.server import heap

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node), node

heap.LOOK_SECONDS = 0.5
old, held = cycle()
gc.collect()  # it is old now
gc.disable()
heap.return_spare_memory()
del held
print(gc.get_threshold(), old() is None)
until = time.monotonic() + 60
while old() is not None and time.monotonic() < until:
    time.sleep(0.01)
print(old() is None)
"""


def test_cycles_that_are_old_are_collected_at_each_look() -> None:
    assert run_python(WALKS).split("\n")[:2] == ["(700, 10, 1000) False", "True"]
