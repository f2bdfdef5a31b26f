"""Collectives over GPUs that write into each other's memory: one launch, no library, captured as any other.

Every rank has a box that all others can write to (`peers.cu`), with room for sums of three kinds. Of small ones every
rank gets all parts (so gathers go, too), with the number of the call in every 8 bytes: a sum takes little longer than
the way of its data. Of larger ones a rank adds one piece for all, so that a link carries what it must: into places that
are zero until it comes, or, of the largest, with flags behind it. The next kernel may start while a sum waits, and ask
for its weights meanwhile.
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

_MOST_UNITS = 8 * _THREADS
"""Of 8 bytes that a block has of a row: a thread keeps them in registers."""

_PUSHED = 768 * 2**10
"""Bytes that a rank may push to all others together for a small sum; beyond, adding by pieces is faster."""

_BLANKS = 4 * 2**20
"""Bytes of the largest sum whose pieces go into blanks, of which a box has four times as many; of larger ones flags and
fences take a small part of the time.
"""

_JOINED = 512 * 2**10
"""Bytes of the largest sum whose norm is in the same launch; of larger ones numbers travel faster alone."""

_NORMED_INSIDE = 4096
"""Widest row of one token that a product norms itself, in a launch less than even a sum with its norm takes."""

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
    def slot(self) -> int:
        """Bytes for what a rank sends in a call with numbers: all of a small sum, or its pieces and their sums."""
        return max(2 * self.small, -(-4 * _JOINED // self.ranks // 32) * 32)

    @property
    def piece(self) -> int:
        """Bytes of the largest piece that one rank adds."""
        return -(-(self.nbytes // 16) // self.ranks) * 16

    @property
    def blanks(self) -> int:
        """Bytes of the largest sum in blanks."""
        return min(self.nbytes, _BLANKS)

    @property
    def blank(self) -> int:
        """Bytes of the largest piece of one."""
        return -(-(self.blanks // 16) // self.ranks) * 16

    def moved(self, nbytes: int) -> int:
        """Bytes that a rank gets from others for a sum of so many, or a gather, with the numbers that travel along."""
        if nbytes <= self.small:
            return 2 * (self.ranks - 1) * nbytes
        return 2 * (self.ranks - 1) * (-(-(nbytes // 16) // self.ranks) * 16)

    @property
    def total(self) -> int:
        """Bytes of a box: flags, two slots with numbers, pieces and their sums, and two of both in blanks."""
        return self.ranks * (8 * MOST_BLOCKS + 2 * self.slot + 2 * self.piece + 4 * self.blank)


@dataclass(frozen=True, slots=True)
class NormSizes:
    """Of rows with their norm: how wide these are, in how many blocks, and in how many hops: a rank adds all parts of a
    row (1), or a piece for all (2).
    """

    width: int
    slices: int
    hops: int


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

    def take_norm(self, x: Tensor) -> bool:
        """Whether rows [n, w] go by `sum_norm_of_peers`: of one token, and of sums that are not small. Of the others
        steps are faster with two launches: clusters wait for room (docs/log/ranks.md).
        """
        alone = len(x) == 1 and x.shape[1] > _NORMED_INSIDE
        return self.take(x) and (alone or self.sizes.small < x.nbytes <= _JOINED) and self.norm_sizes(x) is not None

    def take_before_norm(self, x: Tensor) -> bool:
        """Whether rows [n, w] go by `sum_of_peers` right before their norm. A small sum may leave it to a product."""
        return self.take(x) and x.nbytes > self.sizes.small

    def norm_sizes(self, x: Tensor) -> NormSizes | None:
        """How rows [n, w] are divided; None: not at all."""
        hops = 1 if x.nbytes <= self.sizes.small else 2
        units, rest = divmod(x.nbytes // len(x), 8)
        for slices in (8, 4, 2, 1):
            whole = units % slices == 0 and (hops == 1 or units // slices % self.sizes.ranks == 0)
            if (
                whole
                and (slices == 1 or len(x) * slices <= MOST_BLOCKS)
                and units // slices <= _MOST_UNITS
                and not rest
            ):
                return NormSizes(x.shape[1], slices, hops)
        return None


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
    return sum_in_blanks(x, boxes) if x.nbytes <= boxes.sizes.blanks else sum_by_pieces(x, boxes)


def sum_at_once(x: Tensor, boxes: PeerBoxes) -> Tensor:
    """`sum_of_peers`, every rank adding all parts; of at most `boxes.sizes.small` bytes."""
    x = _aligned(x)
    out = torch.empty_like(x)
    units = x.nbytes // 8
    launch("sum_at_once", x, out, boxes, (units,), min(MOST_BLOCKS, -(-units // _THREADS)))
    return out


def sum_in_blanks(x: Tensor, boxes: PeerBoxes) -> Tensor:
    """`sum_of_peers`, every rank adding a piece for all; of at most `boxes.sizes.blanks` bytes. A sum of zeros may have
    a sign.
    """
    x = _aligned(x)
    out = torch.empty_like(x)
    units = x.nbytes // 16
    launch("sum_in_blanks", x, out, boxes, (units,), _blocks(units, boxes))
    return out


def sum_by_pieces(x: Tensor, boxes: PeerBoxes) -> Tensor:
    """`sum_of_peers`, every rank adding a piece for all; what is larger than a box takes goes in several launches."""
    x = _aligned(x)
    out = torch.empty_like(x)
    most = boxes.sizes.nbytes // x.element_size()
    for start in range(0, x.numel(), most):
        some, there = (t.view(-1)[start : start + most] for t in (x, out))
        units = some.nbytes // 16
        launch("sum_by_pieces", some, there, boxes, (units,), _blocks(units, boxes))
    return out


def _blocks(units: int, boxes: PeerBoxes) -> int:
    """For pieces of so many units of 16 bytes."""
    return min(MOST_BLOCKS, -(-units // boxes.sizes.ranks // _THREADS))


def sum_norm_of_peers(x: Tensor, residual: Tensor, norm: Tensor, eps: float, boxes: PeerBoxes) -> tuple[Tensor, Tensor]:
    """-> (rms_norm(residual + s), residual + s), s the `sum_of_peers` of x [n, w]; `boxes.take_norm(x)`.

    residual: [n, w]; norm: [w]. All call it, with equal residuals.
    """
    x, residual = _aligned(x), _aligned(residual)
    normed, total = torch.empty_like(x), torch.empty_like(x)
    launch_norm(x, residual, norm, normed, total, eps, boxes, len(x))
    return normed, total


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
    """One of the kernels; the first count is of units of 16 bytes (sums by pieces) or of 8."""
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (x, out, boxes.addresses, boxes.calls))
    _kernel(name, boxes.sizes, x.dtype if x.dtype in _DTYPES else torch.float32, x.device).launch(
        blocks,
        [*pointers, ctypes.c_int(boxes.rank), *map(ctypes.c_int, counts)],
        torch.cuda.current_stream(x.device).cuda_stream,
        dependent=launches_early(x.device.index),
    )


def launch_norm(
    x: Tensor, residual: Tensor, norm: Tensor, normed: Tensor, total: Tensor, eps: float, boxes: PeerBoxes, rows: int
) -> None:
    """The kernel for sums of the shape of x with their norm, of its first `rows`."""
    sizes = boxes.norm_sizes(x)
    assert sizes is not None, "`take_norm` has said so"
    pointers = (t.data_ptr() for t in (x, residual, norm, normed, total, boxes.addresses, boxes.calls))
    _norm_kernel(sizes, boxes.sizes, x.dtype, x.device).launch(
        min(len(x), MOST_BLOCKS),
        [NormGiven(*pointers, boxes.rank, rows, eps)],
        torch.cuda.current_stream(x.device).cuda_stream,
        dependent=launches_early(x.device.index),
    )


def peers_source(sizes: BoxSizes, dtype: torch.dtype, threads: int = _THREADS) -> tuple[str, dict[str, int]]:
    """CUDA C++ of all kernels, and the constants that they are compiled with."""
    constants = {
        "RANKS": sizes.ranks,
        "BLOCKS": MOST_BLOCKS,
        "THREADS": threads,
        "SLOT": sizes.slot,
        "PIECE": sizes.piece,
        "BLANK": sizes.blank,
        "FLOATS": int(dtype == torch.float32),
        "BF16": int(dtype != torch.float16),
    }
    return hopper_source("peers.cu"), constants


def norm_source(
    norm: NormSizes, sizes: BoxSizes, dtype: torch.dtype, threads: int = _THREADS
) -> tuple[str, dict[str, int]]:
    """The same of a sum with its norm."""
    _, constants = peers_source(sizes, dtype, threads)
    constants |= {"WIDTH": norm.width, "SLICES": norm.slices, "HOPS": norm.hops}
    return hopper_source("peers.cu", "peers_norm.cu"), constants


def norm_shared(slices: int, threads: int = _THREADS) -> int:
    """Bytes of shared memory: a number of each warp, and of each block of the cluster."""
    return 4 * (-(-threads // 32 // 4) * 4 + 4 * slices)


class NormGiven(ctypes.Structure):
    """As `peers_norm.cu` has it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "residual", "weight", "normed", "total", "boxes", "calls")),
        ("rank", ctypes.c_uint32),
        ("rows", ctypes.c_uint32),
        ("eps", ctypes.c_float),
    )


@functools.cache
def _norm_kernel(norm: NormSizes, sizes: BoxSizes, dtype: torch.dtype, device: torch.device) -> Function:
    cubin = compile_cuda(*norm_source(norm, sizes, dtype), _architecture(device))
    with torch.cuda.device(device):
        return Function(cubin, "sum_norm", _THREADS, norm_shared(norm.slices), norm.slices)


@functools.cache
def _kernel(name: str, sizes: BoxSizes, dtype: torch.dtype, device: torch.device) -> Function:
    cubin = compile_cuda(*peers_source(sizes, dtype), _architecture(device))
    with torch.cuda.device(device):
        return Function(cubin, name, _THREADS, 0, 1)


def _architecture(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major == 9 else ''}"
