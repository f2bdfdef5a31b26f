"""The shares of a block as a linear program: solved, given, searched over block shapes; and what they cost.

FlexGen, equation 1. Variables are the shares and the seconds of one layer's prefill and decode step; duals of the
memory rows say what one more byte would buy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cellar.planner.cost import Channel, Dimensions, Group, Timeline
from cellar.planner.machines import Machine
from cellar.planner.offload import (
    AT,
    CHANNELS,
    SHARES,
    TENSORS,
    TIERS,
    Block,
    Job,
    Phase,
    Problem,
    Schedule,
    Slice,
    Vector,
    problem,
    unit,
)
from cellar.planner.partition import BF16, Formats


@dataclass(frozen=True)
class OffloadPlan:
    """A block with its shares and what they cost. `duals` are tokens/s that one more byte of a tier buys."""

    problem: Problem
    shares: Vector
    duals: Mapping[str, float]

    @property
    def block(self) -> Block:
        """The outer choices."""
        return self.problem.block

    def share(self, name: str) -> float:
        """One of SHARES."""
        return float(self.shares[AT[name]])

    @property
    def seconds(self) -> float:
        """Of a whole block: bls sequences of s + n tokens."""
        return block_seconds(self.problem, self.shares)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over prefill and decode."""
        return self.block.bls * self.problem.job.generate / self.seconds

    def used(self) -> dict[str, float]:
        """Bytes per tier."""
        return {memory.tier: memory.used(self.shares) for memory in self.problem.memory}

    def timeline(self, phase: Phase | None = None) -> Timeline:
        """Channels of one phase, or of both."""
        phases: tuple[Phase, ...] = (phase,) if phase else ("prefill", "decode")
        groups = [phase_group(self.problem, self.shares, one) for one in phases]
        return Timeline(tuple(groups))

    def words(self) -> list[str]:
        """What more memory would buy, in words."""
        found = []
        for tier, per_byte in self.duals.items():
            gain = per_byte * 2**30
            if gain > 1e-6 * self.tokens_per_second:
                found.append(f"one more GiB of {tier} memory buys {gain:.3g} tok/s")
        return found


def phase_group(p: Problem, shares: Vector, phase: Phase) -> Group:
    """One layer's step as a group of overlapping channels, repeated."""
    busy: dict[str, list[float]] = {}
    for term in p.terms(phase):
        seconds = term.seconds(shares)
        if seconds > 0:
            both = busy.setdefault(term.channel, [0.0, 0.0])
            both[0] += seconds
            both[1] += seconds * term.bound
    channels = tuple(Channel(name, v[0], bound=v[1]) for name, v in busy.items())
    return Group(phase, channels, p.overlap, float(p.repeats(phase)))


def block_seconds(p: Problem, shares: Vector) -> float:
    """Seconds of a block at these shares."""
    layers = sum(phase_group(p, shares, phase).seconds for phase in ("prefill", "decode"))
    return layers + p.job.generate * p.head_seconds


def by_tensor(p: Problem, shares: Vector, phase: Phase) -> dict[str, float]:
    """Busy seconds of a phase by kind of tensor, the host's own memory traffic left out: the columns of table 4."""
    found: dict[str, float] = {}
    for term in p.terms(phase):
        if term.channel != "host memory":
            found[term.tensor] = found.get(term.tensor, 0.0) + term.seconds(shares) * p.repeats(phase)
    return found


def time_rows(p: Problem, phase: Phase) -> tuple[NDArray[np.float64], Vector]:
    """Rows (A, b) with T >= A @ shares + b for every channel: T = o * slowest + (1 - o) * sum."""
    a, b = np.zeros((len(CHANNELS), len(SHARES))), np.zeros(len(CHANNELS))
    for term in p.terms(phase):
        i = CHANNELS.index(term.channel)
        a[i] += term.vector
        b[i] += term.constant
    rest = 1 - p.overlap
    return p.overlap * a + rest * a.sum(axis=0), p.overlap * b + rest * b.sum()


def fixed_shares(p: Problem) -> list[tuple[float, float]]:
    """Bounds of the shares: nothing on a disk that is not there."""
    return [(0.0, 0.0 if "disk" in name and p.machine.disk is None else 1.0) for name in SHARES]


def solve(p: Problem, max_seconds: float | None = None) -> OffloadPlan | None:
    """The shares with the shortest block, or None if nothing fits (or not within `max_seconds`).

    Variables: the shares, then the seconds of one layer of prefill and of decode.
    """
    from scipy.optimize import linprog  # not with the module: see planner/collectives.py

    n = len(SHARES)
    repeats = [p.repeats("prefill"), p.repeats("decode")]
    rows, limits = [], []
    for k, phase in enumerate(("prefill", "decode")):
        a, b = time_rows(p, phase)  # type: ignore[arg-type]
        for i in range(len(CHANNELS)):
            last = [0.0, 0.0]
            last[k] = -1.0
            rows.append(np.concatenate([a[i], last]))
            limits.append(-b[i])
    scale = [max(memory.capacity, 1.0) for memory in p.memory]
    for memory, size in zip(p.memory, scale, strict=True):
        rows.append(np.concatenate([memory.vector / size, [0.0, 0.0]]))
        limits.append((memory.capacity - memory.constant) / size)
    if max_seconds is not None:
        rows.append(np.concatenate([np.zeros(n), repeats]))
        limits.append(max_seconds - p.job.generate * p.head_seconds)
    whole = np.zeros((len(TENSORS), n + 2))
    for i, members in enumerate(TENSORS.values()):
        whole[i, list(members)] = 1.0
    found = linprog(
        np.concatenate([np.zeros(n), repeats]),
        A_ub=np.array(rows),
        b_ub=np.array(limits),
        A_eq=whole,
        b_eq=np.ones(len(TENSORS)),
        bounds=[*fixed_shares(p), (0.0, None), (0.0, None)],
        method="highs",
    )
    if found.status != 0:
        return None
    shares = np.clip(found.x[:n], 0.0, 1.0)
    seconds = block_seconds(p, shares)
    first = 2 * len(CHANNELS)
    marginals = found.ineqlin.marginals[first : first + len(TIERS)]
    tokens = p.block.bls * p.job.generate
    # d(tok/s)/d(byte) = -tokens / T^2 * dT/d(byte)
    duals = {
        tier: float(-tokens / seconds**2 * marginal / size)
        for tier, marginal, size in zip(TIERS, marginals, scale, strict=True)
    }
    return OffloadPlan(p, shares, duals)


def policy(p: Problem, **shares: float) -> OffloadPlan:
    """A plan with given shares, e.g. weights__host=0.5; what is not named is 0."""
    return OffloadPlan(p, unit(**shares), {})


GBS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
BATCHES = (1, 2, 4, 8, 12, 16, 20)


def search(
    d: Dimensions,
    machine: Machine,
    job: Job,
    formats: tuple[Formats, ...] = (BF16,),
    schedules: tuple[Schedule, ...] = ("zigzag",),
    max_seconds: float | None = None,
    part: Slice | None = None,
    gbs: tuple[int, ...] = GBS,
    batches: tuple[int, ...] = BATCHES,
) -> list[OffloadPlan]:
    """The best plan of every block shape that fits, highest throughput first (FlexGen: at most 20 batches a block)."""
    found = []
    for form in formats:
        for schedule in schedules:
            for size in gbs:
                for count in batches:
                    plan = solve(problem(d, machine, job, Block(size, count, form, schedule), part), max_seconds)
                    if plan is None:
                        break  # more batches need more of everything
                    found.append(plan)
    return sorted(found, key=lambda plan: -plan.tokens_per_second)


def without_overlap(p: Problem) -> Problem:
    """The same block with one channel at work at a time."""
    return replace(p, overlap=0.0)
