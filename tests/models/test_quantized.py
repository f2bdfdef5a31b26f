"""Quantized checkpoints as tools write them, packed here by their documented layouts, number by number.

What is loaded must compute what the dequantized matrices compute, in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from cellar.core.errors import CheckpointError, ConfigError
from cellar.core.formats import Format
from cellar.core.specs import TensorSpec
from cellar.models.fingerprint import of_checkpoint, of_quantized
from cellar.models.loader import LoadedWeights, dummy, load
from cellar.models.model import Model
from cellar.models.quantization import is_linear
from cellar.models.registry import open_model, read_config
from cellar.models.sharding import shard
from cellar.ops.linear.weight import LinearWeight
from cellar.quant.activations import rounded
from cellar.quant.weight import QuantizedWeight, StackedWeight
from tests.conformance.chatglm import config_of
from tests.models.dense_context import logits_of
from tests.models.fake_comm import ThreadComm, on_ranks

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TOKENS = torch.randint(0, 101, (24,), generator=torch.Generator().manual_seed(1))
Array = NDArray[Any]


def words(codes: Array, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """codes [r, n] -> int32 [r, n bits / 32]: element order[i] of each word at bits `bits` i."""
    count = 32 // bits
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % count)))
    packed = np.zeros((len(codes), codes.shape[1] // count), np.uint32)
    for i in range(count):
        packed |= codes[:, (order[i] if order else i) :: count].astype(np.uint32) << np.uint32(bits * i)
    return torch.from_numpy(packed.view(np.int32).copy())


class Packed:
    """Random codes, zero points and scales of a matrix, and what they stand for. Rows and groups differ in size."""

    def __init__(self, out: int, columns: int, bits: int, group: int, seed: int) -> None:
        dice = np.random.default_rng(seed)
        self.codes = dice.integers(0, 1 << bits, (out, columns))
        groups = columns // group
        self.zeros = dice.integers(1, 1 << bits, (out, groups))
        self.scales = (dice.uniform(0.2, 2, (out, groups)) / columns**0.5 / (1 << bits)).astype(np.float16)
        self.order = np.arange(columns) // group

    def dense(self) -> Tensor:
        spread = self.scales.astype(np.float32)[:, self.order]
        return torch.from_numpy((self.codes - self.zeros[:, self.order]).astype(np.float32) * spread)

    def half(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array))


# A layout: (out, in, seed) -> the tensors of a module by suffix, and the matrix that they stand for.
Layout = Callable[[int, int, int], tuple[dict[str, Tensor], Tensor]]


def awq(group: int) -> Layout:
    def make(out: int, columns: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        p = Packed(out, columns, 4, group, seed)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            ".qweight": words(p.codes.T, 4, order),
            ".qzeros": words(p.zeros.T, 4, order),
            ".scales": p.half(p.scales.T),
        }, p.dense()

    return make


def gptq(
    bits: int, group: int, *, lowered: bool, act_order: bool = False, bias: bool = False, symmetric: bool = False
) -> Layout:
    def make(out: int, columns: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        p = Packed(out, columns, bits, group or columns, seed)
        if symmetric:
            p.zeros[:] = 1 << (bits - 1)
        if act_order:
            p.order = np.random.default_rng(seed).permutation(p.order)
        zeros = p.zeros - 1 if lowered else p.zeros
        found = {
            ".qweight": words(p.codes, bits).T.contiguous(),
            ".qzeros": words(zeros.T, bits),
            ".scales": p.half(p.scales.T),
            ".g_idx": torch.from_numpy(p.order.astype(np.int32)),
        }
        return found | ({".bias": torch.zeros(out)} if bias else {}), p.dense()

    return make


def compressed(bits: int, group: int, *, symmetric: bool = True, act_order: bool = False) -> Layout:
    def make(out: int, columns: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        p = Packed(out, columns, bits, group or columns, seed)
        if symmetric:
            p.zeros[:] = 1 << (bits - 1)
        found = {".weight_scale": p.half(p.scales), ".weight_shape": torch.tensor([out, columns])}
        if act_order:
            p.order = np.random.default_rng(seed).permutation(p.order)
            found[".weight_g_idx"] = torch.from_numpy(p.order.astype(np.int32))
        if not symmetric:
            found[".weight_zero_point"] = words(p.zeros.T, bits).T.contiguous()
        return found | {".weight_packed": words(p.codes, bits)}, p.dense()

    return make


def int8_rows(out: int, columns: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (out, columns), generator=generator, dtype=torch.int8)
    scale = (0.5 + torch.rand((out, 1), generator=generator)) / 73 / columns**0.5
    return {".weight": codes, ".weight_scale": scale.bfloat16()}, codes.float() * scale.bfloat16().float()


def fp8(scale_shape: tuple[int, ...] | str, suffix: str = ".weight_scale") -> Layout:
    """`scale_shape`: of one scale as it is written, or `rows`, or `blocks`."""

    def make(out: int, columns: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(seed)
        codes = (100 * torch.randn((out, columns), generator=generator)).to(torch.float8_e4m3fn)
        blocks = (-(-out // 128), -(-columns // 128))
        shape = {"rows": (out, 1), "blocks": blocks}[scale_shape] if isinstance(scale_shape, str) else scale_shape
        scale = (0.5 + torch.rand(shape, generator=generator)) / 100 / columns**0.5
        spread = scale
        if scale_shape == "blocks":
            spread = scale.repeat_interleave(128, 0)[:out].repeat_interleave(128, 1)[:, :columns]
        found = {".weight": codes, suffix: scale, ".input_scale": torch.tensor(0.5)}
        return found, codes.float() * (spread if spread.dim() == 2 else spread.reshape(()))

    return make


def mxfp4(out: int, columns: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    dice = np.random.default_rng(seed)
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    codes = dice.integers(0, 16, (out, columns))
    exponents = dice.integers(121, 124, (out, columns // 32))
    dense = numbers[codes] * np.exp2(exponents - 127.0).astype(np.float32).repeat(32, 1)
    blocks = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8).reshape(out, columns // 32, 16)
    scales = exponents.astype(np.uint8)
    return {".weight_blocks": torch.from_numpy(blocks), ".weight_scales": torch.from_numpy(scales)}, torch.from_numpy(
        dense
    )


def groups(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, "dynamic": False} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def grouped(bits: int, size: int, **more: Any) -> dict[str, Any]:
    return groups("pack-quantized", num_bits=bits, strategy="group", group_size=size, **more)


def with_inputs(config: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """With what is said of activations."""
    return config | {"config_groups": {"group_0": config["config_groups"]["group_0"] | {"input_activations": inputs}}}


FLOAT_TOKENS = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token", "symmetric": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
CASES: dict[str, tuple[dict[str, Any], Layout]] = {
    "awq 32": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "GEMM"}, awq(32)),
    "awq 128": ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, awq(128)),
    "gptq 64": (GPTQ, gptq(4, 64, lowered=True)),
    "gptq with biases of zeros": (GPTQ, gptq(4, 64, lowered=True, bias=True)),
    "gptq act-order": (GPTQ | {"desc_act": True}, gptq(4, 64, lowered=True, act_order=True)),
    "gptq symmetric": (GPTQ | {"sym": True}, gptq(4, 64, lowered=True, symmetric=True)),
    "gptq 8 bits, v2, symmetric": (
        GPTQ | {"sym": True, "checkpoint_format": "gptq_v2", "bits": 8},
        gptq(8, 64, lowered=False, symmetric=True),
    ),
    "gptq rows": (GPTQ | {"group_size": -1}, gptq(4, 0, lowered=True)),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2", "group_size": 32}, gptq(4, 32, lowered=False)),
    "gptq 8 bits": (GPTQ | {"bits": 8, "group_size": 128}, gptq(8, 128, lowered=True)),
    "gptq 8 bits, v2": (GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"}, gptq(8, 64, lowered=False)),
    "compressed 4 bits": (grouped(4, 128), compressed(4, 128)),
    "compressed 4 bits, zero points": (grouped(4, 32, symmetric=False), compressed(4, 32, symmetric=False)),
    "compressed act-order": (grouped(4, 32, actorder="group"), compressed(4, 32, act_order=True)),
    "compressed 8 bits": (groups("pack-quantized", num_bits=8, strategy="channel"), compressed(8, 0)),
    "compressed 8 bits, plain": (
        groups("int-quantized", num_bits=8, strategy="channel", group_size=None)
        | {"kv_cache_scheme": None, "sparsity_config": {"format": "dense"}},
        int8_rows,
    ),
    "compressed fp8, rows": (groups("float-quantized", type="float", num_bits=8, strategy="channel"), fp8("rows")),
    "compressed fp8, tensor": (groups("float-quantized", type="float", num_bits=8, strategy="tensor"), fp8((1,))),
    "compressed fp8, activations by token": (
        with_inputs(groups("float-quantized", type="float", num_bits=8, strategy="channel"), FLOAT_TOKENS),
        fp8("rows"),
    ),
    "fp8, tensor": (FP8, fp8(())),
    "fp8, rows": (FP8 | {"activation_scheme": "dynamic"}, fp8("rows")),
    "fp8, blocks": (
        FP8 | {"weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        fp8("blocks", ".weight_scale_inv"),
    ),
    "mxfp4": ({"quant_method": "mxfp4"}, mxfp4),
}


def written(directory: Path, quantization: Mapping[str, Any], layout: Layout, **changes: Any) -> Path:
    """A quantized checkpoint in `directory`, and its dequantized twin in `directory`/dense, which is returned."""
    config = CONFIG | changes
    generator = torch.Generator().manual_seed(3)
    stored: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for number, tensor in enumerate(open_model(config, "float32").spec.tensors()):
        for place, part in enumerate(tensor.stored_parts()):
            if is_linear(tensor) and tensor.name != "lm_head":
                found, matrix = layout(*part.shape, 10 * number + place)
                stored |= {part.name.removesuffix(".weight") + suffix: t for suffix, t in found.items()}
                dense[part.name] = matrix
                continue
            scale = part.shape[-1] ** -0.5 if len(part.shape) == 2 else 0.1
            made = scale * torch.randn(part.shape, generator=generator) + float(tensor.name.endswith("norm"))
            stored[part.name] = dense[part.name] = made
    twin = directory / "dense"
    twin.mkdir()
    for folder, tensors, about in (
        (directory, stored, config | {"quantization_config": quantization}),
        (twin, dense, config),
    ):
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(about))
    return twin


def opened(directory: Path, dtype: str = "float32") -> tuple[Model, LoadedWeights]:
    model = open_model(read_config(directory), dtype)
    return model, load(model.spec, directory)


class Rounding(LinearWeight):
    """A plain matrix behind tokens that are rounded as a format wants them."""

    def __init__(self, matrix: Tensor, format: Format) -> None:
        super().__init__(*matrix.shape)
        self.matrix, self.format = matrix, format

    nbytes = 0

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(rounded(x, self.format).to(x.dtype), self.matrix, bias)

    def dense(self) -> Tensor:
        return self.matrix

    def remade(self, matrix: Tensor) -> Rounding:
        return Rounding(matrix, self.format)


def rounding(model: Model, weights: LoadedWeights) -> LoadedWeights:
    """Plain weights that round activations where the model's formats say so."""

    def changed(tensors: Sequence[TensorSpec], found: Mapping[str, Any]) -> dict[str, Any]:
        kinds = {t.name: t.formats[0] for t in tensors if t.formats and t.formats[0].activations}
        return {name: Rounding(w, kinds[name]) if name in kinds else w for name, w in found.items()}

    layers = [changed(spec.tensors, layer) for spec, layer in zip(model.spec.layers, weights.layers, strict=True)]
    return LoadedWeights(weights.embedding, layers, changed(model.spec.head, weights.head))


def same(found: Tensor, wanted: Tensor, unrounded: Tensor | None = None) -> None:
    """The same up to float32; where tokens are rounded to e4m3, up to a number here and there that lay between two
    codes, and much closer than without the rounding.
    """
    if unrounded is None:
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    else:
        error, without = (float((found - of).norm() / wanted.norm()) for of in (wanted, unrounded))
        assert error < 0.012 < 0.02 < without


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_the_dequantized_model(name: str, tmp_path: Path) -> None:
    """Behind activations that are rounded where the format says so."""
    twin = written(tmp_path, *CASES[name])
    model, weights = opened(tmp_path)
    plain, dense = opened(twin)
    wanted = logits_of(plain, rounding(model, dense), TOKENS, [24])
    rounds = [format.activations for t in model.spec.layers[0].tensors for format in t.formats[:1]]
    assert set(rounds) == {"fp8" if name.startswith("fp8") or "activations" in name else ""}
    assert wanted.std() > 0.3, "logits this flat would hide errors"
    unrounded = logits_of(plain, dense, TOKENS, [24]) if rounds == ["fp8"] * 4 else None
    same(logits_of(model, weights, TOKENS, [20, 1, 3]), wanted, unrounded)
    for layer in weights.layers:
        assert all(isinstance(layer[matrix], (QuantizedWeight, StackedWeight)) for matrix in ("qkv", "gate_up", "down"))
    bits = 8 if "8 bits" in name or "fp8" in name else 4
    elements = sum(t.size for t in model.spec.layers[0].tensors if is_linear(t))
    kept = sum(weight.nbytes for n, weight in weights.layers[0].items() if not n.endswith("norm"))
    assert elements * bits / 8 <= kept < elements * bits / 8 * 1.35
    # The spec says about what is in memory: zero points that are always there, orders of columns not counted.
    assert abs(sum(t.nbytes for t in model.spec.layers[0].tensors if is_linear(t)) - kept) < 0.2 * kept


@pytest.mark.parametrize(
    "name", ["awq 32", "gptq 64", "gptq act-order", "compressed act-order", "compressed fp8, rows", "mxfp4"]
)
def test_ranks_read_their_share(name: str, tmp_path: Path) -> None:
    twin = written(tmp_path, *CASES[name])
    model = open_model(read_config(tmp_path), "float32")
    wanted = logits_of(*opened(twin), TOKENS, [24])

    def rank_logits(rank: int, comm: ThreadComm) -> Tensor:
        part = type(model)(shard(model.spec, rank, 2))  # type: ignore[call-arg]
        return logits_of(part, load(part.spec, tmp_path), TOKENS, [24], comm)

    for logits in on_ranks(2, rank_logits):
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


def test_every_part_keeps_its_own_format(tmp_path: Path) -> None:
    """k in 8 bits, up plain by a regular expression, the rest in 4: three kinds under one another."""
    four, eight = compressed(4, 32), compressed(8, 0)
    weights = {"type": "int", "symmetric": True, "dynamic": False}
    config = grouped(4, 32)
    config["config_groups"] = {
        "keys": {
            "targets": ["re:.*k_proj$"],
            "weights": weights | {"num_bits": 8, "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"},
        },
        "others": {"targets": ["Linear"], "weights": weights | {"num_bits": 4, "strategy": "group", "group_size": 32}},
    }
    config["ignore"] = ["lm_head", r"re:.*layers\.\d+\.mlp\.up_proj", "model.layers.1.self_attn.o_proj"]
    plain = CONFIG
    stored: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for number, tensor in enumerate(open_model(plain, "float32").spec.tensors()):
        for place, part in enumerate(tensor.stored_parts()):
            ignored = "up_proj" in part.name or part.name == "model.layers.1.self_attn.o_proj.weight"
            if not is_linear(tensor) or tensor.name == "lm_head" or ignored:
                generator = torch.Generator().manual_seed(number)
                stored[part.name] = torch.randn(part.shape, generator=generator) * part.shape[-1] ** -0.5
                dense[part.name] = stored[part.name]
                continue
            found, dense[part.name] = (eight if "k_proj" in part.name else four)(*part.shape, 10 * number + place)
            stored |= {part.name.removesuffix(".weight") + suffix: t for suffix, t in found.items()}
    (tmp_path / "dense").mkdir()
    for folder, tensors, about in (
        (tmp_path, stored, plain | {"quantization_config": config}),
        (tmp_path / "dense", dense, plain),
    ):
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(about))
    model, loaded = opened(tmp_path)
    wanted = logits_of(*opened(tmp_path / "dense"), TOKENS, [24])
    torch.testing.assert_close(logits_of(model, loaded, TOKENS, [24]), wanted, atol=1e-4, rtol=1e-4)
    formats = {t.name: [f.name for f in t.formats] for t in model.spec.layers[1].tensors if is_linear(t)}
    assert formats == {"qkv": ["int4", "int8", "int4"], "out": [], "gate_up": ["int4", "float32"], "down": ["int4"]}


@pytest.mark.parametrize(
    ("weights", "inputs", "rounds"),
    [
        ("channel", FLOAT_TOKENS, "fp8"),
        ("tensor", FLOAT_TOKENS, "fp8"),
        ("channel", FLOAT_TOKENS | {"strategy": "tensor", "dynamic": False}, "fp8"),
        ("channel", FLOAT_TOKENS | {"strategy": "group", "group_size": 128}, ""),
        ("channel", FLOAT_TOKENS | {"type": "int"}, ""),
        ("channel", FLOAT_TOKENS | {"num_bits": 4}, ""),
        ("block", FLOAT_TOKENS | {"strategy": "group", "group_size": 128}, "fp8"),
        ("block", FLOAT_TOKENS | {"strategy": "group", "group_size": 64}, ""),
        ("block", FLOAT_TOKENS, ""),
        ("group", FLOAT_TOKENS, ""),
        ("channel", None, ""),
    ],
)
def test_activations_are_rounded_where_weights_have_their_kind(
    weights: str, inputs: dict[str, Any] | None, rounds: str
) -> None:
    more = {"block": {"block_structure": [128, 128]}, "group": {"group_size": 128}}.get(weights, {})
    config = groups("float-quantized", type="float", num_bits=8, strategy=weights, **more)
    config = config if inputs is None else with_inputs(config, inputs)
    spec = open_model(CONFIG | {"quantization_config": config}, "float32").spec
    assert {f.activations for layer in spec.layers for t in layer.tensors for f in t.formats} == {rounds}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"NF4 and LLM.int8 \(bitsandbytes\) are not read; quant_method may be awq,"),
        ({"quant_method": "gguf"}, "GGUF are not read"),
        ({"quant_method": "modelopt"}, "ModelOpt are not read"),
        ({"quant_method": "magic"}, "'magic' are not read"),
        ({"quant_method": None}, "None are not read"),
        ({"bits": 3}, "bits in the quantization config .gptq. is 3; it must be 4 or 8"),
        ({"bits": None}, "bits .* it must be 4 or 8"),
        ({"group_size": 48}, "group_size .* is 48; it must be 32 or 64 or 128 or -1"),
        ({"checkpoint_format": "marlin"}, "'marlin'; it must be 'gptq' or 'gptq_v2'"),
        ({"dynamic": {"-:.*": {}}}, "dynamic"),
        ({"sym": "yes"}, "sym .* is 'yes'; it must be False or True"),
        ({"desc_act": 1}, "desc_act .* is 1; it must be False or True"),
        ({"modules_to_not_convert": "lm_head"}, "must be a list of names"),
        ({"modules_to_not_convert": ["model"]}, "matches no module of model_type llama"),
        ({"quant_method": "awq", "version": "gemv"}, "only the layout 'gemm'"),
        ({"quant_method": "awq", "bits": 8}, "it must be 4"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size .* must be \[128, 128\]"),
        ({"quant_method": "fp8", "activation_scheme": "magic"}, "activation_scheme"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt .* is 'e5m2'; it must be 'e4m3'"),
        (groups("int-quantized", num_bits=4, strategy="channel"), "stores int 4 as 'int-quantized'; it must be pack-"),
        (groups("pack-quantized", num_bits=3, strategy="channel"), "num_bits .* it must be 4 or 8"),
        (groups("nvfp4-pack-quantized", num_bits=4, type="float", strategy="group"), "only int 4, int 8 and float 8"),
        (groups("pack-quantized", num_bits=4, strategy="group"), "group_size"),
        (groups("pack-quantized", num_bits=4, strategy="magic"), "strategy"),
        (groups("pack-quantized", num_bits=4, strategy="channel", group_size=64), "one of both is wrong"),
        (groups("pack-quantized", num_bits=4, strategy="channel", dynamic=True), "dynamic"),
        (groups("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=False), "no zero points"),
        (grouped(4, 32) | {"config_groups": {}}, "at least one group"),
        (grouped(4, 32) | {"config_groups": [1]}, "must be an object"),
        (grouped(4, 32) | {"ignore": ["re:("]}, "no regular expression"),
        (grouped(4, 32) | {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "rotated"),
        (grouped(4, 32, actorder="magic"), "actorder .* is 'magic'"),
        (groups("pack-quantized", num_bits=8, strategy="channel", actorder="group"), "an order of columns"),
        (
            with_inputs(grouped(4, 32), {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "token"}),
            "strategy 'token' knows its scales when tokens come only",
        ),
        (grouped(4, 32) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights are not read"),
    ],
)
def test_what_is_damaged_or_contradictory_is_refused_in_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        open_model(CONFIG | {"quantization_config": GPTQ | changes}, "float32")
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


DAMAGE = (None, -1, 0, 1.5, True, "x", "", [], [1], {}, {"a": 1}, {"targets": [1]})


@pytest.mark.parametrize(
    "name", ["awq 32", "gptq 64", "compressed 4 bits", "compressed fp8, rows", "fp8, blocks", "mxfp4"]
)
def test_a_damaged_config_is_read_or_refused_in_one_sentence(name: str) -> None:
    """Each field in turn, those inside of others too, has a value of any type."""

    def variants(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            for field, inner in value.items():
                yield from ({**value, field: changed} for changed in (*DAMAGE, *variants(inner)))

    tried = 0
    for damaged in variants(CASES[name][0] | {"modules_to_not_convert": [], "sparsity_config": {"format": "dense"}}):
        said = "."
        try:
            open_model(CONFIG | {"quantization_config": damaged}, "float32").spec.nbytes()
        except CheckpointError as error:
            said = str(error)
        assert said.endswith("."), damaged
        tried += 1
    assert tried > 30


def _change(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    from safetensors.torch import load_file

    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_weights_that_are_not_what_the_config_says_are_refused(tmp_path: Path) -> None:
    written(tmp_path, *CASES["gptq act-order"])
    name = "model.layers.1.mlp.down_proj"

    def config(**changes: Any) -> None:
        about = CONFIG | {"quantization_config": GPTQ | {"desc_act": True} | changes}
        (tmp_path / "config.json").write_text(json.dumps(about))

    config(group_size=32)
    with pytest.raises(CheckpointError, match=r"qzeros in .* is I32 \[2, 16\], but .* calls for I32 \[4, 16\]"):
        opened(tmp_path)
    config(bits=8)
    with pytest.raises(CheckpointError, match=r"qweight in .* is I32 \[16, 128\], but .* calls for I32 \[32, 128\]"):
        opened(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match=r"no tensor model.layers.0.self_attn.q_proj.weight"):
        opened(tmp_path)
    config()
    _change(tmp_path, lambda t: t[name + ".g_idx"].fill_(4))
    with pytest.raises(CheckpointError, match="names groups that it does not have"):
        opened(tmp_path)
    _change(tmp_path, lambda t: t.update({name + ".bias": torch.ones(128)}))
    with pytest.raises(CheckpointError, match=r"does not use, such as model\.layers\.1\.mlp\.down_proj\.bias"):
        opened(tmp_path)

    def without_scales(tensors: dict[str, Tensor]) -> None:
        del tensors[name + ".bias"], tensors[name + ".scales"]

    _change(tmp_path, without_scales)
    with pytest.raises(CheckpointError, match=r"no tensor .*scales, which its quantization config calls for"):
        opened(tmp_path)


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    written(tmp_path, *CASES["fp8, blocks"])
    _change(tmp_path, lambda t: t["model.layers.0.mlp.up_proj.weight"].view(torch.uint8)[3:4, 5:6].fill_(0xFF))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight has elements that are not a number"):
        opened(tmp_path)


def test_zero_points_that_are_not_symmetric_ones_are_refused(tmp_path: Path) -> None:
    """The convention of zero points cannot be seen but by this; by the wrong one answers would be fluent and wrong."""
    for name, wrong in (("gptq symmetric", "gptq_v2"), ("gptq 8 bits, v2, symmetric", "gptq")):
        (folder := tmp_path / wrong).mkdir()
        config, layout = CASES[name]
        written(folder, config | {"checkpoint_format": wrong}, layout)
        with pytest.raises(CheckpointError, match=r"other zero points than (8|128), .*check sym and checkpoint_format"):
            opened(folder)


@pytest.mark.parametrize(("name", "suffix"), [("gptq act-order", ".g_idx"), ("compressed act-order", ".weight_g_idx")])
def test_an_order_of_columns_that_is_missing_is_noticed(name: str, suffix: str, tmp_path: Path) -> None:
    written(tmp_path, *CASES[name])

    def without(tensors: dict[str, Tensor]) -> None:
        for one in [one for one in tensors if one.endswith(suffix)]:
            del tensors[one]

    _change(tmp_path, without)
    with pytest.raises(CheckpointError, match=r"no tensor .*g_idx, which its quantization config calls for"):
        opened(tmp_path)


def test_two_configs_that_differ_are_refused() -> None:
    twice = {"quantization_config": GPTQ, "compression_config": GPTQ}
    assert open_model(CONFIG | twice, "float32").spec.nbytes() > 0
    with pytest.raises(CheckpointError, match="say different things; remove the one that is wrong"):
        open_model(CONFIG | twice | {"compression_config": GPTQ | {"bits": 8}}, "float32")


def test_a_packed_shape_that_differs_is_refused(tmp_path: Path) -> None:
    written(tmp_path, *CASES["compressed 4 bits"])
    _change(tmp_path, lambda t: t["model.layers.0.mlp.up_proj.weight_shape"].fill_(128))
    with pytest.raises(CheckpointError, match=r"packs a matrix \[128, 128\], but config.json calls for \[256, 128\]"):
        opened(tmp_path)


def test_groups_that_do_not_divide_a_row_are_refused(tmp_path: Path) -> None:
    config = CONFIG | {"intermediate_size": 160, "quantization_config": GPTQ}
    model = open_model(config, "float32")
    written(tmp_path, *CASES["gptq 64"])
    with pytest.raises(CheckpointError, match=r"160 is no multiple of 64|calls for"):
        load(model.spec, tmp_path)


def test_rows_in_another_order_are_refused() -> None:
    with pytest.raises(CheckpointError, match="not implemented for model_type chatglm; use a plain checkpoint"):
        open_model(config_of(4, 2, 16, 64) | {"quantization_config": FP8}, "float32")


# -- quantized while loading --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantization", "least"), [("int8", 0.9995), ("fp8", 0.99), ("int4", 0.92)], ids=["int8", "fp8", "int4"]
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_plain_checkpoint_is_quantized_when_it_is_loaded(
    quantization: str, least: float, tied: bool, tmp_path: Path
) -> None:
    """Logits correlate with the plain model's as closely as the bits allow; they equal the dequantized model's."""
    written(tmp_path, *CASES["fp8, rows"], tie_word_embeddings=tied)
    twin = tmp_path / "dense"
    plain = logits_of(*opened(twin), TOKENS, [24])
    model = open_model(read_config(twin), "float32", quantization=quantization)
    weights = load(model.spec, twin)
    head = weights.head["lm_head"]
    assert isinstance(head, QuantizedWeight)
    assert head.matrix.format.name == ("fp8" if quantization == "fp8" else "int8")
    assert isinstance(weights.embedding["embed"], Tensor)
    found = logits_of(model, weights, TOKENS, [24])
    assert least < torch.corrcoef(torch.stack((found.flatten(), plain.flatten())))[0, 1] < 0.999999
    dense = LoadedWeights(
        weights.embedding,
        [{n: w if isinstance(w, Tensor) else w.dense() for n, w in layer.items()} for layer in weights.layers],
        {n: w if isinstance(w, Tensor) else w.dense() for n, w in weights.head.items()},
    )
    unrounded = logits_of(model, dense, TOKENS, [24])
    wanted = logits_of(model, rounding(model, dense), TOKENS, [24])
    same(found, wanted, unrounded if quantization == "fp8" else None)


def test_what_cannot_be_quantized_on_loading_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"quantized already \(gptq\); leave the option out"):
        open_model(CONFIG | {"quantization_config": GPTQ}, "float32", quantization="int4")
    narrow = CONFIG | {"hidden_size": 80, "num_attention_heads": 4, "head_dim": 20}
    with pytest.raises(ConfigError, match="groups of 32, but those of qkv have 80 numbers; take int8 or fp8"):
        open_model(narrow, "float32", quantization="int4")
    assert open_model(narrow, "float32", quantization="int8").spec.nbytes() > 0


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_random_models_are_quantized_too_and_shards_agree(quantization: str) -> None:
    model = open_model(CONFIG, "bfloat16", quantization=quantization)
    weights = dummy(model.spec, seed=1)
    assert logits_of(model, weights, TOKENS, [24]).isfinite().all()
    part = dummy(shard(model.spec, 1, 2), seed=1)
    whole, share = weights.layers[1]["qkv"], part.layers[1]["qkv"]
    assert isinstance(whole, QuantizedWeight)
    assert isinstance(share, QuantizedWeight)
    assert torch.equal(share.dense(), torch.cat([whole.dense()[a:b] for a, b in ((64, 128), (160, 192), (224, 256))]))


def test_chatglm_is_quantized_on_loading() -> None:
    model = open_model(config_of(4, 2, 16, 64, ffn_hidden_size=64), "float32", quantization="int4")
    assert logits_of(model, dummy(model.spec), TOKENS, [24]).isfinite().all()


def test_quantized_weights_have_a_fingerprint_of_their_own(tmp_path: Path) -> None:
    written(tmp_path, *CASES["fp8, rows"])
    content = of_checkpoint(tmp_path / "dense")
    assert len({content, of_quantized(content, "int4"), of_quantized(content, "int8")}) == 3
