"""Collectives over GPUs that write into each other's memory: one launch, no library, captured as any other.

Every rank has a box that all others can write to (`peers.cu`), with room for sums of two kinds. Of small ones every
rank gets all parts (so gathers go, too), with the number of the call in every 8 bytes: a sum takes little longer than
the way of its data. Of large ones a rank adds one piece for all, so that a link carries what it must. The next kernel
may start while a sum waits, and ask for its weights meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cellar.ops.cuda.compiler import compile_cuda
from cellar.ops.cuda.driver import Function
from cellar.ops.cuda.hopper import hopper_source
from cellar.ops.triton_support import launches_early

MOST_BLOCKS = 128
"""Of a launch. A block waits for its like on every rank; so many run at once on any GPU that has peers."""

_THREADS = 256

_PUSHED = 768 * 2**10
"""Bytes that a rank may push to all others together for a small sum; beyond, adding by pieces is faster."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class BoxSizes:
    """Of boxes for sums of up to `nbytes` over `ranks` ranks; small ones have at most `small` bytes."""

    ranks: int
    nbytes: int

    @property
    def small(self) -> int:
        """Bytes of the largest sum of which every rank gets all parts."""
        return min(self.nbytes, _PUSHED // (self.ranks - 1) // 16 * 16)

    @property
    def piece(self) -> int:
        """Bytes of the largest piece that one rank adds."""
        return -(-(self.nbytes // 16) // self.ranks) * 16

    def moved(self, nbytes: int) -> int:
        """Bytes that a rank gets from others for a sum of so many, or a gather, with the numbers that travel along."""
        if nbytes <= self.small:
            return 2 * (self.ranks - 1) * nbytes
        return 2 * (self.ranks - 1) * (-(-(nbytes // 16) // self.ranks) * 16)

    @property
    def total(self) -> int:
        """Bytes of a box: flags, two slots of small parts beside their numbers, pieces and their sums."""
        return self.ranks * (8 * MOST_BLOCKS + 4 * self.small + 2 * self.piece)


@dataclass(frozen=True, slots=True)
class PeerBoxes:
    """A rank's view of all boxes. `addresses`: int64 [ranks] on its device, its own among them; `calls`: int32
    [MOST_BLOCKS], zeros at first, of nobody else. A box has `sizes.total` bytes, zeros at first.
    """

    addresses: Tensor
    calls: Tensor
    rank: int
    sizes: BoxSizes

    def take(self, x: Tensor) -> bool:
        """Whether `sum_of_peers` takes such a tensor."""
        return x.nbytes > 0 and x.nbytes % 16 == 0 and x.dtype in _DTYPES

    def take_rows(self, x: Tensor) -> bool:
        """Whether `rows_of_peers` takes such a tensor, and `first_of_peers`, of any type."""
        row = x.nbytes // max(1, len(x))
        return 0 < x.nbytes <= self.sizes.small and row % 8 == 0


def peer_boxes(addresses: list[int], rank: int, nbytes: int, device: torch.device) -> PeerBoxes:
    """The boxes at these addresses, of ranks 0 on, as seen by one rank, whose device can write to all of them."""
    return PeerBoxes(
        torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.zeros(MOST_BLOCKS, dtype=torch.int32, device=device),
        rank,
        BoxSizes(len(addresses), nbytes),
    )


def sum_of_peers(x: Tensor, boxes: PeerBoxes) -> Tensor:
    """The sum of every rank's `x`, in the order of ranks: the same bits on all. All call it, in the same order.

    `x`: any shape, of a type and size that are the same on all ranks, and of which `boxes.take`.
    """
    if x.nbytes <= boxes.sizes.small:
        return sum_at_once(x, boxes)
    return sum_by_pieces(x, boxes)


def sum_at_once(x: Tensor, boxes: PeerBoxes) -> Tensor:
    """`sum_of_peers`, every rank adding all parts; of at most `boxes.sizes.small` bytes."""
    x = _aligned(x)
    out = torch.empty_like(x)
    units = x.nbytes // 8
    launch("sum_at_once", x, out, boxes, (units,), min(MOST_BLOCKS, -(-units // _THREADS)))
    return out


def sum_by_pieces(x: Tensor, boxes: PeerBoxes) -> Tensor:
    """`sum_of_peers`, every rank adding a piece for all; what is larger than a box takes goes in several launches."""
    x = _aligned(x)
    out = torch.empty_like(x)
    most = boxes.sizes.nbytes // x.element_size()
    for some, there in zip(x.view(-1).split(most), out.view(-1).split(most), strict=True):
        units = some.nbytes // 16
        blocks = -(-units // boxes.sizes.ranks // _THREADS)
        launch("sum_by_pieces", some, there, boxes, (units,), min(MOST_BLOCKS, blocks))
    return out


def rows_of_peers(x: Tensor, boxes: PeerBoxes) -> Tensor:
    """[n, w] of every rank side by side: [n, ranks w]. All call it, with equal shapes; `boxes.take_rows(x)`."""
    x = _aligned(x)
    out = x.new_empty((len(x), boxes.sizes.ranks * x.shape[1]))
    _gather(x, out, boxes, x.nbytes // len(x) // 8, boxes.sizes.ranks)
    return out


def first_of_peers(x: Tensor, boxes: PeerBoxes) -> Tensor:
    """Rank 0's `x`, contiguous, in the place of everyone's; `boxes.take_rows(x)`."""
    if x.data_ptr() % 16:
        return x.copy_(first_of_peers(x.clone(), boxes))
    _gather(x, x, boxes, x.nbytes // 8, 1)
    return x


def _gather(x: Tensor, out: Tensor, boxes: PeerBoxes, width: int, kept: int) -> None:
    units = x.nbytes // 8
    launch("gather_rows", x, out, boxes, (units, width, kept), min(MOST_BLOCKS, -(-units // _THREADS)))


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def launch(name: str, x: Tensor, out: Tensor, boxes: PeerBoxes, counts: Sequence[int], blocks: int) -> None:
    """One of the kernels; the first count is of units of 16 bytes (`sum_by_pieces`) or of 8."""
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (x, out, boxes.addresses, boxes.calls))
    _kernel(name, boxes.sizes, x.dtype if x.dtype in _DTYPES else torch.float32, x.device).launch(
        blocks,
        [*pointers, ctypes.c_int(boxes.rank), *map(ctypes.c_int, counts)],
        torch.cuda.current_stream(x.device).cuda_stream,
        dependent=launches_early(x.device.index),
    )


def peers_source(sizes: BoxSizes, dtype: torch.dtype, threads: int = _THREADS) -> tuple[str, dict[str, int]]:
    """CUDA C++ of all kernels, and the constants that they are compiled with."""
    constants = {
        "RANKS": sizes.ranks,
        "BLOCKS": MOST_BLOCKS,
        "THREADS": threads,
        "SMALL": sizes.small,
        "PIECE": sizes.piece,
        "FLOATS": int(dtype == torch.float32),
        "BF16": int(dtype != torch.float16),
    }
    return hopper_source("peers.cu"), constants


@functools.cache
def _kernel(name: str, sizes: BoxSizes, dtype: torch.dtype, device: torch.device) -> Function:
    source, constants = peers_source(sizes, dtype)
    major, minor = torch.cuda.get_device_capability(device)
    cubin = compile_cuda(source, constants, f"sm_{major}{minor}{'a' if major == 9 else ''}")
    with torch.cuda.device(device):
        return Function(cubin, name, _THREADS, 0, 1)
