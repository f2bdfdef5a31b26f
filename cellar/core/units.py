"""What placement and sharding may cut, as data: units of rows, a pure function of the specs.

A KV head goes with the queries that it serves, a gate column with its up column and the row of `down` that both feed;
anything else is cut in groups of 64. A quantization group is never cut, along whichever axis it lies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cellar.core.specs import LayerSpec, ModelSpec, TensorSpec

GROUP_ROWS = 64
"""Of what has no structure of its own: a tile of the smallest kernels."""


@dataclass(frozen=True, slots=True)
class Units:
    """How an axis may be cut.

    The axis is some `segments` behind one another ([q | k | v], [gate | up], mostly one). Unit u is `sizes[s]`
    neighbours of each segment s: [u sizes[s], (u + 1) sizes[s]); the last one may be shorter.
    """

    segments: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of units."""
        return -(-self.segments[0] // self.sizes[0])

    def ranges(self, start: int, stop: int) -> tuple[range, ...]:
        """Where units [start, stop) lie on the axis, one range for each segment."""
        found, first = [], 0
        for length, size in zip(self.segments, self.sizes, strict=True):
            found.append(range(first + min(length, start * size), first + min(length, stop * size)))
            first += length
        return tuple(found)

    def share(self, rank: int, size: int) -> tuple[int, int]:
        """The units [start, stop) of one of `size` ranks: as equal as units allow, larger shares first."""
        each, rest = divmod(self.count, size)
        start = rank * each + min(rank, rest)
        return start, start + each + (rank < rest)


def row_units(spec: LayerSpec | ModelSpec) -> dict[str, Units]:
    """Axis -> its units, for the axes of a layer's tensors, or of a model's embedding and head.

    `heads` and `qkv` have the same units (KV heads), and so have `mlp` and `gate_up`: what is cut together has one
    number.
    """
    if isinstance(spec, ModelSpec):
        return _plain((*spec.embedding, *spec.head))
    units = _plain(spec.tensors)
    steps = group_steps(spec.tensors)
    group = spec.num_heads // spec.num_kv_heads
    if {"heads", "qkv"} & set(units):
        width = group * spec.head_dim
        heads = math.lcm(width, steps.get("heads", 1)) // width
        heads = math.lcm(heads * spec.head_dim, steps.get("qkv", 1)) // spec.head_dim
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        sizes = heads * width, heads * spec.head_dim, heads * spec.head_dim
        units["heads"] = Units((q,), sizes[:1])
        units["qkv"] = Units((q, kv, kv), sizes)
    if "gate_up" in units:
        (both,) = units["gate_up"].segments
        step = math.lcm(steps.get("gate_up", 1), steps.get("mlp", 1))
        units["gate_up"] = Units((both // 2, both // 2), (step, step))
        units["mlp"] = Units((both // 2,), (step,))
    return units


def _plain(tensors: Iterable[TensorSpec]) -> dict[str, Units]:
    """Every axis in groups."""
    tensors = tuple(tensors)
    steps = group_steps(tensors)
    return {
        axis: Units((length,), (math.lcm(GROUP_ROWS, steps.get(axis, 1)),))
        for tensor in tensors
        for axis, length in zip(tensor.axes, tensor.shape, strict=True)
    }


def group_steps(tensors: Iterable[TensorSpec]) -> dict[str, int]:
    """Axis -> the step that no quantization group along it allows to leave."""
    found: dict[str, int] = {}
    for tensor in tensors:
        if len(tensor.shape) != 2:
            continue
        rows, columns = tensor.axes
        for part in tensor.stored_parts():
            found[rows] = math.lcm(found.get(rows, 1), max(1, part.format.rows))
            found[columns] = math.lcm(found.get(columns, 1), max(1, part.format.group))
    return found
