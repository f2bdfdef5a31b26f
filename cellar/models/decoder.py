"""The block that Llama, Mistral and Qwen have in common: RMSNorm, grouped-query attention with rotary
embedding, gated feed-forward. A model file fills in a `DecoderShape`; specs and forward follow from it.

What it costs, with E = hidden_size, F = intermediate_size, H and K heads and KV heads of D dimensions,
L layers, V words, t new tokens with c tokens of context each, b bytes per element:

    parameters of a layer   E D (2 H + 2 K) + 3 E F + 2 E       (q and out: E H D each; k, v; gate, up, down; norms)
    parameters              L (layer) + V E (2, or 1 if the head is tied) + E
    KV bytes per token      2 L K D b
    FLOPs of a step         t L (2 matrices + 4 H D c) + 2 V E per sampled token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from cellar.core.errors import CheckpointError
from cellar.core.specs import KVGroup, KVSpec, LayerSpec, ModelSpec, TensorSpec
from cellar.models import points
from cellar.models.fields import Fields
from cellar.models.model import Carried, Comm, Hidden, LayerContext, Projected, Weights, plain
from cellar.models.rope import rope_spec
from cellar.models.tensors import LayerTensors, head_matrix
from cellar.ops.linear.definition import linear
from cellar.ops.norm import rms_norm


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """Sizes and switches. `windows` has one entry per layer: how many positions it sees, None for all."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    activation: str
    tied_head: bool
    windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def head_dim_of(fields: Fields, hidden_size: int, num_heads: int) -> int:
    """`head_dim` if it is given, else hidden_size / heads. Raises CheckpointError if that is no whole number."""
    if fields.raw("head_dim") is not None:
        return fields.integer("head_dim", 0)
    if hidden_size % num_heads:
        raise CheckpointError(
            f"hidden_size {hidden_size} in config.json is not a multiple of num_attention_heads {num_heads}; "
            "give head_dim, too."
        )
    return hidden_size // num_heads


def layer_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Windows of Qwen's layers: `layer_types` says which slide; else those from `max_window_layers` on do."""
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    if "sliding_window" in fields and fields.raw("sliding_window") is None:
        window = None
    kinds = fields.names("layer_types")
    if not kinds:
        first = fields.integer("max_window_layers", 28, least=0)
        return tuple(window if j >= first else None for j in range(num_layers))
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise fields.refusal("layer_types", f"it must name full_attention or sliding_attention for {num_layers} layers")
    if window is None and "sliding_attention" in kinds:
        raise fields.refusal("layer_types", "sliding layers need use_sliding_window and sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def uniform_layers(fields: Fields, kind: str) -> None:
    """Refuse `layer_types` that name anything but `kind`. For model types whose layers are all alike."""
    if set(fields.names("layer_types") or [kind]) != {kind}:
        raise fields.refusal("layer_types", "layers of several kinds are not defined for this model_type")


def kv_spec(windows: Sequence[int | None], num_kv_heads: int, head_dim: int, dtype: str, chunk_size: int) -> KVSpec:
    """One group: `window` if all layers have the same window, else `full`.

    A model that mixes both keeps all layers' K and V for the whole context, paged together.
    """
    window = windows[0] if len(set(windows)) == 1 else None
    kind = "full" if window is None else "window"
    group = KVGroup(kind, kind, tuple(range(len(windows))), num_kv_heads, head_dim, dtype, window)  # type: ignore[arg-type]
    return KVSpec((group,), chunk_size)


def decoder_spec(
    fields: Fields, shape: DecoderShape, dtype: str, chunk_size: int, max_model_len: int | None
) -> ModelSpec:
    """Everything static about such a model. Raises CheckpointError or ConfigError for what is not supported."""
    if shape.num_heads % shape.num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads {shape.num_heads} in config.json is not a multiple of num_key_value_heads "
            f"{shape.num_kv_heads}; every KV head must serve as many heads."
        )
    rope = rope_spec(fields, shape.head_dim, shape.max_position, max_model_len)
    # A window as long as the context hides nothing.
    windows = tuple(None if w is None or w >= rope.max_position else w for w in shape.windows)
    kv = kv_spec(windows, shape.num_kv_heads, shape.head_dim, dtype, chunk_size)
    embed = TensorSpec(
        "embed", (shape.vocab_size, shape.hidden_size), dtype, ("vocab", "embed"), ("model.embed_tokens.weight",)
    )
    return ModelSpec(
        model_type=shape.model_type,
        dtype=dtype,
        hidden_size=shape.hidden_size,
        num_layers=len(windows),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        max_position=rope.max_position,
        embedding=(embed,),
        layers=tuple(
            LayerSpec(
                index=j,
                tensors=_layer_tensors(shape, dtype, f"model.layers.{j}."),
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                window=window,
                kv_group=kv.groups[0].name,
            )
            for j, window in enumerate(windows)
        ),
        head=(
            TensorSpec("norm", (shape.hidden_size,), dtype, ("embed",), ("model.norm.weight",)),
            head_matrix(embed, shape.tied_head),
        ),
        kv=kv,
        rope=rope,
        eos_token_ids=shape.eos_token_ids,
        bos_token_id=shape.bos_token_id,
        tied_head=shape.tied_head,
        options={"activation": shape.activation, "norm_eps": shape.norm_eps},
    )


def _layer_tensors(shape: DecoderShape, dtype: str, prefix: str) -> tuple[TensorSpec, ...]:
    """The tensors of one layer in the order of use; `prefix` is that of their names in the checkpoint."""
    e, f = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    found = LayerTensors(prefix, e, dtype)
    qkv = (f"self_attn.{name}_proj" for name in "qkv")
    found.norm("input_norm", "input_layernorm")
    found.matrix("qkv", (q + 2 * kv, e), ("qkv", "embed"), *qkv, bias=shape.qkv_bias, parts=(q, kv, kv))
    if shape.qk_norm:
        for name in ("q_norm", "k_norm"):
            stored = (f"{prefix}self_attn.{name}.weight",)
            found.tensors.append(TensorSpec(name, (shape.head_dim,), dtype, ("head_dim",), stored))
    found.matrix("out", (e, q), ("embed", "heads"), "self_attn.o_proj", bias=shape.out_bias)
    found.norm("post_norm", "post_attention_layernorm")
    gate_up = "mlp.gate_proj", "mlp.up_proj"
    found.matrix("gate_up", (2 * f, e), ("gate_up", "embed"), *gate_up, bias=shape.mlp_bias, parts=(f, f))
    found.matrix("down", (e, f), ("embed", "mlp"), "mlp.down_proj", bias=shape.mlp_bias)
    return tuple(found.tensors)


class Decoder:
    """The forward of such a model; which biases and norms a layer has is seen from its weights."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._eps = float(spec.options["norm_eps"])
        self._activation = str(spec.options["activation"])
        self._split = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]

    def embed(self, weights: Weights, tokens: Tensor, ctx: LayerContext) -> Hidden:
        """tokens: int64 [tokens] -> hidden."""
        return Hidden(points.embedded(tokens, plain(weights)["embed"], ctx.comm))

    def before_attention(self, j: int, weights: Weights, h: Hidden, ctx: LayerContext) -> Projected:
        """q, k, v = norm(x) W, of each head normed again in some models."""
        tensors = plain(weights)
        norm, bias = tensors["input_norm"], tensors.get("qkv_bias")
        qkv, residual = points.norm_linear(h.residual, h.added, norm, self._eps, weights["qkv"], bias, ctx.comm)
        q, k, v = qkv.view(-1, sum(self._split), self.spec.head_dim).split_with_sizes(self._split, dim=1)
        q, k, v = points.spread(q, k, v, ctx.comm)
        if "q_norm" in weights:
            q = rms_norm(q, tensors["q_norm"], self._eps)
            k = rms_norm(k, tensors["k_norm"], self._eps)
        return Projected(q, k, v, Carried(residual))

    def after_attention(
        self, j: int, weights: Weights, carried: Carried, attended: Tensor, ctx: LayerContext
    ) -> Hidden:
        """x += out(attended); x += down(act(gate(norm(x))) * up(norm(x))), the last add put off."""
        tensors, comm = plain(weights), ctx.comm
        attended = points.returned(attended, comm)
        out, bias = weights["out"], tensors.get("out_bias")
        delta = points.parted_linear(attended.flatten(1), out, bias, carried.residual, comm)
        up = points.FeedForward(
            weights["gate_up"], tensors.get("gate_up_bias"), self._activation, weights["down"], tensors.get("down_bias")
        )
        fed, residual = points.norm_feed_forward(carried.residual, delta, tensors["post_norm"], self._eps, up, comm)
        return Hidden.of(residual, fed)

    def final_hidden(self, weights: Weights, h: Hidden, comm: Comm | None = None) -> Tensor:
        """Hidden rows after the last norm, if there is one: [n, hidden]."""
        if "norm" in weights:
            x, _ = points.rms_norm(h.residual, h.delta, plain(weights)["norm"], self._eps, comm)
        else:
            x = points.entered(h.residual if h.delta is None else h.residual + h.delta, comm)
        return points.wide(x, comm)

    def head(self, weights: Weights, h: Hidden, comm: Comm | None = None) -> Tensor:
        """Hidden rows [n, hidden] -> logits [n, vocab]."""
        x = points.whole_rows(self.final_hidden(weights, h, comm), comm)
        return points.gathered(linear(x, weights["lm_head"]), comm)
