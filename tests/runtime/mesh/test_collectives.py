"""Collectives on thread ranks are their definitions, exact on integers, whatever comes first; and they are counted."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import Tensor

from cellar.core.errors import DeviceError
from cellar.core.layouts import Mesh
from cellar.models.collectives import Collectives
from cellar.runtime.mesh.threads import ThreadCollectives, ThreadMesh

MESH = Mesh(2, 2, 2)
AXES = ("x", "y", "z", "zy", "zyx", "xz")


def part_of(rank: int, *shape: int) -> Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("axes", AXES)
def test_collectives_are_sums_and_pieces_of_their_group(axes: str) -> None:
    k = MESH.count(axes)
    uneven = [3 * at for at in range(k)]
    total = sum(uneven)

    def one(c: Collectives) -> tuple[Tensor, ...]:
        x, at = part_of(c.rank, 16, 8), MESH.index(c.rank, axes)
        return (
            c.all_reduce(x, axes, "a"),
            c.reduce_scatter(x, 1, axes, "b"),
            c.reduce_scatter(part_of(c.rank, total, 2), 0, axes, "c", uneven),
            c.all_gather(x[: uneven[at]], 0, axes, "d", uneven),
            c.all_to_all(x, 0, 1, axes, "e"),
            c.all_to_all(part_of(c.rank, total, 8), 0, 1, axes, "f", split_sizes=uneven),
        )

    found = ThreadMesh(MESH).run(one)
    for rank in range(MESH.size):
        group, at = MESH.group(rank, axes), MESH.index(rank, axes)
        assert group[at] == rank
        xs = [part_of(other, 16, 8) for other in group]
        longs = [part_of(other, total, 2) for other in group]
        wide = [part_of(other, total, 8) for other in group]
        expected = (
            sum(xs),
            torch.stack(xs).sum(0).chunk(k, 1)[at],
            torch.stack(longs).sum(0).split(uneven)[at],
            torch.cat([x[:n] for x, n in zip(xs, uneven, strict=True)]),
            torch.cat([x.chunk(k)[at] for x in xs], 1),
            torch.cat([x.split(uneven)[at] for x in wide], 1),
        )
        for mine, wanted in zip(found[rank], expected, strict=True):
            assert torch.equal(mine, wanted)  # type: ignore[arg-type]


def test_turning_there_and_back_changes_nothing() -> None:
    homes = [0, 5, 2, 1]

    def one(c: Collectives) -> bool:
        x = part_of(c.rank, 8, 4, 3)
        there = c.all_to_all(x, 0, 1, "zy", "q", split_sizes=homes)
        assert there.shape == (homes[MESH.index(c.rank, "zy")], 16, 3)
        return torch.equal(c.all_to_all(there, 1, 0, "zy", "a", join_sizes=homes), x)

    assert all(ThreadMesh(MESH).run(one))


def test_sums_are_in_the_order_of_ranks_whoever_comes_first() -> None:
    """Floats whose sum depends on the order, ranks that come in every order: the same bits, on every rank."""
    numbers = (1e8, 1.0, -1e8, 1.0)
    expected = torch.tensor(numbers[0])
    for number in numbers[1:]:
        expected = expected + number
    shared = ThreadMesh(Mesh(z=4))
    for order in itertools.islice(itertools.permutations(range(4)), 0, 24, 5):

        def one(c: ThreadCollectives, order: tuple[int, ...] = order) -> Tensor:
            time.sleep(0.002 * order[c.rank])
            return c.all_reduce(torch.tensor([numbers[c.rank]]), "z", "s")

        assert all(torch.equal(found, expected.view(1)) for found in shared.run(one))


def test_the_account_counts_what_must_be_sent_and_what_was_moved() -> None:
    def one(c: ThreadCollectives) -> dict[str, tuple[int, int]]:
        x = torch.zeros(8, 4)  # 128 bytes
        c.all_reduce(x, "zy", "a")
        c.reduce_scatter(x, 0, "zy", "b")
        c.all_gather(x, 0, "zy", "c")
        c.all_to_all(x, 0, 1, "zy", "d", split_sizes=[8, 0, 0, 0])
        c.all_gather(x, 0, "", "nothing")
        return dict(c.account.totals())

    for rank, totals in enumerate(ThreadMesh(MESH).run(one)):
        sent = 0 if MESH.index(rank, "zy") == 0 else 128
        assert totals == {
            "all-reduce": (192, 384),
            "reduce-scatter": (96, 384),
            "all-gather": (384, 384),
            "all-to-all": (sent, 384),
        }


def test_a_rank_that_fails_or_strays_ends_all() -> None:
    def fails(c: Collectives) -> None:
        if c.rank == 3:
            raise RuntimeError("out of memory")
        c.all_reduce(torch.zeros(1), "zyx", "a")

    with pytest.raises(RuntimeError, match="out of memory"):
        ThreadMesh(MESH).run(fails)

    def strays(c: Collectives) -> None:
        c.all_reduce(torch.zeros(1), "x", "a" if c.rank else "b")

    with pytest.raises(DeviceError, match="different collectives"):
        ThreadMesh(Mesh(2)).run(strays)
