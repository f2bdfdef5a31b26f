"""Specs of the models: known sizes of well-known models, defaults, both spellings, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from cellar.core.errors import CheckpointError, ConfigError
from cellar.core.specs import ModelSpec
from cellar.models.registry import MODELS, auto_dtype, open_model, shipped_config, shipped_names

BASE: dict[str, dict[str, Any]] = {
    kind: {
        "model_type": kind,
        "architectures": [module.ARCHITECTURE],
        "vocab_size": 101,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
    }
    for kind, module in MODELS.items()
}


def spec_of(kind: str, max_model_len: int | None = None, **changes: Any) -> ModelSpec:
    return open_model(BASE[kind] | changes, "float32", max_model_len=max_model_len).spec


def shipped(name: str, dtype: str = "bfloat16") -> ModelSpec:
    config = shipped_config(name)
    assert config is not None
    return open_model(config, dtype).spec


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        ("llama-2-7b", 6_738_415_616, 2 * 32 * 32 * 128 * 2),
        ("llama-2-13b", 13_015_864_320, 2 * 40 * 40 * 128 * 2),
        ("llama-3-8b", 8_030_261_248, 131_072),
        ("llama-3.2-1b", 1_235_814_400, 2 * 16 * 8 * 64 * 2),
        ("mistral-7b", 7_241_732_096, 131_072),
        ("qwen2.5-7b", 7_615_616_512, 57_344),
        ("qwen3-8b", 8_190_735_360, 147_456),
        ("chatglm2-6b", 6_243_584_000, 28_672),
        ("opt-6.7b", 6_658_473_984, 2 * 32 * 4096 * 2),
        ("opt-30b", 29_974_540_288, 2 * 48 * 7168 * 2),
        ("opt-175b", 174_604_468_224, 2 * 96 * 12288 * 2),
        ("falcon-7b", 6_921_720_704, 8_192),
        ("starcoder", 15_517_456_384, 20_480),
        ("command-r", 34_980_831_232, 1_310_720),
    ],
)
def test_sizes_of_shipped_models(name: str, parameters: int, kv_bytes: int) -> None:
    spec = shipped(name)
    assert spec.num_parameters() == parameters
    assert spec.nbytes() == 2 * parameters
    assert spec.kv.nbytes_per_token() == kv_bytes
    assert name in shipped_names()


def test_flops_and_bytes_of_a_step_by_hand() -> None:
    spec = shipped("llama-3-8b")
    matrices = 32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336)
    head = 128256 * 4096
    assert spec.flops(1, 1024, 1) == 2 * (matrices + head) + 32 * 4 * 32 * 128 * 1024
    norms = (2 * 32 + 1) * 4096
    assert spec.step_nbytes(1024) == 2 * (matrices + head + norms) + 1024 * 131_072

    opt = spec_of("opt", word_embed_proj_dim=24, do_layer_norm_before=False, ffn_dim=40)
    layer = 4 * 32 * 32 + 2 * 32 * 40
    assert opt.flops(3, 10, 2) == 3 * (2 * (2 * layer + 24 * 32) + 2 * 4 * 32 * 10) + 2 * 2 * (24 * 32 + 101 * 24)
    everything = opt.num_parameters() - (64 + 2) * 32  # the tied table is read as the head, positions are not
    assert opt.step_nbytes(0) == 4 * everything


def test_parameters_follow_the_formulas_in_the_files() -> None:
    e, f, h, k, d, layers, v = 32, 48, 4, 2, 8, 2, 101
    decoder = layers * (e * d * (2 * h + 2 * k) + 3 * e * f + 2 * e) + v * e + e
    sizes = {"intermediate_size": f, "num_key_value_heads": k}
    assert spec_of("llama", **sizes).num_parameters() == decoder + v * e
    assert spec_of("llama", tie_word_embeddings=True, **sizes).num_parameters() == decoder
    assert spec_of("qwen2", **sizes).num_parameters() == decoder + v * e + layers * d * (h + 2 * k)
    assert spec_of("qwen3", head_dim=d, **sizes).num_parameters() == decoder + v * e + layers * 2 * d
    opt = layers * (4 * e * e + 2 * e * f + 9 * e + f) + (64 + 2) * e
    assert spec_of("opt", ffn_dim=f).num_parameters() == opt + v * e + 2 * e
    narrow = spec_of("opt", ffn_dim=f, word_embed_proj_dim=20, do_layer_norm_before=False)
    assert narrow.num_parameters() == opt + v * 20 + 2 * e * 20


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "chatglm"])
def test_missing_fields_have_the_defaults_of_transformers(kind: str) -> None:
    import transformers

    theirs = transformers.AutoConfig.for_model(kind)
    ours = open_model({"model_type": kind}, "float32").spec
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    shared = getattr(theirs, "multi_query", False)
    assert ours.num_kv_heads == (1 if shared else getattr(theirs, "num_key_value_heads", theirs.num_attention_heads))
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    wide = (getattr(theirs, name, None) for name in ("intermediate_size", "ffn_dim", "ffn_hidden_size"))
    assert ours.intermediate_size == next((size for size in wide if size), 4 * theirs.hidden_size)
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.tied_head == theirs.tie_word_embeddings
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    window = getattr(theirs, "sliding_window", None)
    assert {layer.window for layer in ours.layers} == {window}
    norms = (getattr(theirs, name, None) for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"))
    assert ours.options["norm_eps"] == next((eps for eps in norms if eps), 1e-5)
    if ours.rope is not None:
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


def test_both_spellings_of_the_rotary_embedding_mean_the_same() -> None:
    stretch = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    old = spec_of("llama", rope_theta=5e5, rope_scaling={"type": "llama3"} | stretch)
    new = spec_of("llama", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5} | stretch)
    assert old.rope == new.rope
    assert old.rope is not None
    assert (old.rope.kind, old.rope.theta, old.rope.scaling) == ("llama3", 5e5, stretch)
    old, new = (
        spec_of("llama", rope_theta=7.0, rope_scaling=None),
        spec_of("llama", rope_parameters={"rope_theta": 7.0}),
    )
    assert old.rope == new.rope


@pytest.mark.parametrize(
    ("scaling", "default", "limit"),
    [
        (None, 64, 64),
        ({"type": "linear", "factor": 4.0}, 64, 256),
        ({"type": "dynamic", "factor": 2.0}, 64, 128),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64, 64),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
            },
            64,
            64,
        ),
    ],
)
def test_the_context_that_a_model_allows(scaling: dict[str, Any] | None, default: int, limit: int) -> None:
    assert spec_of("llama", rope_scaling=scaling).max_position == default
    spec = spec_of("llama", max_model_len=limit, rope_scaling=scaling)
    assert spec.rope is not None
    assert spec.max_position == spec.rope.max_position == limit
    assert spec_of("llama", max_model_len=5, rope_scaling=scaling).max_position == 5
    with pytest.raises(ConfigError, match=f"from 2 to {limit}"):
        spec_of("llama", max_model_len=limit + 1, rope_scaling=scaling)


def test_the_context_of_opt_is_its_table_of_positions() -> None:
    spec = spec_of("opt", max_model_len=10)
    assert spec.max_position == 10
    assert spec.embedding[1].shape == (66, 32)
    with pytest.raises(ConfigError, match="from 2 to 64"):
        spec_of("opt", max_model_len=65)


def test_layers_of_two_kinds_are_paged_together() -> None:
    mixed = spec_of("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert [layer.window for layer in mixed.layers] == [None, 8]
    assert [(g.kind, g.layers) for g in mixed.kv.groups] == [("full", (0, 1))]
    same = spec_of("mistral", sliding_window=8)
    assert [(g.kind, g.window) for g in same.kv.groups] == [("window", 8)]
    assert {layer.kv_group for layer in same.layers} == {"window"}
    assert [layer.window for layer in spec_of("mistral", max_model_len=8, sliding_window=8).layers] == [None, None]


def test_end_symbols_may_be_one_several_or_none() -> None:
    assert spec_of("llama", eos_token_id=[5, 6], bos_token_id=None).eos_token_ids == (5, 6)
    assert spec_of("llama", eos_token_id=None).eos_token_ids == ()
    assert spec_of("llama").eos_token_ids == (2,)
    assert spec_of("llama", bos_token_id=None).bos_token_id is None


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "mamba2"}, "model_type 'mamba2'.* supported are llama, mistral, qwen2, qwen3, opt"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification is not supported"),
    ("llama", {"rope_scaling": {"type": "longrope", "factor": 4.0}}, "type 'longrope' .* supported are default"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "factor of the rotary embedding .* is None"),
    ("llama", {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "not one per layer type"),
    ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, "type 'mrope' is not supported"),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "part of each head"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor in config.json is 0.5"),
    ("llama", {"hidden_act": "xielu"}, "hidden_act in config.json is 'xielu'; supported are silu"),
    ("opt", {"activation_function": "quick_gelu"}, "activation_function"),
    ("qwen3", {"quantization_config": {"quant_method": "gptq"}}, "bits in the quantization config"),
    ("qwen3", {"quantization_config": "gptq"}, "quantization_config in config.json is 'gptq'; it must be an object"),
    ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping in config.json is 50.0"),
    ("llama", {"residual_multiplier": 0.2}, "residual_multiplier"),
    ("qwen2", {"is_causal": False}, "is_causal"),
    ("llama", {"sliding_window": 16}, "model_type llama has no window"),
    ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
    ("qwen2", {"layer_types": ["full_attention"]}, "for 2 layers"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "need use_sliding_window"),
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
    ("opt", {"num_attention_heads": 5}, "not a multiple of num_attention_heads"),
    ("llama", {"num_attention_heads": 5}, "not a multiple of num_attention_heads 5; give head_dim, too"),
    ("llama", {"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
    ("llama", {"head_dim": 9}, "needs an even one"),
    ("falcon", {"new_decoder_architecture": True}, "new_decoder_architecture in config.json is True; of Falcon the 7B"),
    ("falcon", {"alibi": True}, "alibi in config.json is True"),
    ("falcon", {"parallel_attn": False}, "parallel_attn in config.json is False"),
    ("falcon", {"num_attention_heads": 5}, "not a multiple of num_attention_heads 5"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
    ("cohere", {"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
    ("cohere", {"logit_scale": "x"}, "logit_scale"),
    ("gpt_bigcode", {"scale_attn_weights": False}, "only scaled scores"),
    ("gpt_bigcode", {"n_head": 5, "n_embd": 32}, "n_embd 32 in config.json is not a multiple of n_head 5"),
    ("llama", {"vocab_size": "many"}, "vocab_size in config.json is 'many'; it must be a whole number"),
    ("llama", {"rms_norm_eps": -1}, "rms_norm_eps"),
    ("llama", {"eos_token_id": "</s>"}, "eos_token_id"),
    ("llama", {"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "auto_map"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_would_change_the_function_is_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        spec_of(kind, **changes)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


DAMAGE = (None, -1, 0, 1.5, True, "x", "", [], [1], {}, {"a": 1}, {"rope_type": [1]}, {"type": 3, "factor": "x"})


@pytest.mark.parametrize("kind", MODELS)
def test_a_damaged_config_is_read_or_refused_in_one_sentence(kind: str) -> None:
    """Each field in turn has a value of any type."""
    more = {"rope_scaling", "rope_parameters", "rope_theta", "layer_types", "sliding_window", "auto_map", "hidden_act"}
    more |= {"activation_function", "head_dim", "eos_token_id", "tie_word_embeddings", "rope_ratio", "_name_or_path"}
    for field in more | BASE[kind].keys():
        for value in DAMAGE:
            said = "."
            try:
                spec_of(kind, **{field: value}).nbytes()
            except (CheckpointError, ConfigError) as error:
                said = str(error)
            assert said.endswith("."), field


def test_neutral_values_and_foreign_fields_are_no_reason_to_refuse() -> None:
    spec_of("llama", attention_dropout=0.1, pretraining_tp=2, unsloth_version="1")
    spec_of("llama", logit_scale=1.0, quantization_config=None)
    spec_of("llama", architectures=None)


def test_auto_dtype() -> None:
    half, brain, old = {"torch_dtype": "float16"}, {"dtype": "bfloat16"}, {"model_type": "opt"}
    assert [auto_dtype(c, "cuda") for c in (half, brain, old)] == ["float16", "bfloat16", "float32"]
    assert [auto_dtype(c, "cpu", False) for c in (half, brain, old)] == ["float32"] * 3
    assert [auto_dtype(c, "cpu", True) for c in (half, brain, old)] == ["float32", "bfloat16", "float32"]
    assert auto_dtype(brain, "cpu") in ("float32", "bfloat16")
