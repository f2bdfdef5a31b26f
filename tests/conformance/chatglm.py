"""Random ChatGLM checkpoints, and two oracles: transformers' GLM with renamed weights where it is the same function,
and the published definition, written down in float64.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

VOCAB, LAYERS = 101, 3
LAYER = "transformer.encoder.layers.{}."


def config_of(heads: int, groups: int, dim: int, hidden: int, **changes: Any) -> dict[str, Any]:
    """A config.json as ChatGLM2's are."""
    return {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        "auto_map": {"AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration"},
        "padded_vocab_size": VOCAB,
        "num_layers": LAYERS,
        "num_attention_heads": heads,
        "multi_query_attention": True,
        "multi_query_group_num": groups,
        "kv_channels": dim,
        "hidden_size": hidden,
        "ffn_hidden_size": 52,
        "seq_length": 128,
        "layernorm_epsilon": 1e-5,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "original_rope": True,
        "rmsnorm": True,
        "torch_dtype": "float32",
        **changes,
    }


def save_config(config: Mapping[str, Any], weights: Mapping[str, Tensor], folder: Path) -> None:
    """A checkpoint as it is published, with the frequencies that it stores for no use."""
    stored = {name: tensor.float().contiguous() for name, tensor in weights.items()}
    stored["transformer.rotary_pos_emb.inv_freq"] = torch.ones(4)
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def saved_glm(config: Mapping[str, Any], folder: Path) -> Any:
    """A model of transformers' GLM with random parameters; its weights are saved to `folder` under ChatGLM's names."""
    import transformers

    theirs = transformers.GlmForCausalLM(
        transformers.GlmConfig(
            vocab_size=VOCAB,
            hidden_size=config["hidden_size"],
            intermediate_size=config["ffn_hidden_size"],
            num_hidden_layers=LAYERS,
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["multi_query_group_num"],
            head_dim=config["kv_channels"],
            rms_norm_eps=config["layernorm_epsilon"],
            max_position_embeddings=config["seq_length"],
            attention_bias=config["add_qkv_bias"],
            tie_word_embeddings=False,
            pad_token_id=None,
            rope_parameters=_rope(config),
            attn_implementation="eager",
        )
    ).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            scale = 1.4 * weight.shape[1] ** -0.5 if weight.ndim == 2 else 0.2
            weight.normal_(1.0 if name.endswith("norm.weight") else 0.0, scale)
    save_config(config, _renamed(theirs.state_dict()), folder)
    return theirs


def random_weights(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights in float64 under ChatGLM's names."""
    e, f, d = config["hidden_size"], config["ffn_hidden_size"], config["kv_channels"]
    heads = config["num_attention_heads"]
    groups = config["multi_query_group_num"] if config["multi_query_attention"] else heads
    generator = torch.Generator().manual_seed(e + d)
    found: dict[str, Tensor] = {}

    def add(name: str, *shape: int) -> None:
        center, scale = (0.0, 1.4 * shape[-1] ** -0.5) if len(shape) == 2 else (1.0, 0.2)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        found[name] = center * ("norm" in name) + scale * drawn

    add("transformer.embedding.word_embeddings.weight", VOCAB, e)
    for j in range(LAYERS):
        prefix = LAYER.format(j)
        add(prefix + "input_layernorm.weight", e)
        add(prefix + "post_attention_layernorm.weight", e)
        matrices = {
            "self_attention.query_key_value": ((heads + 2 * groups) * d, e),
            "self_attention.dense": (e, heads * d),
            "mlp.dense_h_to_4h": (2 * f, e),
            "mlp.dense_4h_to_h": (e, f),
        }
        for name, shape in matrices.items():
            add(f"{prefix}{name}.weight", *shape)
            if config["add_bias_linear"] or (config["add_qkv_bias"] and "query" in name):
                add(f"{prefix}{name}.bias", shape[0])
    if config.get("post_layer_norm", True):
        add("transformer.encoder.final_layernorm.weight", e)
    add("transformer.output_layer.weight", VOCAB, e)
    return found


def defined_logits(config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """What the published code computes, in float64: logits [tokens, vocab] of one sequence."""
    d, heads = config["kv_channels"], config["num_attention_heads"]
    grouped = config["multi_query_attention"]
    groups = config["multi_query_group_num"] if grouped else heads
    cos, sin = _angles(config, len(tokens))
    hidden_from = torch.full((len(tokens), len(tokens)), -torch.inf, dtype=torch.float64).triu(1)

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, weights[name + ".weight"], weights.get(name + ".bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config["layernorm_epsilon"]).rsqrt() * weights[name + ".weight"]

    def rotated(x: Tensor) -> Tensor:
        pairs, rest = x[..., : d // 2].unflatten(-1, (-1, 2)), x[..., d // 2 :]
        a, b = pairs[..., 0], pairs[..., 1]
        return torch.cat((torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2), rest), -1)

    x = weights["transformer.embedding.word_embeddings.weight"][tokens]
    for j in range(LAYERS):
        prefix = LAYER.format(j)
        qkv = linear(norm(x, prefix + "input_layernorm"), prefix + "self_attention.query_key_value")
        if grouped:
            q, k, v = (part.unflatten(-1, (-1, d)) for part in qkv.split([heads * d, groups * d, groups * d], dim=-1))
        else:
            q, k, v = qkv.unflatten(-1, (heads, 3 * d)).split(d, dim=-1)
        q, k = rotated(q), rotated(k)
        k, v = (part.repeat_interleave(heads // groups, dim=1) for part in (k, v))
        shares = (torch.einsum("qhd,khd->hqk", q, k) * d**-0.5 + hidden_from).softmax(-1)
        x = x + linear(torch.einsum("hqk,khd->qhd", shares, v).flatten(1), prefix + "self_attention.dense")
        gate, up = linear(norm(x, prefix + "post_attention_layernorm"), prefix + "mlp.dense_h_to_4h").chunk(2, -1)
        x = x + linear(functional.silu(gate) * up, prefix + "mlp.dense_4h_to_h")
    if config.get("post_layer_norm", True):
        x = norm(x, "transformer.encoder.final_layernorm")
    return linear(x, "transformer.output_layer")


def _angles(config: Mapping[str, Any], count: int) -> tuple[Tensor, Tensor]:
    """cos, sin [count, 1, dim / 4]. ChatGLM2's `rope_ratio` divides positions, the later ones' multiplies the base."""
    ratio, half = config.get("rope_ratio", 1), config["kv_channels"] // 2
    second = "chatglm2" in config.get("_name_or_path", "")
    base, step = (10_000.0, 1 / ratio) if second else (10_000.0 * ratio, 1.0)
    exponents = torch.arange(0, half, 2, dtype=torch.float64) / half
    angles = torch.outer(torch.arange(count, dtype=torch.float64) * step, base**-exponents)[:, None]
    return angles.cos(), angles.sin()


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    ratio = float(config.get("rope_ratio", 1))
    if "chatglm2" in config.get("_name_or_path", "") and ratio != 1:
        return {"rope_type": "linear", "factor": ratio, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    return {"rope_type": "default", "rope_theta": 1e4 * ratio, "partial_rotary_factor": 0.5}


def _renamed(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {
        "transformer.embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "transformer.encoder.final_layernorm.weight": theirs["model.norm.weight"],
        "transformer.output_layer.weight": theirs["lm_head.weight"],
    }
    for j in range(LAYERS):
        ours, layer = LAYER.format(j), f"model.layers.{j}."
        for kind in ("weight", "bias"):
            parts = [theirs.get(f"{layer}self_attn.{name}_proj.{kind}") for name in "qkv"]
            if parts[0] is not None:
                found[f"{ours}self_attention.query_key_value.{kind}"] = torch.cat(parts)  # type: ignore[arg-type]
        found[ours + "self_attention.dense.weight"] = theirs[layer + "self_attn.o_proj.weight"]
        found[ours + "mlp.dense_h_to_4h.weight"] = theirs[layer + "mlp.gate_up_proj.weight"]
        found[ours + "mlp.dense_4h_to_h.weight"] = theirs[layer + "mlp.down_proj.weight"]
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{ours}{name}.weight"] = theirs[f"{layer}{name}.weight"]
    return found
