"""int4 on Hopper: where its codes lie, and what a weight of them is, on the CPU and on Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cellar.core.formats import Format
from cellar.ops.cuda.compiler import compile_cuda
from cellar.ops.cuda.hopper import hopper_available
from cellar.ops.linear.fused import norm_feed_forward, norm_linear
from cellar.ops.linear.mixed import Mixed
from cellar.ops.linear.nibbles import Nibbles
from cellar.quant.choice import QuantizedChoice, Tiles, default_nibbles
from cellar.quant.device import PackedWeight, on_device
from cellar.quant.fragments import fragments, fragments_take, unfragmented
from cellar.quant.matrix import Quantized, dequantized, empty_quantized, quantized
from cellar.quant.nibbles import NibbleWeight
from cellar.quant.pack import to_bytes
from cellar.quant.weight import QuantizedWeight
from tests.quant.replays import check_replays

FORMATS = [Format("int4", group, zero_points=zeros) for group in (32, 64, 128) for zeros in (False, True)]
FOUR = Format("int4", 64, zero_points=True)
hopper = pytest.mark.skipif(
    not hopper_available(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    reason="gpu: this machine has no Hopper GPU",
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def example(format: Format, n: int = 72, k: int = 384) -> Quantized:
    return quantized(random(n, k) / k**0.5, format)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(16, 128), (72, 384), (5, 256), (48, 1152)])
def test_what_is_put_in_order_comes_back_bit_for_bit(format: Format, n: int, k: int) -> None:
    matrix = example(format, n, k)
    assert fragments_take(matrix)
    form = fragments(matrix)
    back = unfragmented(form, format)
    assert torch.equal(back.codes, matrix.codes)
    assert torch.equal(back.scales, matrix.scales)
    assert torch.equal(dequantized(back), dequantized(matrix))
    assert (form.zeros is not None) == format.zero_points
    assert form.nbytes == format.nbytes((n, k)), "as the plan counts"


def test_every_code_is_where_the_drawing_says() -> None:
    """One code alone that is not 0, everywhere in two pieces of two blocks."""
    n, k = 32, 128
    scales, zeros = torch.ones((n, 2), dtype=torch.float16), torch.zeros((n, 2), dtype=torch.uint8)
    places = set()
    for row in range(n):
        for column in range(k):
            codes = torch.zeros((n, k), dtype=torch.uint8)
            codes[row, column] = 15
            words = fragments(Quantized(FOUR, to_bytes(codes), scales, zeros)).codes
            (piece, block, lane, word), bits = words.nonzero()[0].tolist(), words[words != 0].item() & 0xFFFFFFFF
            nibble = (bits.bit_length() - 1) // 4
            assert bits == 15 << 4 * nibble
            i, beside = nibble % 4, nibble // 4
            assert row == 16 * piece + lane // 4 + 8 * (i % 2)
            half, side = divmod(word, 2)
            assert column == 64 * block + 32 * half + 8 * (lane % 4) + 4 * side + 2 * (i // 2) + beside
            places.add((piece, block, lane, word, nibble))
    assert len(places) == n * k


def test_scales_and_zero_points_lie_by_groups_rows_i_and_i_8_beside_one_another() -> None:
    matrix = example(FOUR, 24, 256)
    assert matrix.zeros is not None
    form = fragments(matrix)
    assert form.zeros is not None
    for row in range(24):
        for group in range(4):
            place = row // 16, group, row % 8, row % 16 // 8
            assert form.scales[place] == matrix.scales[row, group]
            assert form.zeros[place] == matrix.zeros[row, group]


def test_what_has_no_such_form_keeps_the_other() -> None:
    matrix = example(FOUR)
    assert not fragments_take(example(Format("int4", 32), 40, 96)), "a block and a half"
    assert not fragments_take(quantized(random(8, 256), Format("int8")))
    assert not fragments_take(replace(matrix, scales=matrix.scales.float()))
    assert not fragments_take(replace(matrix, groups=torch.arange(384) // 64))
    assert not fragments_take(example(Format("int4"), 16, 256)), "a scale for all of a row"
    assert fragments_take(empty_quantized(FOUR, (256, 256), torch.device("meta")))


def test_a_weight_is_the_matrix() -> None:
    matrix = example(FOUR)
    weight, wanted = NibbleWeight(matrix), dequantized(matrix)
    assert torch.equal(weight.dense(), wanted)
    assert weight.nbytes == QuantizedWeight(matrix).nbytes == FOUR.nbytes((72, 384))
    assert torch.equal(weight.slice(0, range(8, 41)).dense(), wanted[8:41])
    assert torch.equal(weight.slice(1, range(64, 320)).dense(), wanted[:, 64:320])
    torch.testing.assert_close(weight.remade(wanted).dense(), wanted, rtol=2e-3, atol=1e-6)
    x, bias = random(3, 384, seed=1), random(72, seed=2)
    torch.testing.assert_close(weight.multiply(x, bias), x @ wanted.t() + bias, atol=1e-5, rtol=1e-5)
    assert weight.multiply(x[:0]).shape == (0, 72)


def test_a_choice_for_the_other_form_is_not_taken() -> None:
    nibbles, tiles = (QuantizedChoice((8,), (kernel,)) for kernel in (Nibbles(1, 4, 1, 1, 2, 1), Tiles(32, 8, 2, 1)))
    matrix = example(FOUR)
    assert NibbleWeight(matrix, nibbles).choice == nibbles
    assert NibbleWeight(matrix, tiles).choice == default_nibbles(72, 384)
    weight = on_device(QuantizedWeight(matrix), lambda shape: nibbles)
    assert isinstance(weight, PackedWeight), "on this machine"
    assert weight.choice.all_are(Tiles)


def test_the_kernel_for_many_tokens_is_taken_where_results_lie_on_16_bytes() -> None:
    choice = QuantizedChoice((8, 64), (Nibbles(1, 4, 1, 1, 2, 1), Mixed(64, 2, 1, 2)))
    weight = NibbleWeight(example(FOUR), choice)
    assert weight.choice == choice
    found = [constants for _, constants in weight.sources(bias=True, dtype=torch.bfloat16)]
    assert {c["STAGES"] for c in found if "STAGES" in c} == {2}
    assert NibbleWeight(example(FOUR, 68), choice).choice == default_nibbles(68, 384)


def test_sources_are_of_all_that_may_run() -> None:
    weight = NibbleWeight(example(FOUR))
    found = [constants for _, constants in weight.sources(bias=True, dtype=torch.bfloat16)]
    assert {constants["TOKENS"] for constants in found} == {8, 16, 32, 64}
    assert all(constants["K"] == 384 and constants["GROUP"] == 64 and constants["HAS_ZEROS"] for constants in found)


def on_gpu(format: Format, n: int, k: int, seed: int = 0) -> tuple[Quantized, NibbleWeight]:
    generator = torch.Generator("cuda").manual_seed(seed)
    matrix = quantized(torch.randn((n, k), device="cuda", generator=generator) / k**0.5, format)
    weight = on_device(QuantizedWeight(matrix))
    assert isinstance(weight, NibbleWeight)
    return matrix, weight


def compile_all(sources: Sequence[tuple[str, dict[str, int]]]) -> None:
    """Side by side, onto the disk, where launches find them."""
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda source: compile_cuda(*source), sources))


def near(found: Tensor, wanted: Tensor) -> None:
    """Rounded to bfloat16, by norm: 2^-9 of each number is about 1.7e-3 of all, and may be more of a few numbers."""
    assert found.isfinite().all()
    error = float((found.double() - wanted).norm() / wanted.norm())
    assert error < (2.6e-3 if found.numel() > 256 else 3.4e-3), error


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (1048, 384), (16, 1152), (272, 11008)])
def test_on_hopper_a_product_is_that_of_the_definition(format: Format, n: int, k: int) -> None:
    """At every number of tokens: ours, the library's, and where one gives way to the other."""
    matrix, weight = on_gpu(format, n, k)
    exact = dequantized(matrix).double()
    assert torch.equal(weight.dense(), dequantized(matrix))
    kinds = [(torch.bfloat16, False)]
    if n == 1048:
        kinds += [(torch.bfloat16, True), (torch.float16, True)]
    compile_all([source for dtype, bias in kinds for source in weight.sources(bias, dtype)])
    for dtype, has_bias in kinds:
        bias = torch.randn(n, device="cuda").to(dtype) if has_bias else None
        for m in (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 129, 200, 1000):
            x = torch.randn((m, k), device="cuda").to(dtype)
            wanted = x.double() @ exact.t()
            near(weight.multiply(x, bias), wanted if bias is None else wanted + bias)
    assert weight.multiply(x[:0]).shape == (0, n)


@pytest.mark.gpu
@hopper
def test_on_hopper_what_is_no_number_stays_in_its_token() -> None:
    _, weight = on_gpu(FOUR, 512, 1088)
    for m in (2, 12, 40):
        x = torch.randn((m, 1088), device="cuda").bfloat16()
        wanted = weight.multiply(x)
        x[1, 7] = torch.inf
        found = weight.multiply(x)
        assert not found[1].isfinite().any()
        others = [i for i in range(m) if i != 1]
        assert torch.equal(found[others], wanted[others])


@pytest.mark.gpu
@hopper
def test_on_hopper_a_token_has_the_same_bits_in_any_company_of_a_kernel() -> None:
    """Sums are taken in one order by each kernel, whatever else is in the step; one token alone has its own."""
    _, weight = on_gpu(FOUR, 4096, 4096)
    x = torch.randn((64, 4096), device="cuda").bfloat16()
    for few, many in ((2, 8), (9, 16), (17, 32), (33, 64)):
        assert torch.equal(weight.multiply(x[:few]), weight.multiply(x[:many])[:few])


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("m", [1, 5, 40])
def test_on_hopper_norm_and_gate_stand_around_it(m: int) -> None:
    _, up = on_gpu(FOUR, 2 * 1024, 512)
    _, down = on_gpu(FOUR, 512, 1024, seed=1)
    residual, delta = (torch.randn((m, 512), device="cuda").bfloat16() for _ in range(2))
    norm = torch.rand(512, device="cuda").bfloat16()
    normed, total = norm_linear(residual, delta, norm, 1e-5, up)
    wide = (residual + delta).double()
    scaled = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * norm.double()
    error = (normed.double() - scaled @ up.dense().double().t()).norm() / normed.double().norm()
    assert float(error) < 1e-2
    fed, again = norm_feed_forward(residual, delta, norm, 1e-5, up, None, "silu", down, None)
    assert torch.equal(again, total)
    gate, rest = normed.float().chunk(2, 1)
    inner = torch.nn.functional.silu(gate) * rest
    error = (fed.double() - inner.double() @ down.dense().double().t()).norm() / fed.double().norm()
    assert float(error) < 1e-2


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("m", [4, 20, 50])
def test_on_hopper_products_follow_one_another_in_a_graph(m: int) -> None:
    """Each begins before the kernel in front has ended: its weights early, its tokens not."""
    weights = [on_gpu(FOUR, 4096, 4096, seed)[1] for seed in range(4)]
    check_replays(weights, torch.randn((m, 4096), device="cuda").bfloat16())


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("format", [FOUR, Format("int8")], ids=str)
def test_on_hopper_wide_products_follow_one_another_in_a_graph(format: Format) -> None:
    """Of parts that meet in a cluster, and of whole sums."""
    kernels = Mixed(64, 2, 4, 3), Mixed(128, 4, 1, 3)
    for m, kernel in zip((50, 100), kernels, strict=True):
        weights = []
        for seed in range(4):
            generator = torch.Generator("cuda").manual_seed(seed)
            matrix = quantized(torch.randn((4096, 4096), device="cuda", generator=generator) / 64, format)
            weight = on_device(QuantizedWeight(matrix), lambda shape, kernel=kernel: QuantizedChoice((256,), (kernel,)))  # type: ignore[misc]
            assert isinstance(weight, NibbleWeight | PackedWeight)
            assert weight.choice.at(m) == kernel
            weights.append(weight)
        check_replays(weights, torch.randn((m, 4096), device="cuda").bfloat16())
