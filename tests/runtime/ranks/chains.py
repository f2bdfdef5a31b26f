"""Chains of sums in micro-batches, on simulated streams: the real copies and boxes, between products that a person can
compute.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cellar.core.micro_batches import LANES, MicroBatchSizes
from cellar.models.model import Hidden, Part
from cellar.ops.added import added_definition
from cellar.ops.norm.definition import add_rms_norm_definition
from cellar.runtime.ranks import micro_batches, part_boxes
from cellar.runtime.ranks.micro_batches import CopiedSums, MicroBatches
from cellar.runtime.ranks.part_boxes import PartBoxes, PartSizes
from tests.runtime.ranks.streams import Machine, bytes_at

CPU = torch.device("cpu")
EPS = 1e-5
WIDTH = 3
STEPS, LAYERS = 2, 2
LAST = 2 * LAYERS
"""Of a micro-batch's sums in a step, counted from 1: one behind each attention and one behind each feed-forward."""

PLAIN = (0, LAST, 1, 0, LAST - 1)
"""How many of them are alone, before those with residual and norm: 0 in models whose norm is RMSNorm, else all."""

At = tuple[str, int, int, int]
"""What it is, step, number of the sum, and micro-batch."""

NORM = torch.linspace(0.5, 1.5, WIDTH)


def plain_sums(step: int, k: int) -> int:
    return PLAIN[(2 * step + k) % len(PLAIN)]


def first_rows(counts: Sequence[int]) -> list[Tensor]:
    """Of micro-batches of so many tokens each."""
    rows = torch.randn((sum(counts), WIDTH), generator=torch.Generator().manual_seed(sum(counts)))
    return list(rows.split_with_sizes(list(counts)))


def seen(x: Tensor) -> Tensor:
    """What a micro-batch leaves for those behind it."""
    return x.sum(0) * 0.5


def product(rank: int, x: Tensor, cache: Tensor | None) -> Tensor:
    """A rank's part of a sum. cache: what this micro-batch and those before it have left, in attention."""
    return torch.sin(x * (rank + 1.5) + (1.0 if cache is None else cache.sum(0))) * 3.0**rank


def next_rows(rows: Sequence[Tensor]) -> list[Tensor]:
    """What a step makes of the last rows of all micro-batches, for the next one."""
    return list(torch.cat(list(rows)).roll(1, 0).cos().split_with_sizes([len(each) for each in rows]))


def own_rows(rank: int, ranks: int, count: int) -> slice:
    """That a rank adds."""
    each = math.ceil(count / ranks)
    return slice(rank * each, rank * each + each)


@functools.cache
def expected(ranks: int, counts: tuple[int, ...]) -> dict[At, Tensor]:
    """One thing after the other, all rows on one device."""
    found: dict[At, Tensor] = {}
    rows = first_rows(counts)
    residuals, parts = list(rows), list(rows)

    def summed(step: int, s: int, k: int) -> Tensor:
        total = found["sum", step, s, k] = added_definition(parts[k])
        x, residuals[k] = add_rms_norm_definition(residuals[k], total, NORM, EPS)
        found["normed", step, s, k], found["residual", step, s, k] = x, residuals[k]
        return x

    for step in range(STEPS):
        residuals[:] = rows
        for layer in range(LAYERS):
            first, cache = 2 * layer, torch.empty(len(rows), WIDTH)
            for k in range(len(rows)):
                x = summed(step, first, k) if layer else add_rms_norm_definition(residuals[k], None, NORM, EPS)[0]
                cache[k] = seen(x)
                parts[k] = torch.stack([product(rank, x, cache[: k + 1]) for rank in range(ranks)])
                x = summed(step, first + 1, k)
                parts[k] = torch.stack([product(rank, x, None) for rank in range(ranks)])
        for k, part in enumerate(parts):
            found["sum", step, LAST, k] = added_definition(part)
            found["whole", step, LAST, k] = residuals[k] + found["sum", step, LAST, k]
        rows = next_rows([found["whole", step, LAST, k] for k in range(len(rows))])
    return found


class Ranked:
    """A rank's host, whose micro-batches pass a few layers; what it has of sums, and what products read, is in `found`.

    Memory is used again as soon as the stream goes on: a lane has one buffer for what its attention leaves, and a
    micro-batch one for what its feed-forward leaves.
    """

    def __init__(self, machine: Machine, boxes: PartBoxes, counts: Sequence[int]) -> None:
        self.found: dict[At, Tensor] = {}
        self.noted: list[tuple[int, int]] = []
        self._machine = machine
        self._rank = boxes.rank
        device, sizes = torch.device("cuda", boxes.rank), MicroBatchSizes(1, max(counts))
        self._lanes = MicroBatches(sizes, boxes, device, lambda *moved: self.noted.append(moved))
        self._rows = first_rows(counts)
        self._cache = torch.full((LAYERS, len(counts), WIDTH), torch.nan)
        self._attended = [torch.full((max(counts), WIDTH), torch.nan) for _ in range(LANES)]
        self._fed = [torch.full_like(rows, torch.nan) for rows in self._rows]
        for memory in (*self._attended, *self._fed):
            machine.lend(memory)

    def program(self) -> Iterator[None]:
        """Queues one layer after another."""
        for step in range(STEPS):
            hidden = [Hidden(rows) for rows in self._rows]
            with self._lanes.step():
                for layer in range(LAYERS):
                    for k, h in enumerate(hidden):
                        with self._lanes.at(k):
                            hidden[k] = self._layer(step, layer, k, h)
                        yield
                for k, h in enumerate(hidden):
                    with self._lanes.at(k):
                        self.found["whole", step, LAST, k] = self._whole(step, k, h)
                    yield
            self._mix([self.found["whole", step, LAST, k] for k in range(len(hidden))])
            yield

    def _layer(self, step: int, layer: int, k: int, h: Hidden) -> Hidden:
        before = 2 * layer
        x, residual = self._summed(step, before, k, h)
        self._lanes.await_turn(k)
        cache = self._cache[layer]
        self._launch(lambda: cache[k].copy_(seen(x)))
        self._lanes.end_turn(k)
        part = self._attended[k % LANES][: len(x)]
        self._product((step, before, k), x, cache[: k + 1], part)
        y, residual = self._summed(step, before + 1, k, Hidden(residual, part=Part(part)))
        self._product((step, before + 1, k), y, None, self._fed[k])
        return Hidden(residual, part=Part(self._fed[k]))

    def _summed(self, step: int, s: int, k: int, h: Hidden) -> tuple[Tensor, Tensor]:
        """The norm of all rows, and the residual."""
        comm = self._lanes.comm(k)
        if h.part is None:
            return self._normed(h.residual, None)
        if s <= plain_sums(step, k):
            total = self.found["sum", step, s, k] = comm.all_reduce(h.part.x)
            x, residual = self._normed(h.residual, total)
        else:
            x, residual = comm.add_rms_norm(h.part.x, h.residual, NORM, EPS)
        self.found["residual", step, s, k] = residual
        return x, residual

    def _normed(self, residual: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """A kernel."""
        x, total = torch.full_like(residual, torch.nan), torch.full_like(residual, torch.nan)

        def kernel() -> None:
            for out, result in zip((x, total), add_rms_norm_definition(residual, delta, NORM, EPS), strict=True):
                out.copy_(result)

        self._launch(kernel)
        return x, total

    def _product(self, at: tuple[int, int, int], x: Tensor, cache: Tensor | None, part: Tensor) -> None:
        """A kernel that reads x where that lies, when it runs."""

        def kernel() -> None:
            self.found["normed", *at] = x.clone()
            part.copy_(product(self._rank, x, cache))

        self._launch(kernel)

    def _whole(self, step: int, k: int, h: Hidden) -> Tensor:
        assert h.part is not None
        if plain_sums(step, k) == LAST:
            total = self.found["sum", step, LAST, k] = self._lanes.comm(k).all_reduce(h.part.x)
            h = Hidden(h.residual, total)
            assert self._lanes.whole(k, h) is h, "nothing is left to be added up"
            return h.residual + total
        h = self._lanes.whole(k, h)
        assert (h.delta, h.part) == (None, None)
        return h.residual

    def _mix(self, wholes: Sequence[Tensor]) -> None:
        def kernel() -> None:
            for rows, new in zip(self._rows, next_rows(wholes), strict=True):
                rows.copy_(new)

        self._launch(kernel)

    def _launch(self, kernel: Callable[[], object]) -> None:
        self._machine.launch(self._rank, kernel)


def _called(machine: Machine, name: str, *arguments: Any) -> Any:
    """By a method, as that is now."""
    return getattr(machine, name)(*arguments)


@contextmanager
def simulated(machine: Machine) -> Iterator[None]:
    """Micro-batches made and used inside are this machine's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batches, "torch", SimpleNamespace(cuda=machine.cuda, add=torch.add))
        for name in ("copy_far", "write", "wait_for", "added_rms_norm"):
            patch.setattr(micro_batches, name, partial(_called, machine, name))
        patch.setattr(part_boxes, "_Memory", bytes_at)
        yield


def boxes_on(machine: Machine, sizes: PartSizes) -> list[PartBoxes]:
    """Of every rank."""
    memory = [torch.from_numpy(np.zeros(sizes.total, np.uint8)) for _ in range(sizes.ranks)]  # torch asks other threads
    addresses = [machine.lend(box) for box in memory]
    return [PartBoxes(addresses, rank, sizes, CPU) for rank in range(sizes.ranks)]


@dataclass(frozen=True)
class Order:
    """Of events; see `Machine.run`."""

    seed: int
    restless: float
    ahead: bool
    one_queue: bool = False

    def machine(self, ranks: int) -> Machine:
        return Machine(ranks, self.one_queue)

    def run(self, machine: Machine, programs: Sequence[Iterator[None]]) -> None:
        machine.run(programs, random.Random(self.seed), self.restless, self.ahead)


def check_sums(ranks: int, counts: Sequence[int], order: Order) -> None:
    """Every rank has every sum, of all parts in the order of ranks, and its rows of residuals; products have read all
    rows of every norm.
    """
    machine = order.machine(ranks)
    row = WIDTH * 4
    sizes = PartSizes(LANES, ranks, max(counts) * row, row)
    with simulated(machine):
        hosts = [Ranked(machine, boxes, counts) for boxes in boxes_on(machine, sizes)]
        order.run(machine, [host.program() for host in hosts])
    wanted = expected(ranks, tuple(counts))
    for rank, host in enumerate(hosts):
        for at, total in wanted.items():
            what, step, s, k = at
            by_rows = s > plain_sums(step, k)
            if what != "sum" or not by_rows:
                rows = own_rows(rank, ranks, counts[k]) if what == "residual" and by_rows else slice(None)
                assert torch.equal(host.found.pop(at), total[rows]), f"{at} of rank {rank}"
        assert not any(s for _, _, s, _ in host.found), "nothing else but what the first norms have made"
        moved = []
        for count in counts:
            own = len(range(count)[own_rows(rank, ranks, count)])
            moved += [(count * row, ((ranks - 1) * own + count - own) * row)] * STEPS * LAST
        assert sorted(host.noted) == sorted(moved)


class Sending:
    """A rank's host that has one sum after another in one buffer, and writes to whatever it has sent."""

    def __init__(self, machine: Machine, boxes: PartBoxes, parts: Sequence[Tensor]) -> None:
        self.found: list[Tensor] = []
        self._rank, self._ranks = boxes.rank, boxes.sizes.ranks
        self._launch = partial(machine.launch, boxes.rank)
        self._comm = CopiedSums(0, boxes, torch.device("cuda", boxes.rank), lambda *_: None)
        self._parts = parts
        self._memory = torch.full((max(map(len, parts)), WIDTH), torch.nan)
        machine.lend(self._memory)

    def program(self) -> Iterator[None]:
        for part in self._parts:
            self._sum(part, self._memory[: len(part)])
            yield

    def _sum(self, part: Tensor, memory: Tensor) -> None:
        own = own_rows(self._rank, self._ranks, len(part))

        def add() -> None:
            self.found.append(others.clone())
            sums[own] = memory[own]
            memory.fill_(torch.nan)

        def read() -> None:
            self.found.append(sums.clone())
            sums[own] = torch.nan

        self._launch(lambda: memory.copy_(part))
        _, others, sums = self._comm._pieces(memory)
        self._launch(add)
        self._comm._everywhere(sums)
        self._launch(read)


def check_sends(ranks: int, counts: Sequence[int], order: Order) -> None:
    """What is launched behind pieces, or rows, finds those of all ranks, and may write to where this rank's lay."""
    machine = order.machine(ranks)
    row = WIDTH * 4
    parts = [[rows * (rank + 2.0) for rows in first_rows(counts)] for rank in range(ranks)]
    with simulated(machine):
        boxes = boxes_on(machine, PartSizes(LANES, ranks, max(counts) * row, row))
        hosts = [Sending(machine, box, part) for box, part in zip(boxes, parts, strict=True)]
        order.run(machine, [host.program() for host in hosts])
    for rank, host in enumerate(hosts):
        wanted = []
        for k, count in enumerate(counts):
            own = own_rows(rank, ranks, count)
            wanted.append(torch.stack([parts[r][k][own] for r in range(ranks) if r != rank]))
            wanted.append(torch.cat([parts[r][k][own_rows(r, ranks, count)] for r in range(ranks)]))
        assert len(host.found) == len(wanted)
        assert all(map(torch.equal, host.found, wanted)), f"of rank {rank}"
