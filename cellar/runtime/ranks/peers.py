"""Boxes for sums between GPUs that reach each other's memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from cellar.core.errors import DeviceError
from cellar.ops.cuda import shared
from cellar.ops.cuda.driver import driver_available
from cellar.ops.peers import PeerBoxes, box_nbytes, peer_boxes
from cellar.ops.triton_support import triton_available

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

PAIR_NBYTES = 2**20
"""Largest sum of two ranks that goes through boxes. More ranks push more: `GROUP_NBYTES`."""

GROUP_NBYTES = 2**19

_NONE = "none"
_YES = "yes"


def meet(store: Store, rank: int, size: int, device: torch.device) -> PeerBoxes | None:
    """Boxes of all ranks, each a process with a GPU of its own; None if not every one reaches every other.

    All ranks call it, and all get boxes or none does.
    """
    nbytes = PAIR_NBYTES if size == 2 else GROUP_NBYTES
    mine: shared.SharedMemory | None = None
    addresses: list[int] = []
    failed = _NONE
    if torch.version.hip is None and driver_available() and triton_available():
        try:
            mine = shared.SharedMemory(box_nbytes(size, nbytes))
        except DeviceError as error:
            failed = str(error)
    else:
        failed = "there is no driver, or no compiler, for the kernel of such sums"
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
    return peer_boxes(addresses, rank, nbytes, device)
