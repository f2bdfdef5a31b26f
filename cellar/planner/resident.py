"""Plans with all weights and KV in device memory: for every split and batch the best layout of each phase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from cellar.core.config import step_tokens
from cellar.core.layouts import Layout
from cellar.planner.cost import Dimensions
from cellar.planner.machines import Machine
from cellar.planner.offload import Job, logits_bytes
from cellar.planner.partition import (
    Choice,
    Formats,
    Work,
    choices,
    kv_bytes_per_chip,
    meshes,
    padded_heads,
    relay_bytes,
    torus,
)
from cellar.planner.plans import Plan, ways

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
PIECE_TOKENS = 65_536  # of a prompt's step that keeps several devices busy


def resident_bytes(d: Dimensions, formats: Formats, tensor: int, stages: int) -> float:
    """Bytes of weights on one device; the first and the last stage also hold the tables."""
    layers = d.layers // stages * d.layer_elements * formats.weight_bytes
    return (layers + (d.head_elements + d.table_elements) * formats.table_bytes) / tensor


def resident_plans(
    d: Dimensions, machine: Machine, job: Job, formats: Iterable[Formats], batches: Sequence[int] = BATCHES
) -> list[Plan]:
    """Plans with all weights and KV in device memory: per split and batch the best layout of each phase."""
    found = []
    for form in formats:
        for t, p, copies in ways(machine.num_devices, d.layers):
            found += _resident_batches(d, machine, job, form, (t, p, copies), batches)
    return found


def _resident_batches(
    d: Dimensions, machine: Machine, job: Job, form: Formats, split: tuple[int, int, int], batches: Sequence[int]
) -> list[Plan]:
    t, p, _ = split
    padded = padded_heads(d, t)
    capacity = machine.usable("device")
    if padded is None or resident_bytes(padded, form, t, p) >= capacity:
        return []
    hosts = max(1, -(-t // machine.per_host)) if len(machine.networks) > 1 else 1
    if t % hosts:
        return []
    boxes = meshes(t, hosts)
    if machine.networks and machine.networks[0].topology == "torus":
        if t & (t - 1):
            return []
        boxes = ((torus(t), ""),)
    layers, held = d.layers // p, resident_bytes(padded, form, t, p)
    context = d.chunks(job.prompt + job.generate) * d.chunk
    found = []
    for batch in batches:
        micro = min(p, batch)
        step = -(-batch // micro)
        room = capacity - held - logits_bytes(d, step, t)
        best: Plan | None = None
        possible = False
        # One stored model, so one mesh for both phases: the best pair over all meshes.
        for mesh, outer in boxes:
            work = Work(step, 1, job.prompt + job.generate / 2)
            steps = choices(padded, machine, t, work, form, mesh=mesh, outer=outer, layers=layers)
            decode = _fastest(steps, padded, batch, p, room, job, form)
            if decode is None:
                continue
            kv = kv_bytes_per_chip(padded, decode.layout, batch, context, form) / p
            for pieces, prefill in _prompts(padded, machine, job, form, decode, batch, (t, p), capacity - held - kv):
                possible = True
                plan = _resident(d, machine, job, form, split, batch, pieces, micro, prefill, decode)
                best = plan if best is None or plan.latency < best.latency else best
        if best is not None:
            found.append(best)
        elif batch >= t and not possible:
            break
    return found


def _fastest(
    found: Iterable[Choice], d: Dimensions, batch: int, stages: int, room: float, job: Job, form: Formats
) -> Choice | None:
    """The fastest choice whose cache of `batch` sequences fits into `room` bytes."""
    best: Choice | None = None
    seconds = float("inf")
    for choice in found:
        taken = choice.timeline.seconds
        if taken < seconds:
            kv = kv_bytes_per_chip(d, choice.layout, batch, job.prompt + job.generate, form) / stages
            if kv <= room:
                best, seconds = choice, taken
    return best


def _prompts(
    d: Dimensions,
    machine: Machine,
    job: Job,
    form: Formats,
    decode: Choice,
    batch: int,
    split: tuple[int, int],
    room: float,
) -> Iterator[tuple[int, Choice]]:
    """Ways to cut a batch of prompts into steps, each with its fastest layout on the decode's mesh.

    The fewest steps whose activations fit into `room` bytes, and steps of PIECE_TOKENS (on one device:
    `step_tokens`); stages want a step each.
    """
    pieces, stages = min(split[1], batch), split[1]
    fits = False
    while pieces <= batch:
        each = -(-batch // pieces)
        tokens = each * job.prompt
        small = tokens <= max(PIECE_TOKENS if split != (1, 1) else step_tokens(machine.device.kind), job.prompt)
        if not fits or small:
            work = Work(each, job.prompt, job.prompt)
            best: Choice | None = None
            mesh, layers = decode.layout.mesh, d.layers // stages
            for choice in choices(d, machine, split[0], work, form, mesh=mesh, outer=decode.outer, layers=layers):
                faster = best is None or choice.timeline.seconds < best.timeline.seconds
                if faster and prompt_bytes(d, tokens, choice.layout) <= room:
                    best = choice
            if best is not None:
                yield pieces, best
                fits = True
                if small:
                    return
        pieces *= 2


def prompt_bytes(d: Dimensions, tokens: float, layout: Layout) -> float:
    """Largest set of activations of a prompt's step on one chip: gathered over all axes but x, cut over the batch."""
    mesh = layout.mesh
    whole = 1 if layout.gather else mesh.x
    rest = mesh.count(layout.rest)
    q, kv = d.heads * d.head_dim / rest, d.kv_heads * d.head_dim
    width = d.mlp * (3 if d.gated else 1) / rest
    return 2.0 * tokens / mesh.count(layout.gather) * (2 * d.embed / whole + max(2 * q + 2 * kv, width))


def _resident(
    d: Dimensions,
    machine: Machine,
    job: Job,
    form: Formats,
    split: tuple[int, int, int],
    batch: int,
    pieces: int,
    micro: int,
    prefill: Choice,
    decode: Choice,
) -> Plan:
    t, p, copies = split
    steps = job.generate - 1
    handover = 0.0
    if machine.networks:
        share = machine.constants.network.value
        net = machine.networks[0].bandwidth.value * share
        # Stages pass activations on, over the outer network if they lie in several hosts.
        wire = machine.networks[-1 if t * p > machine.per_host else 0]
        pace, hop = wire.bandwidth.value * share, wire.hop.value
        if t > 1:
            padded = padded_heads(d, t)
            assert padded is not None, "its layouts have a price"
            handover = relay_bytes(padded, prefill.layout, decode.layout, batch, job.prompt, form) / p / net
        passed = 2.0 * d.embed * job.prompt * batch / pieces / t / pace + hop if p > 1 else 0.0
        token = 2.0 * d.embed * batch / micro / t / pace + hop if p > 1 else 0.0
    else:
        passed = token = 0.0
    turn = prefill.timeline.seconds + passed
    prefill_seconds = (pieces + p - 1) * turn + handover
    decode_seconds = steps * p * (decode.timeline.seconds + token)
    busy: dict[str, float] = {}
    for timeline, times in ((prefill.timeline, pieces), (decode.timeline, steps * micro)):
        for name, seconds in timeline.busy().items():
            busy[name] = busy.get(name, 0.0) + times * seconds
    if handover:
        busy["collectives"] = busy.get("collectives", 0.0) + handover
    bound = pieces * prefill.timeline.lower_bound + steps * micro * decode.timeline.lower_bound
    return Plan(
        "resident" if machine.num_devices == 1 or t * p == 1 else "partition",
        machine,
        d,
        job,
        form,
        t,
        p,
        copies,
        batch,
        prefill_seconds,
        decode_seconds,
        bound,
        tuple(busy.items()),
        prefill,
        decode,
        None,
        micro,
    )
