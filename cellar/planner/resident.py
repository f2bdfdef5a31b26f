"""Plans with all weights and KV in device memory: for every split and batch the best layout of each phase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from cellar.core.config import step_tokens
from cellar.core.layouts import Layout, Mesh, relay
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
PIECE_TOKENS = 65_536  # of a prompt's step that keeps a torus busy


def resident_bytes(d: Dimensions, formats: Formats, tensor: int, stages: int) -> float:
    """Bytes of weights on one device; the first and the last stage also hold the tables."""
    layers = d.layers // stages * d.layer_elements * formats.weight_bytes
    return (layers + (d.head_elements + d.table_elements) * formats.table_bytes) / tensor


def repeated_bytes(d: Dimensions, formats: Formats, layout: Layout) -> float:
    """What a device holds beyond that where a layout runs as tensor parallelism: the whole table of words."""
    if not layout.is_tensor_parallel(d.kv_heads):
        return 0.0
    cut = 0.0 if d.tied else d.table_elements / layout.mesh.size  # a tied one is the head's share beside it
    return ((d.head_elements if d.tied else d.table_elements) - cut) * formats.table_bytes


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
        priced: list[Plan] = []
        # One stored model, so one mesh for both phases: the best pair over all meshes.
        for mesh, outer in boxes:
            work = Work(step, 1, job.prompt + job.generate / 2)
            steps = list(choices(padded, machine, t, work, form, mesh=mesh, outer=outer, layers=layers))
            prompts = _Prompts(padded, machine, job, form, mesh, outer, batch, (t, p))
            for among, staying in ((steps, False), *((one, True) for one in _staying(steps, padded.kv_heads, split))):
                decode = _fastest(among, padded, batch, p, room, job, form)
                if decode is None:
                    continue
                kv = kv_bytes_per_chip(padded, decode.layout, batch, context, form) / p
                kv += repeated_bytes(padded, form, decode.layout)
                for pieces, prefill in prompts.ways(capacity - held - kv, decode.layout if staying else None):
                    priced.append(_resident(d, machine, job, form, split, batch, pieces, micro, prefill, decode))
        if priced:
            best = min(priced, key=lambda plan: plan.latency)
            found.append(best)
            if best.obstacle:
                found += sorted((plan for plan in priced if not plan.obstacle), key=lambda plan: plan.latency)[:1]
        elif batch >= t:
            break
    return found


def _staying(steps: Sequence[Choice], kv_heads: int, split: tuple[int, int, int]) -> list[list[Choice]]:
    """Decodes by where they keep K and V, for prompts that leave them there: engines run such pairs alone, and of these
    only one copy without stages.
    """
    found: list[list[Choice]] = []
    if split[0] == 1 or split[1:] != (1, 1):
        return found
    for choice in steps:
        alike = [one for one in found if not relay(one[0].layout, choice.layout, kv_heads)]
        if alike:
            alike[0].append(choice)
        else:
            found.append([choice])
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
            if kv + repeated_bytes(d, form, choice.layout) <= room:
                best, seconds = choice, taken
    return best


@dataclass
class _Prompts:
    """A batch of prompts on one mesh: every layout of a step of them is priced once. `split`: chips a stage, stages."""

    d: Dimensions
    machine: Machine
    job: Job
    form: Formats
    mesh: Mesh
    outer: str
    batch: int
    split: tuple[int, int]
    priced: dict[int, list[Choice]] = field(default_factory=dict)

    def ways(self, room: float, decode: Layout | None) -> Iterator[tuple[int, Choice]]:
        """Ways to cut the batch into steps, each with its fastest layout; of those alone, if given, that leave K and V
        where this layout of decodes takes them.

        Steps of at most `step_tokens`, as engines over several devices run them. On one device, and on a torus (of
        PIECE_TOKENS), also the fewest whose activations fit into `room` bytes. Stages want a step each.
        """
        pieces, fits = min(self.split[1], self.batch), False
        several = self.split != (1, 1)
        most = PIECE_TOKENS if several and self._torus else step_tokens(self.machine.device.kind)
        while pieces <= self.batch:
            each = -(-self.batch // pieces)
            tokens = each * self.job.prompt
            small = tokens <= max(most, self.job.prompt)
            if small or not (fits or (several and not self._torus)):
                best: Choice | None = None
                for choice in self._layouts(each):
                    faster = best is None or choice.timeline.seconds < best.timeline.seconds
                    taken = prompt_bytes(self.d, tokens, choice.layout)
                    if not faster or taken + gathered_bytes(self.d, self.form, choice.layout) > room:
                        continue
                    if decode is None or not relay(choice.layout, decode, self.d.kv_heads):
                        best = choice
                if best is not None:
                    yield pieces, best
                    fits = True
                    if small:
                        return
            pieces *= 2

    @property
    def _torus(self) -> bool:
        """Whether chips are joined by rings, on which our engines do not run."""
        return bool(self.machine.networks) and self.machine.networks[0].topology == "torus"

    def _layouts(self, each: int) -> list[Choice]:
        """Of a step of so many prompts."""
        if each not in self.priced:
            work, layers = Work(each, self.job.prompt, self.job.prompt), self.d.layers // self.split[1]
            loops = bool(self.machine.networks) and not self._torus
            found = choices(
                self.d,
                self.machine,
                self.split[0],
                work,
                self.form,
                mesh=self.mesh,
                outer=self.outer,
                looped=loops,
                layers=layers,
            )
            self.priced[each] = list(found)
        return self.priced[each]


def prompt_bytes(d: Dimensions, tokens: float, layout: Layout) -> float:
    """Largest set of activations of a prompt's step on one chip: gathered over all axes but x, cut over the batch."""
    mesh = layout.mesh
    whole = 1 if layout.gather else mesh.x
    rest = mesh.count(layout.rest)
    q, kv = d.heads * d.head_dim / rest, d.kv_heads * d.head_dim
    width = d.mlp * (3 if d.gated else 1) / rest
    return 2.0 * tokens / mesh.count(layout.gather) * (2 * d.embed / whole + max(2 * q + 2 * kv, width))


def gathered_bytes(d: Dimensions, formats: Formats, layout: Layout) -> float:
    """What a chip holds of weights that it has gathered: the layer that it computes, and the next."""
    if layout.mesh.count(layout.gather) == 1:
        return 0.0
    return 2.0 * d.layer_elements * formats.weight_bytes / layout.mesh.count(layout.rest)


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
        if t > 1:
            padded = padded_heads(d, t)
            assert padded is not None, "its layouts have a price"
            handover = relay_bytes(padded, prefill.layout, decode.layout, batch, job.prompt, form) / p / net
        passed = wire.sending(2.0 * d.embed * job.prompt * batch / pieces / t, share) if p > 1 else 0.0
        token = wire.sending(2.0 * d.embed * batch / micro / t, share) if p > 1 else 0.0
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
