"""Whole sequences in a layout on thread ranks, against one device: contexts with homes, and steps of several rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cellar.core.layouts import Layout
from cellar.core.specs import ModelSpec
from cellar.models.collectives import Collectives
from cellar.models.laid import Laid
from cellar.models.loader import LoadedWeights
from cellar.models.loop import Lane, Loop
from cellar.models.model import Hidden, Model, run_layer
from cellar.models.views import View, laid, laid_spec
from cellar.ops.rotary import rope_table
from tests.models.dense_context import DenseContext
from tests.models.relay import relaid


@dataclass(frozen=True)
class Span:
    """Tokens of one row in a step, from position `start` on."""

    row: int
    start: int
    tokens: Tensor


class LaidContext:
    """A LayerContext of a rank: rows of its home attend, in the order in which the step has them."""

    def __init__(self, spec: ModelSpec, side: Laid, rows: dict[int, DenseContext]) -> None:
        self.spec = spec
        self.side = side
        self.comm = side
        self.rows = rows
        self.positions = torch.zeros(0, dtype=torch.int64)
        self.cos_sin = None if spec.rope is None else rope_table(spec.rope, torch.device("cpu"))
        self.here: list[Span] = []

    def attend(self, j: int, q: Tensor, k: Tensor, v: Tensor, *, rotate: bool = False) -> Tensor:
        sizes = [len(span.tokens) for span in self.here]
        out = torch.zeros_like(q)
        parts = zip(*(x.split(sizes) for x in (q, k, v, out)), self.here, strict=True)
        for q_row, k_row, v_row, to, span in parts:
            row = self.rows[span.row]
            row.positions = torch.arange(span.start, span.start + len(span.tokens))
            to.copy_(row.attend(j, q_row, k_row, v_row, rotate=rotate))
        return out


class LaidRank:
    """One rank: the weights that it stores, seen in one layout after another; `homes[row]` is a rank."""

    def __init__(
        self,
        model: Model,
        stored: LoadedWeights,
        collectives: Collectives,
        homes: Sequence[int],
        loop: Loop | None = None,
        ahead: Lane | None = None,
    ) -> None:
        self.loop = loop
        self.ahead = ahead
        self.whole = model.spec
        self.kind = type(model)
        self.stored = stored
        self.collectives = collectives
        self.homes = homes
        self.rows: dict[int, DenseContext] = {}
        self.lengths: dict[int, int] = {}
        self.layout: Layout | None = None

    def step(self, layout: Layout, spans: Sequence[Span]) -> dict[int, Tensor]:
        """Logits of every token of a step, by row."""
        mesh, rank = layout.mesh, self.collectives.rank
        spec = laid_spec(self.whole, layout, self.collectives)
        model = self.kind(spec)  # type: ignore[call-arg]
        view = View(self.whole, self.stored, layout, self.collectives, self.ahead)
        place = [mesh.index(home, layout.batch_axes) for home in self.homes]
        ordered = sorted(spans, key=lambda span: place[span.row])
        tokens = np.zeros(mesh.count(layout.batch_axes), np.int64)
        for span in ordered:
            tokens[place[span.row]] += len(span.tokens)
        side = replace(laid(self.whole, layout, self.collectives).of(tokens.tolist()), loop=self.loop)
        ctx = LaidContext(spec, side, self.rows)
        ctx.here = [s for s in ordered if place[s.row] == mesh.index(rank, layout.batch_axes)]
        attention = replace(spec, num_heads=side.heads[0], num_kv_heads=side.heads[1])
        if self.layout not in (None, layout):
            self.move(layout, side, attention)
        self.layout = layout
        for span in spans:
            self.lengths[span.row] = span.start + len(span.tokens)
        for span in ctx.here:
            self.rows.setdefault(span.row, DenseContext(attention))
        group = [s for s in ordered if mesh.index(self.homes[s.row], layout.gather) == mesh.index(rank, layout.gather)]
        ctx.positions = torch.cat(
            [torch.zeros(0, dtype=torch.int64), *(torch.arange(s.start, s.start + len(s.tokens)) for s in group)]
        )
        h: Hidden = model.embed(view.embedding, torch.cat([s.tokens for s in ordered]), ctx)
        for j in range(len(view)):
            with view.at(j) as weights:
                h = run_layer(model, j, weights, h, ctx)
        logits = model.head(view.head, h, side)
        parts = logits.split([len(s.tokens) for s in ordered])
        return {span.row: part for span, part in zip(ordered, parts, strict=True)}

    def move(self, layout: Layout, side: Laid, attention: ModelSpec) -> None:
        """The cache of all rows from the last step's layout to this one's: K and V of all layers at once."""
        assert self.layout is not None
        heads = side.whole.kv_heads
        here = heads // layout.mesh.count(self.layout.kv_axes(heads))
        width = 2 * len(self.stored.layers) * self.whole.head_dim
        held = [torch.cat([*row.k, *row.v], 2) for _, row in sorted(self.rows.items())]
        x = torch.cat([torch.zeros(0, here, width), *held])
        homes = {row: self.homes[row] for row in self.lengths}
        x = relaid(x, homes, self.lengths, self.layout, layout, heads, self.collectives)
        axes, rank = layout.batch_axes, self.collectives.rank
        mine = [r for r in sorted(homes) if layout.mesh.index(homes[r], axes) == layout.mesh.index(rank, axes)]
        self.rows.clear()
        for row, part in zip(mine, x.split([self.lengths[r] for r in mine]), strict=True):
            self.rows[row] = DenseContext(attention)
            both = part.split(self.whole.head_dim, 2)
            self.rows[row].k, self.rows[row].v = list(both[: len(both) // 2]), list(both[len(both) // 2 :])
