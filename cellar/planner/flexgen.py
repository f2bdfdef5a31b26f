"""What FlexGen measured on its T4, and the constants of `flexgen_t4` fitted to half of it, to be judged on the other.

OPT in 16 bits, 512 tokens of prompt and 32 generated (tables 2 to 5), where the paper names the policy or its command
does: rows of 1,024 tokens and of four bits do not say theirs. Rates are tokens/s; channels are seconds of a block with
one channel at work at a time (table 4).

In four bits FlexGen unpacks weights and KV by operations of their own before it computes, for each GPU batch anew. What
a number costs is fitted to one model; the policy is the best one without attention on the CPU, which would unpack, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
from scipy.optimize import least_squares

from cellar.core.hardware import Measure
from cellar.planner.cost import Dimensions, dimensions
from cellar.planner.linear import OffloadPlan, by_tensor, phase_group, policy, search, without_overlap
from cellar.planner.machines import Machine
from cellar.planner.models import decoder_spec
from cellar.planner.offload import Block, Job, Phase, problem
from cellar.planner.partition import INT4_KV4

JOB = Job(512, 32)


@dataclass(frozen=True, slots=True)
class Policy:
    """A block and its shares; `overlaps`: channels work at the same time."""

    model: str
    block: Block
    shares: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    overlaps: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure. `kind`: tokens/s of prompts and decodes, or of decodes alone; else seconds of a kind of
    tensor in a phase.
    """

    name: str
    policy: Policy
    kind: str
    published: float


def _policy(model: str, gbs: int, batches: int, **shares: float) -> Policy:
    return Policy(model, Block(gbs, batches), MappingProxyType(shares))


_HOST = {"hidden__host": 1.0}
_OPT_30B = {"weights__device": 0.2, "weights__host": 0.8, **_HOST}
_OPT_175B = {"weights__host": 0.5, "weights__disk": 0.5, **_HOST}
_BY_CPU, _LOADED = {"kv__host__cpu": 1.0}, {"kv__host__device": 1.0}
_DISK_BY_CPU, _DISK_LOADED = {"kv__disk__cpu": 1.0}, {"kv__disk__device": 1.0}
_WHOLE_6 = _policy("6.7B", 2, 1, weights__device=1.0, hidden__device=1.0, kv__device=1.0)
_WHOLE_30 = _policy("30B", 64, 2, **_OPT_30B, **_BY_CPU)
_WHOLE_175 = _policy("175B", 32, 8, **_OPT_175B, **_DISK_BY_CPU)
_APART_175 = replace(_WHOLE_175, overlaps=False)

ROWS = (
    Row("6.7B", _WHOLE_6, "all", 25.26),
    Row("6.7B, decode", _WHOLE_6, "decode", 38.28),
    Row("30B", _WHOLE_30, "all", 7.32),
    Row("30B, decode", _WHOLE_30, "decode", 11.52),
    Row("30B, no policy search", _policy("30B", 64, 2, weights__host=1.0, **_HOST, **_BY_CPU), "all", 6.93),
    Row("30B, no overlap", replace(_WHOLE_30, overlaps=False), "all", 5.86),
    Row("30B, no CPU attention", _policy("30B", 64, 2, **_OPT_30B, **_LOADED), "all", 4.03),
    Row("175B", _WHOLE_175, "all", 0.69),
    Row("175B, decode", _WHOLE_175, "decode", 0.83),
    Row("175B, no policy search", _policy("175B", 32, 1, **_OPT_175B, **_DISK_BY_CPU), "all", 0.27),
    Row("175B, no overlap", _APART_175, "all", 0.59),
    Row("175B, no CPU attention", _policy("175B", 32, 8, **_OPT_175B, **_DISK_LOADED), "all", 0.62),
    Row("175B, prefill, compute", _APART_175, "prefill compute", 2220),
    Row("175B, prefill, KV written", _APART_175, "prefill kv write", 261),
    Row("175B, decode, compute", _APART_175, "decode compute", 1498),
    Row("175B, decode, weights", _APART_175, "decode weights", 3047),
    Row("175B, decode, KV read", _APART_175, "decode kv read", 7046),
    Row("175B, decode, KV written", _APART_175, "decode kv write", 124),
)
"""Table 4's seconds of weights in the prefill are left out: they are no part of its own total."""

HALVES = (ROWS[0::2], ROWS[1::2])


def _opt(layers: int, heads: int) -> Dimensions:
    embed = 128 * heads
    spec = decoder_spec(
        "opt", layers=layers, embed=embed, mlp=4 * embed, heads=heads, kv_heads=heads, head_dim=128, vocab=50272,
        gated=False, parallel=False, dtype="float16",
    )  # fmt: skip
    return dimensions(spec)


MODELS = {"6.7B": _opt(32, 32), "30B": _opt(48, 56), "175B": _opt(96, 96)}


def plan_of(asked: Policy, machine: Machine) -> OffloadPlan:
    """The policy, priced."""
    p = problem(MODELS[asked.model], machine, JOB, asked.block)
    return policy(p if asked.overlaps else without_overlap(p), **asked.shares)


def predicted(row: Row, machine: Machine) -> float:
    """What the cost model says of a row, in its unit."""
    plan = plan_of(row.policy, machine)
    if row.kind == "all":
        return plan.tokens_per_second
    if row.kind == "decode":
        seconds = phase_group(plan.problem, plan.shares, "decode").seconds
        steps = JOB.generate - 1
        return plan.block.bls * steps / (seconds + steps * plan.problem.head_seconds)
    name, tensor = row.kind.split(" ", 1)
    phase: Phase = "prefill" if name == "prefill" else "decode"
    return by_tensor(plan.problem, plan.shares, phase)[tensor]


# What one would guess before any of it was measured, and how far (in logarithms) the fit may go for one standard
# deviation of error: share of the matrix peak; of the shorter channels, what is not hidden; bytes/s of the CPU's
# attention (a quarter of its memory's) and of the link; what no page cache takes of reads and writes; seconds
# of a small write, and of a layer's launches.
GUESS = np.array([0.4, 0.1, 20e9, 12e9, 0.7, 0.7, 1e-3, 2e-4])
LOOSE = np.array([0.5, 1.0, 0.7, 0.3, 0.5, 0.7, 1.5, 1.0])
MOST = np.array([1.0, 1.0, 80e9, 16e9, 1.0, 1.0, 1e-1, 1e-2])
TRUST = 0.1


def with_constants(machine: Machine, values: Sequence[float]) -> Machine:
    """A machine with these constants instead, in the order of GUESS."""
    matmul, bare, attention, link, read, write, operation, layer = (float(value) for value in values)

    def fitted(value: float, unit: str) -> Measure:
        return Measure(value, unit, "fitted")

    return replace(
        machine,
        to_device=replace(machine.to_device, bandwidth=fitted(link, "bytes/s")),
        to_host=replace(machine.to_host, bandwidth=fitted(link, "bytes/s")),
        constants=replace(
            machine.constants,
            matmul=fitted(matmul, "share"),
            attention_matmul=fitted(matmul, "share"),
            overlap=fitted(1 - bare, "share"),
            host_attention=fitted(attention, "bytes/s"),
            read_cached=fitted(1 - read, "share"),
            write_cached=fitted(1 - write, "share"),
            disk_op_seconds=fitted(operation, "s"),
            layer_seconds=fitted(layer, "s"),
        ),
    )


def fit(rows: Sequence[Row], machine: Machine) -> list[float]:
    """The constants with the least squared errors of logarithms, near the guess."""

    def errors(log: np.ndarray) -> np.ndarray:
        candidate = with_constants(machine, np.exp(log).tolist())
        missed = [np.log(predicted(row, candidate) / row.published) / TRUST for row in rows]
        return np.array([*missed, *((log - np.log(GUESS)) / LOOSE)])

    bounds = (np.full(len(GUESS), -np.inf), np.log(MOST))
    found = least_squares(errors, np.log(GUESS), bounds=bounds, diff_step=1e-3)
    return [float(value) for value in np.exp(found.x)]


FOUR_BITS = {"6.7B": 29.12, "30B": 8.38, "175B": 1.12}
"""Tokens/s in four bits (table 2), by policies that are not named."""

_NEVER = Measure(1.0, "bytes/s", "assumed")


def four_bits(model: str, machine: Machine, unpack_seconds: float) -> float:
    """Tokens/s of the best policy in four bits where each number costs so much to unpack."""
    unpacking = Measure(unpack_seconds, "s", "fitted")
    constants = replace(machine.constants, unpack_seconds=unpacking, host_attention=_NEVER)
    sizes, counts = (1, 4, 8, 16, 32, 64, 128), (1, 2, 4, 8)
    plans = search(MODELS[model], replace(machine, constants=constants), JOB, (INT4_KV4,), gbs=sizes, batches=counts)
    return plans[0].tokens_per_second


def fit_unpacking(model: str, machine: Machine) -> float:
    """Seconds a number with which the model's row is met; 0 if it is slower without."""
    low, high = -27.0, -20.0  # in logarithms: 2e-12 to 2e-9
    if four_bits(model, machine, 0.0) < FOUR_BITS[model]:
        return 0.0
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if four_bits(model, machine, np.exp(middle)) > FOUR_BITS[model] else (low, middle)
    return float(np.exp((low + high) / 2))
