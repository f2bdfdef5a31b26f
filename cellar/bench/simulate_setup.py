"""What `cellar simulate` simulates: an engine, from a model and a machine by name and the engine's options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from cellar.bench.plan import model_spec
from cellar.bench.steps import read_steps, table_name
from cellar.core.config import CacheConfig, ScheduleConfig
from cellar.core.errors import ConfigError
from cellar.core.hardware import Profile
from cellar.core.specs import ModelSpec
from cellar.planner.calibration import fit_steps
from cellar.planner.cost import Dimensions, dimensions
from cellar.planner.machines import Machine, from_profile, machine, processor
from cellar.planner.partition import BF16, INT4, INT8, Formats
from cellar.planner.steps import StepPrices
from cellar.runtime import arena
from cellar.runtime.protocol import Capacity
from cellar.simulate import capacity_of

FLOAT32 = Formats("float32", 4.0, 4.0)
WEIGHTS = {form.name: form for form in (BF16, INT8, INT4, FLOAT32)}


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
) -> Setup:
    """Raises ConfigError, CheckpointError or CapacityError for what cannot be simulated."""
    profile = Profile.load(Path(machine_name)) if _is_file(machine_name) else None
    found, kind = _machine(machine_name, profile)
    if len(found.networks) > 1 and found.num_hosts > 1:
        raise ConfigError(
            f"{found.num_devices} devices of {found.name} are {found.num_hosts} hosts, but an engine serves on one; "
            f"ask for {found.per_host} or fewer."
        )
    form = _weights(weights, kind)
    spec = _spec(model, kind, form)
    d, dtype = dimensions(spec), "float32" if form is FLOAT32 else "bfloat16"
    about = "rates of the machine library"
    if profile is not None:
        found, about = _fitted(found, profile, d, model, form, dtype)
    prices = StepPrices(d, found, form, dtype=dtype)
    if schedule.max_num_batched_tokens is None:
        schedule = replace(schedule, max_num_batched_tokens=2048 if kind == "cpu" else 8192)
    kv_bytes = arena.cpu_cache_nbytes(cache, int(found.device.capacity.value)) if kind == "cpu" else None
    capacity = capacity_of(spec, prices, cache, schedule, max_model_len or spec.max_position, kv_bytes)
    return Setup(spec, prices, capacity, cache, schedule, about)


def _is_file(name: str) -> bool:
    return name.endswith(".json") or Path(name).is_file()


def _machine(name: str, profile: Profile | None) -> tuple[Machine, str]:
    """The machine, and the kind of what computes: gpu or cpu."""
    if profile is None:
        return machine(name), "gpu"
    if profile.device("gpu") is None:
        return processor(profile), "cpu"
    return from_profile(profile), "gpu"


def _weights(name: str | None, kind: str) -> Formats:
    if name is None:
        return BF16 if kind == "gpu" else FLOAT32
    if name not in WEIGHTS:
        raise ConfigError(f"weights {name!r} are unknown; use {', '.join(WEIGHTS)}.")
    return WEIGHTS[name]


def _spec(model: str, kind: str, form: Formats) -> ModelSpec:
    spec = model_spec(model, kind)
    dtype = "float32" if form is FLOAT32 else "bfloat16"
    groups = tuple(replace(group, dtype=dtype) for group in spec.kv.groups)
    return replace(spec, kv=replace(spec.kv, groups=groups))


def _fitted(
    found: Machine, profile: Profile, d: Dimensions, model: str, form: Formats, dtype: str
) -> tuple[Machine, str]:
    """The profile's machine with constants fitted to the model's measured steps, if the profile has some."""
    table = profile.tables.get(table_name(model, dtype))
    if table is None:
        return found, f"profile of {found.name}, which has no measured steps of this model"
    return fit_steps(d, found, form, dtype, read_steps(table)), (
        f"profile of {found.name}, fitted to {len(table.rows)} measured steps"
    )
