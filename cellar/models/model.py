"""The Model protocol: specs, and three functions over `ops`. The runtime owns the loop over layers.

The hidden state between layers is a pair (`Hidden`): the add of a layer's last output is put off, so that
the next norm can fuse it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from cellar.core.specs import ModelSpec

Weights = Mapping[str, Tensor]


class Hidden(NamedTuple):
    """The hidden state is residual + delta (delta None: nothing to add). Both [tokens, hidden]."""

    residual: Tensor
    delta: Tensor | None = None


class LayerContext(Protocol):
    """What a layer gets from the runtime besides weights and hidden state."""

    @property
    def positions(self) -> Tensor:
        """Absolute position of each token: int64 [tokens]."""

    @property
    def cos_sin(self) -> Tensor | None:
        """Rotary table float32 [max_position, rotary_dim], cosines then sines; None if the model has none."""

    def attend(self, j: int, q: Tensor, k: Tensor, v: Tensor, *, rotate: bool = False) -> Tensor:
        """Write k, v into layer j's cache, then attend; `rotate`: turn q and k by their positions first.

        q: [tokens, heads, head_dim], k and v: [tokens, kv_heads, head_dim]; -> [tokens, heads, head_dim].
        """


class Model(Protocol):
    """One architecture. Weights are arguments, so that they may lie anywhere and come in any format."""

    @property
    def spec(self) -> ModelSpec:
        """Everything static about the model."""

    def embed(self, weights: Weights, tokens: Tensor, ctx: LayerContext) -> Hidden:
        """tokens: int64 [tokens] -> hidden."""

    def layer(self, j: int, weights: Weights, h: Hidden, ctx: LayerContext) -> Hidden:
        """Layer j over all tokens of the step."""

    def head(self, weights: Weights, h: Hidden) -> Tensor:
        """Hidden rows (already selected) [n, hidden] -> logits [n, vocab], in the weights' dtype or float32."""

    def final_hidden(self, weights: Weights, h: Hidden) -> Tensor:
        """Hidden rows after the last norm: [n, hidden]."""
