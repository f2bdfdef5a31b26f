"""Models known by their dimensions alone: those with no Hugging Face model type, as specs that can be priced."""

from __future__ import annotations

from cellar.core.specs import KVGroup, KVSpec, LayerSpec, ModelSpec, TensorSpec


def decoder_spec(
    name: str,
    *,
    layers: int,
    embed: int,
    mlp: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    gated: bool,
    parallel: bool,
    dtype: str = "bfloat16",
    max_position: int = 2048,
    tied: bool = True,
    chunk_size: int = 32,
) -> ModelSpec:
    """A decoder of equal layers without biases. `parallel`: attention and MLP read the same normed input.

    Matrices are [out, in]: qkv [(H + 2 K) D, E], out [E, H D], gate_up [2 F, E] or up [F, E], down [E, F].
    """
    qkv = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    entry = ("gate_up", 2 * mlp) if gated else ("up", mlp)
    tensors = (
        TensorSpec("input_norm", (embed,), dtype, ("embed",)),
        TensorSpec("qkv", (sum(qkv), embed), dtype, ("qkv", "embed"), parts=qkv),
        TensorSpec("out", (embed, heads * head_dim), dtype, ("embed", "heads")),
        TensorSpec(entry[0], (entry[1], embed), dtype, ("gate_up" if gated else "mlp", "embed")),
        TensorSpec("down", (embed, mlp), dtype, ("embed", "mlp")),
    )
    table = TensorSpec("embed", (vocab, embed), dtype, ("vocab", "embed"))
    group = KVGroup("full", "full", tuple(range(layers)), kv_heads, head_dim, dtype)
    return ModelSpec(
        model_type=name,
        dtype=dtype,
        hidden_size=embed,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=mlp,
        vocab_size=vocab,
        max_position=max_position,
        embedding=(table,),
        layers=tuple(LayerSpec(j, tensors, heads, kv_heads, head_dim) for j in range(layers)),
        head=(
            TensorSpec("norm", (embed,), dtype, ("embed",)),
            TensorSpec("lm_head", (vocab, embed), dtype, ("vocab", "embed")),
        ),
        kv=KVSpec((group,), chunk_size),
        tied_head=tied,
        options={"parallel_block": parallel},
    )


def _palm(name: str, layers: int, embed: int, heads: int) -> ModelSpec:
    """PaLM (arXiv 2204.02311, table 1): F = 4E, SwiGLU, one KV head of 256, parallel blocks, 256k words."""
    return decoder_spec(
        name,
        layers=layers,
        embed=embed,
        mlp=4 * embed,
        heads=heads,
        kv_heads=1,
        head_dim=256,
        vocab=256_000,
        gated=True,
        parallel=True,
    )


def _mt_nlg() -> ModelSpec:
    """MT-NLG 530B (arXiv 2201.11990, section 2): 105 layers, E 20480, 128 heads of 160, F = 4E, serial blocks."""
    return decoder_spec(
        "mt-nlg-530b",
        layers=105,
        embed=20480,
        mlp=81920,
        heads=128,
        kv_heads=128,
        head_dim=160,
        vocab=51_200,
        gated=False,
        parallel=False,
    )


NAMES = ("mt-nlg-530b", "palm-540b", "palm-62b", "palm-8b")


def known_spec(name: str) -> ModelSpec | None:
    """The spec of one of NAMES in any case, or None."""
    match name.lower():
        case "palm-540b":
            return _palm("palm-540b", 118, 18432, 48)
        case "palm-62b":
            return _palm("palm-62b", 64, 8192, 32)
        case "palm-8b":
            return _palm("palm-8b", 32, 4096, 16)
        case "mt-nlg-530b":
            return _mt_nlg()
        case _:
            return None
