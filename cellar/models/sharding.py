"""One rank's share of a model, as a function over its specs: 1D tensor parallelism (Megatron-LM, arXiv 1909.08053, §3).

Rows of q, k, v and of gate and up, columns of `out` and `down`, and rows of the head are cut, in the units of
`core/units.py`; norms and tables are repeated. The result is a spec like any other: its weights are loaded, made up and
packed as those of a whole model, and its layers, given `ctx.comm`, add up what each rank has of a sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cellar.core.errors import ConfigError
from cellar.core.specs import Cut, HeadRows, LayerSpec, ModelSpec, Region, TensorSpec
from cellar.core.units import row_units

# Axis -> the ranges of it that a rank has, in order.
Ranges = Mapping[str, tuple[range, ...]]

_LAYER_AXES = ("qkv", "heads", "gate_up", "mlp")


def shard(spec: ModelSpec, rank: int, size: int) -> ModelSpec:
    """The spec of rank `rank` of `size`; `spec` itself for one rank.

    Its heads, KV heads and intermediate size are the rank's; hidden size and vocabulary are the model's. A tied head is
    a tensor of its own, since each rank has some rows of it and the whole table. Raises ConfigError for more ranks than
    there are units of anything.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"rank {rank} is not one of {size}; count from 0 to {size - 1}.")
    if size == 1:
        return spec
    layers = tuple(_layer(layer, rank, size) for layer in spec.layers)
    head = _ranges_of(spec, ("vocab",), rank, size)
    first = layers[0]
    kv_heads = {layer.index: layer.num_kv_heads for layer in layers}
    return replace(
        spec,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        intermediate_size=next(t.shape[1] for t in first.tensors if t.name == "down"),
        layers=layers,
        head=tuple(_cut(t, head) if t.name == "lm_head" else t for t in spec.head),
        kv=replace(
            spec.kv,
            groups=tuple(replace(group, num_kv_heads=kv_heads[group.layers[0]]) for group in spec.kv.groups),
        ),
        tied_head=False,
        elsewhere=spec.elsewhere | (_stored(spec.layers) - _stored(layers)),
    )


def _stored(layers: Sequence[LayerSpec]) -> set[str]:
    return {name for layer in layers for tensor in layer.tensors for name in tensor.stored}


def _layer(layer: LayerSpec, rank: int, size: int) -> LayerSpec:
    ranges = _ranges_of(layer, _LAYER_AXES, rank, size)
    summed = {t.name for t in layer.tensors if len(t.shape) == 2 and t.axes[1] in ranges}
    tensors = tuple(
        _cut(tensor, ranges)
        for tensor in layer.tensors
        # A bias of what is summed over ranks is added once.
        if rank == 0 or tensor.name.removesuffix("_bias") not in summed or tensor.name in summed
    )
    q, k, _ = ranges["qkv"]
    return replace(layer, tensors=tensors, num_heads=len(q) // layer.head_dim, num_kv_heads=len(k) // layer.head_dim)


def _ranges_of(spec: LayerSpec | ModelSpec, axes: Sequence[str], rank: int, size: int) -> Ranges:
    found = {}
    for axis, units in row_units(spec).items():
        if axis not in axes:
            continue
        if units.count < size:
            raise ConfigError(
                f"{size} ranks cannot share axis {axis}, which has {units.count} units; take at most that many."
            )
        found[axis] = units.ranges(*units.share(rank, size))
    return found


def _cut(tensor: TensorSpec, ranges: Ranges) -> TensorSpec:
    """The piece of a tensor that lies in these ranges of its axes; the whole along others."""
    if not any(axis in ranges for axis in tensor.axes):
        return tensor
    assert tensor.cut is None, "pieces are cut of whole tensors"
    rows = ranges.get(tensor.axes[0], (range(tensor.shape[0]),))
    columns = None
    if len(tensor.shape) == 2 and tensor.axes[1] in ranges:
        (columns,) = ranges[tensor.axes[1]]
    heads = tensor.heads
    if heads is not None and tensor.axes[0] in ranges:
        q, k, _ = rows
        if heads.by_head:
            rows = (_stored_by_head(heads, q),)
        heads = replace(heads, num_heads=len(q) // heads.head_dim, num_kv_heads=len(k) // heads.head_dim)
    regions = tuple(region for piece in rows for region in _regions(tensor, piece, columns))
    shape = (sum(len(r.rows) for r in regions), *tensor.shape[1:])
    if columns is not None:
        shape = (shape[0], len(columns))
    return replace(tensor, shape=shape, heads=heads, cut=Cut(tensor.shape, regions))


def _stored_by_head(heads: HeadRows, q: range) -> range:
    """Where q, k and v of the heads whose q rows are these lie, if those of one head are stored together."""
    return range(3 * q.start, 3 * q.stop)


def _regions(tensor: TensorSpec, rows: range, columns: range | None) -> list[Region]:
    """Rows of the whole as rows of its stored parts."""
    found, first = [], 0
    for p, part in enumerate(tensor.stored_parts()):
        stop = first + part.shape[0]
        start, end = max(rows.start, first), min(rows.stop, stop)
        if start < end:
            found.append(Region(p, range(start - first, end - first), columns))
        first = stop
    return found
