"""Real gloo between threads: sums are those of rank order, whatever stands beside them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from cellar.core import sums
from cellar.core.errors import DeviceError
from cellar.models.loop import Loop
from cellar.models.points import summed_linear
from cellar.ops.peers import peer_boxes
from cellar.runtime.ranks import comm as comms
from cellar.runtime.ranks.comm import GroupComm, gloo_comm
from cellar.runtime.ranks.lane import HostLane
from tests.limits import SECONDS

T = TypeVar("T")


def on_ranks(size: int, directory: Path, run: Callable[[GroupComm], T], columns: tuple[int, ...] = ()) -> list[T]:
    def one(rank: int) -> T:
        widths = {columns[rank]: columns} if columns else None
        made = gloo_comm(FileStore(str(directory / "meeting"), size), rank, size, widths, patience=SECONDS)
        with torch.inference_mode():
            return run(made)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


def part_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
    return made.to(dtype)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_sums_are_those_of_rank_order(
    size: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones and large ones alike; 7 x 331 elements are not a multiple of any number of ranks."""
    monkeypatch.setattr(sums, "ONE_SHOT_NBYTES", 4 * 331)
    parts = [part_of(rank, (7, 331), dtype) for rank in range(size)]
    exact = torch.int32 if dtype is torch.int32 else torch.float32
    wanted = parts[0].to(exact)
    for part in parts[1:]:
        wanted = wanted + part.to(exact)
    wanted = wanted.to(dtype)

    def run(made: GroupComm) -> tuple[Tensor, Tensor, dict[str, tuple[int, int]]]:
        found = made.all_reduce(parts[made.rank]), made.all_reduce(parts[made.rank][3:4])
        return *found, dict(made.account.totals())

    large, small, item = 7 * 331, 331, parts[0].element_size()
    sent = sum(2 * n * item * (size - 1) // size for n in (large, small))
    # A small one, and any of two, as all parts; a large one in pieces, filled up to be equal, twice.
    moved = (size - 1) * item * (small + (large if size == 2 else 2 * -(-large // size)))
    for whole, row, account in on_ranks(size, tmp_path, run):
        assert account == {"all-reduce": (sent, moved)}
        assert torch.equal(whole, wanted)
        assert torch.equal(row, wanted[3:4]), "a row alone has the bits that it has in company"


@pytest.mark.parametrize("tokens", [None, 2])
def test_chunks_are_summed_beside_the_products_to_the_same_bits(tokens: int | None, tmp_path: Path) -> None:
    """Powers of two times integers: the products are exact, the sums over ranks are not, and depend on their order."""
    size, x = 4, torch.randint(-8, 9, (11, 16), generator=torch.Generator().manual_seed(5)).float()
    parts = [
        torch.randint(-8, 9, (24, 16), generator=torch.Generator().manual_seed(r)) * 2.0 ** (9 * r) for r in range(size)
    ]
    wanted = x @ parts[0].t()
    for part in parts[1:]:
        wanted = wanted + x @ part.t()
    assert not torch.equal(wanted, sum(x @ part.t() for part in reversed(parts))), "the order shows"

    def run(made: GroupComm) -> tuple[Tensor, int]:
        made.loop = None if tokens is None else Loop(HostLane(), tokens)
        return summed_linear(x, parts[made.rank], None, made), made.count

    for found, count in on_ranks(size, tmp_path, run):
        assert torch.equal(found, wanted)
        assert count == (1 if tokens is None else 4)


def test_a_rank_that_goes_in_the_middle_of_a_loop_is_missed(tmp_path: Path) -> None:
    def run(made: GroupComm) -> str:
        made.all_reduce(torch.ones(1))  # all have met: one that goes before is missed by the library's connecting
        if made.rank == 1:
            return "gone"
        made.loop = Loop(HostLane(), 2)
        with pytest.raises(DeviceError, match="another rank has gone"):
            summed_linear(torch.ones(8, 4), torch.ones(4, 4), None, made)
        return "missed it"

    assert on_ranks(2, tmp_path, run) == ["missed it", "gone"]


def test_columns_stand_side_by_side_and_tokens_are_rank_0s(tmp_path: Path) -> None:
    columns = (3, 3, 2, 2)
    first = [sum(columns[:rank]) for rank in range(4)]
    whole = part_of(0, (5, 10), torch.bfloat16)

    def run(made: GroupComm) -> tuple[Tensor, Tensor, int]:
        mine = whole[:, first[made.rank] : first[made.rank] + columns[made.rank]]
        return made.all_gather(mine), made.share(torch.full((2, 3), 7 - made.rank)), made.count

    for gathered, told, count in on_ranks(4, tmp_path, run, columns):
        assert torch.equal(gathered, whole)
        assert torch.equal(told, torch.full((2, 3), 7))
        assert count == 2


def test_a_rank_that_has_gone_is_missed(tmp_path: Path) -> None:
    def run(made: GroupComm) -> str:
        made.all_reduce(torch.ones(1))  # all have met: one that goes before is missed by the library's connecting
        if made.rank == 1:
            return "gone"  # and with it the only reference to its group
        with pytest.raises(DeviceError, match="another rank has gone"):
            made.all_reduce(torch.ones(3))
        return "missed it"

    assert on_ranks(2, tmp_path, run) == ["missed it", "gone"]


def test_norms_behind_sums_go_with_them_or_right_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 16 KiB and boxes of three ranks, in which a sum of 384 KiB is small and one of 512 has its norm inside:
    of several, one of small sums goes neither way.
    """
    launched: list[str] = []
    for name in ("sum_norm_of_peers", "add_rms_norm_behind_sum"):
        monkeypatch.setattr(comms, name, lambda *_, name=name: launched.append(name))
    monkeypatch.setattr(comms, "sum_of_peers", lambda part, boxes: part)
    boxes = peer_boxes([0, 0, 0], 1, 2**20, torch.device("cpu"))
    whole = GroupComm(None, 1, 3, boxes=boxes)
    cut = GroupComm(None, 1, 3, boxes=boxes, loop=Loop(HostLane(), 8))
    norm = torch.ones(8184, dtype=torch.bfloat16)
    rows = {n: torch.ones((n, 8184), dtype=torch.bfloat16) for n in (1, 2, 24, 25, 32, 33, 500)}
    assert [n for n, x in rows.items() if whole.take(x)] == [1, 25, 32, 33, 500]
    assert [n for n, x in rows.items() if whole.take(x, apart=False)] == [1, 25, 32], "it would be a launch more"
    assert [n for n, x in rows.items() if cut.take(x)] == [1, 25, 32], "products hide what a loop sums"
    assert not GroupComm(None, 1, 3).take(rows[33])
    for n in (1, 32, 33, 500):
        whole.add_rms_norm(rows[n], rows[n], norm, 1e-5)
    assert launched == ["sum_norm_of_peers"] * 2 + ["add_rms_norm_behind_sum"] * 2
