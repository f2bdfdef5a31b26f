"""Random placements of a model's rows over device, host and disk, as plans that run."""

from __future__ import annotations

import itertools

import numpy as np

from cellar.core.messages import BlockSchedule, Placed, PlacedUnits, Placement
from cellar.core.specs import ModelSpec
from cellar.planner.saved import Limits, SavedPlan, geometry_of

PLACES = ("device", "host", "disk")


def random_placement(spec: ModelSpec, seed: int, chunks: int = 40, batch: int = 2) -> Placement:
    """Every tensor of a layer is cut into one to four runs of rows, each in any place, vectors too."""
    random = np.random.default_rng(seed)
    weights: list[Placed] = []
    for name, tensor in spec.named_tensors():
        rows = tensor.shape[0]
        if not name.startswith("layers."):
            weights.append(Placed(name, "device", 0, rows, spec.dtype))
            continue
        inner = random.choice(np.arange(1, rows), min(rows - 1, int(random.integers(0, 4))), replace=False)
        ends = [0, *sorted(inner.tolist()), rows]
        for start, stop in itertools.pairwise(ends):
            weights.append(Placed(name, PLACES[int(random.integers(3))], start, stop, spec.dtype))
    order = random.permutation(len(weights))
    return Placement(
        tuple(weights[k] for k in order),
        "device",
        "device",
        "offload",
        (PlacedUnits("device", chunks, "device"),),
        (),
        BlockSchedule(batch, 2),
    )


def plan_of(spec: ModelSpec, placement: Placement, limits: Limits) -> SavedPlan:
    """The placement as a plan for a processor."""
    return SavedPlan(
        model="tiny",
        geometry=geometry_of(spec),
        dtype=spec.dtype,
        chunk_size=spec.kv.chunk_size,
        machine="any",
        device="cpu",
        placement=placement,
        limits=limits,
        cost=None,
        steps=(),
        figures={},
    )
