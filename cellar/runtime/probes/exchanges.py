"""One rank's part in measuring collectives: every kind, way and size, with all other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cellar.core.collectives import COLUMNS, OURS, PEERS, SEND, sent_nbytes
from cellar.core.layouts import Mesh
from cellar.ops.peers import PeerBoxes, sum_of_peers
from cellar.runtime.captured import captured
from cellar.runtime.probes.context import synchronize
from cellar.runtime.ranks.axes import AxisCollectives, groups_of
from cellar.runtime.ranks.comm import GroupComm, gloo_group, nccl_group
from cellar.runtime.ranks.peers import meet
from cellar.runtime.ranks.place import prepare_nccl

LEAST_NBYTES = 2**10

CALLS = 8
"""Of a collective in a row that is timed, on an accelerator in one graph, as steps of decodes have them."""

MOST_REPEATS = 50

Row = tuple[str, str, int, int, int, float, int]
Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Setup:
    """What all ranks are told: how many they are, the file by which they find each other (new), where they compute, the
    largest tensor in bytes, seconds for each figure (about), CPU threads of each, and how long one waits for another.
    """

    size: int
    meeting: str
    kind: str
    most_nbytes: int
    seconds: float
    threads: int
    patience: float


def sizes(most: int) -> list[tuple[int, bool]]:
    """(bytes, whether prices are fitted to it): powers of two are, what is half way between every second two is not."""
    powers = [2**k for k in range(LEAST_NBYTES.bit_length() - 1, max(most, LEAST_NBYTES).bit_length())]
    between = [(nbytes * 3 // 2, False) for nbytes in powers[1:-1:2]]
    return sorted([*((nbytes, True) for nbytes in powers), *between])


def measure_exchanges(rank: int, setup: Setup) -> list[Row]:
    """Rows of the profile's table (`COLUMNS`); every rank calls it, and times alike. Groups of k ranks, for each k that
    divides their number, are at work all at once, as the axes of a mesh are. Raises DeviceError if a rank goes.
    """
    device = torch.device(setup.kind if setup.kind == "cpu" else f"{setup.kind}:{rank}")
    torch.set_num_threads(setup.threads)
    if device.type != "cpu":
        torch.cuda.set_device(device)
        prepare_nccl(setup.size)
    found: list[Row] = []
    with torch.inference_mode():
        for ranks in (k for k in range(2, setup.size + 1) if setup.size % k == 0):
            exchanges = _Exchanges.meet(rank, setup, ranks, device)
            for way, kind, nbytes, fitted, work in exchanges.works(setup.most_nbytes):
                seconds = exchanges.seconds(work, setup.seconds) / (2 if kind == SEND else 1)
                row = (way, kind, ranks, nbytes, sent_nbytes(kind, nbytes, ranks), float(f"{seconds:.3g}"), int(fitted))
                assert len(row) == len(COLUMNS)
                found.append(row)
    return found


@dataclass(frozen=True)
class _Exchanges:
    """Groups of `ranks` that one rank is in, at the place `index`."""

    ranks: int
    index: int
    group: Any
    axis: AxisCollectives
    comm: GroupComm
    boxes: PeerBoxes | None
    device: torch.device

    @classmethod
    def meet(cls, rank: int, setup: Setup, ranks: int, device: torch.device) -> _Exchanges:
        from torch._C._distributed_c10d import FileStore, PrefixStore  # not in every build of torch

        mesh = Mesh(setup.size // ranks, 1, ranks)
        store = PrefixStore(str(ranks), FileStore(setup.meeting, setup.size))
        join = gloo_group if device.type == "cpu" else nccl_group
        groups = {}
        for axes, members in groups_of(mesh, rank):
            own = PrefixStore(f"{axes}-{members[0]}", store)
            groups[members] = join(own, members.index(rank), len(members), setup.patience)
        members = tuple(sorted(mesh.group(rank, "z")))
        index, group = members.index(rank), groups[members]
        boxes = None
        if device.type != "cpu":
            boxes = meet(PrefixStore(f"boxes-{members[0]}", store), index, ranks, device)
        comm = GroupComm(group, index, ranks, boxes=boxes)
        return cls(ranks, index, group, AxisCollectives(mesh, rank, groups), comm, boxes, device)

    def works(self, most: int) -> Iterator[tuple[str, str, int, bool, Work]]:
        """Way, kind, bytes of the whole tensor, whether to be fitted, and the work."""
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        library = "gloo" if self.device.type == "cpu" else "nccl"
        for wanted, fitted in sizes(most):
            count = max(1, wanted // dtype.itemsize // self.ranks) * self.ranks
            x = torch.zeros(count, dtype=dtype, device=self.device)
            whole = x.nbytes
            for kind, work in self._ours(x):
                yield OURS, kind, whole, fitted, work
            for kind, work in self._of_library(x):
                yield library, kind, whole, fitted, work
            if self.boxes is not None and self.boxes.take(x):
                yield PEERS, "all-reduce", whole, fitted, partial(sum_of_peers, x, self.boxes)

    def seconds(self, work: Work, budget: float) -> float:
        """The shortest that one collective of CALLS in a row takes, on this rank; all repeat it equally often."""

        def often() -> None:
            for _ in range(CALLS):
                work()

        run = captured(often, self.device)
        self._timed(run)
        once = self._timed(run)
        count = torch.tensor([min(MOST_REPEATS, max(2, int(budget / once)))], device=self.device)
        repeats = int(self.axis.share(count).item())
        return min(once, *(self._timed(run) for _ in range(repeats))) / CALLS

    def _timed(self, run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        synchronize(self.device)
        return time.perf_counter() - start

    def _ours(self, x: Tensor) -> Iterator[tuple[str, Work]]:
        part, table, run = x[: len(x) // self.ranks], x.view(self.ranks, -1), self.axis
        yield "all-reduce", lambda: self.comm.all_reduce(x)
        yield "all-gather", lambda: run.all_gather(part, 0, "z", "probe")
        yield "reduce-scatter", lambda: run.reduce_scatter(x, 0, "z", "probe")
        yield "all-to-all", lambda: run.all_to_all(table, 0, 1, "z", "probe")
        if self.ranks == 2:
            yield SEND, lambda: self._there_and_back(x)

    def _of_library(self, x: Tensor) -> Iterator[tuple[str, Work]]:
        part, other, group = x[: len(x) // self.ranks].clone(), torch.empty_like(x), self.group
        yield "all-reduce", lambda: group.allreduce([other]).wait()
        yield "all-gather", lambda: group._allgather_base(other, part).wait()
        yield "reduce-scatter", lambda: group._reduce_scatter_base(part, x).wait()
        yield "all-to-all", lambda: group.alltoall_base(other, x, [], []).wait()

    def _there_and_back(self, x: Tensor) -> None:
        send, receive = (self.group.send, self.group.recv)
        for begin in (send, receive) if self.index == 0 else (receive, send):
            begin([x], 1 - self.index, 0).wait()
