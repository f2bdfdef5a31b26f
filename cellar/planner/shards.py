"""What one chip of a mesh stores of a model's tensors: the stored layout of `layouts`, by the axes of `TensorSpec`."""

from __future__ import annotations

from cellar.core.layouts import Layout, Mesh, stored_axes
from cellar.core.specs import TensorSpec
from cellar.planner.cost import Dimensions


def stored_shape(tensor: TensorSpec, d: Dimensions, mesh: Mesh) -> tuple[int, ...]:
    """The shape of one chip's piece. Heads of `d` are padded already; what does not divide is filled up."""
    cuts = zip(tensor.axes, tensor.shape, stored_axes(tensor.axes), strict=True)
    return tuple(_length(axis, length, chips, d, mesh) for axis, length, chips in cuts)


def _length(axis: str, length: int, axes: str, d: Dimensions, mesh: Mesh) -> int:
    chips = mesh.count(axes)
    match axis:
        case _ if not axes:
            return length
        case "qkv":
            keys = d.kv_heads // mesh.count(Layout(mesh).stored_kv_axes(d.kv_heads))
            return (d.heads // chips + 2 * keys) * d.head_dim
        case "heads":
            return d.heads * d.head_dim // chips
        case _:
            return -(-length // chips)
