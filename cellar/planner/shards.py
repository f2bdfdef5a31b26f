"""What one chip of a mesh stores of a model's tensors: the stored layout of `layouts`, by the axes of `TensorSpec`.

What bears one name is cut alike, so that products need no move: `embed` over x; what attention and MLP make of it over
z, then y; the vocabulary over all chips. Vectors along `embed` (norms, biases of what is summed) are repeated, and so
are the norms of a head and the table of positions.
"""

from __future__ import annotations

from cellar.core.specs import TensorSpec
from cellar.planner.cost import Dimensions
from cellar.planner.layouts import Layout
from cellar.planner.sharding import Mesh

AXES = {
    "embed": "x",
    "qkv": "zy",
    "heads": "zy",
    "gate_up": "zy",
    "mlp": "zy",
    "vocab": "zyx",
    "head_dim": "",
    "position": "",
    "words": "",
}


def stored_shape(tensor: TensorSpec, d: Dimensions, mesh: Mesh) -> tuple[int, ...]:
    """The shape of one chip's piece. Heads of `d` are padded already; what does not divide is filled up."""
    if tensor.axes == ("embed",):
        return tensor.shape
    return tuple(_length(axis, length, d, mesh) for axis, length in zip(tensor.axes, tensor.shape, strict=True))


def _length(axis: str, length: int, d: Dimensions, mesh: Mesh) -> int:
    chips = mesh.count(AXES[axis])
    match axis:
        case "qkv":
            keys = d.kv_heads // mesh.count(Layout(mesh).stored_kv_axes(d.kv_heads))
            return (d.heads // chips + 2 * keys) * d.head_dim
        case "heads":
            return d.heads * d.head_dim // chips
        case _:
            return -(-length // chips)
