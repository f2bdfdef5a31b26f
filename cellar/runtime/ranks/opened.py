"""Opening a model over several ranks: a process for each, on a GPU or a part of the processor of its own."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from cellar.core.config import DeviceConfig, EngineConfig
from cellar.core.errors import ConfigError
from cellar.core.layouts import Layouts, Mesh
from cellar.core.messages import Placed, Placement, StepPlan
from cellar.core.pieces import format_name
from cellar.core.specs import ModelSpec
from cellar.models import fingerprint, hub, registry
from cellar.models.sharding import shard
from cellar.models.staging import stage, stage_layers
from cellar.models.stored import padded_heads, stored
from cellar.runtime.device import resolve_device
from cellar.runtime.offload.opened import OffloadReport
from cellar.runtime.protocol import Runtime
from cellar.runtime.ranks.group import MakeRank, RankGroup
from cellar.runtime.ranks.place import LaidPlace, Place, StagedPlace, TensorPlace
from cellar.runtime.ranks.rank import ProcessRank
from cellar.runtime.steps.local import open_local
from cellar.runtime.steps.memory_use import MemoryUse
from cellar.runtime.steps.placed import DEVICE, check_resident

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedRanks:
    """A group of ranks as one runtime, the whole model that they run, and the options with nothing left to decide."""

    runtime: RankGroup
    spec: ModelSpec
    config: EngineConfig
    fingerprint: bytes
    memory: MemoryUse | None

    @property
    def offloads(self) -> Sequence[OffloadReport]:
        """Where the weights of each rank lie, if they are streamed."""
        return self.runtime.offload


def open_ranks(
    config: EngineConfig,
    directory: Path | None,
    placement: Placement | None = None,
    make: MakeRank = ProcessRank,
    offloaded: Sequence[Placement] = (),
) -> OpenedRanks:
    """Load a model's shares into `config.device.num_ranks` ranks, or into those of a placement of kind partition, whose
    layouts they run, or its stages; `directory` as in `open_local`. Layouts of 1D by heads run as tensor parallelism.
    `offloaded`: of each rank's share, if they do not all fit their devices.

    Options of memory and threads are divided: each rank takes its part of the host's. Raises ConfigError for what does
    not run on several ranks, DeviceError, CheckpointError or CapacityError.
    """
    split = None if placement is None else placement.partition
    layouts = None if split is None or split.stages > 1 else Layouts.of(split)
    tensor, stages = config.device.tensor_parallel_size, config.device.pipeline_parallel_size
    size = tensor * stages if layouts is None else layouts.mesh.size
    kind = kind_of_ranks(config, size, layouts, planned=split is not None)
    config = config.on(kind)
    raw = registry.read_config(directory) if directory is not None else _shipped(config)
    if raw is None:
        assert config.model.model is not None, "a model without a name is the demo, which has a directory"
        directory = hub.resolve(config.model.model)
        raw = registry.read_config(directory)
    dtype = registry.auto_dtype(raw, kind) if config.model.dtype == "auto" else config.model.dtype
    named = config.model
    cache = config.cache
    spec = registry.open_model(
        raw, dtype, cache.block_size, named.max_model_len, named.quantization, cache.kv_cache_dtype
    ).spec
    if layouts is None:
        _check_stages(spec, stages)
        _check_shares(spec, tensor)
    else:
        _check_layouts(spec, layouts)
    if named.load_format == "dummy" or directory is None:
        content = fingerprint.of_dummy(spec, named.seed, kind)
    else:
        content = fingerprint.of_checkpoint(directory)
    if named.quantization is not None:
        content = fingerprint.of_quantized(content, named.quantization)
    begin = time.perf_counter()
    meeting = tempfile.mkdtemp(prefix="cellar-ranks-")
    try:
        places: list[Place] = []
        as_tensor = layouts is not None and _are_tensor_parallel(layouts, spec)
        for rank in range(size):
            at = f"{meeting}/ranks"
            if layouts is not None and not as_tensor:
                places.append(LaidPlace(rank, layouts, at))
            elif stages > 1:
                places.append(StagedPlace(rank, tensor, stages, at, config.steps_ahead))
            else:
                places.append(TensorPlace(rank, size, at))
        parts: Sequence[Placement | None] = offloaded or [placement] * size
        if placement is not None and stages > 1:
            parts = [_of_stage(placement, spec, rank, stages) for rank in range(stages)]
        elif placement is not None and layouts is not None and as_tensor:
            parts = [_of_share(placement, spec, layouts.mesh, rank) for rank in range(size)]
        runtime = RankGroup(
            [
                partial(open_rank, _of_rank(config, p, kind, stages, streams=bool(offloaded)), directory, own, p)
                for p, own in zip(places, parts, strict=True)
            ],
            make,
            stages=stages,
        )
    finally:
        shutil.rmtree(meeting, ignore_errors=True)
    logger.info("%d ranks are there after %.1f s", size, time.perf_counter() - begin)
    device = "cpu" if kind == "cpu" else "cuda"
    resolved = config.resolve(dtype=dtype, max_model_len=spec.max_position, device=device)
    return OpenedRanks(runtime, spec, resolved, content, _together(runtime.memory))


def open_rank(
    config: EngineConfig, directory: Path | None, placement: Placement | None, place: Place
) -> Runtime[StepPlan]:
    """One rank's runtime, in its process or thread."""
    threads = config.device.num_threads
    if threads is not None:
        torch.set_num_threads(threads)  # those that load weights, too
    return open_local(config, directory, placement, place=place).runtime


def kind_of_ranks(config: EngineConfig, size: int, layouts: Layouts | None, *, planned: bool) -> str:
    """cpu or cuda. Raises ConfigError for what several ranks do not do, or more of them than there are GPUs."""
    device = resolve_device(config.device.device)
    asked = _asked(config.device) if layouts is None else f"the plan is for {size} devices"
    if config.device.device.startswith("cuda:"):
        raise ConfigError(
            f"device is {config.device.device}, but {asked}, which takes the first {size} GPUs; set device to cuda, "
            "and CUDA_VISIBLE_DEVICES to choose which they are."
        )
    if device.type != "cpu" and (count := torch.cuda.device_count()) < size:
        change = f"set it to at most {count}" if layouts is None else f"plan for at most {count}"
        if config.device.pipeline_parallel_size > 1:
            change = f"take {count} ranks in all at most"
        raise ConfigError(f"{asked}, but this machine has {count} GPU{'s' * (count > 1)}; {change}, or device to cpu.")
    for name, given in (
        ("plan", None if planned else config.model.plan),
        ("device_memory", config.offload.device_memory if planned else None),
        ("sparse_v", config.offload.sparse_v),
        ("kv_disk_path", config.cache.kv_disk_path),
        ("kv_remote", config.cache.kv_remote),
        ("kv_offloading_size", None if layouts is None or layouts.homes == 1 else config.cache.kv_offloading_size),
    ):
        if given is not None:
            raise ConfigError(f"{name} does not work on several ranks yet, but {asked}; leave one of both out.")
    return device.type


def _asked(device: DeviceConfig) -> str:
    """What was asked for, as the beginning of a sentence."""
    both = {name: getattr(device, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
    return " and ".join(f"{name} is {count}" for name, count in both.items() if count > 1)


def _of_stage(placement: Placement, spec: ModelSpec, index: int, stages: int) -> Placement:
    """What a placement of the whole model says of one stage of one device, in the stage's names."""
    own, first = stage(spec, index, stages), stage_layers(spec.num_layers, index, stages).start
    names = {name: name for name, _ in own.named_tensors()}
    for layer in own.layers:
        for tensor in layer.tensors:
            names[f"layers.{layer.index}.{tensor.name}"] = f"layers.{layer.index + first}.{tensor.name}"
    if "lm_head" in names and spec.tied_head:
        names["lm_head"] = spec.embedding[0].name
    there = {part.tensor: part for part in placement.weights}
    weights = tuple(replace(there[whole], tensor=name) for name, whole in names.items() if whole in there)
    return replace(placement, weights=weights)


def _are_tensor_parallel(layouts: Layouts, spec: ModelSpec) -> bool:
    """Whether tensor parallelism by heads computes the same, of equal shares of heads: it is captured, and sums through
    boxes, which layouts are not and do not.
    """
    size = layouts.mesh.size
    return (
        all(one.is_tensor_parallel(spec.num_kv_heads) for one in (layouts.prefill, layouts.decode))
        and all(layer.num_heads % size == layer.num_kv_heads % size == 0 for layer in spec.layers)
        and _shares(spec, size)
    )


def _of_share(placement: Placement, spec: ModelSpec, mesh: Mesh, rank: int) -> Placement:
    """What a placement, which says what layouts store, means for a rank's share in tensor parallelism: that has the
    whole table of words, and may have a few rows more or fewer of the head. Raises ConfigError if it is of another
    model.
    """
    check_resident(placement, stored(spec, mesh, rank))
    share = shard(spec, rank, mesh.size)
    rows = [(name, tensor.shape[0], format_name(tensor)) for name, tensor in share.named_tensors()]
    return replace(placement, weights=tuple(Placed(name, DEVICE, 0, count, form) for name, count, form in rows))


def _check_stages(spec: ModelSpec, stages: int) -> None:
    """Raise ConfigError for more stages than layers."""
    if stages > spec.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size is {stages}, but this {spec.model_type} model has {spec.num_layers} layers; set "
            f"it to at most {spec.num_layers}."
        )


def _check_layouts(spec: ModelSpec, layouts: Layouts) -> None:
    """Raise ConfigError for layouts that do not run, or that the model's shape forbids."""
    stored(spec, layouts.mesh, 0)
    _, kv_heads = padded_heads(spec.num_heads, spec.num_kv_heads, layouts.mesh.size)
    if layouts.moves(kv_heads):
        first, then = layouts.prefill, layouts.decode
        raise ConfigError(
            f"the plan computes prompts as {first.name} {first.attention} and decodes as {then.name} {then.attention}, "
            "between which K and V would move; what runs are layouts that keep them where they are, such as one for "
            "both, or XYZ for prompts and 2D by batch for decodes."
        )


def _check_shares(spec: ModelSpec, size: int) -> None:
    """Raise ConfigError, saying how many ranks would do, if so many cannot share the model."""
    try:
        shard(spec, 0, size)
    except ConfigError as error:
        most = next(count for count in range(size - 1, 0, -1) if _shares(spec, count))
        raise ConfigError(
            f"tensor_parallel_size is {size}, but this {spec.model_type} model has {spec.num_kv_heads} KV heads, "
            f"{spec.intermediate_size} intermediate columns and {spec.vocab_size} tokens to share, in whole heads "
            f"and in groups of up to 64; set it to at most {most}."
        ) from error


def _shares(spec: ModelSpec, size: int) -> bool:
    try:
        shard(spec, 0, size)
    except ConfigError:
        return False
    return True


def _of_rank(config: EngineConfig, place: Place, kind: str, stages: int, *, streams: bool) -> EngineConfig:
    """The options of one rank: its device, its part of what the host has, and the tokens of a plan for its stage."""
    host_kv = config.cache.kv_offloading_size
    cache = replace(config.cache, kv_offloading_size=None if host_kv is None else host_kv / place.size)
    device = replace(config.device, tensor_parallel_size=1, pipeline_parallel_size=1)
    parts = {name: getattr(config.offload, name) for name in ("host_memory", "disk")}
    offload = replace(config.offload, **{name: given and given / place.size for name, given in parts.items()})
    if kind == "cpu" or streams:
        device = replace(device, num_threads=threads_of_rank(config.device, kind, place.size))
    device = replace(device, device="cpu" if kind == "cpu" else f"cuda:{place.rank}")
    tokens = config.schedule.max_num_batched_tokens
    assert tokens is not None, "decided by EngineConfig.on"
    schedule = replace(config.schedule, max_num_batched_tokens=-(-tokens // stages))
    return replace(config, cache=cache, device=device, offload=offload, schedule=schedule)


def threads_of_rank(device: DeviceConfig, kind: str, size: int) -> int:
    """Of the processor, for each of so many ranks; beside a GPU one thread more of each launches (`threads_beside`)."""
    each = (device.num_threads or torch.get_num_threads()) // size
    return max(1, each - (kind != "cpu" and device.num_threads is None))


def _shipped(config: EngineConfig) -> dict[str, object] | None:
    name = config.model.model
    return None if name is None else registry.shipped_config(name)


def _together(each: Sequence[MemoryUse | None]) -> MemoryUse | None:
    """What all ranks take."""
    known = [memory for memory in each if memory is not None]
    if len(known) < len(each):
        return None
    kind = known[0].device.partition(":")[0]
    return MemoryUse(
        f"{len(known)} ranks ({kind})" if kind != "cpu" else kind,
        sum(memory.weights for memory in known),
        sum(memory.kv for memory in known),
        min(memory.num_chunks for memory in known),
        sum(memory.host_kv for memory in known),
        sum(memory.taken for memory in known),
    )
