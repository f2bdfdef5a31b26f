"""Several engines on one machine: what each has of its GPUs, processor threads, memory and disk. See decisions/0055."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cellar import demo
from cellar.core.config import CacheConfig, EngineConfig
from cellar.core.errors import CapacityError, ConfigError
from cellar.core.specs import ModelSpec
from cellar.engine.opened import Opened, open_front
from cellar.models import hub, registry
from cellar.runtime.device import resolve_device
from cellar.runtime.memory import host_available, human
from cellar.runtime.steps.arena import cpu_cache_nbytes

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Share:
    """One engine's options, and by their names its GPUs or else the number of its processor threads."""

    config: EngineConfig
    gpus: tuple[str, ...] = ()
    threads: int = 0

    def open(self, persist_seconds: float) -> Opened:
        """`open_front` with what is this engine's, in a process that has not used a device yet."""
        if self.gpus:
            os.environ[VISIBLE] = ",".join(self.gpus)
        else:
            torch.set_num_threads(self.threads)  # those that load weights, too
        return open_front(self.config, persist_seconds=persist_seconds)


def shares_of(config: EngineConfig, count: int) -> Sequence[Share]:
    """The machine dealt out to `count` engines.

    Options of processor threads, host memory, disk and the remote tier are those of all engines together; what a GPU
    has is its engine's alone. Raises ConfigError for options that do not work with several engines, or CapacityError
    if a CPU's memory does not hold the weights so many times; DeviceError, CheckpointError.
    """
    _check(config, count)
    cache = _divided(config.cache, count)
    caches = [_own_directory(cache, index) for index in range(count)]
    if resolve_device(config.device.device).type != "cpu":
        gpus = _gpus(config.device.num_ranks, count)
        return [Share(replace(config, cache=one), gpus=own) for one, own in zip(caches, gpus, strict=True)]
    nbytes = _kv_nbytes(config, count)
    shares = []
    for one, threads in zip(caches, _threads(config.device.num_threads, count), strict=True):
        asked = None if config.device.num_threads is None else threads
        shares.append(
            Share(
                replace(
                    config,
                    cache=replace(one, kv_cache_memory_bytes=nbytes),
                    device=replace(config.device, device="cpu", num_threads=asked),
                ),
                threads=threads,
            )
        )
    return shares


def _check(config: EngineConfig, count: int) -> None:
    for name, given in (("plan", config.model.plan), ("device_memory", config.offload.device_memory)):
        if given is not None:
            raise ConfigError(f"{name} does not work with replicas yet, of which there are {count}; leave one out.")
    if ":" in config.device.device:
        raise ConfigError(
            f"device is {config.device.device}, but {count} replicas take GPUs of their own each; set device to cuda, "
            f"and {VISIBLE} to choose which they are."
        )


def _divided(cache: CacheConfig, count: int) -> CacheConfig:
    """An engine's part of what all may take beside their devices."""
    names = ("kv_offloading_size", "kv_disk_size", "kv_remote_size")
    sizes: dict[str, float | None] = {name: getattr(cache, name) for name in names}
    parts = {name: None if size is None else size / count for name, size in sizes.items()}
    return replace(
        cache,
        kv_offloading_size=parts["kv_offloading_size"],
        kv_disk_size=parts["kv_disk_size"],
        kv_remote_size=parts["kv_remote_size"],
    )


def _own_directory(cache: CacheConfig, index: int) -> CacheConfig:
    """A directory belongs to one engine."""
    if cache.kv_disk_path is None:
        return cache
    return replace(cache, kv_disk_path=os.fspath(Path(cache.kv_disk_path).expanduser() / f"replica-{index}"))


def _gpus(each: int, count: int) -> Sequence[tuple[str, ...]]:
    """Names of GPUs, `each` for every engine."""
    there = torch.cuda.device_count()
    if each * count > there:
        raise ConfigError(
            f"{count} replicas of {each} rank{'s' * (each > 1)} each need {each * count} GPUs, but this machine has "
            f"{there}; set replicas to at most {there // each}."
        )
    listed = os.environ.get(VISIBLE, "")
    names = [name.strip() for name in listed.split(",")] if listed.strip() else [str(k) for k in range(there)]
    return [tuple(names[k * each : (k + 1) * each]) for k in range(count)]


def _threads(asked: int | None, count: int) -> Sequence[int]:
    """Processor threads of each engine; the first ones have those that are left over."""
    total = asked or torch.get_num_threads()
    return [max(1, total // count + (k < total % count)) for k in range(count)]


def _kv_nbytes(config: EngineConfig, count: int) -> int:
    """Bytes of KV cache that each engine on a CPU has: its part of what is left when all have their weights."""
    ranks = config.device.num_ranks
    spec, free = _spec(config), host_available()
    weights = spec.nbytes()
    if count * weights > free:
        raise CapacityError(
            f"{count} replicas take {human(count * weights)} for the weights, {human(weights)} each, but "
            f"{human(free)} of memory are free; set replicas to at most {max(1, free // weights)}."
        )
    asked = config.cache.kv_cache_memory_bytes
    return cpu_cache_nbytes(config.cache, free - count * weights) // (count if asked is not None else count * ranks)


def _spec(config: EngineConfig) -> ModelSpec:
    """The model as it will be opened on the CPU. What is not on this machine yet is fetched now, once."""
    named = config.model
    raw = None
    if named.load_format == "dummy" and named.model is not None:
        raw = registry.shipped_config(named.model)
    if raw is None:
        raw = registry.read_config(demo.path() if named.model is None else hub.resolve(named.model))
    dtype = registry.auto_dtype(raw, "cpu") if named.dtype == "auto" else named.dtype
    return registry.open_model(
        raw,
        dtype,
        config.cache.block_size,
        named.max_model_len,
        named.quantization,
        config.cache.kv_cache_dtype,
    ).spec
