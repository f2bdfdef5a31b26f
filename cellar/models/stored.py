"""What one chip of a mesh stores of a model, as a function over its specs: the same for every layout.

Which axis of a tensor lies over which axes of the mesh stands in `core/layouts.py`. Heads that do not divide are padded
with zeros, and so is the vocabulary: what lies past the end of a stored part is zero (`Region`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from cellar.core.errors import ConfigError
from cellar.core.layouts import Layout, Mesh, stored_axes
from cellar.core.specs import Cut, LayerSpec, ModelSpec, Region, TensorSpec
from cellar.core.units import group_steps


def stored(spec: ModelSpec, mesh: Mesh, rank: int) -> ModelSpec:
    """The spec of what rank `rank` of a mesh stores; `spec` itself for one chip.

    Raises ConfigError where a dimension has no equal shares, or a share would cut a quantization group.
    """
    if not 0 <= rank < mesh.size:
        raise ConfigError(f"rank {rank} is not one of {mesh.size}; count from 0 to {mesh.size - 1}.")
    if mesh.size == 1:
        return spec
    for name, length in (("hidden size", spec.hidden_size), ("intermediate size", spec.intermediate_size)):
        if length % mesh.size:
            raise ConfigError(f"a {name} of {length} has no equal shares for {mesh.size} chips; take a divisor of it.")
    layers = tuple(_layer(layer, mesh, rank) for layer in spec.layers)
    first = layers[0]
    words = {
        tensor.name: _vocabulary(tensor, mesh, rank)
        for tensor in (*spec.embedding, *spec.head)
        if "vocab" in tensor.axes
    }
    return replace(
        spec,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        intermediate_size=spec.intermediate_size // mesh.count("zy"),
        layers=layers,
        embedding=tuple(words.get(t.name, t) for t in spec.embedding),
        head=tuple(words.get(t.name, t) for t in spec.head),
        kv=replace(spec.kv, groups=tuple(replace(group, num_kv_heads=first.num_kv_heads) for group in spec.kv.groups)),
    )


def padded_heads(heads: int, kv_heads: int, chips: int) -> tuple[int, int]:
    """Heads and KV heads filled up to a multiple of the chips, as the planner prices them.

    Raises ConfigError where groups of more than one query forbid it.
    """
    found = -(-heads // chips) * chips
    if found == heads:
        return heads, kv_heads
    if kv_heads not in (1, heads):
        raise ConfigError(
            f"{heads} heads with {kv_heads} heads of K and V have no equal shares for {chips} chips, and cannot be "
            "padded; take a number of chips that divides the heads."
        )
    return found, found if kv_heads == heads else 1


def _layer(layer: LayerSpec, mesh: Mesh, rank: int) -> LayerSpec:
    heads, kv_heads = padded_heads(layer.num_heads, layer.num_kv_heads, mesh.size)
    kv_axes = Layout(mesh).stored_kv_axes(kv_heads)
    q = _share(heads, mesh, rank, "zy")
    k = _share(kv_heads, mesh, rank, kv_axes)
    quantized = [t.name for t in layer.tensors if any(f.layout != "plain" for f in t.formats)]
    if heads != layer.num_heads and quantized:
        raise ConfigError(
            f"{layer.num_heads} heads would be padded for {mesh.size} chips, but the checkpoint has {quantized[0]} "
            "quantized; take a number of chips that divides the heads."
        )
    _refuse_cut_groups(layer.tensors, mesh, len(k) < layer.num_kv_heads, layer.head_dim)
    tensors = tuple(_cut(tensor, layer, q, k, mesh, rank) for tensor in layer.tensors)
    return replace(layer, tensors=tensors, num_heads=len(q), num_kv_heads=len(k))


def _share(length: int, mesh: Mesh, rank: int, axes: str) -> range:
    size = length // mesh.count(axes)
    return range(mesh.index(rank, axes) * size, (mesh.index(rank, axes) + 1) * size)


def _cut(tensor: TensorSpec, layer: LayerSpec, q: range, k: range, mesh: Mesh, rank: int) -> TensorSpec:
    cuts = stored_axes(tensor.axes)
    if not any(mesh.count(axes) > 1 for axes in cuts):
        return tensor
    assert tensor.cut is None, "pieces are cut of whole tensors"
    by_head = tensor.heads is not None and tensor.heads.by_head
    d, heads, kv_heads = layer.head_dim, layer.num_heads, layer.num_kv_heads
    spans = []
    for axis, axes, length in zip(tensor.axes, cuts, tensor.shape, strict=True):
        match axis:
            case "qkv" if by_head:
                spans.append(_within(q, heads, 3 * d, 0))
            case "qkv":
                spans.append(
                    [
                        *_within(q, heads, d, 0),
                        *_within(k, kv_heads, d, heads * d),
                        *_within(k, kv_heads, d, (heads + kv_heads) * d),
                    ]
                )
            case "heads":
                spans.append([range(q.start * d, q.stop * d)])
            case "gate_up":
                part = _share(length // 2, mesh, rank, axes)
                spans.append([part, range(part.start + length // 2, part.stop + length // 2)])
            case _:
                spans.append([_share(length, mesh, rank, axes)])
    arranged = tensor.heads
    if arranged is not None:
        arranged = replace(arranged, num_heads=len(q), num_kv_heads=len(k))
    return _piece(replace(tensor, heads=arranged), spans[0], spans[1][0])


def _within(part: range, there: int, width: int, first: int) -> list[range]:
    """Heads as rows, `width` of each, behind row `first`; heads past those that are `there` as rows past all ends."""
    real = range(min(part.start, there), min(part.stop, there))
    rows = [range(first + real.start * width, first + real.stop * width)]
    if missing := len(part) - len(real):
        rows.append(range(_PAST, _PAST + missing * width))
    return rows


_PAST = 1 << 40  # a row that no tensor has


def _vocabulary(tensor: TensorSpec, mesh: Mesh, rank: int) -> TensorSpec:
    size = -(-tensor.shape[0] // mesh.size)
    first = mesh.index(rank, "zyx") * size
    there = range(min(first, tensor.shape[0]), min(first + size, tensor.shape[0]))
    rows = [there]
    if len(there) < size:
        rows.append(range(_PAST, _PAST + size - len(there)))
    return _piece(tensor, rows, range(tensor.shape[1]))


def _piece(tensor: TensorSpec, rows: Sequence[range], columns: range) -> TensorSpec:
    """Rows and columns of a whole matrix; what is past its ends is zero."""
    all_columns = columns == range(tensor.shape[1])
    regions: list[Region] = []
    for span in rows:
        if span.start >= _PAST:
            part = tensor.stored_parts()[0]
            regions.append(Region(0, range(part.shape[0], part.shape[0] + len(span)), None if all_columns else columns))
            continue
        first = 0
        for p, part in enumerate(tensor.stored_parts()):
            start, stop = max(span.start, first), min(span.stop, first + part.shape[0])
            if start < stop:
                regions.append(Region(p, range(start - first, stop - first), None if all_columns else columns))
            first += part.shape[0]
    shape = (sum(len(region.rows) for region in regions), len(columns))
    return replace(tensor, shape=shape, cut=Cut(tensor.shape, tuple(regions)))


def _refuse_cut_groups(tensors: Iterable[TensorSpec], mesh: Mesh, cuts_kv: bool, head_dim: int) -> None:
    """Raises ConfigError if a share of a quantized matrix ends inside a group."""
    tensors = tuple(tensors)
    for axis, step in group_steps(tensors).items():
        for tensor in tensors:
            if axis not in tensor.axes or len(tensor.shape) != 2:
                continue
            at = tensor.axes.index(axis)
            chips = mesh.count(stored_axes(tensor.axes)[at])
            if axis in ("qkv", "heads"):
                share = head_dim * (1 if axis == "qkv" and cuts_kv else max(1, tensor.shape[at] // head_dim // chips))
            else:
                share = tensor.shape[at] // chips // (2 if axis == "gate_up" else 1)
            if chips > 1 and share % step:
                raise ConfigError(
                    f"{chips} chips would cut {tensor.name} every {share} of axis {axis}, through a quantization group "
                    f"of {step}; take fewer chips along {stored_axes(tensor.axes)[at]!r}."
                )
