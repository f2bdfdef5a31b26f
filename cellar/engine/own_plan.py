"""An engine that plans by itself: a device held to so much memory, and a model that may not fit it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cellar.core.config import EngineConfig
from cellar.core.errors import ConfigError
from cellar.planner.capped import KV_SHARE, Room, capped_plan, fits
from cellar.planner.saved import Limits, SavedPlan

HOST_SHARE = 0.9
"""Of the host's memory that is free, what an accelerator's weights and KV may take if nobody says how much."""


def with_own_plan(config: EngineConfig, checkpoint: Path | None) -> tuple[EngineConfig, SavedPlan | None]:
    """The options within `device_memory`, and the plan of a model that does not fit it; None for one that does, whose
    KV is cut to size.

    Raises ConfigError for what does not run offloaded yet, CapacityError if the places together are too small.
    """
    from cellar.engine.plan import DEMO
    from cellar.models import registry
    from cellar.runtime.device import resolve_device
    from cellar.runtime.memory import host_available

    sizes = config.offload.nbytes
    held = sizes["device"]
    assert held is not None, "whoever calls has looked"
    device = resolve_device(config.device.device)
    name = config.model.model or DEMO
    raw = registry.shipped_config(name) if checkpoint is None else registry.read_config(checkpoint)
    assert raw is not None, "a model without a checkpoint is a shipped config"
    dtype = registry.auto_dtype(raw, device.type) if config.model.dtype == "auto" else config.model.dtype
    chunk, longest = config.cache.block_size, config.model.max_model_len
    kept = config.cache.kv_cache_dtype
    spec = registry.open_model(raw, dtype, chunk, longest, config.model.quantization, kept).spec
    config = config.on(device.type)
    tokens = config.schedule.max_num_batched_tokens
    assert tokens is not None, "decided by EngineConfig.on"
    limits = Limits(config.schedule.max_num_seqs, tokens, spec.max_position)
    kind = "cpu" if device.type == "cpu" else "gpu"
    host = sizes["host"]
    if host is None and kind == "gpu":
        host = int(HOST_SHARE * host_available())
    room = Room(held, host, sizes["disk"] or 0, config.cache.kv_cache_memory_bytes, kind)
    if fits(spec, room, limits):
        if kind == "gpu":
            return config, None  # KV gets what is left of it, which the runtime sees
        kv = int(held * KV_SHARE) if room.kv is None else room.kv
        return replace(config, cache=replace(config.cache, kv_cache_memory_bytes=kv)), None
    if any(tensor.formats for tensor in spec.tensors()):
        raise ConfigError(
            f"{name} is quantized and does not fit device_memory, but quantized weights are not offloaded yet; raise "
            "device_memory, or leave quantization out."
        )
    return config, capped_plan(spec, room, limits, model=name, machine=str(device))
