"""From a plan that a search found to the file that an engine obeys."""

from __future__ import annotations

import math

from cellar.core.config import ScheduleConfig, step_tokens
from cellar.core.layouts import Layout
from cellar.core.specs import ModelSpec
from cellar.planner.offload import logits_bytes, working_bytes
from cellar.planner.partition import Formats, padded_heads
from cellar.planner.placement import placement
from cellar.planner.plans import Plan
from cellar.planner.resident import gathered_bytes, repeated_bytes, resident_bytes
from cellar.planner.saved import Limits, SavedPlan, StepShape, geometry_of, kv_cache_dtype_of
from cellar.planner.steps import StepPrices
from cellar.planner.work import StepCost, StepWork


def saved_plan(plan: Plan, spec: ModelSpec, model: str, **about: object) -> SavedPlan:
    """What a plan says to an engine that has the model of this spec in its formats, with `about` among its figures.

    Raises CapacityError if whole rows do not fit where shares did.
    """
    dtype = run_dtype(plan.formats, spec.dtype)
    limits = cost = chunks = None
    steps: tuple[StepShape, ...] = ()
    if plan.offload is None and plan.replicas == 1 and plan.stages_run:
        assert plan.decode is not None
        chunks = _slots(plan, plan.decode.layout)
        longest = min(spec.max_position, chunks * plan.d.chunk)
        limits = Limits(plan.batch, step_tokens(plan.machine.device.kind), longest)
        # One price for steps of both kinds; of several stages each has a price of its own.
        if plan.stages == 1 and plan.prefill is not None and plan.prefill.layout == plan.decode.layout:
            cost = StepPrices(plan.d, plan.machine, plan.formats, plan.decode.layout, plan.prefill.looped).cost
            steps = _shapes(plan, cost)
    return SavedPlan(
        model=model,
        geometry=geometry_of(spec),
        dtype=dtype,
        chunk_size=plan.d.chunk,
        machine=plan.machine.name,
        device=plan.machine.device.kind,
        placement=placement(plan, spec, dtype, chunks),
        limits=limits,
        cost=cost,
        steps=steps,
        figures={**about, **plan.figures()},
        kv_cache_dtype=kv_cache_dtype_of(spec),
    )


def run_dtype(formats: Formats, dtype: str) -> str:
    """The dtype of a run in these formats of a model that is in `dtype` by itself: either 16-bit type is as good."""
    return formats.compute if "float32" in (formats.compute, dtype) else dtype


def _slots(plan: Plan, layout: Layout) -> int:
    """Chunks of KV on each chip, of its stage's layers, that let all sequences of the batch run at once, each at its
    home, if there is room for the reserve that the scheduler keeps for decodes when it admits one; without, the last
    wait for the first.
    """
    job, mesh, batch = plan.job, layout.mesh, -(-plan.batch // layout.mesh.count(layout.batch_axes))
    d = padded_heads(plan.d, mesh.size)
    assert d is not None, "its layouts have a price"
    held = resident_bytes(d, plan.formats, mesh.size, plan.stages) + repeated_bytes(d, plan.formats, layout)
    held += max(gathered_bytes(d, plan.formats, c.layout) for c in (plan.prefill, plan.decode) if c is not None)
    buffers = working_bytes(d, step_tokens(plan.machine.device.kind)) + logits_bytes(d, plan.batch)
    each = (
        d.layers
        // plan.stages
        * d.kv_elements()
        * plan.formats.kv_bytes
        * d.chunk
        / mesh.count(layout.kv_axes(d.kv_heads))
    )
    room = int((plan.machine.usable("device") - held - buffers) // each)
    prompts = batch * d.chunks(job.prompt)
    at_once = min(math.ceil(prompts / (1 - ScheduleConfig().decode_reserve)), prompts + batch)
    return max(batch * d.chunks(job.prompt + job.generate), min(at_once, room))


def _shapes(plan: Plan, cost: StepCost) -> tuple[StepShape, ...]:
    """The job's prompts, cut into equal steps, and its decodes at the middle of their contexts."""
    s, n, batch = plan.job.prompt, plan.job.generate, plan.batch
    each = max(1, step_tokens(plan.machine.device.kind) // s)
    shapes = []
    for phase, sequences, new, context in (
        ("prefill", min(each, batch), s, float(s)),
        ("decode", batch, 1, s + n / 2),
    ):
        attended = sequences * new * plan.d.seen(context - (new - 1) / 2)
        work = StepWork(sequences * new, sequences, attended, sequences * plan.d.seen(context), new > 1)
        shapes.append(StepShape(phase, sequences, new, context, cost.seconds(work)))
    return tuple(shapes)
