"""Every supported architecture against transformers: logits of random small models in float32.

Models are made by transformers with random parameters (biases and norms too), saved, and loaded by our loader.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cellar.models.loader import load
from cellar.models.registry import MODELS, open_model, read_config
from tests.conformance.chatglm import config_of, saved_glm
from tests.models.dense_context import logits_of

TOLERANCE = 1e-4
PROMPT = 45

LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 4.0}


@dataclass(frozen=True)
class Case:
    """A config of transformers, and how it is saved. `context` is the max_model_len of our run."""

    name: str
    kind: str
    config: dict[str, Any]
    shard: str = "1GB"
    context: int | None = None
    layers: int = 3
    windows: tuple[int | None, ...] | None = None


def llama3(**changes: Any) -> dict[str, Any]:
    rope = {"rope_type": "llama3", "rope_theta": 700.0, "factor": 4.0, "original_max_position_embeddings": 16}
    return rope | {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | changes


def yarn(**changes: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 256} | changes


def heads(h: int, kv: int, d: int, hidden: int | None = None) -> dict[str, Any]:
    return {"num_attention_heads": h, "num_key_value_heads": kv, "head_dim": d, "hidden_size": hidden or h * d}


CASES = [
    Case("mha", "llama", heads(4, 4, 16)),
    Case("gqa, narrow heads, sharded", "llama", heads(6, 2, 20), shard="40KB"),
    Case("mqa, wide heads, tied", "llama", heads(3, 1, 80, 36) | {"tie_word_embeddings": True}),
    Case("all biases", "llama", heads(4, 2, 12) | {"attention_bias": True, "mlp_bias": True}),
    Case("llama3 rope", "llama", heads(4, 2, 32) | {"rope_parameters": llama3()}),
    Case("linear rope", "llama", heads(2, 2, 24) | {"rope_parameters": LINEAR}),
    Case("yarn rope", "llama", heads(4, 1, 32) | {"rope_parameters": yarn()}),
    Case(
        "yarn rope, own factors",
        "llama",
        heads(4, 4, 32) | {"rope_parameters": yarn(attention_factor=1.3, beta_fast=8.0, beta_slow=2.0, truncate=False)},
    ),
    Case("yarn rope, mscale", "llama", heads(4, 4, 32) | {"rope_parameters": yarn(mscale=0.7, mscale_all_dim=1.2)}),
    Case(
        "dynamic rope past its training length",
        "llama",
        heads(4, 2, 16) | {"max_position_embeddings": 20, "rope_parameters": DYNAMIC},
        context=PROMPT,
    ),
    Case("tanh gelu", "llama", heads(4, 2, 16) | {"hidden_act": "gelu_pytorch_tanh"}),
    Case("window", "mistral", heads(4, 2, 16) | {"sliding_window": 7}, windows=(7, 7, 7)),
    Case("no window, wide heads", "mistral", heads(2, 1, 40, 48) | {"sliding_window": None}),
    Case("window beyond the context", "mistral", heads(8, 8, 8) | {"sliding_window": 500}, windows=(None,) * 3),
    Case("biases, gqa", "qwen2", heads(6, 2, 16), shard="60KB"),
    Case("tied", "qwen2", heads(7, 1, 8) | {"tie_word_embeddings": True}),
    Case(
        "later layers windowed",
        "qwen2",
        heads(4, 4, 16) | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        windows=(None, 5, 5),
    ),
    Case(
        "layer types",
        "qwen2",
        heads(4, 2, 16)
        | {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        windows=(9, None, 9),
    ),
    Case(
        "window switched off",
        "qwen2",
        heads(4, 2, 16) | {"sliding_window": 3, "max_window_layers": 0},
        windows=(None,) * 3,
    ),
    Case("heads wider than hidden", "qwen3", heads(4, 2, 20, 56)),
    Case("biases, tied, mqa", "qwen3", heads(6, 1, 16, 40) | {"attention_bias": True, "tie_word_embeddings": True}),
    Case(
        "yarn rope, window",
        "qwen3",
        heads(2, 2, 32, 64)
        | {"rope_parameters": yarn(), "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
        windows=(None, None, 6),
    ),
    Case("norms first", "opt", {"hidden_size": 60, "num_attention_heads": 3}, shard="50KB"),
    Case(
        "narrow words, norms last",
        "opt",
        {"hidden_size": 64, "num_attention_heads": 4, "word_embed_proj_dim": 24, "do_layer_norm_before": False},
    ),
    Case("narrow words, norms first", "opt", {"hidden_size": 48, "num_attention_heads": 6, "word_embed_proj_dim": 20}),
    Case(
        "no biases, head of its own, gelu",
        "opt",
        {
            "hidden_size": 80,
            "num_attention_heads": 1,
            "enable_bias": False,
            "tie_word_embeddings": False,
            "activation_function": "gelu",
        },
    ),
    Case(
        "without its last norm", "opt", {"hidden_size": 32, "num_attention_heads": 4, "_remove_final_layer_norm": True}
    ),
    Case("grouped", "chatglm", config_of(4, 2, 16, 64)),
    Case("mqa, heads wider than hidden", "chatglm", config_of(3, 1, 36, 56)),
    Case("16 heads to one", "chatglm", config_of(32, 2, 8, 100)),
    Case("no bias, own k and v of each head", "chatglm", config_of(5, 5, 12, 44, add_qkv_bias=False)),
    Case("stretched base", "chatglm", config_of(4, 2, 16, 64, rope_ratio=9, _name_or_path="glm-4")),
    Case("seven heads to one", "falcon", {"num_attention_heads": 7, "hidden_size": 56}, shard="30KB"),
    Case("71 heads to one", "falcon", {"num_attention_heads": 71, "hidden_size": 284}, layers=2),
    Case(
        "biases, a KV head each, a head of its own",
        "falcon",
        {
            "num_attention_heads": 4,
            "hidden_size": 64,
            "multi_query": False,
            "bias": True,
            "tie_word_embeddings": False,
            "ffn_hidden_size": 52,
        },
    ),
    Case("grouped", "cohere", heads(4, 2, 16) | {"logit_scale": 0.7}),
    Case("mha, biases", "cohere", heads(4, 4, 12) | {"attention_bias": True, "logit_scale": 1.5}),
    Case(
        "mqa, a head of its own, linear rope",
        "cohere",
        heads(6, 1, 8) | {"tie_word_embeddings": False, "rope_parameters": LINEAR, "logit_scale": 1.0},
    ),
    Case("48 heads to one", "gpt_bigcode", {"n_head": 48, "n_embd": 192}, layers=2),
    Case("a KV head each", "gpt_bigcode", {"n_head": 4, "n_embd": 64, "multi_query": False}, shard="30KB"),
    Case(
        "gelu, wide, a head of its own",
        "gpt_bigcode",
        {"n_head": 3, "n_embd": 60, "n_inner": 100, "activation_function": "gelu", "tie_word_embeddings": False},
    ),
    Case("stretched positions", "chatglm", config_of(2, 2, 40, 48, rope_ratio=2.5, _name_or_path="chatglm2-6b-32k")),
]


def saved_model(case: Case, folder: Path) -> Any:
    """A model of transformers with random parameters, saved to `folder`."""
    import transformers

    torch.manual_seed(len(case.name))
    if case.kind == "chatglm":
        return saved_glm(case.config, folder)
    sizes: dict[str, Any] = {"vocab_size": 101, "num_hidden_layers": case.layers, "max_position_embeddings": 64}
    wide = {"opt": "ffn_dim", "falcon": "ffn_hidden_size", "gpt_bigcode": "n_inner"}
    sizes[wide.get(case.kind, "intermediate_size")] = 52
    if case.kind == "gpt_bigcode":
        sizes["n_positions"], sizes["n_layer"] = sizes.pop("max_position_embeddings"), sizes.pop("num_hidden_layers")
    settings = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "attn_implementation": "eager"}
    config = transformers.AutoConfig.for_model(case.kind, **(sizes | settings | case.config))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0.0, 1.4 * weight.shape[1] ** -0.5)
            else:
                weight.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
    model.save_pretrained(folder, max_shard_size=case.shard)
    return model


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}: {case.name}")
def test_logits_equal_those_of_transformers(case: Case, tmp_path: Path) -> None:
    theirs = saved_model(case, tmp_path)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (case.shard != "1GB")
    tokens = torch.randint(0, 101, (PROMPT,))
    with torch.no_grad():
        wanted = theirs(tokens[None]).logits[0]
    assert wanted.std() > 0.3, "logits this flat would hide errors"

    model = open_model(read_config(tmp_path), "float32", max_model_len=case.context)
    weights = load(model.spec, tmp_path)
    whole = logits_of(model, weights, tokens, [PROMPT])
    pieces = logits_of(model, weights, tokens, [1, 16, 7, 20, 1])
    assert (whole - wanted).abs().max() < TOLERANCE
    assert (pieces - wanted).abs().max() < TOLERANCE
    assert model.spec.num_parameters() == sum(p.numel() for p in theirs.parameters())
    if case.windows is not None:
        assert tuple(layer.window for layer in model.spec.layers) == case.windows


def test_every_model_type_has_several_cases() -> None:
    for kind in MODELS:
        assert sum(case.kind == kind for case in CASES) >= 3
