"""Micro-batches without a GPU: their copies, numbers and turns in any order of events, and whole engines over ranks."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cellar.core.config import EngineConfig
from cellar.core.errors import DeviceError
from cellar.core.micro_batches import LANES, PART_NBYTES, MicroBatchSizes
from cellar.core.specs import ModelSpec
from cellar.models.model import Hidden
from cellar.ops.added import added_rms_norm
from cellar.ops.cuda import shared
from cellar.runtime.ranks import comm, micro_batches, part_boxes, place
from cellar.runtime.ranks.comm import GroupComm, RankComm
from cellar.runtime.ranks.group import RankGroup
from cellar.runtime.ranks.lane import HostLane
from cellar.runtime.ranks.micro_batches import CopiedSums, MicroBatches
from cellar.runtime.ranks.opened import open_ranks
from cellar.runtime.ranks.part_boxes import PIECES, SUMS, PartBoxes, PartSizes, meet_with_parts
from cellar.runtime.ranks.place import TensorPlace
from cellar.runtime.ranks.rank import ThreadRank
from cellar.runtime.steps.lanes import Lanes
from cellar.runtime.steps.local import LocalRuntime, open_local
from tests.limits import join_all
from tests.runtime.ranks import test_models as models
from tests.runtime.ranks.chains import CPU, Order, Ranked, check_sends, check_sums, own_rows
from tests.runtime.ranks.streams import Astray, Event, Machine, Stalled, Stream, Unrecorded, bytes_at
from tests.runtime.steps.steps import tiny_model
from tests.runtime.steps.test_lanes import CROWDED, LONGEST, Crowd, CutLanes, check_answers, crowds
from tests.tiny_checkpoint import write_checkpoint

# -- sums by copies, in any order of events -----------------------------------------------------

COUNTS = st.lists(st.integers(1, 5), min_size=2, max_size=5)
"""Also such as do not divide by ranks, and fewer than there are."""

SEEDS = st.integers(0, 2**32)
RESTLESS = st.sampled_from([0.01, 0.1, 0.5, 1.0])
ORDERS = 10


def check_orders(ranks: int, counts: Sequence[int], seed: int, restless: float, ahead: bool) -> None:
    for k in range(ORDERS):
        check_sums(ranks, counts, Order(seed + k, restless, ahead))


@settings(max_examples=10, deadline=None)
@given(COUNTS, SEEDS, RESTLESS, st.booleans())
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_in_any_order_of_events(ranks: int, counts: list[int], seed: int, restless: float, ahead: bool) -> None:
    check_orders(ranks, counts, seed, restless, ahead)


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(COUNTS, SEEDS, RESTLESS, st.booleans())
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_in_many_more_orders(ranks: int, counts: list[int], seed: int, restless: float, ahead: bool) -> None:
    check_orders(ranks, counts, seed, restless, ahead)


@settings(max_examples=10, deadline=None)
@given(COUNTS, SEEDS, RESTLESS, st.booleans())
@pytest.mark.parametrize("ranks", [2, 4])
def test_streams_may_share_one_queue(ranks: int, counts: list[int], seed: int, restless: float, ahead: bool) -> None:
    """Nobody waits for what stands behind him in it."""
    check_sums(ranks, counts, Order(seed, restless, ahead, one_queue=True))


@settings(max_examples=40, deadline=None)
@given(COUNTS, SEEDS, RESTLESS, st.booleans())
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_who_has_sent_may_write(ranks: int, counts: list[int], seed: int, restless: float, ahead: bool) -> None:
    check_sends(ranks, counts, Order(seed, restless, ahead))


# -- bugs that some order must show -------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, Plant] = {}


def bug(plant: Plant) -> Plant:
    BUGS[plant.__name__] = plant
    return plant


@bug
def lanes_share_their_pieces(patch: pytest.MonkeyPatch) -> None:
    pieces = PartSizes.pieces
    patch.setattr(PartSizes, "sums", lambda self, lane: pieces(self, lane) + (self.ranks - 1) * self.piece)
    patch.setattr(PartSizes, "pieces", lambda self, lane: pieces(self, 0))


@bug
def lanes_share_their_rows(patch: pytest.MonkeyPatch) -> None:
    rows = PartSizes.sums
    patch.setattr(PartSizes, "sums", lambda self, lane: rows(self, 0))


@bug
def lanes_share_their_numbers(patch: pytest.MonkeyPatch) -> None:
    number = PartSizes.number
    patch.setattr(PartSizes, "number", lambda self, lane, phase, rank: number(self, 0, phase, rank))


@bug
def pieces_and_rows_share_a_number(patch: pytest.MonkeyPatch) -> None:
    number = PartSizes.number
    patch.setattr(PartSizes, "number", lambda self, lane, phase, rank: number(self, lane, PIECES, rank))


@bug
def ranks_share_their_numbers(patch: pytest.MonkeyPatch) -> None:
    number = PartSizes.number
    patch.setattr(PartSizes, "number", lambda self, lane, phase, rank: number(self, lane, phase, 0))


@bug
def a_box_has_room_for_its_owner(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartSizes, "piece_of", lambda self, lane, rank, owner: self.pieces(lane) + rank * self.piece)


@bug
def a_rank_adds_the_next_ones_rows(patch: pytest.MonkeyPatch) -> None:
    """It gets pieces of its own ones, and its place for sums is not theirs."""
    rows, begin = PartSizes.rows, CopiedSums._pieces

    def of_next(self: CopiedSums, part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own, others, sums = begin(self, part)
        sizes, rank = self._boxes.sizes, self._boxes.rank
        there = rows(sizes, (rank + 1) % sizes.ranks, len(part))
        return part[there.start : there.stop] if len(there) == len(own) else own, others, sums

    patch.setattr(CopiedSums, "_pieces", of_next)


InPhase = Callable[[CopiedSums, pytest.MonkeyPatch], None]


def bug_in_each_phase(change: InPhase) -> InPhase:
    """Where pieces are sent, and where rows are."""

    def plant(phase: int, patch: pytest.MonkeyPatch) -> None:
        send = CopiedSums._send

        def changed(self: CopiedSums, at: int, *sent: Any) -> None:
            with pytest.MonkeyPatch.context() as inner:
                if at == phase:
                    change(self, inner)
                send(self, at, *sent)

        patch.setattr(CopiedSums, "_send", changed)

    for phase, name in ((PIECES, "pieces"), (SUMS, "rows")):
        BUGS[f"{change.__name__} ({name})"] = partial(plant, phase)
    return change


@bug_in_each_phase
def the_number_is_written_before_the_copy(sums: CopiedSums, patch: pytest.MonkeyPatch) -> None:
    copy, write = Machine.copy_far, Machine.write
    late: list[tuple[Machine, int, int, int, int]] = []

    def write_first(self: Machine, stream: int, address: int, value: int) -> None:
        write(self, stream, address, value)
        while late:
            copy(*late.pop())

    patch.setattr(Machine, "copy_far", lambda *copied: late.append(copied))
    patch.setattr(Machine, "write", write_first)


@bug_in_each_phase
def a_lane_waits_for_the_sum_before(sums: CopiedSums, patch: pytest.MonkeyPatch) -> None:
    wait = Machine.wait_for
    patch.setattr(Machine, "wait_for", lambda self, stream, address, value: wait(self, stream, address, value - 1))


@bug_in_each_phase
def a_lane_waits_for_the_sum_behind(sums: CopiedSums, patch: pytest.MonkeyPatch) -> None:
    """It stands still."""
    wait = Machine.wait_for
    patch.setattr(Machine, "wait_for", lambda self, stream, address, value: wait(self, stream, address, value + 1))


@bug_in_each_phase
def a_lane_waits_for_nobody(sums: CopiedSums, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Machine, "wait_for", lambda self, stream, address, value: None)


@bug_in_each_phase
def a_lane_waits_for_one_rank(sums: CopiedSums, patch: pytest.MonkeyPatch) -> None:
    wait = Machine.wait_for
    waited: list[int] = []

    def wait_for_first(self: Machine, stream: int, address: int, value: int) -> None:
        if not waited:
            wait(self, stream, address, value)
        waited.append(address)

    patch.setattr(Machine, "wait_for", wait_for_first)


@bug_in_each_phase
def a_lane_goes_on_before_all_is_sent(sums: CopiedSums, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sums, "_sent", Unrecorded())


@bug_in_each_phase
def copies_begin_before_all_is_there(sums: CopiedSums, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sums, "_ready", Unrecorded())


@bug
def another_product_still_reads_rows_of_the_sum_before(patch: pytest.MonkeyPatch) -> None:
    """It runs beside its lane, which waits for it before its micro-batch's next sum, but not before another's."""
    begin, layer, product, whole = Ranked.__init__, Ranked._layer, Ranked._product, Ranked._whole
    beside: dict[tuple[Ranked, int], Stream] = {}

    def begin_beside(self: Ranked, machine: Machine, boxes: PartBoxes, counts: Sequence[int]) -> None:
        begin(self, machine, boxes, counts)
        for k in range(len(counts)):
            beside[self, k] = machine.cuda.Stream(torch.device("cuda", boxes.rank))

    def lane_of(self: Ranked) -> Stream:
        return self._machine.current[self._rank]

    def layer_beside(self: Ranked, step: int, number: int, k: int, h: Hidden) -> Hidden:
        lane_of(self).wait_stream(beside[self, k])
        return layer(self, step, number, k, h)

    def product_beside(self: Ranked, at: tuple[int, int, int], x: Tensor, cache: Tensor | None, part: Tensor) -> None:
        stream = lane_of(self)
        if cache is None:  # the last one of a layer: another micro-batch comes next
            stream = beside[self, at[-1]]
            stream.wait_stream(lane_of(self))
        with self._machine.using(stream):
            product(self, at, x, cache, part)

    def whole_beside(self: Ranked, step: int, k: int, h: Hidden) -> Tensor:
        lane_of(self).wait_stream(beside[self, k])
        return whole(self, step, k, h)

    patch.setattr(Ranked, "__init__", begin_beside)
    patch.setattr(Ranked, "_layer", layer_beside)
    patch.setattr(Ranked, "_product", product_beside)
    patch.setattr(Ranked, "_whole", whole_beside)


def without_clone(method: str, patch: pytest.MonkeyPatch) -> None:
    """What it gives lies in the box."""
    everywhere, inner = CopiedSums._everywhere, getattr(CopiedSums, method)

    def everywhere_alone(self: CopiedSums, sums: Tensor) -> Any:
        found = everywhere(self, sums)
        return SimpleNamespace(clone=lambda: found)

    def changed(self: CopiedSums, x: Any) -> Any:
        with pytest.MonkeyPatch.context() as now:
            now.setattr(CopiedSums, "_everywhere", everywhere_alone)
            return inner(self, x)

    patch.setattr(CopiedSums, method, changed)


@bug
def a_sum_stays_in_the_box(patch: pytest.MonkeyPatch) -> None:
    without_clone("all_reduce", patch)


@bug
def what_the_last_layer_leaves_stays_in_the_box(patch: pytest.MonkeyPatch) -> None:
    without_clone("whole", patch)


@bug
def a_rank_adds_to_the_first_rows_of_the_residual(patch: pytest.MonkeyPatch) -> None:
    add = CopiedSums.add_rms_norm

    def to_first(self: CopiedSums, part: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        own = self._boxes.sizes.rows(self._boxes.rank, len(part))
        return add(self, part, residual[: len(own)], norm, eps)

    patch.setattr(CopiedSums, "add_rms_norm", to_first)


@bug
def what_the_last_layer_leaves_has_the_first_rows_of_the_residual(patch: pytest.MonkeyPatch) -> None:
    whole = CopiedSums.whole

    def with_first(self: CopiedSums, h: Hidden) -> Hidden:
        if h.part is None:
            return whole(self, h)
        own = self._boxes.sizes.rows(self._boxes.rank, len(h.part.x))
        return whole(self, Hidden(h.residual[: len(own)], part=h.part))

    patch.setattr(CopiedSums, "whole", with_first)


@bug
def a_sum_begins_with_the_own_part(patch: pytest.MonkeyPatch) -> None:
    def own_first(own: Tensor, others: Tensor, rank: int) -> Tensor:
        return torch.cat([own[None], others])

    patch.setattr(micro_batches, "joined", own_first)


@bug
def a_sum_with_its_norm_begins_with_the_own_part(patch: pytest.MonkeyPatch) -> None:
    def own_first(own: Tensor, others: Tensor, rank: int, *more: Any) -> tuple[Tensor, Tensor]:
        return added_rms_norm(own, others, 0, *more)

    patch.setattr("tests.runtime.ranks.streams.added_rms_norm", own_first)


@bug
def nobody_waits_for_a_turn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MicroBatches, "await_turn", lambda self, k: None)


@bug
def a_turn_ends_as_it_begins(patch: pytest.MonkeyPatch) -> None:
    wait, end = MicroBatches.await_turn, MicroBatches.end_turn

    def wait_and_end(self: MicroBatches, k: int) -> None:
        wait(self, k)
        end(self, k)

    patch.setattr(MicroBatches, "await_turn", wait_and_end)
    patch.setattr(MicroBatches, "end_turn", lambda self, k: None)


@bug
def the_caller_does_not_wait_for_lanes(patch: pytest.MonkeyPatch) -> None:
    wait = Stream.wait_stream
    patch.setattr(Stream, "wait_stream", lambda self, other: None if self.is_callers else wait(self, other))


@bug
def lanes_do_not_wait_for_the_caller(patch: pytest.MonkeyPatch) -> None:
    wait = Stream.wait_stream
    patch.setattr(Stream, "wait_stream", lambda self, other: None if other.is_callers else wait(self, other))


@bug
def a_rank_counts_all_sums_in_one_lane(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MicroBatches, "comm", lambda self, k: self._comms[k % LANES if self._comms[0]._boxes.rank else 0])


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By few of the orders that the tests above try."""
    # Layers never write where something lies that is on its way: who has all rows knows that his own pieces came.
    check = check_sends if name.startswith(a_lane_goes_on_before_all_is_sent.__name__) else check_sums
    BUGS[name](monkeypatch)
    with pytest.raises((AssertionError, Stalled, Astray)):  # noqa: PT012
        for seed in range(20):
            counts = random.Random(seed).choices(range(1, 6), k=2 + seed % 4)
            for restless, ahead in ((0.01, True), (0.1, False), (0.5, True), (1.0, False)):
                check(3, counts, Order(seed, restless, ahead))


def test_streams_wait_for_events_as_cudas_do() -> None:
    """For what was recorded last when the wait was asked for, not for later records; before the first, for nothing."""
    for seed in range(20):
        machine, event = Machine(2), Event()
        done: list[str] = []
        first, second = machine.current
        second.wait_event(event)
        machine.launch(1, partial(done.append, "not bound"))
        machine.launch(0, partial(done.append, "awaited"))
        event.record(first)
        second.wait_event(event)
        machine.launch(1, partial(done.append, "behind it"))
        event.record(second)
        first.wait_event(event)
        machine.launch(0, partial(done.append, "last"))
        machine.run([], random.Random(seed), 1.0, ahead=False)
        assert [word for word in done if word != "not bound"] == ["awaited", "behind it", "last"]
        assert done.index("not bound") < done.index("behind it")


def test_a_machine_says_what_cannot_be() -> None:
    machine, number = Machine(1), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(Astray):
        machine.write(0, machine.lend(number) + 1, 1)
    machine.wait_for(0, number.data_ptr(), 1)
    with pytest.raises(Stalled):
        machine.run([], random.Random(0), 1.0, ahead=False)


# -- boxes --------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(2, 8), st.integers(1, 64), st.integers(1, 300))
def test_nothing_in_a_box_lies_over_another(lanes: int, ranks: int, rows: int, row: int) -> None:
    """For each lane the others' pieces and all rows, and two numbers of each rank; pieces as long as may be fit in."""
    sizes = PartSizes(lanes, ranks, rows * row, row)
    numbers = [
        range(at, at + 4)
        for lane in range(lanes)
        for phase in (PIECES, SUMS)
        for rank in range(ranks)
        for at in [sizes.number(lane, phase, rank)]
    ]
    assert sizes.piece >= len(sizes.rows(0, rows)) * row
    for owner in range(ranks):
        others = [rank for rank in range(ranks) if rank != owner]
        rooms = [sizes.piece_of(lane, rank, owner) for lane in range(lanes) for rank in others]
        rooms += [sizes.sums(lane) for lane in range(lanes)]
        assert all(room % 16 == 0 for room in rooms), "kernels read words of 16 bytes"
        lengths = [sizes.piece] * (lanes * len(others)) + [rows * row] * lanes
        used = [range(at, at + length) for at, length in zip(rooms, lengths, strict=True)]
        used = sorted([*numbers, *used], key=lambda each: each.start)
        assert used[0].start >= 0
        assert all(one.stop <= other.start for one, other in pairwise(used))
        assert used[-1].stop <= sizes.total
        for lane in range(lanes):
            at = sizes.pieces(lane)
            assert [sizes.piece_of(lane, rank, owner) for rank in others] == [
                at + k * sizes.piece for k in range(ranks - 1)
            ]


@given(st.integers(1, 8), st.integers(1, 100))
def test_each_row_is_added_once(ranks: int, count: int) -> None:
    """By ranks in their order, as many by each as may be; the last ones may have fewer or none."""
    sizes = PartSizes(LANES, ranks, 800, 8)
    shares = [sizes.rows(rank, count) for rank in range(ranks)]
    assert [row for share in shares for row in share] == list(range(count))
    assert max(map(len, shares)) == math.ceil(count / ranks)
    assert shares == [range(count)[own_rows(rank, ranks, count)] for rank in range(ranks)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_pieces_that_have_come_are_tensors(dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any sum that has room."""
    monkeypatch.setattr(part_boxes, "_Memory", bytes_at)
    sizes = PartSizes(LANES, 3, 5000, 11 * dtype.itemsize)
    memory = torch.zeros(sizes.total, dtype=torch.uint8)
    boxes = PartBoxes([0, memory.data_ptr(), 0], 1, sizes, CPU)
    pieces = {
        rank: torch.randn((count, 11), generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in (0, 2)
    }
    for rank, piece in pieces.items():
        at = sizes.piece_of(1, rank, 1)
        memory[at : at + piece.nbytes] = piece.view(-1).view(torch.uint8)
    assert torch.equal(boxes.pieces(1, pieces[0]), torch.stack([pieces[0], pieces[2]]))
    assert not boxes.pieces(0, pieces[0]).any()
    assert not boxes.sums(1, pieces[0]).any()
    boxes.sums(1, pieces[0]).copy_(pieces[0])
    at = sizes.sums(1)
    assert torch.equal(memory[at : at + pieces[0].nbytes].view(dtype).view(count, 11), pieces[0])


SIZES = PartSizes(LANES, 3, 4096, 64)


def met(path: Path, fails: str, monkeypatch: pytest.MonkeyPatch) -> list[PartBoxes | None]:
    """What each of three ranks gets; `fails`: what rank 1 cannot do."""
    from torch._C._distributed_c10d import FileStore

    def by_rank_1(what: str) -> bool:
        return (fails, threading.current_thread().name) == (what, "1")

    def shared_memory(nbytes: int) -> SimpleNamespace:
        assert nbytes == SIZES.total
        if by_rank_1("share"):
            raise DeviceError("out of memory")
        rank = int(threading.current_thread().name)
        return SimpleNamespace(address=1000 * rank, handle=bytes([rank]) * 64)

    def opened(handle: bytes) -> int:
        if by_rank_1("open"):
            raise DeviceError("peer access is not supported")
        return 1000 * handle[0] + 1

    stream = SimpleNamespace(cuda_stream=7, synchronize=lambda: None)
    monkeypatch.setattr(shared, "SharedMemory", shared_memory)
    monkeypatch.setattr(shared, "opened", opened)
    monkeypatch.setattr(part_boxes, "streams_wait", lambda stream, address: not (by_rank_1("wait") and address == 2001))
    cuda = SimpleNamespace(Stream=lambda device: stream)
    monkeypatch.setattr(part_boxes, "torch", SimpleNamespace(cuda=cuda, as_tensor=lambda memory, device: memory))
    found: list[PartBoxes | None] = [None] * SIZES.ranks

    def run(rank: int) -> None:
        found[rank] = meet_with_parts(FileStore(str(path / "store"), SIZES.ranks), rank, SIZES, CPU)

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(SIZES.ranks)]
    for thread in threads:
        thread.start()
    join_all(threads)
    return found


def test_all_that_reach_each_other_have_every_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, boxes in enumerate(met(tmp_path, "", monkeypatch)):
        assert boxes is not None
        assert (boxes.rank, boxes.sizes) == (rank, SIZES)
        assert boxes.addresses == [1000 * r + (r != rank) for r in range(SIZES.ranks)]


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        ("share", "out of memory"),
        ("open", "peer access is not supported"),
        ("wait", "the driver does not write numbers into another device's memory"),
    ],
)
def test_where_one_cannot_nobody_does_and_one_says_why(
    fails: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert met(tmp_path, fails, monkeypatch) == [None] * SIZES.ranks
    assert [record.getMessage() for record in caplog.records] == [
        f"long prompts wait for their sums: GPU 1 says: {why}"
    ]


CUTS: dict[str, Any] = {"micro_tokens": 40}


@pytest.mark.parametrize(
    ("boxes", "parts", "options", "asks", "cuts"),
    [
        (True, True, CUTS, True, True),
        (True, False, CUTS, True, False),
        (True, True, {}, False, False),  # so small a model never asks for it
        (False, True, CUTS, False, False),
        (True, True, CUTS | {"loop_tokens": 64}, False, False),
        (True, True, CUTS | {"of_stage": True}, False, False),
    ],
)
def test_who_cuts_steps(
    boxes: bool,
    parts: bool,
    options: dict[str, Any],
    asks: bool,
    cuts: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank on a GPU whose sums go through boxes, and are not cut into chunks; not one of a stage, nor one whose steps
    are never long enough.
    """
    model, _ = tiny_model()
    asked: list[PartSizes] = []

    def meet_for_parts(store: Any, rank: int, sizes: PartSizes, device: torch.device) -> str | None:
        asked.append(sizes)
        return "boxes" if parts else None

    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SHM_DISABLE", "1")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(comm, "nccl_group", comm.gloo_group)
    monkeypatch.setattr(place, "lane_on", lambda device: HostLane())
    monkeypatch.setattr(place, "meet", lambda *_: SimpleNamespace() if boxes else None)
    monkeypatch.setattr(place, "meet_with_parts", meet_for_parts)
    monkeypatch.setattr(place, "MicroBatches", lambda *given: given)
    seat = TensorPlace(0, 1, str(tmp_path / "meeting"), **options).take(model, torch.device("cuda", 0))
    row = model.spec.hidden_size * 4
    assert asked == ([PartSizes(LANES, 1, PART_NBYTES, row)] if asks else [])
    assert (seat.lanes is not None) == cuts
    if cuts:
        found: Any = seat.lanes
        assert found[:2] == (MicroBatchSizes(40, PART_NBYTES // row), "boxes")
        found[-1](40, 20)
        assert isinstance(seat.comm, GroupComm)
        assert seat.comm.count == 1, "sums of lanes are counted with the others"
        assert list(seat.comm.account.totals().values()) == [(0, 20)]


# -- whole engines over ranks, which are threads ------------------------------------------------


@contextmanager
def cut_on_ranks() -> Iterator[list[CutLanes]]:
    """Ranks opened inside cut their steps, and sum over gloo; -> their lanes."""
    made: list[CutLanes] = []
    join = TensorPlace._join

    def join_and_cut(self: TensorPlace, whole: ModelSpec, device: torch.device) -> tuple[RankComm, Lanes | None]:
        others, lanes = join(self, whole, device)
        assert lanes is None, "a CPU has none"
        made.append(CutLanes(others))
        return others, made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorPlace, "_join", join_and_cut)
        patch.setattr("cellar.runtime.ranks.opened.open_ranks", partial(open_ranks, make=ThreadRank))
        yield made


@pytest.mark.long
@pytest.mark.parametrize("family", models.FAMILIES)
def test_requests_that_join_leave_and_are_suspended(family: str, tmp_path: Path) -> None:
    """What ranks do whole: shared prefixes, a host tier, prompts in several steps, and twice the same."""
    with cut_on_ranks() as made:
        models.test_requests_that_join_leave_and_are_suspended(family, tmp_path)
    check_cut_alike(made, models.FAMILIES[family][1])


@pytest.mark.long
def test_what_requests_may_ask_is_as_on_one_device(tmp_path: Path) -> None:
    with cut_on_ranks() as made:
        models.test_what_requests_may_ask_is_as_on_one_device(tmp_path)
    check_cut_alike(made, 2)


def check_cut_alike(made: list[CutLanes], size: int) -> None:
    assert len(made) == size
    assert made[0].steps > 0
    assert all(made[0].summed), "some steps were cut into as many as may be"
    assert {(lanes.steps, *lanes.summed) for lanes in made} == {(made[0].steps, *made[0].summed)}


Both = tuple[LocalRuntime, RankGroup, list[CutLanes]]


@pytest.fixture(scope="module", params=[("llama", 2), ("llama", 3), ("opt", 4)], ids=str)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """One device, and several ranks that cut their steps, with the same model and 24 chunks."""
    family, size = request.param
    shape = models.FAMILIES[family][0]
    path = write_checkpoint(tmp_path_factory.mktemp("cut"), **shape)
    nbytes, heads = 24 * 16 * models.token_nbytes(path), shape["num_key_value_heads"]

    def config(size: int) -> EngineConfig:
        return EngineConfig.of(
            model=str(path),
            device="cpu",
            num_threads=1,
            tensor_parallel_size=size,
            kv_cache_memory_bytes=nbytes * -(-heads // size) // heads,
            block_size=16,
            max_num_seqs=5,
            max_model_len=LONGEST,
        )

    alone = open_local(config(1), path).runtime
    with cut_on_ranks() as made:
        ranks = open_ranks(config(size), path, make=ThreadRank).runtime
    yield alone, ranks, made
    ranks.close()
    alone.close()


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(crowds())
@example(CROWDED)
def test_an_engine_over_ranks_that_cut_is_one_over_one_device(both: Both, crowd: Crowd) -> None:
    """Any requests, dropped and suspended ones among them: the same tokens."""
    alone, ranks, made = both
    check_answers(alone, ranks, made[0], crowd)
    check_cut_alike(made, len(made))
