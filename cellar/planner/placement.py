"""From a plan to the Placement that a runtime executes, to the row."""

from __future__ import annotations

from cellar.core.errors import CapacityError
from cellar.core.layouts import Mesh
from cellar.core.messages import BlockSchedule, Partition, Placed, PlacedUnits, Placement
from cellar.core.pieces import format_name
from cellar.core.specs import ModelSpec, TensorSpec
from cellar.planner.integer import IntegerPlan, integer
from cellar.planner.offload import TIERS
from cellar.planner.partition import padded_heads
from cellar.planner.plans import Plan
from cellar.planner.shards import stored_shape


def placement(plan: Plan, spec: ModelSpec, dtype: str, chunks: int | None = None) -> Placement:
    """What a plan means for the tensors of a spec in the plan's formats that runs in `dtype`; a resident one has so
    many chunks of KV.

    Raises CapacityError if whole rows do not fit where shares did.
    """
    if plan.offload is not None:
        found = integer(plan.offload)
        if found is None:
            raise CapacityError(f"the plan ({plan.name}) fits in shares, but not in whole rows; take a smaller batch.")
        return _offloaded(plan, found, spec, dtype)
    d = padded_heads(plan.d, plan.tensor)
    assert plan.decode is not None
    assert d is not None
    mesh = plan.decode.layout.mesh
    weights = tuple(
        Placed(name, "device", 0, stored_shape(t, d, mesh)[0], _format(t, dtype)) for name, t in spec.named_tensors()
    )
    kv = () if chunks is None else (PlacedUnits("device", chunks, "device"),)
    assert plan.kind != "offload", "it has shares"
    return Placement(weights, "device", "device", plan.kind, kv, partition=_partition(plan))


def _format(tensor: TensorSpec, dtype: str) -> str:
    """As its spec has it; a quantized head is priced as a table is, with more bytes."""
    return format_name(tensor) if tensor.formats else dtype


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
        plan.prefill.looped,
    )


def _offloaded(plan: Plan, found: IntegerPlan, spec: ModelSpec, dtype: str) -> Placement:
    assert plan.offload is not None
    block, part = plan.offload.block, plan.offload.problem.part
    # A gathered shard is cut over the axes that it is gathered over; a stationary one over the heads' axes.
    gather = "xyz" if part.gathered > 1 else ""
    mesh = Mesh(part.gathered, 1, part.cut)
    weights = []
    for name, tensor in spec.named_tensors():
        rows = found.rows.get(tensor.name) if name.startswith("layers.") else None
        if rows is None:
            shape = stored_shape(tensor, plan.d, mesh)
            weights.append(Placed(name, "device", 0, shape[0], _format(tensor, dtype)))
            continue
        start = 0
        for tier, count in zip(TIERS, rows, strict=True):
            if count:
                weights.append(Placed(name, tier, start, start + count, _format(tensor, dtype)))
            start += count
    kv = []
    for kind, units in found.kv.items():
        _, tier, *where = kind.split(".")
        if units:
            kv.append(PlacedUnits(tier, units, "host" if where == ["cpu"] else "device"))
    hidden = [PlacedUnits(tier, n, "device") for tier, n in zip(TIERS, found.hidden, strict=True) if n]
    split = None
    if plan.machine.num_devices > 1:
        heads = "" if gather else "zyx"
        split = Partition(
            (mesh.x, mesh.y, mesh.z), "", gather, heads, gather, heads, plan.stages, block.batches, plan.replicas
        )
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
