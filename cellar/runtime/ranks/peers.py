"""Boxes for sums between GPUs that reach each other's memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from cellar.core.errors import DeviceError
from cellar.ops.cuda import shared
from cellar.ops.cuda.compiler import compiler_available
from cellar.ops.cuda.driver import driver_available
from cellar.ops.peers import BoxSizes, PeerBoxes, peer_boxes

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

BOX_SUM_NBYTES = 16 * 2**20
"""Largest sum in one launch: 1,024 tokens of 8,192 numbers in 16 bits, a chunk of a long prompt."""

_NONE = "none"
_YES = "yes"


def meet(store: Store, rank: int, size: int, device: torch.device) -> PeerBoxes | None:
    """Boxes of all ranks, each a process with a GPU of its own; None if not every one reaches every other.

    All ranks call it, and all get boxes or none does.
    """
    mine: shared.SharedMemory | None = None
    addresses: list[int] = []
    failed = _NONE
    if torch.version.hip is None and driver_available() and compiler_available():
        try:
            mine = shared.SharedMemory(BoxSizes(size, BOX_SUM_NBYTES).total)
        except DeviceError as error:
            failed = str(error)
    else:
        failed = "there is no driver, or no compiler, for the kernels of such sums"
    store.set(f"box {rank}", _NONE if mine is None else mine.handle.hex())
    handles = [store.get(f"box {r}").decode() for r in range(size)]
    if mine is not None and _NONE not in handles:
        try:
            addresses = [
                mine.address if r == rank else shared.opened(bytes.fromhex(handle)) for r, handle in enumerate(handles)
            ]
        except DeviceError as error:
            failed = str(error)
    store.set(f"reaches {rank}", _YES if addresses else failed.rstrip("."))
    said = [store.get(f"reaches {r}").decode() for r in range(size)]
    if any(words != _YES for words in said):
        if rank == 0:  # once for all
            first = next(r for r, words in enumerate(said) if words not in (_YES, _NONE))
            logger.warning("small sums go through NCCL, which is slower: GPU %d says: %s.", first, said[first])
        return None
    return peer_boxes(addresses, rank, BOX_SUM_NBYTES, device)
