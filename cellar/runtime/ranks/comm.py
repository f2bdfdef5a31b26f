"""GroupComm: collectives among ranks over gloo or NCCL, with sums in the order of ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from cellar.core.errors import DeviceError
from cellar.core.sums import at_once, moved_by_all_reduce, sent_by_all_reduce
from cellar.models.loop import Loop
from cellar.models.model import Comm, NormedSums
from cellar.ops.added import added
from cellar.ops.norm import add_rms_norm_behind_sum
from cellar.ops.peers import PeerBoxes, first_of_peers, rows_of_peers, sum_norm_of_peers, sum_of_peers
from cellar.runtime.mesh.account import Account, Entry

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

GONE = "another rank has gone"
"""What a rank says that finds nobody at the other end; who went says more."""


class RankLink(Protocol):
    """What the runtime of one rank of several has of the others. Every rank calls the same, in the same order."""

    @property
    def rank(self) -> int:
        """From 0; rank 0 samples."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def count(self) -> int:
        """Collectives begun so far: while it stands still, the ranks have not begun anything together."""

    def share(self, x: Tensor) -> Tensor:
        """Rank 0's `x`, in the place of everyone's."""


class RankComm(RankLink, Comm, Protocol):
    """Collectives of a rank that has its share of every tensor, by heads and columns (`models/sharding.py`)."""


class GroupComm:
    """Implements `RankComm` over a process group of torch.distributed, which moves bytes and adds nothing.

    Libraries add in an order that depends on where in a tensor an element lies, so a request's tokens would depend on
    its company. Here parts are gathered, or exchanged, and added in the order of ranks, in float32: the same bits on
    all ranks, whatever the other rows are. Of R ranks each sends (R - 1) n elements of a small sum, 2 n (R - 1)/R of a
    large one, as an all-reduce does. `loop`: see `Comm`. `widths`: own columns of a gather -> those of all ranks, where
    they are unequal. `boxes`: how sums and gathers up to some size go between GPUs that reach each other's memory.
    `account` keeps what was sent, but nothing of what a recorded step sends when it is replayed; `waited` the seconds
    of this rank's host in collectives. Raises DeviceError if another rank has gone.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        size: int,
        widths: Mapping[int, Sequence[int]] | None = None,
        boxes: PeerBoxes | None = None,
        loop: Loop | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.loop = loop
        self.account = Account()
        self.count = 0
        self.waited = 0.0
        self._group = group
        self._widths = dict(widths or {})
        self._boxes = boxes

    @property
    def normed_sums(self) -> NormedSums | None:
        """Through boxes."""
        return None if self._boxes is None else self

    def take(self, like: Tensor, apart: bool = True) -> bool:
        """Whether a sum of this shape and type goes with its norm, or right in front of it where that is no launch
        more.
        """
        if self._boxes is None:
            return False
        behind = apart and self.loop is None and self._boxes.take_before_norm(like)
        return behind or self._boxes.take_norm(like)

    def add_rms_norm(self, part: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Implements `NormedSums`."""
        assert self._boxes is not None, "`take` has said so"
        self.noted(part.nbytes, self._boxes.sizes.moved(part.nbytes))
        if self._boxes.take_norm(part):
            return sum_norm_of_peers(part, residual, norm, eps, self._boxes)
        return add_rms_norm_behind_sum(residual, sum_of_peers(part, self._boxes), norm, eps)

    def noted(self, nbytes: int, moved: int) -> None:
        """A sum of so many bytes begins, for which a rank gets `moved` from others, by whatever way."""
        self.count += 1
        self.account.add(Entry("all-reduce", "z", "sum"), sent_by_all_reduce(nbytes, self.size), moved)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in the order of ranks."""
        if self._boxes is not None and self._boxes.take(x):
            self.noted(x.nbytes, self._boxes.sizes.moved(x.nbytes))
            return sum_of_peers(x, self._boxes)
        moved = moved_by_all_reduce(x.nbytes, x.element_size(), self.size)
        self.account.add(Entry("all-reduce", "z", "sum"), sent_by_all_reduce(x.nbytes, self.size), moved)
        if at_once(x.nbytes, self.size):
            return added(self._gathered(x))
        each = -(-x.numel() // self.size)
        padded = x.new_empty(each * self.size)
        padded[: x.numel()] = x.reshape(-1)
        padded[x.numel() :] = 0
        theirs = torch.empty_like(padded)
        self._exchange(lambda: self._group.alltoall_base(as_bytes(theirs), as_bytes(padded), [], []))
        mine = added(theirs.view(self.size, each))
        return self._gathered(mine).view(-1)[: x.numel()].view(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        """[n, w_r] of every rank r side by side."""
        widths = self._widths.get(x.shape[1], (x.shape[1],) * self.size)
        widest, own = max(widths), x.nbytes
        if self._boxes is not None and len(set(widths)) == 1 and self._boxes.take_rows(x):
            self.count += 1
            self.account.add(Entry("all-gather", "z", "logits"), (self.size - 1) * own, self._boxes.sizes.moved(own))
            return rows_of_peers(x, self._boxes)
        if x.shape[1] < widest:
            x = torch.nn.functional.pad(x, (0, widest - x.shape[1]))
        parts = self._gathered(x)
        found = torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)
        self.account.add(Entry("all-gather", "z", "logits"), found.nbytes - own, (self.size - 1) * x.nbytes)
        return found

    def share(self, x: Tensor) -> Tensor:
        """Rank 0's `x`, contiguous, in the place of everyone's."""
        if self._boxes is not None and self._boxes.take_rows(x):
            self.count += 1
            return first_of_peers(x, self._boxes)
        self._exchange(lambda: self._group.broadcast([x]))
        return x

    def _gathered(self, x: Tensor) -> Tensor:
        """[ranks, *shape]."""
        found = x.new_empty((self.size, *x.shape))
        self._exchange(lambda: self._group._allgather_base(as_bytes(found), as_bytes(x.contiguous())))
        return found

    def _exchange(self, begin: Any) -> None:
        self.count += 1
        begun = time.monotonic()
        with gone():
            begin().wait()
        self.waited += time.monotonic() - begun


def gloo_comm(
    store: Store,
    rank: int,
    size: int,
    widths: Mapping[int, Sequence[int]] | None = None,
    patience: float = 1800.0,
    loop: Loop | None = None,
) -> GroupComm:
    """Ranks in processes or threads of this machine, on CPUs. Waits for all of them. Raises DeviceError."""
    return GroupComm(gloo_group(store, rank, size, patience), rank, size, widths, loop=loop)


def nccl_comm(
    store: Store,
    rank: int,
    size: int,
    widths: Mapping[int, Sequence[int]] | None = None,
    patience: float = 1800.0,
    boxes: PeerBoxes | None = None,
    loop: Loop | None = None,
) -> GroupComm:
    """Ranks in processes of this machine, on GPUs: rank r on the current device of its process."""
    return GroupComm(nccl_group(store, rank, size, patience), rank, size, widths, boxes, loop)


def gloo_group(store: Store, rank: int, size: int, patience: float = 1800.0) -> Any:
    """A process group over gloo, once all are there. Raises DeviceError."""
    kind: Any = torch.distributed.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname="127.0.0.1")]  # no other machine shall reach it
    options._timeout = timedelta(seconds=patience)
    with gone():
        return kind(store, rank, size, options)


def nccl_group(store: Store, rank: int, size: int, patience: float = 1800.0) -> Any:
    """A process group over NCCL on the current device. Raises DeviceError."""
    kind: Any = torch.distributed.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=patience)
    with gone():
        return kind(store, rank, size, options)


def as_bytes(x: Tensor) -> Tensor:
    """A contiguous tensor as what it is for a network: not all libraries know all types."""
    return x.view(-1).view(torch.uint8)


@contextlib.contextmanager
def gone() -> Iterator[None]:
    """What a library says of ranks that do not answer, as a DeviceError."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(f"{GONE} ({' '.join(str(error).split())[:200]}).") from error
