"""OPT (model_type opt), all sizes: LayerNorm, learned positions, full attention, a plain feed-forward with biases.

Two things that only the 350M has: its words are narrower than its hidden states (`word_embed_proj_dim`, with a
projection after the embedding and one before the head), and its norms stand after each block instead of before.

What it costs, with E = hidden_size, F = ffn_dim, W = word_embed_proj_dim, L layers, V words, P positions, t new tokens
with c tokens of context each, b bytes per element:

    parameters of a layer   4 E^2 + 2 E F + 9 E + F      (q, k, v, out; two matrices; 5 E + F biases, 4 E in the norms)
    parameters              L (layer) + V W + (P + 2) E, + 2 E for a last norm (not in the 350M), + 2 E W if W is not E
    KV bytes per token      2 L E b
    FLOPs of a step         t L (8 E^2 + 4 E F + 4 E c) + 2 V W per sampled token; 2 E W more of each if W is not E

OPT-175B has E 12288, F 49152, L 96, V 50272, P 2048: 1.746e11 parameters, 4.7 MB of KV per token in two bytes an
element.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cellar.core.errors import CheckpointError
from cellar.core.specs import LayerSpec, ModelSpec, TensorSpec
from cellar.models import points
from cellar.models.decoder import kv_spec
from cellar.models.fields import Fields
from cellar.models.model import Carried, Comm, Hidden, LayerContext, Projected, Weights, plain
from cellar.models.rope import context_length
from cellar.models.tensors import LayerTensors, head_matrix
from cellar.ops.embedding import embedding
from cellar.ops.linear.definition import linear

ARCHITECTURE = "OPTForCausalLM"

# Row 0 of the position table is never used, row 1 is the padding's: positions count from row 2.
POSITION_OFFSET = 2
NORM_EPS = 1e-5


def spec(config: Mapping[str, Any], dtype: str, chunk_size: int, max_model_len: int | None) -> ModelSpec:
    """Everything static about the model that a config.json defines."""
    fields = Fields(config, ARCHITECTURE)
    e, f = fields.integer("hidden_size", 768), fields.integer("ffn_dim", 3072)
    heads, num_layers = fields.integer("num_attention_heads", 12), fields.layers("num_hidden_layers", 12)
    words, vocab = fields.integer("word_embed_proj_dim", e), fields.integer("vocab_size", 50272)
    positions = fields.integer("max_position_embeddings", 2048)
    if e % heads:
        raise CheckpointError(f"hidden_size {e} in config.json is not a multiple of num_attention_heads {heads}.")
    if not fields.flag("layer_norm_elementwise_affine", True):
        raise fields.refusal("layer_norm_elementwise_affine", "only norms with weights are supported")
    bias, tied = fields.flag("enable_bias", True), fields.flag("tie_word_embeddings", True)
    norm_first = fields.flag("do_layer_norm_before", True)
    norm_last = norm_first and not fields.flag("_remove_final_layer_norm", False)

    def tensor(name: str, shape: tuple[int, ...], axes: tuple[str, ...], stored: str) -> TensorSpec:
        return TensorSpec(name, shape, dtype, axes, ("model.decoder." + stored,))

    embed = tensor("embed", (vocab, words), ("vocab", "embed"), "embed_tokens.weight")
    table = (positions + POSITION_OFFSET, e)
    embeddings = [embed, tensor("positions", table, ("position", "embed"), "embed_positions.weight")]
    head = []
    if norm_last:
        head.append(tensor("norm", (e,), ("embed",), "final_layer_norm.weight"))
        head.append(tensor("norm_bias", (e,), ("embed",), "final_layer_norm.bias"))
    if words != e:
        embeddings.append(tensor("project_in", (e, words), ("embed", "words"), "project_in.weight"))
        head.append(tensor("project_out", (words, e), ("words", "embed"), "project_out.weight"))
    head.append(head_matrix(embed, tied))
    kv = kv_spec((None,) * num_layers, heads, e // heads, dtype, chunk_size)
    return ModelSpec(
        model_type="opt",
        dtype=dtype,
        hidden_size=e,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=e // heads,
        intermediate_size=f,
        vocab_size=vocab,
        max_position=context_length(positions, positions, max_model_len),
        embedding=tuple(embeddings),
        layers=tuple(
            LayerSpec(j, _layer_tensors(e, f, bias, dtype, f"model.decoder.layers.{j}."), heads, heads, e // heads)
            for j in range(num_layers)
        ),
        head=tuple(head),
        kv=kv,
        eos_token_ids=fields.token_ids("eos_token_id", 2),
        bos_token_id=fields.first_token_id("bos_token_id", 2),
        tied_head=tied,
        options={
            "activation": fields.activation("activation_function", "relu"),
            "norm_first": norm_first,
            "norm_eps": NORM_EPS,
            "norm_mean": True,
            "position_offset": POSITION_OFFSET,
        },
    )


def model(spec: ModelSpec) -> OPT:
    """The forward of a spec that this file made."""
    return OPT(spec)


def _layer_tensors(e: int, f: int, bias: bool, dtype: str, prefix: str) -> tuple[TensorSpec, ...]:
    """The tensors of one layer in the order of use; `prefix` is that of their names in the checkpoint."""
    found = LayerTensors(prefix, e, dtype)
    qkv = (f"self_attn.{name}_proj" for name in "qkv")
    found.norm("input_norm", "self_attn_layer_norm", bias=True)
    found.matrix("qkv", (3 * e, e), ("qkv", "embed"), *qkv, bias=bias)
    found.matrix("out", (e, e), ("embed", "heads"), "self_attn.out_proj", bias=bias)
    found.norm("post_norm", "final_layer_norm", bias=True)
    found.matrix("up", (f, e), ("mlp", "embed"), "fc1", bias=bias)
    found.matrix("down", (e, f), ("embed", "mlp"), "fc2", bias=bias)
    return tuple(found.tensors)


class OPT:
    """The forward. With norms first the last add of a layer is put off; with norms last there is nothing to put off."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._eps = float(spec.options["norm_eps"])
        self._first_position = int(spec.options["position_offset"])
        self._split = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self._activation = str(spec.options["activation"])
        self._norm_first = bool(spec.options["norm_first"])

    def embed(self, weights: Weights, tokens: Tensor, ctx: LayerContext) -> Hidden:
        """tokens: int64 [tokens] -> hidden: the words (projected if narrower) plus the positions."""
        table = plain(weights)["embed"]
        if "project_in" in weights:
            words = linear(points.looked_up(tokens, table, ctx.comm), weights["project_in"], None)
        else:
            words = points.embedded(tokens, table, ctx.comm)
        h = Hidden(words, embedding(ctx.positions + self._first_position, plain(weights)["positions"]))
        return h if self._norm_first else Hidden(points.entered(_sum(h), ctx.comm))

    def before_attention(self, j: int, weights: Weights, h: Hidden, ctx: LayerContext) -> Projected:
        """q, k, v = norm(x) W; with norms last x W."""
        tensors = plain(weights)
        if self._norm_first:
            norm, norm_bias = tensors["input_norm"], tensors["input_norm_bias"]
            bias = tensors.get("qkv_bias")
            qkv, residual = points.layer_norm_linear(
                h.residual, h.delta, norm, norm_bias, self._eps, weights["qkv"], bias, ctx.comm
            )
        else:
            residual = _sum(h)
            qkv = linear(residual, weights["qkv"], tensors.get("qkv_bias"))
        q, k, v = qkv.view(-1, sum(self._split), self.spec.head_dim).split_with_sizes(self._split, dim=1)
        q, k, v = points.spread(q, k, v, ctx.comm)
        return Projected(q, k, v, Carried(residual))

    def after_attention(
        self, j: int, weights: Weights, carried: Carried, attended: Tensor, ctx: LayerContext
    ) -> Hidden:
        """Norms first: x += out(attended), x += mlp(norm(x)). Norms last: x = norm(x + out(attended)), likewise."""
        residual, comm = carried.residual, ctx.comm
        attended = points.returned(attended, comm)
        delta = points.summed_linear(attended.flatten(1), weights["out"], plain(weights).get("out_bias"), comm)
        if self._norm_first:
            x, residual = self._norm(residual, delta, weights, "post_norm", comm)
            return Hidden(residual, self._mlp(weights, x, comm))
        # What is normed last is what the next product takes: it stays as it is, and the stream is a part of it.
        x, _ = self._norm(points.kept(residual, comm), delta, weights, "input_norm", comm)
        x, _ = self._norm(points.kept(x, comm), self._mlp(weights, x, comm), weights, "post_norm", comm)
        return Hidden(x)

    def final_hidden(self, weights: Weights, h: Hidden, comm: Comm | None = None) -> Tensor:
        """Hidden rows after the last norm, projected if the words are narrower: [n, words]."""
        return self._narrowed(weights, self._normed(weights, h, comm))

    def head(self, weights: Weights, h: Hidden, comm: Comm | None = None) -> Tensor:
        """Hidden rows [n, hidden] -> logits [n, vocab]."""
        x = self._narrowed(weights, points.whole_rows(self._normed(weights, h, comm), comm))
        return points.gathered(linear(x, weights["lm_head"]), comm)

    def _normed(self, weights: Weights, h: Hidden, comm: Comm | None) -> Tensor:
        """After the last norm, if there is one: [n, hidden]."""
        if "norm" in weights:
            x, _ = self._norm(h.residual, h.delta, weights, "norm", comm)
        else:
            x = points.entered(_sum(h), comm) if self._norm_first else _sum(h)
        return points.wide(x, comm)

    def _narrowed(self, weights: Weights, x: Tensor) -> Tensor:
        """[n, hidden] -> [n, words]."""
        return linear(x, weights["project_out"], None) if "project_out" in weights else x

    def _mlp(self, weights: Weights, x: Tensor, comm: Comm | None) -> Tensor:
        biases = plain(weights)
        up = points.FeedForward(
            weights["up"],
            biases.get("up_bias"),
            self._activation,
            weights["down"],
            biases.get("down_bias"),
            gated=False,
        )
        return points.feed_forward(x, up, comm)

    def _norm(
        self, residual: Tensor, delta: Tensor | None, weights: Weights, name: str, comm: Comm | None
    ) -> tuple[Tensor, Tensor]:
        """(norm(residual + delta), residual + delta)."""
        norms = plain(weights)
        return points.layer_norm(residual, delta, norms[name], norms[name + "_bias"], self._eps, comm)


def _sum(h: Hidden) -> Tensor:
    return h.residual if h.delta is None else h.residual + h.delta
