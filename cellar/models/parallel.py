"""Blocks whose attention and feed-forward read the same normed input and are added at once: Falcon, Command-R, PaLM.

Ranks that share such a layer sum once where others sum twice (Efficiently Scaling Transformer Inference, §3.4). The
norm is a LayerNorm, with or without a bias; its result goes past attention, so that ranks gather its input once.
"""

from __future__ import annotations

from torch import Tensor

from cellar.core.specs import ModelSpec
from cellar.models import points
from cellar.models.model import Carried, Comm, Hidden, LayerContext, Projected, Weights, plain
from cellar.ops.linear.definition import linear


class ParallelDecoder:
    """The forward of such a model; biases, and whether the feed-forward is gated, are seen from a layer's weights."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._eps = float(spec.options["norm_eps"])
        self._activation = str(spec.options["activation"])
        self._logit_scale = float(spec.options.get("logit_scale", 1.0))
        self._split = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]

    def embed(self, weights: Weights, tokens: Tensor, ctx: LayerContext) -> Hidden:
        """tokens: int64 [tokens] -> hidden."""
        return Hidden(points.embedded(tokens, plain(weights)["embed"], ctx.comm))

    def before_attention(self, j: int, weights: Weights, h: Hidden, ctx: LayerContext) -> Projected:
        """q, k, v = norm(x) W."""
        x, residual = self._norm(weights, "input_norm", h, ctx.comm)
        qkv = linear(x, weights["qkv"], plain(weights).get("qkv_bias"))
        q, k, v = qkv.view(-1, sum(self._split), self.spec.head_dim).split_with_sizes(self._split, dim=1)
        return Projected(*points.spread(q, k, v, ctx.comm), Carried(residual, x))

    def after_attention(
        self, j: int, weights: Weights, carried: Carried, attended: Tensor, ctx: LayerContext
    ) -> Hidden:
        """x += out(attended) + mlp(norm(x)), the add put off."""
        tensors, comm = plain(weights), ctx.comm
        residual, x = carried
        assert x is not None, "before_attention has normed it"
        name = "gate_up" if "gate_up" in weights else "up"
        up = points.FeedForward(
            weights[name],
            tensors.get(name + "_bias"),
            self._activation,
            weights["down"],
            tensors.get("down_bias"),
            gated=name == "gate_up",
        )
        attended = points.returned(attended, comm)
        delta = linear(attended.flatten(1), weights["out"], tensors.get("out_bias"))
        return Hidden(residual, points.feed_forward(x, up, comm, beside=delta))

    def final_hidden(self, weights: Weights, h: Hidden, comm: Comm | None = None) -> Tensor:
        """Hidden rows after the last norm: [n, hidden]."""
        return points.wide(self._norm(weights, "norm", h, comm)[0], comm)

    def head(self, weights: Weights, h: Hidden, comm: Comm | None = None) -> Tensor:
        """Hidden rows [n, hidden] -> logits [n, vocab]."""
        x = points.whole_rows(self.final_hidden(weights, h, comm), comm)
        logits = points.gathered(linear(x, weights["lm_head"]), comm)
        return logits if self._logit_scale == 1 else logits * self._logit_scale

    def _norm(self, weights: Weights, name: str, h: Hidden, comm: Comm | None) -> tuple[Tensor, Tensor]:
        """(norm(residual + delta), residual + delta)."""
        norms = plain(weights)
        return points.layer_norm(h.residual, h.delta, norms[name], norms.get(name + "_bias"), self._eps, comm)
