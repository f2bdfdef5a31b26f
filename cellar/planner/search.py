"""One search over partition, pipeline and offload: every way to run a model on a machine, and the frontier of the best.

A way is t devices per pipeline stage (tensor parallel), p stages, and as many copies as the devices allow; prefill and
decode have layouts of their own over one stored model. What fits the devices is priced as it is; offloading is priced
by the LP for the three pure ways to split it: every device a shard, every device gathering streamed shards, all stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from cellar.core.errors import CapacityError, ConfigError
from cellar.planner.advice import does_not_fit, gib
from cellar.planner.cost import Dimensions
from cellar.planner.machines import Machine
from cellar.planner.offload import Job, Schedule
from cellar.planner.partition import BF16, Formats
from cellar.planner.passes import rounded_up
from cellar.planner.plans import Plan
from cellar.planner.resident import resident_plans
from cellar.planner.streamed import offload_plans

Objective = Literal["throughput", "latency", "cost"]

TIE = 0.01


def frontier(plans: Iterable[Plan]) -> list[Plan]:
    """Plans that no other beats in latency and throughput (and so in cost per token) at once, fastest first."""
    found: list[Plan] = []
    best = 0.0
    for plan in sorted(plans, key=lambda plan: (plan.latency, -plan.tokens_per_second)):
        if plan.tokens_per_second > best * (1 + 1e-9):
            found.append(plan)
            best = plan.tokens_per_second
    return found


@dataclass(frozen=True)
class Answer:
    """What a search found: the plan for the objective, the best of those that an engine runs (None: it runs none), the
    next best of another kind, the frontier, and warnings.
    """

    chosen: Plan
    running: Plan | None
    next_best: Plan | None
    pareto: tuple[Plan, ...]
    plans: tuple[Plan, ...]
    warnings: tuple[str, ...]


def find(
    d: Dimensions,
    machine: Machine,
    job: Job,
    objective: Objective = "throughput",
    max_latency: float | None = None,
    formats: Sequence[Formats] = (BF16,),
    schedules: Sequence[Schedule] = ("zigzag",),
) -> Answer:
    """Search all plans and choose. Raises CapacityError if nothing fits, ConfigError for an impossible wish."""
    if job.prompt < 1 or job.generate < 1:
        raise ConfigError(f"prompt {job.prompt} and generate {job.generate} must each be at least 1 token.")
    if max_latency is not None and not 0 < max_latency < math.inf:
        raise ConfigError(
            f"latency is {max_latency:g}; it must be a positive number of seconds, or be left out for no bound."
        )
    resident = resident_plans(d, machine, job, formats)
    offloaded = offload_plans(d, machine, job, formats, schedules, None)
    if max_latency is not None:
        # Within a bound other shares are best: less offloaded, smaller blocks.
        offloaded += offload_plans(d, machine, job, formats, schedules, max_latency)
    plans = resident + offloaded
    if not plans:
        raise CapacityError(does_not_fit(d, machine, job, formats))
    allowed = plans if max_latency is None else [plan for plan in plans if plan.latency <= max_latency]
    if not allowed:
        raise ConfigError(_too_slow(plans, max_latency or 0.0))
    ranked = sorted(allowed, key=lambda plan: _score(plan, objective))
    chosen = _best(ranked, objective)
    runs = [plan for plan in ranked if not plan.obstacle]
    running = _best(runs, objective) if runs else None
    rest = [plan for plan in ranked if plan is not chosen]
    other = next((plan for plan in rest if _shape(plan) != _shape(chosen)), rest[0] if rest else None)
    warnings = (*_running_warning(chosen, running), *_warnings(chosen, resident, offloaded))
    return Answer(chosen, running, other, tuple(frontier(allowed)), tuple(plans), warnings)


def _best(ranked: Sequence[Plan], objective: Objective) -> Plan:
    """Within a hundredth of the best the model cannot tell; the quickest of them waits least."""
    most = _score(ranked[0], objective) + _tie(ranked[0], objective)
    return min((plan for plan in ranked if _score(plan, objective) <= most), key=lambda plan: plan.latency)


def _score(plan: Plan, objective: Objective) -> float:
    match objective:
        case "throughput":
            return -plan.tokens_per_second
        case "latency":
            return plan.latency
        case "cost":
            return plan.dollars_per_million or -plan.tokens_per_second


def _tie(best: Plan, objective: Objective) -> float:
    return TIE * abs(_score(best, objective))


def _shape(plan: Plan) -> tuple[object, ...]:
    """Plans of one shape differ in batch alone."""
    names = (plan.prefill.name, plan.decode.name) if plan.prefill and plan.decode else ()
    return plan.kind, plan.tensor, plan.stages, plan.formats.name, names


def _too_slow(plans: Sequence[Plan], wish: float) -> str:
    fastest = min(plans, key=lambda plan: plan.latency)
    bound = min(plan.bound for plan in plans)
    why = f"even at peak rates {fastest.binds} needs {bound:.3g} s" if wish < bound else "no plan reaches that"
    return (
        f"a latency of {wish:g} s is impossible: {why}; the fastest plan takes {fastest.latency:.3g} s "
        f"({fastest.name}), so ask for --latency {rounded_up(fastest.latency)} or more."
    )


def _running_warning(chosen: Plan, running: Plan | None) -> Sequence[str]:
    """What runs instead of a plan that no engine runs."""
    if not chosen.obstacle:
        return ()
    instead = "and none of these plans is run"
    if running is not None:
        instead = (
            f"the best that runs, which --output writes, is {running.name}: {running.tokens_per_second:,.4g} tok/s, "
            f"{running.latency:,.3g} s"
        )
    return (f"no engine runs this plan yet: {chosen.obstacle}; {instead}.",)


def _warnings(chosen: Plan, resident: Sequence[Plan], offloaded: Sequence[Plan]) -> list[str]:
    found = []
    device, link = chosen.machine.device.bandwidth.value, chosen.machine.to_device.bandwidth.value
    moved = [plan for plan in offloaded if plan.offload and plan.offload.share("weights.device") < 1 - 1e-6]
    if resident and moved:
        best = max(moved, key=lambda plan: plan.tokens_per_second)
        kept = max(resident, key=lambda plan: plan.tokens_per_second)
        if best.tokens_per_second < kept.tokens_per_second:
            found.append(
                f"offloading weights is pure loss here: in {kept.formats.name} all fits the devices, and the link "
                f"moves {link / 1e9:.3g} GB/s where device memory moves {device / 1e9:,.0f}: "
                f"{best.tokens_per_second:,.3g} tok/s at best, {kept.tokens_per_second:,.3g} without."
            )
    if chosen.offload is not None:
        found += _link_warning(chosen, link)
    return found


def _link_warning(chosen: Plan, link: float) -> list[str]:
    """What the link makes impossible: weights streamed once per token must be shared by enough sequences."""
    plan = chosen.offload
    assert plan is not None
    away = plan.share("weights.host") + plan.share("weights.disk")
    if away < 1e-6:
        return []
    p = plan.problem
    part = p.part
    per_step = away * part.layers * p.d.layer_elements * chosen.formats.weight_bytes / part.cut / part.gathered
    rate = chosen.machine.flops(chosen.formats.compute) * chosen.machine.constants.matmul.value
    hide = rate * chosen.formats.weight_bytes / 2 / link * away / part.gathered
    return [
        f"every step streams {gib(per_step)} of weights over {link / 1e9:.3g} GB/s: {per_step / link:.3g} s a token "
        f"whatever the batch, and {hide:,.0f} sequences in flight would hide it (this plan has {plan.block.bls:,})."
    ]
