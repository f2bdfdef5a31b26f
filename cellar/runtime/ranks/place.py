"""Place: which of several ranks a process is, and where it meets the others."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass

import torch

from cellar.core.specs import ModelSpec
from cellar.core.units import row_units
from cellar.models.model import Model
from cellar.models.sharding import shard
from cellar.runtime.memory import human
from cellar.runtime.ranks.comm import GroupComm, gloo_comm, nccl_comm

logger = logging.getLogger(__name__)

SHM_NBYTES = 64 * 2**20
"""Of shared memory that a rank's NCCL may take."""


@dataclass(frozen=True, slots=True)
class Place:
    """Rank `rank` of `size`. `meeting` is a file in a private directory, new for each group, by which they find each
    other.
    """

    rank: int
    size: int
    meeting: str

    def share_of(self, model: Model) -> Model:
        """The model with the rank's share of its tensors. Raises ConfigError if it cannot be shared so."""
        kind: type = type(model)
        share: Model = kind(shard(model.spec, self.rank, self.size))
        return share

    def join(self, whole: ModelSpec, device: torch.device) -> GroupComm:
        """Meet the others: NCCL on GPUs, gloo on CPUs. Raises DeviceError if they do not come."""
        from torch._C._distributed_c10d import FileStore  # not in every build of torch

        store = FileStore(self.meeting, self.size)
        vocab = row_units(whole)["vocab"]
        shares = [vocab.ranges(*vocab.share(rank, self.size)) for rank in range(self.size)]
        columns = [sum(len(piece) for piece in share) for share in shares]
        widths = {columns[self.rank]: columns}
        if device.type == "cpu":
            return gloo_comm(store, self.rank, self.size, widths)
        torch.cuda.set_device(device)
        _prepare_nccl(self.size)
        return nccl_comm(store, self.rank, self.size, widths)


def _prepare_nccl(size: int) -> None:
    """What NCCL reads of the environment, unless its user has said otherwise."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # ranks are of one machine: no other shall reach them
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        free = 0
    if free < size * SHM_NBYTES and "NCCL_SHM_DISABLE" not in os.environ:
        os.environ["NCCL_SHM_DISABLE"] = "1"
        logger.warning(
            "/dev/shm has %s free, less than %d ranks may take; GPUs without peer access exchange through sockets, "
            "which is slower: give the container more (--shm-size 1g).",
            human(free),
            size,
        )
