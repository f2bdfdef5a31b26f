"""A plan as a file: what an engine obeys (placement, limits, dtype), for which model, and what it predicts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cellar.core.errors import ConfigError
from cellar.core.kv_formats import kv_format
from cellar.core.messages import BlockSchedule, Partition, Placed, PlacedUnits, Placement
from cellar.core.specs import ModelSpec
from cellar.planner.work import StepCost

PLAN_SCHEMA = 2


@dataclass(frozen=True)
class Limits:
    """What the scheduler may have at once: requests, tokens of a step, tokens of a request."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True)
class StepShape:
    """One kind of step of the job, predicted: `sequences` of `tokens` new ones each, which end at `context`."""

    phase: str
    sequences: int
    tokens: int
    context: float
    seconds: float


@dataclass(frozen=True)
class SavedPlan:
    """A plan for one model on one kind of machine. `geometry` is that of `geometry_of` the model's spec.

    `device` is the kind of what computes, cpu or gpu. `limits`, `cost` and `steps` are there for resident plans, which
    run; `figures` are what the planner promises for its job. `kv_cache_dtype`: in what the chunks of KV are counted.
    """

    model: str
    geometry: str
    dtype: str
    chunk_size: int
    machine: str
    device: str
    placement: Placement
    limits: Limits | None
    cost: StepCost | None
    steps: tuple[StepShape, ...]
    figures: Mapping[str, Any]
    kv_cache_dtype: str = "auto"

    def to_json(self) -> str:
        """The plan as a JSON document with its schema version."""
        return json.dumps({"schema": PLAN_SCHEMA, **asdict(self)}, indent=1)


def kv_cache_dtype_of(spec: ModelSpec) -> str:
    """The option that keeps K and V as the spec has them."""
    dtype = spec.kv.groups[0].dtype
    return "auto" if kv_format(dtype) == "plain" else dtype


def geometry_of(spec: ModelSpec) -> str:
    """What any two models share that one plan fits: a digest of tensors, heads and windows, whatever the dtype."""
    layers = [(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.window) for layer in spec.layers]
    tensors = [(tensor.name, tensor.shape) for tensor in spec.tensors()]
    said = json.dumps([spec.model_type, spec.tied_head, layers, tensors])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def load_plan(path: str | Path) -> SavedPlan:
    """Read a plan's file. Raises ConfigError if it cannot be read or is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the plan {path} cannot be read ({error}); make one with `cellar plan --output FILE`."
        ) from error
    return read_plan(text)


def read_plan(text: str) -> SavedPlan:
    """A document of `SavedPlan.to_json`. Raises ConfigError if it is none, of another schema, or damaged."""
    try:
        data = json.loads(text)
        schema = data.pop("schema")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("the file is not a plan; make one with `cellar plan --output FILE`.") from error
    if schema != PLAN_SCHEMA:
        raise ConfigError(f"the plan has schema {schema}, but {PLAN_SCHEMA} is needed; run `cellar plan` again.")
    try:
        cost = data["cost"]
        return SavedPlan(
            **{
                **data,
                "placement": _placement(data["placement"]),
                "limits": Limits(**data["limits"]) if data["limits"] else None,
                "cost": _cost(cost) if cost else None,
                "steps": tuple(StepShape(**shape) for shape in data["steps"]),
            }
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the plan is damaged at {error}; make it again with `cellar plan`.") from error


def _cost(data: Mapping[str, Any]) -> StepCost:
    spans = tuple(tuple(span) for span in data.get("talk_spans", ()))
    return StepCost(**{**data, "windows": tuple(data["windows"]), "talk_spans": spans})


def _placement(data: Mapping[str, Any]) -> Placement:
    split = data["partition"]
    return Placement(
        **{
            **data,
            "weights": tuple(Placed(**p) for p in data["weights"]),
            "kv": tuple(PlacedUnits(**u) for u in data["kv"]),
            "activations": tuple(PlacedUnits(**u) for u in data["activations"]),
            "block": BlockSchedule(**data["block"]) if data["block"] else None,
            "partition": Partition(**{**split, "mesh": tuple(split["mesh"])}) if split else None,
        }
    )
