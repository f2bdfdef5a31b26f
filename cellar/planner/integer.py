"""From shares to counts: rows of every tensor class, chunks of KV, sequences of activations, each wholly in one tier.

The same linear model as `linear.solve`, with integer variables: per layer the rows of qkv, out, up and down in each
tier, of the KV the chunks, of the activations the sequences. HiGHS' branch and bound finds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from cellar.planner.cost import Dimensions
from cellar.planner.linear import OffloadPlan, fixed_shares, time_rows
from cellar.planner.offload import CHANNELS, SHARES, TENSORS, TIERS, Problem, Vector

SLACK = 1e-5  # of a capacity, left free for the solver's tolerance
GAP = 2e-3  # relative distance to the optimum at which the search may stop
SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RowClass:
    """A matrix of every layer: rows of the share that one device holds, and bytes of a row."""

    name: str
    rows: int
    row_bytes: float


def row_classes(d: Dimensions, weight_bytes: float, cut: int = 1, gathered: int = 1) -> tuple[RowClass, ...]:
    """The matrices [out, in] of a layer, as `models` names them; rows of one device's shard.

    `cut` devices share heads and the MLP's columns: rows of qkv and of gate and up, columns of out and down. `gathered`
    devices share the embedding's dimension: columns of the former, rows of the latter.
    """
    q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
    embed, mlp = d.embed // gathered, d.mlp // cut
    up = ("gate_up", 2 * mlp) if d.gated else ("up", mlp)
    return (
        RowClass("qkv", (q + 2 * kv) // cut, embed * weight_bytes),
        RowClass("out", embed, q // cut * weight_bytes),
        RowClass(up[0], up[1], embed * weight_bytes),
        RowClass("down", embed, mlp * weight_bytes),
    )


@dataclass(frozen=True)
class IntegerPlan:
    """A plan whose shares are counts. `rows[class]` are rows in device, host and disk, the same in every layer.

    `kv` counts chunks per kind of SHARES (a shard's chunk has its heads alone), `hidden` sequences per tier.
    """

    plan: OffloadPlan
    relaxed: OffloadPlan
    rows: dict[str, tuple[int, int, int]]
    kv: dict[str, int]
    hidden: tuple[int, int, int]


def integer(relaxed: OffloadPlan) -> IntegerPlan | None:
    """The best integer plan of the same block, or None if the last rows do not fit."""
    p = relaxed.problem
    classes = row_classes(p.d, p.block.formats.weight_bytes, p.part.cut, p.part.gathered)
    to_shares, totals = _shares_of_counts(p, classes)
    counts = to_shares.shape[1]
    repeats = [p.repeats("prefill"), p.repeats("decode")]
    rows, limits = [], []
    for k, phase in enumerate(("prefill", "decode")):
        a, b = time_rows(p, phase)  # type: ignore[arg-type]
        for i in range(len(CHANNELS)):
            last = np.zeros(2)
            last[k] = -1.0
            rows.append(np.concatenate([a[i] @ to_shares, last]))
            limits.append(-b[i])
    for memory in p.memory:
        unit = max(memory.capacity, 1.0)
        rows.append(np.concatenate([memory.vector @ to_shares / unit, [0.0, 0.0]]))
        limits.append((memory.capacity - memory.constant) / unit - SLACK)
    groups = _groups(len(classes))
    equal = np.zeros((len(groups), counts + 2))
    for i, members in enumerate(groups):
        equal[i, members] = 1.0
    upper = np.concatenate([_upper(p, totals, groups, counts), [np.inf, np.inf]])
    found = milp(
        np.concatenate([np.zeros(counts), repeats]),
        integrality=np.concatenate([np.ones(counts), [0.0, 0.0]]),
        bounds=Bounds(np.zeros(counts + 2), upper),
        constraints=[
            LinearConstraint(np.array(rows), -np.inf, np.array(limits)),
            LinearConstraint(equal, totals, totals),
        ],
        options={"mip_rel_gap": GAP, "time_limit": SECONDS},
    )
    if found.x is None:
        return None
    whole = np.rint(found.x[:counts])
    plan = OffloadPlan(p, to_shares @ whole, relaxed.duals)
    n = 3 * len(classes)
    kinds = [name for name in SHARES if name.startswith("kv.")]
    return IntegerPlan(
        plan,
        relaxed,
        {c.name: _three(whole[3 * i : 3 * i + 3]) for i, c in enumerate(classes)},
        {name: int(whole[n + 3 + i]) for i, name in enumerate(kinds)},
        _three(whole[n : n + 3]),
    )


def _three(values: Vector) -> tuple[int, int, int]:
    a, b, c = (int(v) for v in values)
    return a, b, c


def _groups(classes: int) -> list[list[int]]:
    """Variables that add up to one total: each class's rows, the activations, the KV."""
    n = 3 * classes
    return [*([3 * i, 3 * i + 1, 3 * i + 2] for i in range(classes)), [n, n + 1, n + 2], list(range(n + 3, n + 8))]


def _shares_of_counts(p: Problem, classes: tuple[RowClass, ...]) -> tuple[Vector, Vector]:
    """Matrix from counts to shares, and the total of each group."""
    n = 3 * len(classes)
    matrix = np.zeros((len(SHARES), n + 8))
    layer = sum(c.rows * c.row_bytes for c in classes)
    for i, c in enumerate(classes):
        for tier in range(len(TIERS)):
            matrix[TENSORS["weights"][tier], 3 * i + tier] = c.row_bytes / layer
    for i, at in enumerate(TENSORS["hidden"]):
        matrix[at, n + i] = 1 / p.block.bls
    chunks = p.block.bls * p.d.chunks(p.job.prompt + p.job.generate)
    for i, at in enumerate(TENSORS["kv"]):
        matrix[at, n + 3 + i] = 1 / chunks
    return matrix, np.array([*(float(c.rows) for c in classes), float(p.block.bls), float(chunks)])


def _upper(p: Problem, totals: Vector, groups: list[list[int]], counts: int) -> Vector:
    upper = np.zeros(counts)
    for total, members in zip(totals, groups, strict=True):
        upper[members] = total
    allowed = fixed_shares(p)
    for i in range(3 * (len(groups) - 2)):
        if allowed[i % 3][1] == 0.0:
            upper[i] = 0.0
    n = 3 * (len(groups) - 2)
    for i, at in enumerate((*TENSORS["hidden"], *TENSORS["kv"])):
        if allowed[at][1] == 0.0:
            upper[n + i] = 0.0
    return upper
