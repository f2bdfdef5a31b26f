"""ChatGLM2 beyond what transformers' GLM covers: against the published definition in float64; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cellar.core.errors import CheckpointError, ConfigError
from cellar.models.loader import LoadedWeights, dummy, load
from cellar.models.registry import open_model, read_config, shipped_config
from tests.conformance.chatglm import config_of, defined_logits, random_weights, save_config, saved_glm
from tests.models.dense_context import logits_of
from tests.runtime.steps.steps import Step, greedy, prompt_of, run, runtime_of, tokens_of

BEYOND = {
    "every head with its own k and v": config_of(3, 1, 12, 40, multi_query_attention=False),
    "biases everywhere": config_of(4, 2, 16, 64, add_bias_linear=True),
    "no bias": config_of(4, 4, 8, 32, add_qkv_bias=False),
    "no last norm": config_of(6, 2, 20, 48, post_layer_norm=False),
    "32k of ChatGLM2": config_of(4, 2, 16, 64, rope_ratio=4, _name_or_path="THUDM/chatglm2-6b-32k"),
    "32k of ChatGLM3": config_of(4, 2, 16, 64, rope_ratio=50, _name_or_path="THUDM/chatglm3-6b-32k"),
}


@pytest.mark.parametrize("name", BEYOND)
def test_logits_equal_those_of_the_definition(name: str, tmp_path: Path) -> None:
    config = BEYOND[name]
    weights = random_weights(config)
    save_config(config, weights, tmp_path)
    tokens = torch.randint(0, 101, (40,), generator=torch.Generator().manual_seed(5))
    wanted = defined_logits(config, weights, tokens).float()
    assert wanted.std() > 0.3, "logits this flat would hide errors"
    model = open_model(read_config(tmp_path), "float32")
    loaded = load(model.spec, tmp_path)
    for pieces in ([40], [1, 16, 7, 15, 1]):
        assert (logits_of(model, loaded, tokens, pieces) - wanted).abs().max() < 1e-4
    assert model.spec.num_parameters() == sum(weight.numel() for weight in weights.values())


def test_the_definition_is_that_of_transformers_glm(tmp_path: Path) -> None:
    """One oracle checks the other: the same weights through both."""
    from safetensors.torch import load_file

    config = config_of(4, 2, 16, 64, rope_ratio=3, _name_or_path="THUDM/chatglm2-6b-32k")
    torch.manual_seed(1)
    theirs = saved_glm(config, tmp_path)
    weights = {name: tensor.double() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    tokens = torch.randint(0, 101, (30,))
    with torch.no_grad():
        wanted = theirs(tokens[None]).logits[0].double()
    assert (defined_logits(config, weights, tokens) - wanted).abs().max() < 1e-4


def test_the_shipped_config_is_chatglm2_6b() -> None:
    config = shipped_config("ChatGLM2-6B")
    assert config is not None
    spec = open_model(config, "bfloat16").spec
    assert spec.num_parameters() == 6_243_584_000
    assert spec.kv.nbytes_per_token() == 28 * 2 * 2 * 128 * 2
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads) == (28, 32, 2)
    assert spec.rope is not None
    assert (spec.rope.rotary_dim, spec.rope.theta, spec.max_position) == (64, 1e4, 32768)
    with pytest.raises(ConfigError, match="from 2 to 32768"):
        open_model(config, "bfloat16", max_model_len=32769)


def test_rows_are_put_in_order_in_any_dtype_and_biases_too(tmp_path: Path) -> None:
    """The pairs (0, 1) and (2, 3) of each q and k head become halves; v stays."""
    config = config_of(2, 1, 8, 4)
    weights = random_weights(config)
    name = "transformer.encoder.layers.1.self_attention.query_key_value."
    weights[name + "weight"] = torch.arange(32.0).repeat_interleave(4).view(32, 4).double()
    weights[name + "bias"] = torch.arange(32.0).double()
    save_config(config, weights, tmp_path)
    order = [h + i for h in (0, 8, 16) for i in (0, 2, 1, 3, 4, 5, 6, 7)] + list(range(24, 32))
    layer = load(open_model(config, "bfloat16").spec, tmp_path).layers[1]
    assert layer["qkv_bias"].tolist() == order
    assert layer["qkv"][:, 3].tolist() == order


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device")
def test_the_device_gives_the_tokens_of_the_cpu() -> None:
    """Half of each head rotated, 16 heads to one of K and V."""
    model = open_model(config_of(32, 2, 64, 128), "float32", 16)
    weights = dummy(model.spec, seed=3)
    for tensor in (*weights.head.values(), *weights.embedding.values()):
        tensor.mul_(4.0)
    there = LoadedWeights(
        {name: t.cuda() for name, t in weights.embedding.items()},
        [{name: t.cuda() for name, t in layer.items()} for layer in weights.layers],
        {name: t.cuda() for name, t in weights.head.items()},
    )
    prompt = prompt_of(40, 1)
    wanted = greedy(model, weights, prompt, 3)
    runtime = runtime_of(model, there, device="cuda:0")
    steps = [Step(0).open(0).place(0, [0, 1, 2]).prompt(0, prompt), Step(1).decode(0, 40), Step(2).decode(0, 41)]
    assert [token for result in run(runtime, *steps) for token in tokens_of(result)] == wanted
    runtime.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ({"rmsnorm": False}, "rmsnorm in config.json is False"),
        ({"original_rope": False}, "original_rope"),
        ({"quantization_bit": 4}, "quantization_bit in config.json is 4"),
        ({"pre_seq_len": 16}, "pre_seq_len"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"position_encoding_2d": True}, "the first ChatGLM is another model"),
        ({"rope_ratio": 16}, "rope_ratio in config.json is 16, which divides positions in ChatGLM2"),
        ({"multi_query_group_num": 3}, "num_attention_heads 4 must be a multiple of it"),
        ({"kv_channels": 18}, "multiple of 4"),
        ({"architectures": ["ChatGLMForSequenceClassification"]}, "ChatGLMForSequenceClassification is not supported"),
        ({"num_layers": 0}, "num_layers"),
    ],
)
def test_what_would_change_the_function_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_model(config_of(4, 2, 16, 64) | changes, "float32")


def test_what_changes_nothing_is_read() -> None:
    plain = open_model(config_of(4, 2, 16, 64), "float32").spec
    more = {"architectures": ["ChatGLMForConditionalGeneration"], "pre_seq_len": None, "quantization_bit": 0}
    assert open_model(config_of(4, 2, 16, 64) | more, "float32").spec == plain
