"""The loop over layers: one step's tokens through the model, with K and V of every layer written to the arena."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from cellar.core.specs import ModelSpec
from cellar.models.loader import LoadedWeights
from cellar.models.model import Comm, Hidden, Model, run_layer
from cellar.ops.attention import AttentionShape, AttentionWork, Softmax, attention, decode_attention, plan_attention
from cellar.ops.rotary import rope_table, rotary_kv, write_kv
from cellar.runtime.pace import Pace
from cellar.runtime.steps.arena import Arena
from cellar.runtime.steps.inputs import StepInputs


class StepContext:
    """What the layers of one step share (the LayerContext of `models/model.py`).

    positions: int64 [tokens]. slot_mapping: int64 [tokens]. table: int32 [rows, columns]. works: per layer.
    """

    __slots__ = ("_k", "_scale", "_slot_mapping", "_table", "_v", "_works", "comm", "cos_sin", "positions")

    def __init__(
        self,
        positions: Tensor,
        cos_sin: Tensor | None,
        arena: Arena,
        slot_mapping: Tensor,
        table: Tensor,
        works: list[AttentionWork],
        scale: float,
        comm: Comm | None = None,
    ) -> None:
        self.positions = positions
        self.comm = comm
        self.cos_sin = cos_sin
        self._k = arena.k
        self._v = arena.v
        self._slot_mapping = slot_mapping
        self._table = table
        self._works = works
        self._scale = scale

    def attend(self, j: int, q: Tensor, k: Tensor, v: Tensor, *, rotate: bool = False) -> Tensor:
        """Write k, v of all spans, then attend: a span may see what another of its row writes in this step."""
        k_cache, v_cache, work = self._k[j], self._v[j], self._works[j]
        if work.is_decode:
            cos_sin = self.cos_sin if rotate else None
            return decode_attention(q, k, v, cos_sin, k_cache, v_cache, self._table, work, self._scale)
        if rotate:
            assert self.cos_sin is not None
            turned = torch.empty(k.shape, dtype=k.dtype, device=k.device) if work.reads_new else None
            q = rotary_kv(q, k, v, self.positions, self.cos_sin, k_cache, v_cache, self._slot_mapping, turned)
            new = None if turned is None else (turned, v)
        else:
            write_kv(k, v, k_cache, v_cache, self._slot_mapping)
            new = (k, v)
        return attention(q, k_cache, v_cache, self._table, work, self._scale, new=new)


class Forward:
    """A model with its weights and its arena, ready to compute steps.

    `comm`: the other ranks, if these are the weights of one rank of several (`models/sharding.py`).
    """

    def __init__(
        self, model: Model, weights: LoadedWeights, arena: Arena, device: torch.device, comm: Comm | None = None
    ) -> None:
        self._comm = comm
        self.model = model
        self.weights = weights
        self.arena = arena
        spec: ModelSpec = model.spec
        self._cos_sin = None if spec.rope is None else rope_table(spec.rope, device)
        self._scale = spec.head_dim**-0.5
        self._device = device
        # Layers of equal shape and window share one plan of attention work.
        shapes = [
            AttentionShape(layer.num_heads, layer.num_kv_heads, layer.head_dim, arena.chunk_size, layer.window)
            for layer in spec.layers
        ]
        self.shapes = list(dict.fromkeys(shapes))
        self._shape_of_layer = [self.shapes.index(shape) for shape in shapes]
        self._wide_layers: frozenset[int] = frozenset()
        self._softmax: Softmax = "auto"

    def keep_maximum(self, layers: Collection[int]) -> None:
        """Compute the softmax of these layers with a running maximum: a profile found their scores too wide.

        Say so before steps are captured.
        """
        self._wide_layers = frozenset(layers)

    def use_softmax(self, softmax: Softmax) -> None:
        """How all other layers compute their softmax on a GPU. Say so before steps are captured."""
        self._softmax = softmax

    def plan(self, inputs: StepInputs) -> list[AttentionWork]:
        """The attention work of a step, one for each of `shapes`."""
        return [
            plan_attention(
                inputs.row,
                inputs.start,
                inputs.stop,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                chunk_size=shape.chunk_size,
                window=shape.window,
                device=self._device,
            )
            for shape in self.shapes
        ]

    def run(
        self,
        planned: Sequence[AttentionWork],
        tokens: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        table: Tensor,
        pace: Pace | None = None,
    ) -> Hidden:
        """The hidden state after the last layer, of all tokens of the step: [tokens, hidden]. `planned` by `plan`.

        Each layer is a lap of `pace`.
        """
        for work in planned:
            work.softmax = self._softmax
        works = [planned[shape] for shape in self._shape_of_layer]
        for j in self._wide_layers:
            works[j] = works[j].with_maximum
        context = StepContext(positions, self._cos_sin, self.arena, slot_mapping, table, works, self._scale, self._comm)
        model, weights = self.model, self.weights
        h = model.embed(weights.embedding, tokens, context)
        for j, layer_weights in enumerate(weights.layers):
            h = run_layer(model, j, layer_weights, h, context)
            if pace is not None:
                pace.lap()
        return h

    def logits(self, h: Hidden) -> Tensor:
        """[n, vocab] of hidden rows."""
        return self.model.head(self.weights.head, h, self._comm)

    def final_hidden(self, h: Hidden) -> Tensor:
        """[n, hidden] after the last norm."""
        return self.model.final_hidden(self.weights.head, h)


def select(h: Hidden, index: Tensor) -> Hidden:
    """Some rows of a hidden state. index: int64 [n]."""
    delta = None if h.delta is None else h.delta.index_select(0, index)
    return Hidden(h.residual.index_select(0, index), delta)
