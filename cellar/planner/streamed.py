"""Plans that offload, for each pure way to split a model over devices, priced by the LP of `linear`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from cellar.planner.cost import Dimensions, Timeline
from cellar.planner.linear import OffloadPlan, solve
from cellar.planner.machines import Machine
from cellar.planner.offload import Block, Job, Problem, Schedule, Slice, problem
from cellar.planner.partition import Formats
from cellar.planner.plans import Plan

OFFLOAD_GBS = (1, 4, 16, 32, 64, 128)
OFFLOAD_BATCHES = (1, 4, 8, 16)


def offload_plans(
    d: Dimensions,
    machine: Machine,
    job: Job,
    formats: Iterable[Formats],
    schedules: Sequence[Schedule] = ("zigzag",),
    max_latency: float | None = None,
    sizes: Sequence[int] = OFFLOAD_GBS,
    counts: Sequence[int] = OFFLOAD_BATCHES,
) -> list[Plan]:
    """Plans of the LP for each pure split over the devices of the machine: blocks of `counts` batches of `sizes`."""
    if machine.device.kind == "cpu":
        return []  # its memory is the host's
    n = machine.num_devices
    sharers = min(n, machine.per_host)
    found = []
    for form in formats:
        parts: list[tuple[int, int, int, Slice]] = []
        if n == 1:
            parts.append((1, 1, 1, Slice(d.layers)))
        else:
            if d.layers % n == 0:
                parts.append((1, n, 1, Slice(d.layers // n, stages=n, sharers=sharers)))
            if machine.networks and machine.networks[0].size >= n:
                parts.append((n, 1, 1, Slice(d.layers, gathered=n, sharers=sharers)))
                if d.heads % n == 0 and d.kv_heads % n == 0:
                    parts.append((n, 1, 1, Slice(d.layers, cut=n, sharers=sharers)))
        for t, p, copies, part in parts:
            for schedule in schedules:
                blocks = [[Block(size, count, form, schedule) for count in counts] for size in sizes]
                found += _offloaded(d, machine, job, blocks, (t, p, copies), part, max_latency)
    return found


def _offloaded(
    d: Dimensions,
    machine: Machine,
    job: Job,
    blocks: Sequence[Sequence[Block]],
    split: tuple[int, int, int],
    part: Slice,
    max_latency: float | None,
) -> list[Plan]:
    found = []
    for growing in blocks:
        for block in growing:
            solved = solve(problem(d, machine, job, block, _talking(d, machine, job, block.gbs, part)), max_latency)
            if solved is None:
                break  # more batches need more of everything
            if any(solved.share(name) < 1 - 1e-6 for name in ("weights.device", "hidden.device", "kv.device")):
                found.append(_offload_plan(solved, machine, *split))
    return found


def _talking(d: Dimensions, machine: Machine, job: Job, gbs: int, part: Slice) -> Slice:
    """The slice with its collectives: a cut layer all-reduces its activations twice (once if blocks are parallel)."""
    if part.cut == 1:
        return part
    net, share = machine.networks[0], machine.constants.network.value
    times = 1 if d.parallel else 2
    token = 2 * 2.0 * d.embed * gbs * (part.cut - 1) / part.cut
    prefill, decode = (times * net.summing(token * new, share, part.cut) for new in (job.prompt, 1))
    return replace(part, prefill_talk=prefill, decode_talk=decode)


def _offload_plan(solved: OffloadPlan, machine: Machine, t: int, p: int, copies: int) -> Plan:
    prob: Problem = solved.problem
    timeline: Timeline = solved.timeline()
    prefill = timeline.groups[0].seconds + prob.head_seconds
    return Plan(
        "offload",
        machine,
        prob.d,
        prob.job,
        solved.block.formats,
        t,
        p,
        copies,
        solved.block.bls * prob.part.gathered,
        prefill,
        solved.seconds - prefill,
        timeline.lower_bound,
        tuple(timeline.busy().items()),
        offload=solved,
        micro_batches=solved.block.batches,
    )
