"""The Model protocol: specs, and three functions over `ops`. The runtime owns the loop over layers.

The hidden state between layers is a pair (`Hidden`): the add of a layer's last output is put off, so that
the next norm can fuse it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, TypeAlias, cast

from torch import Tensor

from cellar.core.specs import ModelSpec
from cellar.models.loop import Loop
from cellar.ops.linear.weight import Weight

Weights: TypeAlias = Mapping[str, Weight]
"""What a function of a model finds under the names of its tensor specs: matrices in any format, plain tensors."""


def plain(weights: Weights) -> Mapping[str, Tensor]:
    """The same weights, to look up norms, biases and tables in: these are plain tensors, whatever the matrices are."""
    return cast("Mapping[str, Tensor]", weights)


class Part(NamedTuple):
    """What a rank has computed of a sum over ranks, [tokens, hidden], which the norm behind it adds up on its way."""

    x: Tensor


class Hidden(NamedTuple):
    """The hidden state is residual + delta (delta None: nothing to add). Both [tokens, hidden].

    Between two layers there may be a `part` in the delta's place.
    """

    residual: Tensor
    delta: Tensor | None = None
    part: Part | None = None

    @classmethod
    def of(cls, residual: Tensor, added: Tensor | Part) -> Hidden:
        """With a delta, or a part of one."""
        return cls(residual, None, added) if isinstance(added, Part) else cls(residual, added)

    @property
    def added(self) -> Tensor | Part | None:
        """What is to be added to the residual, or this rank's part of it."""
        return self.delta if self.part is None else self.part

    def first(self, count: int) -> Hidden:
        """Of the first `count` tokens, of a state without a part."""
        return Hidden(self.residual[:count], None if self.delta is None else self.delta[:count])


class Carried(NamedTuple):
    """What the second half of a layer takes of the first: the residual that it adds to, and what a parallel block has
    normed for both (None: nothing). Both [tokens, hidden].
    """

    residual: Tensor
    normed: Tensor | None = None


class Projected(NamedTuple):
    """What the first half of a layer leaves: q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], not yet
    rotated, and what it carries past attention.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    carried: Carried


class NormedSums(Protocol):
    """Sums over ranks with the residual and the norm behind them in one step. All ranks call all, in the same order."""

    def take(self, like: Tensor, apart: bool = True) -> bool:
        """Whether sums of such a shape and type go so: the same on all ranks. `apart`: without it the norm and what is
        behind it are in two launches, too.
        """

    def add_rms_norm(self, part: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """-> (rms_norm(residual + s), residual + s), s the sum of all ranks' parts."""


class Comm(Protocol):
    """Collectives among the ranks that share the tensors of a model (`sharding.py`). Every rank calls all of them, in
    the same order; all get the same bits.
    """

    @property
    def loop(self) -> Loop | None:
        """How long steps are cut, so that a chunk is summed while the next is multiplied; None: they are not."""

    @property
    def normed_sums(self) -> NormedSums | None:
        """How sums go that a norm follows, where that is one step."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in the order of ranks; it may be `x`, changed in place."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[n, w_r] of every rank r side by side: [n, sum of w_r]."""


class LayerContext(Protocol):
    """What a layer gets from the runtime besides weights and hidden state."""

    @property
    def positions(self) -> Tensor:
        """Absolute position of each token: int64 [tokens]."""

    @property
    def cos_sin(self) -> Tensor | None:
        """Rotary table float32 [max_position, rotary_dim], cosines then sines; None if the model has none."""

    @property
    def comm(self) -> Comm | None:
        """The other ranks; None where one device has the whole model."""

    def attend(self, j: int, q: Tensor, k: Tensor, v: Tensor, *, rotate: bool = False) -> Tensor:
        """Write k, v into layer j's cache, then attend; `rotate`: turn q and k by their positions first.

        q: [tokens, heads, head_dim], k and v: [tokens, kv_heads, head_dim]; -> [tokens, heads, head_dim].
        """


class Model(Protocol):
    """One architecture. Weights are arguments, so that they may lie anywhere and come in any format.

    A layer comes in halves, with attention between them: what runs there, and what else runs beside it, is the
    caller's affair. `run_layer` is the whole.
    """

    @property
    def spec(self) -> ModelSpec:
        """Everything static about the model."""

    def embed(self, weights: Weights, tokens: Tensor, ctx: LayerContext) -> Hidden:
        """tokens: int64 [tokens] -> hidden."""

    def before_attention(self, j: int, weights: Weights, h: Hidden, ctx: LayerContext) -> Projected:
        """Layer j up to its q, k and v, over all tokens of the step."""

    def after_attention(
        self, j: int, weights: Weights, carried: Carried, attended: Tensor, ctx: LayerContext
    ) -> Hidden:
        """Layer j from what attention made of q, k and v on; attended: [tokens, heads, head_dim]."""

    def head(self, weights: Weights, h: Hidden, comm: Comm | None = None) -> Tensor:
        """Hidden rows (already selected) [n, hidden] -> logits [n, vocab], in the weights' dtype or float32."""

    def final_hidden(self, weights: Weights, h: Hidden, comm: Comm | None = None) -> Tensor:
        """What the head takes of the hidden rows, after the last norm: [n, spec.vector_size]."""


def run_layer(model: Model, j: int, weights: Weights, h: Hidden, ctx: LayerContext) -> Hidden:
    """Layer j: its first half, attention, its second half."""
    q, k, v, carried = model.before_attention(j, weights, h, ctx)
    return model.after_attention(j, weights, carried, ctx.attend(j, q, k, v, rotate=model.spec.rope is not None), ctx)
