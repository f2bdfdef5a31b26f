"""Activations in 8 bits: how a token is rounded to e4m3, and products of both kinds, on the CPU and on Hopper."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cellar.core.formats import Format
from cellar.ops.activation import gated
from cellar.ops.cuda.hopper import hopper_available
from cellar.ops.linear.fused import norm_feed_forward, norm_linear
from cellar.ops.norm import add_rms_norm
from cellar.quant.activations import float_codes, rounded
from cellar.quant.bytes import ByteWeight, multiplies_bytes
from cellar.quant.device import PackedWeight, on_device
from cellar.quant.matrix import Quantized, dequantized, quantized
from cellar.quant.tokens import byte_tokens
from cellar.quant.weight import QuantizedWeight
from tests.quant.replays import check_replays

ROWS = Format("fp8", activations="fp8")
MATRIX = Format("fp8", rows=0, activations="fp8")
BLOCKS = Format("fp8", 128, rows=128, activations="fp8")
INT8 = Format("int8", activations="int8")
FORMATS = {"rows": ROWS, "matrix": MATRIX, "blocks": BLOCKS, "int8": INT8}
hopper = pytest.mark.skipif(
    not hopper_available(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    reason="gpu: this machine has no Hopper GPU",
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_token_is_rounded_by_its_own_largest_number() -> None:
    x = torch.tensor([[896.0, -896.0, 3.0, 0.0], [0.0] * 4, [1e-30, -2e-30, 0.0, 0.0]])
    codes, scales = float_codes(x)
    assert codes.float().tolist() == [[448.0, -448.0, 1.5, 0.0], [0.0] * 4, [224.0, -448.0, 0.0, 0.0]]
    torch.testing.assert_close(scales.flatten(), torch.tensor([2.0, 1.0, 2e-30 / 448]))
    assert rounded(x, ROWS)[0].tolist() == [896.0, -896.0, 3.0, 0.0]


def test_groups_of_a_token_have_scales_of_their_own() -> None:
    x = torch.cat((random(3, 128), 1e-6 * random(3, 128, seed=1)), 1)
    codes, scales = float_codes(x, 128)
    assert scales.shape == (3, 2)
    assert (codes.float().abs().view(3, 2, 128).amax(2) == 448).all()
    by_token, by_group = ((rounded(x, format) - x)[:, 128:].norm() for format in (ROWS, BLOCKS))
    assert by_group < 0.5 * by_token, "codes below 2^-6 are coarse"
    error = (rounded(x, BLOCKS) - x).abs().view(3, 2, 128)
    largest = x.abs().view(3, 2, 128)
    assert (error <= torch.maximum(largest * 2**-4, largest.amax(2, keepdim=True) / 448 * 2**-10) * 1.001).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_stays_none_and_in_its_token(name: str, bad: float) -> None:
    weight, x = QuantizedWeight(quantized(random(48, 128), FORMATS[name])), random(5, 128, seed=1)
    wanted = weight.multiply(x)
    x[2, 7] = bad
    found = weight.multiply(x)
    assert not found[2].isfinite().any()
    assert torch.equal(found[[0, 1, 3, 4]], wanted[[0, 1, 3, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_on_the_cpu_a_product_is_that_of_rounded_tokens(name: str, dtype: torch.dtype) -> None:
    matrix = quantized(random(144, 256), FORMATS[name])
    x, bias = random(20, 256, seed=1).to(dtype), random(144, seed=2).to(dtype)
    wanted = rounded(x, matrix.format) @ dequantized(matrix).t() + bias
    limit = {torch.float32: 1e-4, torch.bfloat16: 0.15}[dtype]
    for m in (1, 4, 20):
        found = QuantizedWeight(matrix).multiply(x[:m], bias)
        torch.testing.assert_close(found.float(), wanted[:m], atol=limit, rtol=2**-7)


def test_the_form_for_hopper_is_the_matrix() -> None:
    for name, format in FORMATS.items():
        matrix = quantized(random(256, 384), format)
        weight, wanted = ByteWeight(matrix), dequantized(matrix)
        assert torch.equal(weight.dense(), wanted), name
        assert torch.equal(weight.slice(0, range(128, 256)).dense(), wanted[128:256])
        assert torch.equal(weight.slice(1, range(128, 384)).dense(), wanted[:, 128:384])
        again = weight.remade(wanted)
        torch.testing.assert_close(again.dense(), wanted, rtol=1e-6, atol=0)
        assert abs(weight.nbytes - 256 * 384) < 0.02 * 256 * 384
        x = random(3, 384, seed=1)
        product = rounded(x, format) @ wanted.t()
        torch.testing.assert_close(weight.multiply(x), product, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
def test_elsewhere_tokens_are_rounded_and_multiplied_by_packed_codes() -> None:
    matrix = quantized(random(64, 256), ROWS)
    weight = on_device(QuantizedWeight(matrix))
    assert isinstance(weight, PackedWeight)
    assert not multiplies_bytes(matrix)
    x = random(3, 256, seed=1)
    torch.testing.assert_close(weight.multiply(x), QuantizedWeight(matrix).multiply(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("m", [33, 40, 63])
def test_the_library_gets_tokens_by_eights_where_matrices_have_blocks(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(x: Tensor, w: Tensor, x_scales: Tensor, w_scales: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert x.shape[0] % 8 == 0
        assert x_scales.stride() == (1, x.shape[0]), "tokens behind one another"
        wide = w_scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return ((x.float() * x_scales.repeat_interleave(128, 1)) @ (w.float() * wide)).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    matrix, bias = quantized(random(256, 512), BLOCKS), random(256, seed=2).bfloat16()
    weight, x = ByteWeight(matrix), random(m, 512, seed=1).bfloat16()
    assert weight.product_for(m) is None
    wanted = rounded(x, BLOCKS) @ dequantized(matrix).t() + bias
    near(weight.multiply(x, bias), wanted)


@pytest.mark.parametrize("scale", [1.0, 1e6, 1e-12])
def test_the_library_is_not_asked_where_columns_are_no_multiple_of_512(scale: float) -> None:
    """One token of zeros, one group of a token far smaller than the others, rows that end within a block."""
    matrix = quantized(random(272, 384), BLOCKS)
    weight, x = ByteWeight(matrix), (scale * random(70, 384, seed=1)).bfloat16()
    x[3] = 0
    x[4, :128] *= 1e-6
    assert weight.product_for(70) is None
    near(weight.multiply(x), (rounded(x, BLOCKS) @ dequantized(matrix).t()).double())


def on_gpu(format: Format, n: int, k: int, seed: int = 0) -> tuple[Quantized, ByteWeight]:
    generator = torch.Generator("cuda").manual_seed(seed)
    matrix = quantized(torch.randn((n, k), device="cuda", generator=generator) / k**0.5, format)
    weight = on_device(QuantizedWeight(matrix))
    assert isinstance(weight, ByteWeight)
    return matrix, weight


def near(found: Tensor, wanted: Tensor, halves: float = 0.0) -> None:
    """Rounded to bfloat16, by norm: 2^-9 of each number is about 1.7e-3 of all. `halves`: what tokens rounded the other
    way, where they lie between two numbers, make of all besides.
    """
    assert found.isfinite().all()
    error = float((found.double() - wanted).norm() / wanted.norm())
    assert error < math.hypot(2.6e-3, halves), error


def one_each(x: Tensor, name: str) -> float:
    """Of tokens in int8: one number of each, rounded to its other neighbour, as a share of all by norm."""
    return float((x.abs().amax(1) / 127).norm() / x.norm()) if name == "int8" else 0.0


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (1040, 384), (272, 11008)])
def test_on_hopper_a_product_is_that_of_rounded_tokens(name: str, n: int, k: int) -> None:
    """At every number of tokens: ours, the library's, and where one gives way to the other."""
    matrix, weight = on_gpu(FORMATS[name], n, k)
    exact = dequantized(matrix).double()
    bias = torch.randn(n, device="cuda").bfloat16()
    for m in (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129, 1000, 1001, 4096):
        x = torch.randn((m, k), device="cuda").bfloat16()
        wanted = rounded(x, matrix.format).double() @ exact.t()
        halves = one_each(x, name)
        near(weight.multiply(x), wanted, halves)
        if n == 1040:
            near(weight.multiply(x, bias), wanted + bias, halves)
    assert weight.multiply(x[:0]).shape == (0, n)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("name", FORMATS)
def test_on_hopper_half_precision_is_multiplied_by_bytes_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no number of tokens by the matrix written out, and in float16 where our kernels add up."""
    matrix, weight = on_gpu(FORMATS[name], 1040, 384)
    exact = dequantized(matrix).double()
    monkeypatch.setattr(ByteWeight, "dense", lambda self: pytest.fail("the matrix was written out"))
    bias = torch.randn(1040, device="cuda").half()
    for m in (1, 2, 8, 17, 33, 64, 129, 1000):
        x = torch.randn((m, 384), device="cuda").half()
        # As they are rounded there: of 384 numbers one that goes to its other neighbour would be seen.
        codes, scales = byte_tokens(x, matrix.format.activations, matrix.format.group)
        numbers = codes.double().view(m, scales.shape[1], -1) * scales[:, :, None]
        assert float((numbers.flatten(1) - x).norm() / x.norm()) < 0.04
        wanted = numbers.flatten(1) @ exact.t()
        for found, sum in ((weight.multiply(x), wanted), (weight.multiply(x, bias), wanted + bias)):
            assert found.dtype == torch.float16
            near(found, sum)
    residual, norm = torch.randn((8, 384), device="cuda").half(), torch.rand(384, device="cuda").half()
    normed, total = weight.norm_multiply(residual, None, norm, 1e-5, bias)
    assert normed.dtype == total.dtype == torch.float16


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("name", FORMATS)
def test_on_hopper_company_changes_no_number_that_is_summed(name: str) -> None:
    """A token alone, among few and among many: the same but for rounding, far below that of e4m3 (2^-4); of int8 bit
    for bit.
    """
    _, weight = on_gpu(FORMATS[name], 4096, 4096)
    x = torch.randn((600, 4096), device="cuda").bfloat16()
    alone = weight.multiply(x[:1]).double()
    for m in (8, 30, 64, 200, 600):
        found = weight.multiply(x[:m])[:1].double()
        assert float((found - alone).norm() / alone.norm()) < 2.6e-3
        assert name != "int8" or torch.equal(found, alone)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("m", [1, 5, 40, 300])
def test_on_hopper_norm_and_gate_round_as_they_go(name: str, m: int) -> None:
    _, up = on_gpu(FORMATS[name], 2 * 1024, 512)
    _, down = on_gpu(FORMATS[name], 512, 1024, seed=1)
    residual, delta = (torch.randn((m, 512), device="cuda").bfloat16() for _ in range(2))
    norm = torch.rand(512, device="cuda").bfloat16()
    normed, total = add_rms_norm(residual, delta, norm, 1e-5)
    product = up.multiply(normed)
    found, sum_ = norm_linear(residual, delta, norm, 1e-5, up)
    assert torch.equal(sum_, total)
    near(found, product.double())
    fed, sum_ = norm_feed_forward(residual, delta, norm, 1e-5, up, None, "silu", down, None)
    assert torch.equal(sum_, total)
    near(fed, down.multiply(gated(product, "silu")).double())


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("name", FORMATS)
def test_on_hopper_products_follow_one_another_in_a_graph(name: str) -> None:
    """Each begins before the kernel in front has ended: its weights early, its tokens not."""
    weights = [on_gpu(FORMATS[name], 4096, 4096, seed)[1] for seed in range(4)]
    check_replays(weights, torch.randn((4, 4096), device="cuda").bfloat16())
