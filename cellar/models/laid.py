"""One rank's side of a layout: the moves of Pope et al. (§3), at the points that a model's functions name.

The letters are those of `planner/layouts.py`, which prices the same moves in the same order. A rank holds

    between blocks      B_g L E_(x) rest         the residual stream; g: axes that weights are gathered over
    in products         B_g L E_x, F_rest, H_rest; partial sums over x where that is not gathered
    in attention        B_(g, to_batch) H_(head_axes)

Every row has a home, and the tokens of a step are ordered by it: `tokens[h]` of them belong to home h along
`layout.batch_axes`, g first. A rank's tokens are those of its place along g; attention has those of its own home.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cellar.core.layouts import Layout, Mesh
from cellar.models.collectives import Collectives
from cellar.models.loop import Loop, Send, Steps


@dataclass(frozen=True)
class Whole:
    """What a rank must know of the whole model, heads padded already."""

    embed: int
    heads: int
    kv_heads: int
    vocab: int


@dataclass(frozen=True)
class Laid:
    """Implements `Comm` and the further points of a layout, for steps with so many `tokens` of each home.

    `loop`: how the products between blocks are cut, while their collectives run beside them; None: they are not.
    """

    layout: Layout
    collectives: Collectives
    whole: Whole
    tokens: tuple[int, ...] = ()
    loop: Loop | None = None
    normed_sums: None = None

    def of(self, tokens: Sequence[int]) -> Laid:
        """For a step with so many tokens of each home; for the head, so many rows."""
        return replace(self, tokens=tuple(tokens))

    # -- table and head ------------------------------------------------------------------------------

    def embedded(self, tokens: Tensor, table: Tensor) -> Tensor:
        """The words of all homes' tokens, int64 [all tokens], by this rank's rows of the table -> the stream."""
        words = self._of_group(self._looked_up(tokens, table))
        return self.collectives.reduce_scatter(words, 1, self.layout.stream, "words")

    def looked_up(self, tokens: Tensor, table: Tensor) -> Tensor:
        """The same, whole words: [tokens, words], where these are narrower than E."""
        return self.collectives.all_reduce(self._of_group(self._looked_up(tokens, table)), self.layout.stream, "words")

    def _looked_up(self, tokens: Tensor, table: Tensor) -> Tensor:
        mine = tokens - len(table) * self._index("zyx")
        there = (mine >= 0) & (mine < len(table))
        return table.index_select(0, mine.clamp(0, len(table) - 1)) * there[:, None]

    def _of_group(self, words: Tensor) -> Tensor:
        return self.collectives.reduce_scatter(words, 0, self.layout.gather, "words", self._group_tokens())

    def whole_rows(self, x: Tensor) -> Tensor:
        """[rows, E] -> [all homes' rows, E]."""
        return self.collectives.all_gather(x, 0, self.layout.gather, "n", self._group_tokens())

    def wide(self, x: Tensor) -> Tensor:
        """[rows, E_x] -> [rows, E]."""
        return self.collectives.all_gather(x, 1, self.x, "n")

    def all_gather(self, x: Tensor) -> Tensor:
        """Logits of this rank's words -> of all: [rows, V]."""
        return self.collectives.all_gather(x, 1, "zyx", "logits")[:, : self.whole.vocab]

    # -- the residual stream -------------------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        """What a product leaves, partial over `rest` [tokens, E_x] -> its sum as the stream."""
        return self.collectives.reduce_scatter(x, 1, self.layout.rest, "y")

    def entered(self, x: Tensor) -> Tensor:
        """The stream -> [tokens, E_x]."""
        return self.collectives.all_gather(x, 1, self.layout.rest, "n")

    def kept(self, x: Tensor) -> Tensor:
        """[tokens, E_x] -> the stream."""
        size = x.shape[1] // self.layout.mesh.count(self.layout.rest)
        return x.narrow(1, self._index(self.layout.rest) * size, size)

    def rms_norm(
        self, residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float
    ) -> Steps[tuple[Tensor, Tensor]]:
        """-> (rms_norm(residual + delta) as [tokens, E_x], residual + delta as the stream); norm: [E_x]."""
        total = residual if delta is None else residual + delta
        x = yield from sent(self.layout.mesh, self.layout.rest, lambda: self.entered(total))
        wide = x.float()
        squares = wide.square().sum(1, keepdim=True)
        sums = yield from sent(self.layout.mesh, self.x, lambda: self.collectives.all_reduce(squares, self.x, "sums"))
        return (wide * (sums / self.whole.embed + eps).rsqrt()).to(x.dtype) * norm, total

    def layer_norm(
        self, residual: Tensor, delta: Tensor | None, norm: Tensor, bias: Tensor | None, eps: float
    ) -> Steps[tuple[Tensor, Tensor]]:
        """-> (layer_norm(residual + delta) as [tokens, E_x], residual + delta as the stream); norm, bias: [E_x]."""
        total = residual if delta is None else residual + delta
        x = yield from sent(self.layout.mesh, self.layout.rest, lambda: self.entered(total))
        wide = x.float()
        parts = torch.stack((wide.sum(1), wide.square().sum(1)), 1)
        sums = yield from sent(self.layout.mesh, self.x, lambda: self.collectives.all_reduce(parts, self.x, "sums"))
        sums = sums / self.whole.embed
        mean, square = sums[:, :1], sums[:, 1:]
        normed = (wide - mean) * (square - mean.square()).clamp_min(0).add(eps).rsqrt() * norm.float()
        return (normed if bias is None else normed + bias.float()).to(x.dtype), total

    # -- the feed-forward ----------------------------------------------------------------------------

    def narrowed(self, h: Tensor, parts: int) -> Tensor:
        """A product before its activation, partial over x: [tokens, parts F_rest] -> [tokens, parts F_(rest, x)]."""
        split = h.view(len(h), parts, h.shape[1] // parts)
        return self.collectives.reduce_scatter(split, 2, self.x, "h").flatten(1)

    def widened(self, f: Tensor) -> Tensor:
        """After the activation: [tokens, F_(rest, x)] -> [tokens, F_rest]."""
        return self.collectives.all_gather(f, 1, self.x, "f")

    # -- attention -----------------------------------------------------------------------------------

    @property
    def heads(self) -> tuple[int, int]:
        """Heads and KV heads that this rank's attention has."""
        chosen = self._chosen()
        return self.whole.heads // self.layout.mesh.count(self.layout.head_axes), len(chosen)

    def spread(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [tokens, H_rest, D], k, v [tokens, K_.., D], partial over x -> those of attention's rows and heads."""
        layout, run = self.layout, self.collectives
        q = run.reduce_scatter(q, 1, self.x, "q")
        homes = self._sizes("", layout.to_batch)
        q = run.all_to_all(q, 0, 1, layout.to_batch, "q", split_sizes=homes)
        k, v = self._spread_kv(k, "k"), self._spread_kv(v, "v")
        chosen = self._chosen()
        if chosen != list(range(k.shape[1])):
            k, v = k[:, chosen], v[:, chosen]
        return q, k, v

    def returned(self, attended: Tensor) -> Tensor:
        """[rows of this home, H_(head_axes), D] -> [tokens, H_rest, D]."""
        axes = self.layout.to_batch
        back = self.collectives.all_to_all(attended, 1, 0, axes, "a", join_sizes=self._sizes("", axes))
        return self.collectives.all_gather(back, 1, self.x, "a")

    def _spread_kv(self, k: Tensor, name: str) -> Tensor:
        layout, run = self.layout, self.collectives
        held = "".join(a for a in layout.stored_kv_axes(self.whole.kv_heads) if a not in layout.gather)
        cut = "".join(a for a in held if a in layout.to_batch)
        k = run.all_to_all(k, 0, 1, cut, name, split_sizes=self._sizes("", cut))
        for axis in layout.rest:
            if axis in held:
                continue
            if axis in layout.to_batch:
                k = _share(k, 0, self._sizes(cut, axis), self._index(axis))
                cut += axis
            elif axis in layout.kv_axes(self.whole.kv_heads):
                count = layout.mesh.count(axis)
                k = _share(k, 1, [k.shape[1] // count] * count, self._index(axis))
        if not self.x:
            return k
        if "x" in layout.to_batch:
            return run.reduce_scatter(k, 0, "x", name, self._sizes(cut, "x"))
        if "x" in layout.kv_axes(self.whole.kv_heads):
            return run.reduce_scatter(k, 1, "x", name)
        return run.all_reduce(k, "x", name)

    def _chosen(self) -> list[int]:
        """Which of the KV heads that are here serve this rank's queries, for runs of these of one length."""
        layout, whole = self.layout, self.whole
        heads = whole.heads // layout.mesh.count(layout.head_axes)
        group = whole.heads // whole.kv_heads
        run, first = math.gcd(heads, group), self._index(layout.head_axes) * heads
        axes = layout.kv_axes(whole.kv_heads)
        start = self._index(axes) * (whole.kv_heads // layout.mesh.count(axes))
        return [(first + at) // group - start for at in range(0, heads, run)]

    # -- places and shares -----------------------------------------------------------------------------

    @property
    def x(self) -> str:
        """Axes that cut E in products."""
        return "" if self.layout.gather else "x"

    def _index(self, axes: str) -> int:
        return self.layout.mesh.index(self.collectives.rank, axes)

    def _homes(self) -> np.ndarray:
        """Tokens of each home: [place along g, *places along to_batch]."""
        mesh = self.layout.mesh
        return np.array(self.tokens, np.int64).reshape(
            mesh.count(self.layout.gather), *(mesh.count(axis) for axis in self.layout.to_batch)
        )

    def _group_tokens(self) -> list[int]:
        """Tokens of each place along g."""
        homes = self._homes()
        return [int(n) for n in homes.reshape(len(homes), -1).sum(1)]

    def _sizes(self, before: str, axes: str) -> list[int]:
        """Tokens of each place along `axes`, for a batch that is cut to this rank's place along g and `before`."""
        homes = self._homes()[self._index(self.layout.gather)]
        for axis in before:
            homes = homes[self._index(axis)]
        return [int(n) for n in homes.reshape(self.layout.mesh.count(axes), -1).sum(1)]


def _share(x: Tensor, dim: int, sizes: Sequence[int], at: int) -> Tensor:
    return x.narrow(dim, sum(sizes[:at]), sizes[at])


def sent(mesh: Mesh, axes: str, send: Send) -> Steps[Tensor]:
    """Hands a collective along these axes out, if there is anyone to send to."""
    return send() if mesh.count(axes) == 1 else (yield send)
