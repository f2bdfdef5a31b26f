"""What `cellar simulate` simulates: an engine, from a model and a machine by name and the engine's options."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cellar.core.config import CacheConfig, ScheduleConfig, step_tokens
from cellar.core.errors import ConfigError
from cellar.core.specs import ModelSpec
from cellar.planner.cost import dimensions
from cellar.planner.partition import FLOAT32, FORMATS, Formats, formats_of
from cellar.planner.steps import StepPrices
from cellar.reports.machines import fast_bfloat16, fitted, open_machine, open_profile
from cellar.reports.models import model_spec
from cellar.runtime.protocol import Capacity
from cellar.runtime.steps import arena
from cellar.simulate.simulator import capacity_of

WEIGHTS = {name: FORMATS[name] for name in ("bf16", "int8", "int4", "float32")}


@dataclass(frozen=True)
class Setup:
    """An engine to be simulated. `about` says in words what its prices rest on."""

    spec: ModelSpec
    prices: StepPrices
    capacity: Capacity
    cache: CacheConfig
    schedule: ScheduleConfig
    about: str

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt plus output."""
        return self.capacity.max_model_len


def open_setup(
    model: str,
    machine_name: str,
    cache: CacheConfig,
    schedule: ScheduleConfig,
    weights: str | None = None,
    max_model_len: int | None = None,
    dtype: str | None = None,
) -> Setup:
    """Weights are in the format named, else in the `dtype` of a real run, else in the one that an engine on the machine
    resolves `auto` to. Raises ConfigError, CheckpointError or CapacityError for what cannot be simulated."""
    profile = open_profile(machine_name)
    found = open_machine(machine_name, profile)
    kind = found.device.kind
    if len(found.networks) > 1 and found.num_hosts > 1:
        raise ConfigError(
            f"{found.num_devices} devices of {found.name} are {found.num_hosts} hosts, but an engine serves on one; "
            f"ask for {found.per_host} or fewer."
        )
    spec = model_spec(model, kind, fast_bfloat16=fast_bfloat16(profile), chunk_size=cache.block_size)
    form = formats_of(dtype or spec.dtype) if weights is None else _weights(weights)
    run = form.compute if form is FLOAT32 or spec.dtype == "float32" else spec.dtype
    kept = run if cache.kv_cache_dtype == "auto" else cache.kv_cache_dtype
    spec = replace(spec, kv=replace(spec.kv, groups=tuple(replace(group, dtype=kept) for group in spec.kv.groups)))
    d = dimensions(spec)
    found, about = fitted(found, profile, d, model, form, run)
    prices = StepPrices(d, found, form)
    if schedule.max_num_batched_tokens is None:
        schedule = replace(schedule, max_num_batched_tokens=step_tokens(kind))
    kv_bytes = arena.cpu_cache_nbytes(cache, int(found.device.capacity.value)) if kind == "cpu" else None
    capacity = capacity_of(spec, prices, cache, schedule, max_model_len or spec.max_position, kv_bytes)
    return Setup(spec, prices, capacity, cache, schedule, about)


def _weights(name: str) -> Formats:
    if name not in WEIGHTS:
        raise ConfigError(f"weights {name!r} are unknown; use {', '.join(WEIGHTS)}.")
    return WEIGHTS[name]
