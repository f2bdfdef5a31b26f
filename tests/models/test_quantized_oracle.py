"""Quantized checkpoints against transformers, which reads them by compressed-tensors or its own code for FP8.

`test_quantized.py` compares with matrices that the tests themselves dequantized; here the reading is others', too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

from cellar.models.loader import load
from cellar.models.registry import open_model, read_config
from cellar.quant.weight import on_cpu
from tests.models.dense_context import logits_of
from tests.models.test_quantized import (
    CASES,
    FP8,
    TOKENS,
    Layout,
    compressed,
    fp8,
    grouped,
    groups,
    int8_rows,
    opened,
    same,
    with_inputs,
    written,
)

DYNAMIC = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True}
FP8_BLOCKS = FP8 | {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def no_input_scales(layout: Layout) -> Layout:
    """Dynamic checkpoints have none."""

    def make(out: int, columns: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        found, matrix = layout(out, columns, seed)
        return {suffix: t for suffix, t in found.items() if suffix != ".input_scale"}, matrix

    return make


W8A8 = with_inputs(groups("int-quantized", num_bits=8, strategy="channel"), DYNAMIC)
READ: dict[str, tuple[dict[str, Any], Layout]] = {
    "compressed 4 bits": (grouped(4, 128), compressed(4, 128)),
    "compressed 8 bits": CASES["compressed 8 bits"],
    "compressed 8 bits, dynamic activations": (W8A8, int8_rows),
    "compressed fp8, rows": (CASES["compressed fp8, rows"][0], no_input_scales(fp8("rows"))),
    "compressed fp8, tensor": (CASES["compressed fp8, tensor"][0], no_input_scales(fp8((1,)))),
    "compressed fp8, activations by token": (
        CASES["compressed fp8, activations by token"][0],
        no_input_scales(fp8("rows")),
    ),
    "fp8, blocks": (FP8_BLOCKS, no_input_scales(fp8("blocks", ".weight_scale_inv"))),
}


def rounds_by_128(module: torch.nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A linear module's tokens as transformers' own kernel for a GPU rounds them (`act_quant` there)."""
    groups = given[0].unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 448.0
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2), *given[1:]


def theirs(directory: Path, dequantize: bool) -> Tensor:
    """The logits of transformers, float32; dequantized, but with tokens rounded by groups of 128."""
    more = {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)} if dequantize else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **more)
    if dequantize:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.register_forward_pre_hook(rounds_by_128)
    with torch.inference_mode():
        found: Tensor = model(TOKENS[None]).logits[0].float()
    return found


@pytest.mark.parametrize("name", READ)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    config, layout = READ[name]
    written(tmp_path, config | {"quantization_status": "compressed"}, layout)
    wanted = theirs(tmp_path, dequantize=config["quant_method"] == "fp8")
    assert wanted.std() > 0.3, "logits this flat would hide errors"
    unrounded = logits_of(*opened(tmp_path / "dense"), TOKENS, [24])
    rounds = name in ("compressed fp8, activations by token", "fp8, blocks")
    same(logits_of(*opened(tmp_path), TOKENS, [20, 1, 3]), wanted, unrounded if rounds else None)


def test_rounded_activations_are_theirs_in_the_form_of_a_run(tmp_path: Path) -> None:
    """Prepared as a run has them; the dequantized model's logits are far away."""
    twin = written(tmp_path, W8A8 | {"quantization_status": "compressed"}, int8_rows)
    model = open_model(read_config(tmp_path), "float32")
    weights = load(model.spec, tmp_path, transform=lambda _, w: w if isinstance(w, Tensor) else on_cpu(w))
    wanted = theirs(tmp_path, dequantize=False)
    torch.testing.assert_close(logits_of(model, weights, TOKENS, [20, 1, 3]), wanted, atol=1e-4, rtol=1e-4)
    assert (logits_of(*opened(twin), TOKENS, [24]) - wanted).abs().max() > 0.02


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 64)])
def test_packed_zero_points_are_where_compressed_tensors_has_them(bits: int, group: int) -> None:
    """By the module alone: transformers 5.23 expects them unpacked, and takes other numbers instead."""
    found, wanted = compressed(bits, group, symmetric=False)(96, 256, 1)
    arguments = QuantizationArgs(num_bits=bits, strategy="group", group_size=group, symmetric=False)
    module = {suffix.removeprefix("."): t.float() if t.is_floating_point() else t for suffix, t in found.items()}
    read = PackedQuantizationCompressor.decompress(module, QuantizationScheme(targets=["Linear"], weights=arguments))
    torch.testing.assert_close(read["weight"], wanted, atol=1e-6, rtol=1e-6)


def test_of_several_targets_the_closest_decides(tmp_path: Path) -> None:
    """Whatever the order of groups: a name before an expression, and that before a class."""
    four, eight = compressed(4, 32), compressed(8, 0)
    weights = {"type": "int", "symmetric": True, "dynamic": False}
    small = weights | {"num_bits": 4, "strategy": "group", "group_size": 32}
    large = weights | {"num_bits": 8, "strategy": "channel"}
    config = grouped(4, 32) | {
        "quantization_status": "compressed",
        "config_groups": {
            "most": {"targets": ["Linear"], "weights": small},
            "downs": {"targets": ["re:.*down_proj"], "weights": large},
            "one": {"targets": ["model.layers.1.mlp.down_proj"], "weights": small},
        },
    }

    def layout(out: int, columns: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        is_down = (out, columns) == (128, 256)
        return (eight if is_down and seed < 100 else four)(out, columns, seed)

    written(tmp_path, config, layout)
    wanted = theirs(tmp_path, dequantize=False)
    model, weights_there = opened(tmp_path)
    torch.testing.assert_close(logits_of(model, weights_there, TOKENS, [24]), wanted, atol=1e-4, rtol=1e-4)
    downs = [next(t for t in layer.tensors if t.name == "down").formats[0].name for layer in model.spec.layers]
    assert downs == ["int8", "int4"]
