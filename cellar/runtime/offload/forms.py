"""Weights that are streamed, without content, in the forms and pieces that a pass multiplies: for lists of kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cellar.core.specs import TensorSpec
from cellar.models.loader import Transform
from cellar.models.quantization import is_linear
from cellar.ops.linear.in_place import in_place
from cellar.ops.linear.weight import LinearWeight, Weight
from cellar.quant.pieces import scales_of, weight_of
from cellar.quant.weight import StackedWeight
from cellar.runtime.offload.layout import PlacedRows


def streamed_forms(rows: Mapping[str, Sequence[PlacedRows]]) -> Transform:
    """From a tensor on the meta device to the weight that an accelerator multiplies, where its rows lie as in `rows`,
    by name: of layers those of the first one, since a plan cuts all of them alike.
    """

    def form(tensor: TensorSpec, weight: Weight) -> Weight:
        placed = rows.get(f"layers.0.{tensor.name}", rows.get(tensor.name, ()))
        if not placed or not is_linear(tensor):
            return weight
        parts = [_part(tensor, weight, part) for part in placed]
        return parts[0] if len(parts) == 1 else StackedWeight(parts)

    return form


def _part(tensor: TensorSpec, weight: Weight, part: PlacedRows) -> LinearWeight:
    if isinstance(weight, Tensor):
        return in_place(weight[part.start : part.stop])
    format = part.run.format
    shape = (part.stop - part.start, tensor.shape[1])
    there = torch.empty(part.nbytes, dtype=torch.uint8, device="meta")
    return weight_of(there, shape, format, part.kind, scales_of(format))
