"""An engine that plans by itself: a device held to so much memory, and a model that may not fit it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cellar.core.config import EngineConfig
from cellar.core.cores import num_cores
from cellar.core.errors import ConfigError
from cellar.core.specs import ModelSpec
from cellar.planner.capped import KV_SHARE, Room, capped_plan, fits
from cellar.planner.moves import LINK_READS, Away, few_tokens
from cellar.planner.passes import (
    LINK_READS_OF_CODES,
    PROMPT_SHARE,
    block_seconds,
    longest,
    most_within,
    pass_cost,
    predicted_line,
    too_slow,
)
from cellar.planner.rates import Rates
from cellar.planner.saved import Limits, SavedPlan
from cellar.planner.work import FEW_TOKENS

_LOG = logging.getLogger(__name__)

MEASURED_NBYTES = 2**26
"""What is read to measure a processor's rates: more than its caches hold."""

MEASURED_NBYTES_OF_A_HOST = 2**30
"""The same for a machine with an accelerator, and no less than `MEASURED_CACHES` times its processor's last cache."""

MEASURED_CACHES = 8
"""What goes through a gigabyte again and again finds much of it in a cache of 300 MB: the CPU's products beside an H200
had 1.1 to 1.2 times the rate that they have in passes (docs/log/offload.md).
"""

MEASURED_SECONDS = 0.05
"""For each of them."""

MEASURED_SECONDS_OF_A_HOST = 0.2
"""The same beside an accelerator: cores that had nothing to do are slow at first."""

MEASURED_SECONDS_OF_A_DISK = 0.2
"""For each where the disk is read beside it: a record takes tens of milliseconds."""

HOST_SHARE = 0.9
"""Of the host's memory that is free, what an accelerator's weights and KV may take if nobody says how much."""


def held_if_too_large(config: EngineConfig, checkpoint: Path | None) -> EngineConfig:
    """The options, with a `device_memory` if the weights alone are more than an accelerator has free: the share
    `gpu_memory_utilization` of that. What a processor's memory does not hold would lie on disk, for which it must be
    asked; and ranks have a share each. Raises ConfigError for options that do not go together.
    """
    from cellar.runtime.device import resolve_device
    from cellar.runtime.memory import device_free, human

    device = resolve_device(config.device.device)
    if device.type == "cpu" or config.device.num_ranks > 1:
        return config
    _, _, spec = model_of(config, checkpoint, device.type)
    free = device_free(device)
    if spec.nbytes() <= free:
        return config
    held = free * config.cache.gpu_memory_utilization / 2**30
    _LOG.warning(
        "the weights take %s, but %s has %s free: those that it does not hold are streamed from host memory, as with "
        "--device-memory %.3g.",
        human(spec.nbytes()),
        device,
        human(free),
        held,
    )
    return replace(config, offload=replace(config.offload, device_memory=held))


def with_own_plan(
    config: EngineConfig, checkpoint: Path | None, spared: int = 0
) -> tuple[EngineConfig, SavedPlan | None]:
    """The options within `device_memory`, and the plan of a model that does not fit it; None for one that does, whose
    KV is cut to size. `spared`: bytes of the device that a plan leaves free, for buffers that took more than was
    expected.

    Raises ConfigError for what does not run offloaded yet, CapacityError if the places together are too small.
    """
    asked = _asked(config, checkpoint)
    config, spec, raw, limits = asked.config, asked.spec, asked.raw, asked.limits
    room = replace(asked.room, device=asked.room.device - spared)
    if not spared and fits(spec, room, limits):
        return _resident(config, spec, room, limits), None
    if not spared:
        _warn_of_loss(config, raw, spec, room, limits)
    if room.kind == "gpu":
        _warn_of_few_threads(config, asked.machine)
    rates, threads = _rates(config, spec, room.kind)
    plan = _planned(asked, spec, room, limits, rates=rates, latency=config.offload.latency)
    assert plan.limits is not None
    _LOG.info("%s", predicted_line(plan))
    device = replace(config.device, num_threads=threads)
    schedule = replace(config.schedule, max_num_seqs=plan.limits.max_num_seqs)
    return replace(config, device=device, schedule=schedule), plan


def with_rank_plans(
    config: EngineConfig, checkpoint: Path | None, spared: int = 0
) -> tuple[EngineConfig, list[SavedPlan]]:
    """The same over several ranks, of tensor parallelism and of pipeline stages: a plan for the share of each, whose
    device holds `device_memory`, and which has an equal part of the host's memory, cores and disk. No plans if each
    share fits.

    All take the same number of sequences. Raises ConfigError, too, for what does not run on several ranks.
    """
    from cellar.models.sharding import shard
    from cellar.models.staging import stage
    from cellar.runtime.ranks.opened import kind_of_ranks, threads_of_rank

    tensor, stages = config.device.tensor_parallel_size, config.device.pipeline_parallel_size
    size = tensor * stages
    kind_of_ranks(config, size, None, planned=False)  # so many GPUs, or none, before any is asked how fast it is
    asked = _asked(config, checkpoint)
    spec, limits, room = asked.spec, asked.limits, replace(asked.room, device=asked.room.device - spared)
    if stages > 1:
        _check_stages(asked.config)
        limits = replace(limits, max_num_batched_tokens=-(-limits.max_num_batched_tokens // stages))
    room = replace(room, host=None if room.host is None else room.host // size, disk=room.disk // size)
    shares = [shard(stage(spec, rank // tensor, stages), rank % tensor, tensor) for rank in range(size)]
    largest = max(shares, key=lambda share: share.nbytes())
    if not spared and all(fits(share, room, limits) for share in shares):
        if config.offload.latency is not None:
            raise ConfigError(
                f"latency bounds plans that stream weights, but on {size} ranks each device holds its share; leave "
                "latency out, or lower device_memory."
            )
        return _resident(asked.config, largest, room, limits), []
    if tensor > 1 and any(matrix.formats for matrix in spec.tensors()):
        raise ConfigError(
            f"{asked.name} is quantized, and shares of quantized weights are not streamed yet; leave "
            "tensor_parallel_size or quantization out, take pipeline_parallel_size, or raise device_memory."
        )
    if room.kind == "gpu":
        _warn_of_few_threads(config, asked.machine)
    device = replace(asked.config.device, num_threads=threads_of_rank(config.device, room.kind, size))
    rates, _ = _rates(replace(asked.config, device=device), largest, room.kind, size)
    wishes: dict[str, Any] = {"rates": rates, "passes": stages}
    first = _planned(asked, largest, room, limits, latency=config.offload.latency, **wishes)
    assert first.limits is not None
    _LOG.info("on each of %d ranks: %s", size, predicted_line(first))
    room = replace(room, chunks=first.placement.num_chunks)
    plans = [_planned(asked, share, room, first.limits, latency=None, **wishes) for share in shares]
    return replace(asked.config, schedule=replace(asked.config.schedule, max_num_seqs=first.limits.max_num_seqs)), plans


def _check_stages(config: EngineConfig) -> None:
    """Raise ConfigError for what plans of stages cannot say yet."""
    wishes = {"latency": config.offload.latency, "schedule": config.offload.schedule}
    for name, given in wishes.items():
        if given not in (None, "zigzag"):
            raise ConfigError(
                f"{name} {given} does not work on pipeline stages with device_memory yet; leave one of both out."
            )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be planned: the model, its room, and the options for the kind of device."""

    config: EngineConfig
    name: str
    raw: Mapping[str, Any]
    spec: ModelSpec
    machine: str
    room: Room
    limits: Limits


def _asked(config: EngineConfig, checkpoint: Path | None) -> _Asked:
    from cellar.runtime.device import resolve_device
    from cellar.runtime.memory import host_available

    sizes = config.offload.nbytes
    held = sizes["device"]
    assert held is not None, "whoever calls has looked"
    device = resolve_device(config.device.device)
    name, raw, spec = model_of(config, checkpoint, device.type)
    config = config.on(device.type)
    tokens = config.schedule.max_num_batched_tokens
    assert tokens is not None, "decided by EngineConfig.on"
    limits = Limits(config.schedule.max_num_seqs, tokens, spec.max_position)
    kind = "cpu" if device.type == "cpu" else "gpu"
    host = sizes["host"]
    if host is None and kind == "gpu":
        host = int(HOST_SHARE * host_available())
    room = Room(held, host, sizes["disk"] or 0, config.cache.kv_cache_memory_bytes, kind)
    return _Asked(config, name, raw, spec, str(device), room, limits)


def model_of(config: EngineConfig, checkpoint: Path | None, kind: str) -> tuple[str, Mapping[str, Any], ModelSpec]:
    """The model's name, its config.json, and what it is with these options on a `kind` of device: cpu or cuda."""
    from cellar.engine.plan import DEMO
    from cellar.models import registry

    name = config.model.model or DEMO
    raw = registry.shipped_config(name) if checkpoint is None else registry.read_config(checkpoint)
    assert raw is not None, "a model without a checkpoint is a shipped config"
    dtype = registry.auto_dtype(raw, kind) if config.model.dtype == "auto" else config.model.dtype
    chunk, longest = config.cache.block_size, config.model.max_model_len
    kept = config.cache.kv_cache_dtype
    return name, raw, registry.open_model(raw, dtype, chunk, longest, config.model.quantization, kept).spec


def _planned(asked: _Asked, spec: ModelSpec, room: Room, limits: Limits, **wishes: Any) -> SavedPlan:
    order: Any = asked.config.offload.schedule
    return capped_plan(spec, room, limits, model=asked.name, machine=asked.machine, order=order, **wishes)


def _resident(config: EngineConfig, spec: ModelSpec, room: Room, limits: Limits) -> EngineConfig:
    """The options of a model that fits, within the latency. Raises ConfigError if not even one request is."""
    if config.offload.schedule != "zigzag":
        raise ConfigError(
            f"schedule {config.offload.schedule} is of models that device_memory does not hold, but this one fits it; "
            "leave schedule out."
        )
    latency = config.offload.latency
    if latency is not None:
        cost = pass_cost(spec, _rates(config, spec, room.kind)[0], Away(0, 0, "device", room.kind))
        most = most_within(latency, cost, longest(limits), limits)
        if most == 0:
            raise too_slow(latency, block_seconds(cost, longest(limits), 1, limits), longest(limits))
        config = replace(config, schedule=replace(config.schedule, max_num_seqs=most))
    if room.kind == "gpu":
        return config  # KV gets what is left of it, which the runtime sees
    kv = int(room.device * KV_SHARE) if room.kv is None else room.kv
    return replace(config, cache=replace(config.cache, kv_cache_memory_bytes=kv))


def _rates(config: EngineConfig, spec: ModelSpec, kind: str, ranks: int = 1) -> tuple[Rates, int | None]:
    """Those of each of so many ranks, and the threads of the CPU that they are for; None: the engine chooses. The
    machine's are measured now, in a thread that takes its OpenMP team with it (`open_local` says why).
    """
    from cellar.runtime.device import resolve_device
    from cellar.runtime.memory import host_available, last_cache
    from cellar.runtime.offload.device_rates import DeviceRates, device_rates
    from cellar.runtime.offload.host_rows import have_units
    from cellar.runtime.offload.rates import MeasuredRates, measured_rates
    from cellar.runtime.offload.reads import DiskReads

    threads, path, sparse_v = config.device.num_threads, config.offload.disk_path, config.offload.sparse_v
    device = resolve_device(config.device.device)
    nbytes = MEASURED_NBYTES
    if kind != "cpu":
        nbytes = max(MEASURED_NBYTES_OF_A_HOST, min(MEASURED_CACHES * last_cache(), host_available() // 8))
    tokens = config.schedule.max_num_batched_tokens
    assert tokens is not None, "decided by EngineConfig.on"

    units = have_units(spec.dtype)
    few = few_tokens(spec, config.schedule.max_num_seqs, units)
    several = few.planned if few.planned > 1 else few.most

    def measured(reads: DiskReads | None) -> tuple[MeasuredRates, DeviceRates | None]:
        with ThreadPoolExecutor(1, "cellar-rates") as thread:
            own = None if kind == "cpu" else thread.submit(device_rates, spec, device, FEW_TOKENS, tokens).result()
            alone = MEASURED_SECONDS if kind == "cpu" else MEASURED_SECONDS_OF_A_HOST
            seconds = alone if reads is None else MEASURED_SECONDS_OF_A_DISK
            how = (nbytes, seconds, threads, sparse_v, reads, ranks, several)
            host = thread.submit(measured_rates, spec, device, *how).result()
            return host, own

    if not config.offload.disk:
        (found, own), disk = measured(None), Rates().disk
    else:
        with DiskReads(None if path is None else Path(path), MEASURED_NBYTES) as reads:
            found, own = measured(reads)
            disk = found.disk or reads.rate_while(lambda: time.sleep(MEASURED_SECONDS_OF_A_DISK))[0]
    beside = found.link or found.disk
    idle = max(1.0, found.alone / beside) if beside else 1.0
    if own is None:
        here = Rates(attention=found.attention, device=found.multiply, disk=disk, flops=found.flops, idle=idle)
        return here.shared(ranks), threads
    # A share of the values is what the CPU alone reads.
    plain = all(group.dtype == spec.dtype for group in spec.kv.groups)
    rates = replace(
        rates_of_device(*own),
        link=found.link,
        multiply=found.multiply,
        few_multiply=found.few_multiply,
        few_measured=several,
        attention=found.attention,
        disk=disk,
        exchange=found.exchange,
        reads=0.0 if sparse_v else (LINK_READS if plain else LINK_READS_OF_CODES) * found.link,
        runs_ahead=found.runs_ahead,
        units=units,
        idle=idle,
    )
    return rates.shared(ranks, kind), threads if found.threads == 0 else found.threads


def rates_of_device(device: float, flops: float, few_flops: float, attention: float, copies: float) -> Rates:
    """An accelerator's own rates, as they were measured (`DeviceRates`), for a plan."""
    return Rates(
        device=device, flops=PROMPT_SHARE * flops, few_flops=few_flops, device_attention=attention, copies=copies
    )


def _warn_of_few_threads(config: EngineConfig, where: str) -> None:
    """Say so where the environment leaves most of the cores out of what a CPU does for an accelerator."""
    import torch

    said, threads, cores = os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads(), num_cores()
    if said and config.device.num_threads is None and 2 * threads < cores:
        _LOG.warning(
            "OMP_NUM_THREADS is %s, so the CPU works for %s with %d threads on %d cores; unset it, or say "
            "--num-threads %d.",
            said,
            where,
            threads,
            cores,
            cores - 1,
        )


def _warn_of_loss(config: EngineConfig, raw: Mapping[str, Any], spec: ModelSpec, room: Room, limits: Limits) -> None:
    """Say so where nothing would have to move."""
    from cellar.models import registry
    from cellar.runtime.device import resolve_device
    from cellar.runtime.memory import device_free, human

    device = resolve_device(config.device.device)
    free = device_free(device)
    if fits(spec, replace(room, device=free), limits):
        where = "this machine" if room.kind == "cpu" else str(device)
        _LOG.warning(
            "offloading is pure loss here: the model takes %s, and %s has %s free; without device_memory nothing has "
            "to move.",
            human(spec.nbytes()),
            where,
            human(free),
        )
    if any(tensor.formats for tensor in spec.tensors()):
        return
    for name in ("int8", "int4"):
        chunk, kept = config.cache.block_size, config.cache.kv_cache_dtype
        try:
            smaller = registry.open_model(raw, spec.dtype, chunk, config.model.max_model_len, name, kept).spec
        except ConfigError:
            continue  # its rows are not cut into such groups
        if fits(smaller, room, limits):
            _LOG.warning("with --quantization %s the model would fit device_memory, and nothing had to move.", name)
            return
