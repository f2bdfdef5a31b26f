"""Random placements of a model's rows over device, host and disk, as plans that run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cellar.core.messages import BlockSchedule, Placed, PlacedUnits, Placement
from cellar.core.pieces import cut_at_most, format_name
from cellar.core.specs import ModelSpec, TensorSpec
from cellar.planner.saved import Limits, SavedPlan, geometry_of

PLACES = ("device", "host", "disk")

BOTH = {"both": ("host", "device")}


@lru_cache(maxsize=256)
def rows_to_cut_at(tensor: TensorSpec) -> NDArray[np.int64]:
    """The rows at which a tensor may be cut; of a seed's thousand placements of few models, once a tensor."""
    rows = range(1, tensor.shape[0])
    return np.array([row for row in rows if not tensor.formats or cut_at_most(tensor, row) == row], np.int64)


def random_placement(
    spec: ModelSpec,
    seed: int,
    chunks: int = 40,
    batch: int = 2,
    *,
    whole: bool = False,
    places: Sequence[str] = PLACES,
    kv: tuple[str, str] = ("device", "device"),
    order: Literal["zigzag", "diagonal"] = "zigzag",
) -> Placement:
    """Every tensor of a layer is cut into one to four runs of rows (`whole`: into none), each in any place, vectors
    too; the CPU may multiply some of those in host memory. Tables lie there or on the device. `kv`: where it lies, and
    who attends to it (both: half).
    """
    random = np.random.default_rng(seed)
    weights: list[Placed] = []
    tables = {table.name for table in spec.tables} if "host" in places else set()
    for name, tensor in spec.named_tensors():
        rows, form = tensor.shape[0], format_name(tensor)
        if not name.startswith("layers."):
            where = "host" if name in tables and (seed + len(weights)) % 3 else "device"
            weights.append(Placed(name, where, 0, rows, form))
            continue
        allowed = rows_to_cut_at(tensor)
        cuts = 0 if whole else min(len(allowed), int(random.integers(0, 4)))
        inner = random.choice(allowed, cuts, replace=False)
        ends = [0, *sorted(inner.tolist()), rows]
        for start, stop in itertools.pairwise(ends):
            place = places[int(random.integers(len(places)))]
            by_cpu = place == "host" and len(tensor.shape) == 2 and (start + seed) % 2 == 0
            weights.append(Placed(name, place, start, stop, form, "host" if by_cpu else "device"))
    shuffled = random.permutation(len(weights))
    return Placement(
        tuple(weights[k] for k in shuffled),
        kv[0],
        "device",
        "offload",
        tuple(PlacedUnits(kv[0], chunks // len(by), who) for by in (BOTH.get(kv[1], kv[1:]),) for who in by),
        (),
        BlockSchedule(batch, 2, order),
    )


def plan_of(spec: ModelSpec, placement: Placement, limits: Limits, device: str = "cpu") -> SavedPlan:
    """The placement as a plan for a kind of device."""
    return SavedPlan(
        model="tiny",
        geometry=geometry_of(spec),
        dtype=spec.dtype,
        chunk_size=spec.kv.chunk_size,
        machine="any",
        device=device,
        placement=placement,
        limits=limits,
        cost=None,
        steps=(),
        figures={},
    )
