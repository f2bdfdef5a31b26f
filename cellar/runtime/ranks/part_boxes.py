"""Boxes for long sums that copy engines bring: a rank's piece of everyone's rows comes here, and then the sums of all.

A device's box has, for each lane, a number of each rank for pieces and one for sums, room for the others' pieces of its
own rows, and room for all rows of the sums. Sums of a lane come one after the other, in the same order on all ranks.
One room of each is enough: who sends pieces of a sum has all rows of the sum before, so everyone has read the pieces of
that; and who sends its rows has everyone's pieces, so everyone has used the rows of the sum before.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cellar.core.errors import DeviceError
from cellar.ops.cuda import shared
from cellar.ops.cuda.waits import streams_wait

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

_ALIGNED = 4096
_NONE, _YES = "none", "yes"

PIECES, SUMS = 0, 1
"""What numbers are of."""


@dataclass(frozen=True, slots=True)
class PartSizes:
    """Of boxes for sums of `lanes` lanes over `ranks` ranks, of up to `nbytes` bytes in rows of `row` bytes."""

    lanes: int
    ranks: int
    nbytes: int
    row: int

    @property
    def piece(self) -> int:
        """Bytes for one piece."""
        rows = self.nbytes // self.row
        return -(-(-(-rows // self.ranks) * self.row) // _ALIGNED) * _ALIGNED

    @property
    def whole(self) -> int:
        """Bytes for all rows."""
        return -(-self.nbytes // _ALIGNED) * _ALIGNED

    @property
    def lane(self) -> int:
        """Bytes of a lane's rooms."""
        return (self.ranks - 1) * self.piece + self.whole

    @property
    def total(self) -> int:
        """Bytes of a box."""
        return _ALIGNED + self.lanes * self.lane

    def number(self, lane: int, phase: int, rank: int) -> int:
        """Where in a box the number of the last pieces (`PIECES`) or rows (`SUMS`) of that rank lies."""
        return 4 * ((lane * 2 + phase) * self.ranks + rank)

    def pieces(self, lane: int) -> int:
        """Where pieces begin, in the order of ranks without the box's own."""
        return _ALIGNED + lane * self.lane

    def piece_of(self, lane: int, rank: int, owner: int) -> int:
        """Where in the box of rank `owner` the piece of another one lies."""
        return self.pieces(lane) + (rank - (rank > owner)) * self.piece

    def sums(self, lane: int) -> int:
        """Where the rows of sums begin."""
        return self.pieces(lane) + (self.ranks - 1) * self.piece

    def rows(self, rank: int, count: int) -> range:
        """The rows of a sum of `count` that a rank adds."""
        each = -(-count // self.ranks)
        return range(min(rank * each, count), min((rank + 1) * each, count))


class PartBoxes:
    """A rank's view of all boxes: `addresses` as its device sees them, its own among them."""

    def __init__(self, addresses: list[int], rank: int, sizes: PartSizes, device: torch.device) -> None:
        self.addresses = addresses
        self.rank = rank
        self.sizes = sizes
        self._own = torch.as_tensor(_Memory(addresses[rank], sizes.total), device=device)

    def pieces(self, lane: int, like: Tensor) -> Tensor:
        """The others' pieces of this rank's rows, which are `like` this: [ranks - 1, *shape]."""
        sizes = self.sizes
        begin, count = sizes.pieces(lane), sizes.ranks - 1
        rooms = self._own[begin : begin + count * sizes.piece].view(count, sizes.piece)
        return rooms[:, : like.nbytes].view(like.dtype).view(count, *like.shape)

    def sums(self, lane: int, like: Tensor) -> Tensor:
        """Room for all rows of a sum that is `like` this."""
        begin = self.sizes.sums(lane)
        return self._own[begin : begin + like.nbytes].view(like.dtype).view(like.shape)


class _Memory:
    """Bytes at an address of a device, as libraries hand them to each other."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


def meet_with_parts(store: Store, rank: int, sizes: PartSizes, device: torch.device) -> PartBoxes | None:
    """Boxes of all ranks, each a process with a GPU of its own; None if one has no memory for its box, or its driver
    does not write numbers into another's. All ranks call it, and all get boxes or none does.
    """
    mine: shared.SharedMemory | None = None
    failed = ""
    try:
        mine = shared.SharedMemory(sizes.total)
    except DeviceError as error:
        failed = str(error)
    store.set(f"parts {rank}", _NONE if mine is None else mine.handle.hex())
    handles = [store.get(f"parts {r}").decode() for r in range(sizes.ranks)]
    addresses: list[int] = []
    if mine is not None and _NONE not in handles:
        try:
            addresses = [mine.address if r == rank else shared.opened(bytes.fromhex(h)) for r, h in enumerate(handles)]
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if not all(streams_wait(stream.cuda_stream, address) for address in addresses):
                failed = "the driver does not write numbers into another device's memory"
                addresses = []
            stream.synchronize()
        except DeviceError as error:
            failed, addresses = str(error), []
    store.set(f"has parts {rank}", _YES if addresses else failed or _NONE)
    said = [store.get(f"has parts {r}").decode() for r in range(sizes.ranks)]
    if any(words != _YES for words in said):
        if rank == 0:  # once for all
            first = next((r for r, words in enumerate(said) if words not in (_YES, _NONE)), 0)
            logger.warning("long prompts wait for their sums: GPU %d says: %s", first, said[first])
        return None
    return PartBoxes(addresses, rank, sizes, device)
