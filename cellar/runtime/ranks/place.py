"""Places: which of several ranks a process is, what it has of a model, and where it meets the others."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from cellar.core.layouts import Layouts
from cellar.core.loops import LOOP_TOKENS
from cellar.core.micro_batches import LANES, PART_NBYTES
from cellar.core.specs import ModelSpec
from cellar.core.units import row_units
from cellar.models.loop import Lane, Loop
from cellar.models.model import Model
from cellar.models.sharding import shard
from cellar.models.staging import stage, stage_layers
from cellar.models.stored import stored
from cellar.models.views import laid_spec
from cellar.runtime.memory import human
from cellar.runtime.ranks.axes import AxisCollectives, groups_of
from cellar.runtime.ranks.comm import RankComm, RankLink, gloo_comm, gloo_group, nccl_comm, nccl_group
from cellar.runtime.ranks.lane import lane_on
from cellar.runtime.ranks.micro_batches import MicroBatches, sizes_of
from cellar.runtime.ranks.part_boxes import PartSizes, meet_with_parts
from cellar.runtime.ranks.peers import meet
from cellar.runtime.ranks.stages import GroupWay, Stages
from cellar.runtime.steps.lanes import Lanes

logger = logging.getLogger(__name__)

SHM_NBYTES = 64 * 2**20
"""Of shared memory that a rank's NCCL may take."""


@dataclass(frozen=True)
class LaidRank:
    """Layouts of the whole model `model`, as one rank sees them.

    `loop`: how long prompts are cut; None: not at all. `ahead`: where weights are gathered a layer ahead.
    """

    model: Model
    layouts: Layouts
    collectives: AxisCollectives
    loop: Loop | None = None
    ahead: Lane | None = None


@dataclass(frozen=True)
class Seat:
    """A rank among the others: what it loads (`stored`), and its link to those that it computes the same layers with.

    `model` runs on it; `comm` is there where that has its share of every tensor by heads and columns, `laid` where
    layouts say what it has; `stages` where others have other layers. `lanes`: where micro-batches run side by side.
    """

    model: Model
    stored: ModelSpec
    link: RankLink | None
    comm: RankComm | None = None
    laid: LaidRank | None = None
    stages: Stages | None = None
    lanes: Lanes | None = None

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return (1 if self.link is None else self.link.size) * (1 if self.stages is None else self.stages.count)

    def own(self, layers: Collection[int]) -> Collection[int]:
        """Those of the whole model's layers that it has, as it numbers them."""
        if self.stages is None:
            return layers
        return [j - self.stages.layers.start for j in layers if j in self.stages.layers]


class Place(Protocol):
    """Rank `rank` of `size`, before it has met the others."""

    @property
    def rank(self) -> int:
        """From 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def take(self, model: Model, device: torch.device) -> Seat:
        """Meet the others, to run this model with them: NCCL on GPUs, gloo on CPUs.

        Raises ConfigError if it cannot be shared so, DeviceError if they do not come.
        """


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Implements `Place` for tensor parallelism by heads. `meeting` is a file in a private directory, new for each
    group, by which ranks find each other. `loop_tokens`: see `Loop`; None: as planned, but not where sums go through
    boxes, which take less time than products in chunks lose (docs/log/ranks.md). There long steps are cut into
    micro-batches, of `micro_tokens` at least (None: by the model's size), unless these are ranks of a stage.
    """

    rank: int
    size: int
    meeting: str
    loop_tokens: int | None = None
    micro_tokens: int | None = None
    of_stage: bool = False

    def take(self, model: Model, device: torch.device) -> Seat:
        """The model with the rank's share of its tensors."""
        kind: type = type(model)
        share: Model = kind(shard(model.spec, self.rank, self.size))
        comm, lanes = self._join(model.spec, device)
        return Seat(share, share.spec, comm, comm, lanes=lanes)

    def _join(self, whole: ModelSpec, device: torch.device) -> tuple[RankComm, Lanes | None]:
        from torch._C._distributed_c10d import FileStore  # not in every build of torch

        store = FileStore(self.meeting, self.size)
        widths = {}
        if (vocab := row_units(whole).get("vocab")) is not None:  # a stage may have none
            shares = [vocab.ranges(*vocab.share(rank, self.size)) for rank in range(self.size)]
            columns = [sum(len(piece) for piece in share) for share in shares]
            widths[columns[self.rank]] = columns
        loop = Loop(lane_on(device), self.loop_tokens or LOOP_TOKENS)
        if device.type == "cpu":
            return gloo_comm(store, self.rank, self.size, widths, loop=loop), None
        torch.cuda.set_device(device)
        prepare_nccl(self.size)
        boxes = meet(store, self.rank, self.size, device)
        chunks = loop if boxes is None or self.loop_tokens else None
        comm = nccl_comm(store, self.rank, self.size, widths, boxes=boxes, loop=chunks)
        sizes = sizes_of(whole, self.size, self.micro_tokens)
        if chunks is not None or self.of_stage or sizes.never:
            return comm, None
        row = whole.hidden_size * getattr(torch, whole.dtype).itemsize
        parts = meet_with_parts(store, self.rank, PartSizes(LANES, self.size, PART_NBYTES, row), device)
        return comm, None if parts is None else MicroBatches(sizes, parts, device, comm.noted)


@dataclass(frozen=True, slots=True)
class StagedPlace:
    """Implements `Place` for pipeline stages of `tensor` ranks each, which share their layers by heads: rank r is
    number r % tensor of stage r // tensor. `ahead`: plans that are on their way at once; the rest as in `TensorPlace`.
    """

    rank: int
    tensor: int
    stages: int
    meeting: str
    ahead: int
    loop_tokens: int | None = None

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.tensor * self.stages

    def take(self, model: Model, device: torch.device) -> Seat:
        """The rank's share of its stage's layers. It hands its copy of the hidden rows to its like in the next one."""
        index, number = divmod(self.rank, self.tensor)
        kind: type = type(model)
        part: Model = kind(stage(model.spec, index, self.stages))
        seat = Seat(part, part.spec, None)
        if self.tensor > 1:
            place = TensorPlace(number, self.tensor, f"{self.meeting}-{index}", self.loop_tokens, of_stage=True)
            seat = place.take(part, device)
        layers = stage_layers(model.spec.num_layers, index, self.stages)
        width, dtype = model.spec.hidden_size, getattr(torch, model.spec.dtype)
        onward, back = (GroupWay(self._group(f"{name}-{number}", index, device), self.ahead) for name in ("on", "back"))
        stages = Stages(index, self.stages, layers, width, dtype, onward, back)
        stages.greet(device)
        return replace(seat, stages=stages)

    def _group(self, name: str, index: int, device: torch.device) -> Any:
        from torch._C._distributed_c10d import FileStore

        store = FileStore(f"{self.meeting}-{name}", self.stages)
        if device.type == "cpu":
            return gloo_group(store, index, self.stages)
        torch.cuda.set_device(device)
        prepare_nccl(self.size)
        return nccl_group(store, index, self.stages)


@dataclass(frozen=True, slots=True)
class LaidPlace:
    """Implements `Place` for layouts over a mesh; `meeting` and `loop_tokens` as in `TensorPlace`."""

    rank: int
    layouts: Layouts
    meeting: str
    loop_tokens: int = LOOP_TOKENS

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.layouts.mesh.size

    def take(self, model: Model, device: torch.device) -> Seat:
        """The model as decodes see it, and the stored form for both phases."""
        layouts, mesh = self.layouts, self.layouts.mesh
        share = stored(model.spec, mesh, self.rank)
        collectives = AxisCollectives(mesh, self.rank, self._groups(device))
        kind: type = type(model)
        seen: Model = kind(laid_spec(model.spec, layouts.decode, collectives))
        loop = Loop(lane_on(device), self.loop_tokens) if layouts.looped else None
        ahead = lane_on(device) if layouts.gathers else None
        return Seat(seen, share, collectives, laid=LaidRank(model, layouts, collectives, loop, ahead))

    def _groups(self, device: torch.device) -> dict[tuple[int, ...], Any]:
        from torch._C._distributed_c10d import FileStore, PrefixStore

        meeting = FileStore(self.meeting, self.size)
        if device.type != "cpu":
            torch.cuda.set_device(device)
            prepare_nccl(self.size)
        join = gloo_group if device.type == "cpu" else nccl_group
        found = {}
        for axes, members in groups_of(self.layouts.mesh, self.rank):
            store = PrefixStore(f"{axes}-{members[0]}", meeting)
            found[members] = join(store, members.index(self.rank), len(members))
        return found


def prepare_nccl(size: int) -> None:
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
