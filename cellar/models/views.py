"""What a model's functions get of the stored form (`stored.py`) in one layout: a view of the same memory.

Matrices are as they are stored, or gathered over the layout's axes when a layer is entered. Of vectors a rank sees its
part, and a bias only if it is the one that adds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cellar.core.errors import ConfigError
from cellar.core.layouts import Layout
from cellar.core.specs import ModelSpec, TensorSpec
from cellar.models.collectives import Collectives
from cellar.models.laid import Laid, Whole
from cellar.models.loader import LoadedWeights
from cellar.models.loop import Ahead, Lane
from cellar.models.stored import padded_heads
from cellar.ops.linear.weight import Weight
from cellar.quant.weight import QuantizedWeight


def laid(spec: ModelSpec, layout: Layout, collectives: Collectives) -> Laid:
    """A rank's side of a layout of the whole model `spec`."""
    heads, kv_heads = padded_heads(spec.num_heads, spec.num_kv_heads, layout.mesh.size)
    return Laid(layout, collectives, Whole(spec.hidden_size, heads, kv_heads, spec.vocab_size))


def laid_spec(spec: ModelSpec, layout: Layout, collectives: Collectives) -> ModelSpec:
    """What a model's functions and its attention are made for on a rank, from the whole model's `spec`.

    `num_heads` and `num_kv_heads` are those of a layer's products; those of its `layers` and of its KV are attention's.
    """
    if layout.mesh.size == 1:
        return spec
    side = laid(spec, layout, collectives)
    heads, kv_heads = side.heads
    held = "".join(a for a in layout.stored_kv_axes(side.whole.kv_heads) if a not in layout.gather)
    return replace(
        spec,
        num_heads=side.whole.heads // layout.mesh.count(layout.rest),
        num_kv_heads=side.whole.kv_heads // layout.mesh.count(held),
        layers=tuple(replace(layer, num_heads=heads, num_kv_heads=kv_heads) for layer in spec.layers),
        kv=replace(spec.kv, groups=tuple(replace(group, num_kv_heads=kv_heads) for group in spec.kv.groups)),
    )


class View:
    """The weights of the whole model `spec` for one layout, from what a rank stores of it.

    Implements the runtime's `Layers`. `ahead`: where the next layer's weights are gathered while one is computed; there
    are two layers of them then. Nothing else may use the collectives' groups of `layout.gather` between layers: no
    layout does. None: each layer's are gathered when it is entered.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: LoadedWeights,
        layout: Layout,
        collectives: Collectives,
        ahead: Lane | None = None,
    ) -> None:
        self._spec = spec
        self._layout = layout
        self._collectives = collectives
        self._ahead = ahead
        self._next: tuple[int, Ahead[Mapping[str, Weight]]] | None = None
        self._heads, self._kv_heads = padded_heads(spec.num_heads, spec.num_kv_heads, layout.mesh.size)
        self._layers = weights.layers
        self.embedding = self._vectors(spec.embedding, weights.embedding)
        self.head = self._vectors(spec.head, weights.head)
        self._fixed = [
            self._vectors(layer.tensors, found) for layer, found in zip(spec.layers, weights.layers, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._layers)

    def begin(self, num_tokens: int) -> None:
        """Nothing is there of a pass that failed."""
        self._next = None

    def at(self, j: int) -> AbstractContextManager[Mapping[str, Weight]]:
        """Layer j's weights, gathered until the block ends if the layout gathers them. All ranks enter it together."""
        return self._gathered(j) if self._layout.gather else nullcontext(self._fixed[j])

    def computing(self) -> AbstractContextManager[None]:
        """Nobody counts."""
        return nullcontext()

    @contextmanager
    def _gathered(self, j: int) -> Iterator[Mapping[str, Weight]]:
        waiting, self._next = self._next, None
        found = waiting[1].result() if waiting is not None and waiting[0] == j else self._whole(j)
        if self._ahead is not None and self._ahead.open() and j + 1 < len(self._layers):
            self._next = j + 1, self._ahead.run(partial(self._whole, j + 1))
        yield found

    def _whole(self, j: int) -> Mapping[str, Weight]:
        found = dict(self._fixed[j])
        for tensor in self._spec.layers[j].tensors:
            if len(tensor.shape) == 2:
                found[tensor.name] = self._gather(tensor, found[tensor.name])
        return found

    # -- what every layout takes a part of ---------------------------------------------------------

    def _vectors(self, tensors: Sequence[TensorSpec], weights: Mapping[str, Weight]) -> dict[str, Weight]:
        found: dict[str, Weight] = {}
        for tensor in tensors:
            weight = weights[tensor.name]
            if len(tensor.shape) == 1:
                assert isinstance(weight, Tensor)
                if (part := self._vector(tensor, weight)) is not None:
                    found[tensor.name] = part
            elif tensor.axes[0] == "position":
                assert isinstance(weight, Tensor)
                found[tensor.name] = self._part(weight, 1, self._layout.stream)
            elif tensor.name == "project_in":
                matrix = weight if isinstance(weight, Tensor) else weight.dense()
                found[tensor.name] = self._part(matrix, 0, self._layout.stream)
            else:
                found[tensor.name] = weight
        return found

    def _vector(self, tensor: TensorSpec, whole: Tensor) -> Tensor | None:
        layout = self._layout
        x = "" if layout.gather else "x"
        first = layout.mesh.index(self._collectives.rank, x) == 0
        match tensor.axes[0]:
            case "embed" if tensor.name in ("out_bias", "down_bias"):
                adds = layout.mesh.index(self._collectives.rank, layout.rest) == 0
                return self._part(whole, 0, x) if adds else None
            case "embed":
                return self._part(whole, 0, x)
            case "qkv":
                return self._qkv(whole) if first else None
            case "gate_up":
                halves = (self._part(half, 0, layout.rest) for half in whole.chunk(2))
                return torch.cat(list(halves)) if first else None
            case "mlp":
                return self._part(whole, 0, layout.rest) if first else None
        return whole

    def _qkv(self, whole: Tensor) -> Tensor:
        layout, layer = self._layout, self._spec
        d = layer.head_dim
        held = "".join(a for a in layout.stored_kv_axes(self._kv_heads) if a not in layout.gather)
        parts = whole.split_with_sizes([layer.num_heads * d, layer.num_kv_heads * d, layer.num_kv_heads * d])
        sizes = self._heads, self._kv_heads, self._kv_heads
        found = []
        for part, heads, axes in zip(parts, sizes, (layout.rest, held, held), strict=True):
            filled = torch.nn.functional.pad(part, (0, heads * d - len(part)))
            found.append(self._part(filled, 0, axes))
        return torch.cat(found)

    def _part(self, whole: Tensor, dim: int, axes: str) -> Tensor:
        mesh = self._layout.mesh
        size = whole.shape[dim] // mesh.count(axes)
        return whole.narrow(dim, mesh.index(self._collectives.rank, axes) * size, size).contiguous()

    # -- what is gathered ----------------------------------------------------------------------------

    def _gather(self, tensor: TensorSpec, weight: Weight) -> Weight:
        """E over x, then the other axis over what is gathered of z and y: q, k and v apart, and gate and up."""
        if isinstance(weight, Tensor):
            return self._moved(tensor, weight, tensor.name, 1)
        if not isinstance(weight, QuantizedWeight) or weight.order is not None or weight.matrix.format.rows != 1:
            raise ConfigError(
                f"{tensor.name} is in a form that cannot be gathered ({type(weight).__name__}); take a layout that is "
                "weight-stationary."
            )
        matrix = weight.matrix
        codes = self._moved(tensor, matrix.codes.view(torch.uint8), tensor.name, 1).view(matrix.codes.dtype)
        grouped = 1 if matrix.format.group else 0
        scales = self._moved(tensor, matrix.scales, tensor.name + ".scales", grouped)
        zeros = None if matrix.zeros is None else self._moved(tensor, matrix.zeros, tensor.name + ".zeros", grouped)
        return QuantizedWeight(replace(matrix, codes=codes, scales=scales, zeros=zeros))

    def _moved(self, tensor: TensorSpec, x: Tensor, name: str, columns: int) -> Tensor:
        """One matrix of numbers; `columns` 0: all columns share what it has, so that nothing is gathered along them."""
        run, taken = self._collectives, "".join(a for a in "zy" if a in self._layout.gather)
        at = tensor.axes.index("embed")
        other, axis = 1 - at, tensor.axes[1 - at]
        if at == 0 or columns:
            x = run.all_gather(x, at, "x", name)
        if other == 1 and not columns:
            return x
        if axis == "gate_up":
            both = run.all_gather(torch.cat(x.chunk(2), 1), 0, taken, name)
            return torch.cat(both.chunk(2, 1))
        pieces, axes = [x], [taken]
        if axis == "qkv":
            d, mesh = self._spec.head_dim, self._layout.mesh
            stored = self._layout.stored_kv_axes(self._kv_heads)
            q, k = self._heads // mesh.count("zy") * d, self._kv_heads // mesh.count(stored) * d
            pieces = list(x.split_with_sizes([q, k, k]))
            axes = [taken] + ["".join(a for a in stored if a in taken)] * 2
        moved = [run.all_gather(piece, other, a, name) for piece, a in zip(pieces, axes, strict=True)]
        return moved[0] if len(moved) == 1 else torch.cat(moved, other)
