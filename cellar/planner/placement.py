"""From a plan to the Placement that a runtime executes, to the row; and to and from JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from cellar.core.errors import CapacityError, ConfigError
from cellar.core.messages import BlockSchedule, Partition, Placed, PlacedUnits, Placement
from cellar.core.specs import ModelSpec, TensorSpec
from cellar.planner.integer import IntegerPlan, integer
from cellar.planner.offload import TIERS
from cellar.planner.plans import Plan

PLAN_SCHEMA = 1
_STORED = {"int8": "int8", "int4": "int4", "int4+kv4": "int4"}


def placement(plan: Plan, spec: ModelSpec) -> Placement:
    """What a plan means for the tensors of a spec. Raises CapacityError if whole rows do not fit where shares did."""
    if plan.offload is not None:
        found = integer(plan.offload)
        if found is None:
            raise CapacityError(f"the plan ({plan.name}) fits in shares, but not in whole rows; take a smaller batch.")
        return _offloaded(plan, found, spec)
    weights = tuple(Placed(name, "device", 0, t.shape[0], _format(plan, t)) for name, t in named(spec))
    kind = "resident" if plan.tensor * plan.stages * plan.replicas == 1 else "partition"
    return Placement(weights, "device", "device", kind, partition=_partition(plan))  # type: ignore[arg-type]


def named(spec: ModelSpec) -> Iterator[tuple[str, TensorSpec]]:
    """All tensors under names that are their own: `layers.7.qkv`, `embed`, `lm_head`."""
    for t in spec.embedding:
        yield t.name, t
    for layer in spec.layers:
        for t in layer.tensors:
            yield f"layers.{layer.index}.{t.name}", t
    for t in spec.head:
        if not (spec.tied_head and t.name == "lm_head"):
            yield t.name, t


def _format(plan: Plan, tensor: TensorSpec) -> str:
    """Matrices of layers are quantized, tables, head and vectors are not."""
    inner = len(tensor.shape) == 2 and not {"vocab", "position"} & set(tensor.axes)
    return _STORED.get(plan.formats.name, tensor.dtype) if inner else tensor.dtype


def _partition(plan: Plan) -> Partition | None:
    if plan.prefill is None or plan.decode is None or plan.tensor * plan.stages * plan.replicas == 1:
        return None
    mesh, first, then = plan.decode.layout.mesh, plan.prefill.layout, plan.decode.layout
    return Partition(
        (mesh.x, mesh.y, mesh.z),
        plan.decode.outer,
        first.gather,
        first.head_axes,
        then.gather,
        then.head_axes,
        plan.stages,
        plan.micro_batches,
        plan.replicas,
    )


def _offloaded(plan: Plan, found: IntegerPlan, spec: ModelSpec) -> Placement:
    assert plan.offload is not None
    block, part = plan.offload.block, plan.offload.problem.part
    weights = []
    for name, tensor in named(spec):
        rows = found.rows.get(tensor.name) if name.startswith("layers.") else None
        if rows is None:
            weights.append(Placed(name, "device", 0, tensor.shape[0], _format(plan, tensor)))
            continue
        start = 0
        for tier, count in zip(TIERS, rows, strict=True):
            if count:
                weights.append(Placed(name, tier, start, start + count, _format(plan, tensor)))
            start += count
    kv = []
    for kind, units in found.kv.items():
        _, tier, *where = kind.split(".")
        if units:
            kv.append(PlacedUnits(tier, units, "host" if where == ["cpu"] else "device"))
    hidden = [PlacedUnits(tier, n, "device") for tier, n in zip(TIERS, found.hidden, strict=True) if n]
    split = None
    if plan.machine.num_devices > 1:
        # A gathered shard is cut over the axes that it is gathered over; a stationary one over the heads' axes.
        gather = "xyz" if part.gathered > 1 else ""
        mesh = (plan.tensor, 1, 1) if gather else (1, 1, plan.tensor)
        heads = "" if gather else "zyx"
        split = Partition(mesh, "", gather, heads, gather, heads, plan.stages, block.batches, plan.replicas)
    return Placement(
        tuple(weights),
        max(kv, key=lambda u: u.units).device,
        max(hidden, key=lambda u: u.units).device,
        "offload",
        tuple(kv),
        tuple(hidden),
        BlockSchedule(block.gbs, block.batches, block.schedule),
        split,
    )


def to_json(found: Placement, **about: object) -> str:
    """A placement as a JSON document, with what else is to be said about it."""
    return json.dumps({"schema": PLAN_SCHEMA, **about, "placement": asdict(found)}, indent=1)


def read_plan(text: str) -> dict[str, Any]:
    """A document of `to_json`. Raises ConfigError if it is none."""
    try:
        data = json.loads(text)
        if data["schema"] == PLAN_SCHEMA and "placement" in data:
            return dict(data)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError("the file is no plan; make one with `cellar plan --output FILE`.") from error
    raise ConfigError(f"the plan has schema {data['schema']}, but {PLAN_SCHEMA} is needed; run `cellar plan` again.")


def from_json(text: str) -> Placement:
    """The placement of a document of `to_json`. Raises ConfigError if it is damaged."""
    data = read_plan(text)["placement"]
    try:
        return Placement(
            weights=tuple(Placed(**p) for p in data["weights"]),
            kv_device=data["kv_device"],
            activation_device=data["activation_device"],
            kind=data["kind"],
            kv=tuple(PlacedUnits(**u) for u in data["kv"]),
            activations=tuple(PlacedUnits(**u) for u in data["activations"]),
            block=BlockSchedule(**data["block"]) if data["block"] else None,
            partition=_read_partition(data["partition"]),
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the plan is damaged at {error}; make it again with `cellar plan`.") from error


def _read_partition(data: dict[str, Any] | None) -> Partition | None:
    return None if data is None else Partition(**{**data, "mesh": tuple(data["mesh"])})
