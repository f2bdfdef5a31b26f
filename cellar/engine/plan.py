"""A plan obeyed: what `cellar plan --output` wrote becomes an engine's options, or is refused in a sentence."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from cellar.core.config import EngineConfig
from cellar.core.errors import ConfigError
from cellar.planner.saved import Limits, SavedPlan, geometry_of, load_plan

DEMO = "demo"


def with_plan(config: EngineConfig) -> tuple[EngineConfig, SavedPlan | None]:
    """The options with what their plan says, and the plan; as they are if there is none. Twice is as good as once.

    Options left at their defaults follow the plan, others must agree with it. Raises ConfigError if one does not, or if
    the plan is none or of a kind that does not run yet.
    """
    file = config.model.plan
    if file is None:
        return config, None
    plan = load_plan(file)
    split = plan.placement.partition
    chips = 1 if split is None else math.prod(split.mesh)
    if config.device.tensor_parallel_size not in (1, chips):
        raise ConfigError(
            f"tensor_parallel_size is {config.device.tensor_parallel_size}, but the plan {file} is for {chips} "
            f"device{'s' * (chips > 1)}; leave tensor_parallel_size out, or plan again."
        )
    stages = 1 if split is None else split.stages
    if config.device.pipeline_parallel_size not in (1, stages):
        raise ConfigError(
            f"pipeline_parallel_size is {config.device.pipeline_parallel_size}, but the plan {file} has {stages} "
            f"stage{'s' * (stages > 1)}; leave pipeline_parallel_size out, or plan again."
        )
    if plan.limits is None:
        raise ConfigError(
            f"the plan {file} is of kind {plan.placement.kind} ({plan.figures.get('plan', '')}), but this engine runs "
            "only plans whose weights stay on one device or lie over several without copies, and on a processor those "
            f"with stages of one device each and those of `cellar plan --device-memory`; plan {plan.model} for a "
            "machine that holds it so."
        )
    _check_agreement(config, plan, plan.limits, file)
    limits = plan.limits
    model = replace(
        config.model,
        model=config.model.model or (None if plan.model == DEMO else plan.model),
        dtype=plan.dtype,
        max_model_len=config.model.max_model_len or limits.max_model_len,
    )
    schedule = replace(
        config.schedule, max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens
    )
    cache = replace(config.cache, block_size=plan.chunk_size, kv_cache_dtype=plan.kv_cache_dtype)
    device = replace(config.device, pipeline_parallel_size=stages)
    return replace(config, model=model, schedule=schedule, cache=cache, device=device), plan


def _check_agreement(config: EngineConfig, plan: SavedPlan, limits: Limits, file: str) -> None:
    """Raise ConfigError for an option that says something else than the plan."""
    defaults = EngineConfig()
    for part, name, planned in (
        ("model", "dtype", plan.dtype),
        ("cache", "block_size", plan.chunk_size),
        ("cache", "kv_cache_dtype", plan.kv_cache_dtype),
        ("schedule", "max_num_seqs", limits.max_num_seqs),
        ("schedule", "max_num_batched_tokens", limits.max_num_batched_tokens),
    ):
        given: Any = getattr(getattr(config, part), name)
        if given not in (planned, getattr(getattr(defaults, part), name)):
            raise ConfigError(
                f"{name} is {given}, but the plan {file} says {planned}; leave {name} out, or plan again."
            )
    for name in ("kv_cache_memory_bytes", "gpu_memory_utilization"):
        if getattr(config.cache, name) != getattr(defaults.cache, name):
            raise ConfigError(
                f"{name} is given, but the plan {file} says how many chunks of KV there are "
                f"({plan.placement.num_chunks:,}); leave {name} out, or plan again."
            )
    if config.offload.latency is not None:
        raise ConfigError(
            f"latency bounds a plan that is made at the start, but the plan {file} is made; leave latency out, or plan "
            "again with it."
        )
    order = "zigzag" if plan.placement.block is None else plan.placement.block.order
    if config.offload.schedule not in ("zigzag", order):
        raise ConfigError(
            f"schedule is {config.offload.schedule}, but the plan {file} says {order}; leave schedule out, or plan "
            "again."
        )
    longest = config.model.max_model_len
    if longest is not None and longest > limits.max_model_len:
        raise ConfigError(
            f"max_model_len is {longest}, but the KV of the plan {file} holds {limits.max_model_len} tokens of one "
            "request; lower max_model_len, or plan again for more."
        )


def check_here(plan: SavedPlan, config: EngineConfig, checkpoint: Path | None) -> None:
    """Raise ConfigError if the plan is for another model, or for another kind of device than the engine's."""
    from cellar.models import registry
    from cellar.runtime.device import resolve_device

    kind = "cpu" if resolve_device(config.device.device).type == "cpu" else "gpu"
    if kind != plan.device:
        kinds = {"cpu": "a processor", "gpu": "an accelerator"}
        raise ConfigError(
            f"the plan is for {kinds[plan.device]} ({plan.machine}), but this engine runs on {kinds[kind]}; plan with "
            "the profile that `cellar profile` writes here (--machine FILE), or set device."
        )
    name = config.model.model or DEMO
    raw = registry.shipped_config(name) if checkpoint is None else registry.read_config(checkpoint)
    assert raw is not None, "a model without a checkpoint is a shipped config"
    opened = registry.open_model(raw, plan.dtype, plan.chunk_size, quantization=config.model.quantization)
    if geometry_of(opened.spec) != plan.geometry:
        raise ConfigError(
            f"the plan is for {plan.model}, but {name} has tensors of other shapes; run {plan.model}, or plan {name}."
        )
