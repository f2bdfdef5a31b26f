"""Sums over GPUs that write into each other's memory: one launch, no library, captured as any other.

Every rank has a box that all others can write to. A program pushes its piece of `x` into a slot of every other's box,
then raises a flag there, waits for theirs, and adds all pieces in the order of ranks, in float32. A push crosses the
link once, where a library's small all-gather waits for several exchanges. Slots alternate: who writes into one again
has heard from everybody since, so all have read what lay there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cellar.ops.triton_support import kernel

if TYPE_CHECKING:
    import triton.language as tl

MOST_PROGRAMS = 128
"""Of a launch. They wait for each other, so all of them must run at once."""

_SMALLEST = 512


@dataclass(frozen=True, slots=True)
class PeerBoxes:
    """A rank's view of all boxes. `addresses`: int64 [ranks] on its device, its own among them; `calls`: int32
    [MOST_PROGRAMS], zeros at first, of nobody else. A box has `box_nbytes(ranks, nbytes)` bytes, zeros at first.
    """

    addresses: Tensor
    calls: Tensor
    rank: int
    size: int
    nbytes: int

    def take(self, x: Tensor) -> bool:
        """Whether `sum_of_peers` takes such a tensor."""
        return 0 < x.nbytes <= self.nbytes


def box_nbytes(size: int, nbytes: int) -> int:
    """Bytes of a box for sums of up to `nbytes` (a multiple of 16) over `size` ranks: flags, then two slots a rank."""
    return size * (4 * MOST_PROGRAMS + 2 * nbytes)


def peer_boxes(addresses: list[int], rank: int, nbytes: int, device: torch.device) -> PeerBoxes:
    """The boxes at these addresses, of ranks 0 on, as seen by one rank, whose device can write to all of them."""
    return PeerBoxes(
        torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.zeros(MOST_PROGRAMS, dtype=torch.int32, device=device),
        rank,
        len(addresses),
        nbytes,
    )


def sum_of_peers(x: Tensor, boxes: PeerBoxes) -> Tensor:
    """The sum of every rank's `x`, in the order of ranks: the same bits on all. All call it, in the same order.

    `x`: any shape, of a type and size that are the same on all ranks, and of which `boxes.take`.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    n = x.numel()
    block = max(_SMALLEST, 1 << (-(-n // MOST_PROGRAMS) - 1).bit_length())
    _sum_kernel[(-(-n // block),)](
        x,
        out,
        boxes.addresses,
        boxes.calls,
        n,
        boxes.nbytes,
        RANK=boxes.rank,
        SIZE=boxes.size,
        MOST=MOST_PROGRAMS,
        BLOCK=block,
        num_warps=8 if block >= 4096 else 4,
    )
    return out


@kernel
def _sum_kernel(  # type: ignore[no-untyped-def]
    x,
    out,
    addresses,
    calls,
    n,
    nbytes,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Piece `program_id` of the sum. Flag [r, p] of a box: the last call whose piece p rank r has pushed there."""
    p = tl.program_id(0)
    call = tl.load(calls + p) + 1
    at = p * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    own = tl.load(x + at, mask=inside)
    flags: tl.constexpr = 4 * MOST * SIZE
    slots = flags + ((call & 1) * SIZE).to(tl.int64) * nbytes
    for r in tl.static_range(SIZE):
        if r != RANK:
            slot = (tl.load(addresses + r) + slots + RANK * nbytes).to(tl.pointer_type(x.dtype.element_ty))
            tl.store(tl.multiple_of(slot, 16) + at, own, mask=inside)
    tl.debug_barrier()
    for r in tl.static_range(SIZE):
        if r != RANK:
            flag = (tl.load(addresses + r) + (RANK * MOST + p) * 4).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flag, call, sem="release", scope="sys")
    mine = tl.load(addresses + RANK)
    for r in tl.static_range(SIZE):
        if r != RANK:
            flag = (mine + (r * MOST + p) * 4).to(tl.pointer_type(tl.int32))
            last = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            while last - call < 0:
                last = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    total = tl.zeros((BLOCK,), tl.float32)
    for r in tl.static_range(SIZE):
        if r == RANK:
            part = own
        else:
            slot = (mine + slots + r * nbytes).to(tl.pointer_type(x.dtype.element_ty))
            part = tl.load(tl.multiple_of(slot, 16) + at, mask=inside, cache_modifier=".cg")
        total = part.to(tl.float32) if r == 0 else total + part.to(tl.float32)
    tl.store(out + at, total.to(x.dtype.element_ty), mask=inside)
    # Of all pieces that programs of this launch stand for, also those that it is too short to have.
    every = p + tl.num_programs(0) * tl.arange(0, MOST)
    tl.store(calls + every, call, mask=every < MOST)
