"""A model larger than its device: which share of weights, KV and activations lies in which tier (FlexGen §4.3, §A.3).

Outside, block shapes, formats and schedules are enumerated; inside, everything is linear in the shares, so HiGHS finds
the best ones (`linear`). A layer's step is a list of terms, each so many seconds on one channel for one kind of tensor,
linear in the shares; times add up over a channel's terms, and channels overlap as the machine's constant says:
T = o * slowest + (1 - o) * sum. What A.3 leaves out is in: Q and the output of CPU attention crossing the link, cache
loads for GPU attention, the device's own memory, launches, and the host memory's bandwidth.

Letters as in A.1: s prompt, n generated tokens, bls sequences in a block, of which gbs at a time on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cellar.core.layouts import Layout, Mesh
from cellar.planner.cost import Dimensions
from cellar.planner.machines import Machine
from cellar.planner.partition import BF16, Formats, block_work

Vector = NDArray[np.float64]

# The shares, in this order. Weights and activations: device, host, disk. KV: device; host, attended to by the CPU or
# loaded for the device; disk, likewise.
SHARES = (
    "weights.device", "weights.host", "weights.disk",
    "hidden.device", "hidden.host", "hidden.disk",
    "kv.device", "kv.host.cpu", "kv.host.device", "kv.disk.cpu", "kv.disk.device",
)  # fmt: skip
AT = {name: i for i, name in enumerate(SHARES)}
TENSORS = {"weights": (0, 1, 2), "hidden": (3, 4, 5), "kv": (6, 7, 8, 9, 10)}
CHANNELS = ("device", "cpu", "host to device", "device to host", "disk read", "disk write", "host memory", "network")
TIERS = ("device", "host", "disk")

Phase = Literal["prefill", "decode"]
Schedule = Literal["zigzag", "diagonal"]


@dataclass(frozen=True, slots=True)
class Job:
    """What is asked for: prompts of `prompt` tokens, `generate` tokens each."""

    prompt: int
    generate: int


@dataclass(frozen=True, slots=True)
class Block:
    """The outer choices: gbs sequences at a time, `batches` of them in a block, how stored, in which order computed."""

    gbs: int
    batches: int
    formats: Formats = BF16
    schedule: Schedule = "zigzag"

    @property
    def bls(self) -> int:
        """Sequences in a block."""
        return self.gbs * self.batches


@dataclass(frozen=True, slots=True)
class Slice:
    """One device's part of model and host: `layers` of them, 1/`cut` of each layer's bytes and work.

    `gathered` devices keep 1/gathered of the weights each, stream that over their own links and gather the rest from
    one another over the network; each has a block of its own. `sharers` devices share host and disk. `prefill_talk` and
    `decode_talk` are seconds of exposed collectives per layer and GPU batch. `stages` of a pipeline are filled by the
    batches of the block.
    """

    layers: int
    cut: int = 1
    gathered: int = 1
    stages: int = 1
    sharers: int = 1
    prefill_talk: float = 0.0
    decode_talk: float = 0.0


def unit(**shares: float) -> Vector:
    """A vector of shares, named with two underscores for a dot: weights__host=1."""
    v = np.zeros(len(SHARES))
    for name, value in shares.items():
        v[AT[name.replace("__", ".")]] = value
    return v


@lru_cache(maxsize=1)
def _masks() -> dict[str, Vector]:
    w, h = unit, unit
    return {
        "w all": w(weights__device=1, weights__host=1, weights__disk=1),
        "w off": w(weights__host=1, weights__disk=1),
        "w disk": w(weights__disk=1),
        "w device": w(weights__device=1),
        "w host": w(weights__host=1),
        "h off": h(hidden__host=1, hidden__disk=1),
        "h disk": h(hidden__disk=1),
        "h host": h(hidden__host=1),
        "h device": h(hidden__device=1),
        "kv device": unit(kv__device=1),
        "kv off": unit(kv__host__cpu=1, kv__host__device=1, kv__disk__cpu=1, kv__disk__device=1),
        "kv cpu": unit(kv__host__cpu=1, kv__disk__cpu=1),
        "kv fetched": unit(kv__host__device=1, kv__disk__device=1),
        "kv on device": unit(kv__device=1, kv__host__device=1, kv__disk__device=1),
        "kv host": unit(kv__host__cpu=1, kv__host__device=1),
        "kv disk": unit(kv__disk__cpu=1, kv__disk__device=1),
        "none": np.zeros(len(SHARES)),
    }


@dataclass(frozen=True)
class Term:
    """`constant + vector @ shares` seconds on a channel, for a kind of tensor (or `compute`)."""

    channel: str
    tensor: str
    vector: Vector
    constant: float = 0.0
    bound: float = 1.0

    def seconds(self, shares: Vector) -> float:
        """Busy seconds at these shares."""
        return float(self.constant + self.vector @ shares)


@dataclass(frozen=True)
class Memory:
    """`constant + vector @ shares` bytes of one tier may not pass `capacity`."""

    tier: str
    vector: Vector
    constant: float
    capacity: float

    def used(self, shares: Vector) -> float:
        """Bytes at these shares."""
        return float(self.constant + self.vector @ shares)


@dataclass(frozen=True)
class Problem:
    """Everything about one block that is linear in the shares."""

    d: Dimensions
    machine: Machine
    job: Job
    block: Block
    part: Slice
    overlap: float
    prefill: tuple[Term, ...]
    decode: tuple[Term, ...]
    memory: tuple[Memory, ...]
    head_seconds: float

    def terms(self, phase: Phase) -> tuple[Term, ...]:
        """Terms of one layer and one step of the block."""
        return self.prefill if phase == "prefill" else self.decode

    def repeats(self, phase: Phase) -> float:
        """Layer steps of a phase in a block, the waiting of a pipeline's stages included.

        A prompt passes the stages once: (batches + stages - 1) turns for `batches` of work. Tokens follow one another,
        so a stage waits in the decode only if there are fewer batches than stages.
        """
        stages, batches = self.part.stages, self.block.batches
        if phase == "prefill":
            return self.part.layers * (1 + (stages - 1) / batches)
        return self.part.layers * (self.job.generate - 1) * max(1.0, stages / batches)


def kv_growth(job: Job, schedule: Schedule) -> float:
    """Peak KV of a block as a share of bls times (s + n) tokens: A.2's factor for the diagonal, 1 for the zig-zag."""
    s, n = job.prompt, job.generate
    return 1.0 if schedule == "zigzag" else (2 * s + n) * (n - 1) / (2 * n) / (s + n)


def problem(d: Dimensions, machine: Machine, job: Job, block: Block, part: Slice | None = None) -> Problem:
    """The terms and memories of a block."""
    part = part or Slice(d.layers)
    c, m = machine.constants, _masks()
    bls, s, n = block.bls, job.prompt, job.generate
    wb, kb = block.formats.weight_bytes, block.formats.kv_bytes
    # What this device keeps and streams itself; the rest of the layer comes from its neighbours.
    weights = d.layer_elements * wb / part.cut / part.gathered
    kv_token = d.kv_elements() * kb / part.cut
    hidden_token, q_token = 2.0 * d.embed, 2.0 * d.heads * d.head_dim / part.cut
    down, up = machine.to_device.bandwidth.value, machine.to_host.bandwidth.value
    read = machine.disk.bandwidth.value / part.sharers if machine.disk else 1.0
    write = machine.disk_write.value / part.sharers if machine.disk_write else 1.0
    host_rate = machine.host.bandwidth.value / part.sharers
    attention_rate = c.host_attention.value / part.sharers
    hbm_peak = machine.device.bandwidth.value
    hbm, peak = hbm_peak * c.hbm.value, machine.flops(block.formats.compute)
    rate = peak * c.matmul.value
    attention_hbm, attention_flops = hbm_peak * c.attention_hbm.value, peak * c.attention_matmul.value
    operation = c.disk_op_seconds.value
    unpack_weights = c.unpack_seconds.value if wb < 2 else 0.0
    unpack_kv = c.unpack_seconds.value if kb < 2 else 0.0
    one = block_work(d, Layout(Mesh()), "", "switch")  # of one token, on one device
    layers, wire, gathering = part.layers, float("inf"), 0.0
    if machine.networks:
        wire = machine.networks[-1 if part.stages > machine.per_host else 0].bandwidth.value * c.network.value
    if part.gathered > 1:
        gathering = weights * (part.gathered - 1) / (machine.networks[0].bandwidth.value * c.network.value)

    def phase_terms(new: int, context: float, talk: float) -> tuple[Term, ...]:
        prefill = new > 1
        tokens = bls * new
        hidden, grown = hidden_token * tokens, kv_token * tokens
        # The cache that one layer reads; a prompt's own K and V are at hand.
        cache = 0.0 if prefill else kv_token * bls * d.seen(context)
        each = block.gbs * new
        flops, touched = one.flops * each, one.weight_elements * wb + 2.0 * one.activation_elements * each
        both = flops / rate, touched / hbm
        linear = (max(both) + (1 - c.product_overlap.value) * min(both)) / part.cut
        linear_bound = max(flops / peak, touched / hbm_peak) / part.cut
        # A stage hands its activations on once, which is a layer's share of it in each layer.
        passing = hidden / wire / layers if part.stages > 1 else 0.0
        unpacked = unpack_weights * d.layer_elements / part.cut
        fixed = block.batches * (linear + unpacked + c.layer_seconds.value + talk)
        scores = 4 * one.query_elements * each * d.seen(context - (new - 1) / 2) * block.batches / part.cut
        q = q_token * tokens
        terms = [
            Term("device", "compute", m["none"], fixed, block.batches * linear_bound / fixed),
            Term("host to device", "weights", m["w off"] * weights / down),
            Term("disk read", "weights", m["w disk"] * weights / read),
            Term("host memory", "weights", m["w off"] * weights / host_rate),
            Term("host to device", "hidden", m["h off"] * hidden / down),
            Term("device to host", "hidden", m["h off"] * hidden / up),
            Term("disk read", "hidden", m["h disk"] * hidden / read),
            Term("disk write", "hidden", m["h disk"] * hidden / write),
            Term("network", "weights", m["none"], gathering),
            Term("network", "hidden", m["none"], passing),
            Term("device to host", "kv write", m["kv off"] * grown / up),
            Term("host memory", "kv write", m["kv off"] * grown / host_rate),
            Term(
                "disk write",
                "kv write",
                m["kv disk"] * (grown * (1 - c.write_cached.value) / write + operation * block.batches),
            ),
        ]
        if prefill:
            terms.append(Term("device", "compute", m["none"], scores / attention_flops, c.attention_matmul.value))
            return tuple(terms)
        attending = max(scores / attention_flops, cache / attention_hbm) + unpack_kv * cache / kb
        bound = max(scores / peak, cache / hbm_peak) / attending
        terms += [
            Term("device", "compute", m["kv on device"] * attending, 0.0, bound),
            Term("cpu", "compute", m["kv cpu"] * cache / attention_rate),
            Term("host to device", "kv read", m["kv fetched"] * cache / down),
            Term("disk read", "kv read", m["kv disk"] * cache * (1 - c.read_cached.value) / read),
            Term("host memory", "kv read", m["kv off"] * cache / host_rate),
            Term("device to host", "query", m["kv cpu"] * q / up),
            Term("host to device", "query", m["kv cpu"] * q / down),
        ]
        return tuple(terms)

    head_bytes = d.head_elements * block.formats.table_bytes
    head_seconds = max(2 * bls * d.head_elements / rate, block.batches * head_bytes / hbm) / part.cut
    return Problem(
        d,
        machine,
        job,
        block,
        part,
        c.overlap.value,
        phase_terms(s, s, part.prefill_talk),
        phase_terms(1, s + n / 2, part.decode_talk),
        _memories(d, machine, job, block, part, weights, kv_token, hidden_token),
        head_seconds,
    )


def _memories(
    d: Dimensions,
    machine: Machine,
    job: Job,
    block: Block,
    part: Slice,
    weights: float,
    kv_token: float,
    hidden_token: float,
) -> tuple[Memory, ...]:
    m, layers = _masks(), part.layers
    s, n, gbs = job.prompt, job.generate, block.gbs
    tables = (d.head_elements + d.table_elements) * block.formats.table_bytes / part.cut
    held = d.chunks(s + n) * d.chunk  # chunks are kept whole
    kv_all = kv_token * layers * block.bls * held * kv_growth(job, block.schedule)
    hidden_all = hidden_token * s * block.bls
    kv_batch = kv_token * gbs * held
    device = Memory(
        "device",
        m["w device"] * weights * layers
        + m["w off"] * 2 * weights  # this layer's and the next one's, for what does not live here
        + m["w all"] * 2 * weights * (part.gathered - 1)  # and what the neighbours keep of them
        + m["h device"] * hidden_all
        + m["h off"] * 2 * hidden_token * s * gbs
        + m["kv device"] * kv_all
        + m["kv fetched"] * 2 * kv_batch
        # A prompt's K and V wait here to be written out: this batch's and the last one's.
        + m["kv off"] * 2 * kv_token * gbs * s,
        tables + working_bytes(d, gbs * s, part.cut) + logits_bytes(d, gbs, part.cut),
        machine.usable("device"),
    )
    host = Memory(
        "host",
        m["w host"] * weights * layers
        + m["w disk"] * 2 * weights
        + m["h host"] * hidden_all
        + m["h disk"] * 2 * hidden_token * s * gbs
        + m["kv host"] * kv_all
        + m["kv disk"] * 2 * kv_batch,
        0.0,
        machine.usable("host") / part.sharers,
    )
    disk = Memory(
        "disk",
        m["w disk"] * weights * layers + m["h disk"] * hidden_all + m["kv disk"] * kv_all,
        0.0,
        machine.usable("disk") / part.sharers,
    )
    return device, host, disk


def working_bytes(d: Dimensions, tokens: int, cut: int = 1) -> float:
    """Largest set of activations that one layer holds at once; scores are not written out (attention is tiled)."""
    q, kv = d.heads * d.head_dim / cut, d.kv_heads * d.head_dim / cut
    width = d.mlp * (3 if d.gated else 1) / cut
    return 2.0 * tokens * max(2 * d.embed + 2 * q + 2 * kv, 2 * d.embed + width)


def logits_bytes(d: Dimensions, sampled: int, cut: int = 1) -> float:
    """Float32 logits of the sampled positions."""
    return 4.0 * sampled * d.vocab / cut
