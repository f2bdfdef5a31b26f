"""Place: which of several ranks a process is, and where it meets the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cellar.core.specs import ModelSpec
from cellar.core.units import row_units
from cellar.models.model import Model
from cellar.models.sharding import shard
from cellar.runtime.ranks.comm import GroupComm, gloo_comm, nccl_comm


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
        return nccl_comm(store, self.rank, self.size, widths)
