"""Latency against cost over numbers of chips and batches: the frontier of Pope et al., figure 1, with MFU beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from cellar.core.errors import CapacityError
from cellar.planner.cost import Dimensions, flops_utilization, product_flops
from cellar.planner.machines import Machine
from cellar.planner.offload import Job
from cellar.planner.partition import Formats
from cellar.planner.plans import Plan
from cellar.planner.resident import resident_plans

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Point:
    """One batch on one number of chips. `seconds`: a whole prompt (prefill), or from one token to the next (decode).

    `chip_seconds` are what a token costs: of the prompt, or generated. `dollars` are of a million, 0 without a price.
    """

    phase: Phase
    chips: int
    batch: int
    split: str
    formats: str
    seconds: float
    chip_seconds: float
    dollars: float
    utilization: float


def sweep(
    d: Dimensions, machine: Machine, counts: Sequence[int], job: Job, formats: Sequence[Formats]
) -> tuple[Point, ...]:
    """Both phases of every batch that fits the memory of so many chips, which serve one copy of the model.

    Raises CapacityError if it fits none of them.
    """
    found: list[Point] = []
    for count in counts:
        for plan in resident_plans(d, machine.with_devices(count), job, formats):
            if plan.replicas == 1:
                found += _points(plan, count)
    if not found:
        raise CapacityError(
            f"{d.name} fits the memory of none of {', '.join(map(str, counts))} such devices, or its heads cannot be "
            "cut over them; take more, or --formats with fewer bits."
        )
    return tuple(found)


def frontier(points: Iterable[Point], phase: Phase) -> list[Point]:
    """Points of a phase that no other beats in latency and cost at once, the quickest first."""
    found: list[Point] = []
    for point in sorted((p for p in points if p.phase == phase), key=lambda p: (p.seconds, p.chip_seconds)):
        if not found or point.chip_seconds < found[-1].chip_seconds * (1 - 1e-9):
            found.append(point)
    return found


def _points(plan: Plan, chips: int) -> list[Point]:
    prompt, generate = plan.job.prompt, plan.job.generate
    found = [_point(plan, "prefill", chips, plan.prefill_seconds, plan.batch * prompt, plan.batch)]
    if generate > 1:
        found.append(_point(plan, "decode", chips, plan.step_seconds, plan.batch, plan.batch))
    return found


def _point(plan: Plan, phase: Phase, chips: int, seconds: float, tokens: int, sampled: int) -> Point:
    choice = plan.prefill if phase == "prefill" else plan.decode
    cost = seconds * chips / tokens
    price = plan.machine.price.value if plan.machine.price else 0.0
    peak = plan.machine.flops(plan.formats.compute) * max(1.0, plan.machine.constants.matmul.value)
    used = flops_utilization(product_flops(plan.d, tokens, sampled), seconds, chips, peak)
    split = f"{plan.tensor} x {plan.stages}, {choice.name if choice and plan.tensor > 1 else 'whole'}"
    return Point(phase, chips, plan.batch, split, plan.formats.name, seconds, cost, cost / 3600 * price * 1e6, used)
