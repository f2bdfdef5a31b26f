"""Quantized matrices on a GPU: what their form keeps, what kernels compute (in Triton's interpreter), choices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cellar.core.errors import ConfigError
from cellar.core.formats import Format
from cellar.core.hardware import Table
from cellar.ops.compile_jobs import jobs_of, on_target
from cellar.ops.linear.choice import Shape
from cellar.ops.linear.mixed import Kind, Mixed
from cellar.ops.linear.nibbles import Nibbles
from cellar.ops.room import room_on
from cellar.ops.triton_support import noted_launches
from cellar.quant import packed as packed_module
from cellar.quant import spans as spans_module
from cellar.quant import triton as kernels
from cellar.quant.choice import (
    QuantizedChoice,
    QuantizedTiming,
    Tiles,
    default_choice,
    default_nibbles,
    default_spans,
    quantized_choices,
    quantized_timings,
    tables_with,
)
from cellar.quant.device import PackedWeight, on_device
from cellar.quant.matrix import Quantized, dequantized, empty_quantized, quantized
from cellar.quant.packed import packed, packs, unpacked
from cellar.quant.triton import expanded, multiply_packed
from cellar.quant.weight import QuantizedWeight, StackedWeight

interpreter = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

FORMATS = {
    "int4/32": Format("int4", 32),
    "int4/64 zeros": Format("int4", 64, zero_points=True),
    "int4/128 zeros": Format("int4", 128, zero_points=True),
    "int4 rows": Format("int4"),
    "int8": Format("int8"),
    "int8/32": Format("int8", 32),
    "fp8": Format("fp8"),
    "fp8 matrix": Format("fp8", rows=0),
    "fp8 blocks": Format("fp8", 128, rows=128),
    "mxfp4": Format("mxfp4", 32),
}
EIGHT_WITH_ZEROS = Format("int8", 32, zero_points=True)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def eight_with_zeros(n: int = 40, k: int = 96) -> Quantized:
    """As GPTQ stores 8 bits: codes less 128, zero points anywhere."""
    plain = quantized(random(n, k) / k**0.5, Format("int8", 32))
    zeros = torch.randint(-128, 128, plain.scales.shape, generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    return replace(plain, format=EIGHT_WITH_ZEROS, zeros=zeros)


def example(name: str, n: int = 72, k: int = 384) -> Quantized:
    return eight_with_zeros() if name == "int8 zeros" else quantized(random(n, k) / k**0.5, FORMATS[name])


@pytest.mark.parametrize("name", [*FORMATS, "int8 zeros"])
def test_what_is_packed_comes_back_bit_for_bit(name: str) -> None:
    """384 columns are a block and a half of 4 bits with spans of 64."""
    matrix = example(name)
    assert packs(matrix)
    back = unpacked(packed(matrix))
    assert torch.equal(back.codes.view(torch.uint8), matrix.codes.view(torch.uint8))
    assert torch.equal(dequantized(back), dequantized(matrix))
    assert packed(matrix).nbytes <= 1.4 * matrix.nbytes, "no more than the block that is half empty"


def test_every_code_has_its_own_word() -> None:
    """All 16 and 256 codes at once: no bit of one lies where another's does."""
    fours = torch.arange(256, dtype=torch.uint8).repeat(4, 2)
    scales = torch.ones((4, 8), dtype=torch.float16)
    for format in (Format("int4", 128, zero_points=True), Format("mxfp4", 128)):
        matrix = Quantized(format, fours, scales, scales.to(torch.uint8) if format.zero_points else None)
        assert torch.equal(unpacked(packed(matrix)).codes, fours)
    eights = Quantized(Format("int8"), fours.view(torch.int8), torch.ones((4, 1)))
    assert torch.equal(unpacked(packed(eights)).codes, eights.codes)


@interpreter
@pytest.mark.parametrize("name", [*FORMATS, "int8 zeros"])
@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [(1, Tiles(32, 32, 2, 2)), (20, Tiles(64, 16, 3, 1)), (40, Tiles(64, 64, 2, 1))],
    ids=["few, split", "two tiles of few", "many"],
)
def test_products_are_the_definitions(name: str, tokens: int, sizes: Tiles) -> None:
    matrix = example(name)
    n, k = matrix.shape
    x, bias = random(tokens, k, seed=2), random(n, seed=3)
    expected = x @ dequantized(matrix).T + bias
    counters = torch.zeros(64, dtype=torch.int32)
    got = multiply_packed(x, packed(matrix), bias, sizes, counters)
    # Sums of codes before zero points and scales, which are larger than the result.
    torch.testing.assert_close(got, expected, atol=2e-4 if name == "int8 zeros" else 2e-5, rtol=1e-5)
    assert not counters.any(), "counters are left as they were"


@interpreter
@pytest.mark.parametrize("name", [*FORMATS, "int8 zeros"])
def test_the_expanded_matrix_is_the_definitions(name: str) -> None:
    matrix = example(name)
    assert torch.equal(expanded(packed(matrix), torch.float32), dequantized(matrix))
    torch.testing.assert_close(
        expanded(packed(matrix), torch.float16).float(), dequantized(matrix), rtol=1e-3, atol=1e-7
    )


def acting(matrix: Quantized) -> Quantized:
    """Its columns in an order of their own."""
    group = matrix.format.group
    return replace(matrix, groups=torch.randperm(matrix.shape[1], generator=torch.Generator().manual_seed(5)) // group)


@interpreter
def test_a_weight_on_the_device_is_the_quantized_one() -> None:
    for matrix in (example("int4/64 zeros"), acting(example("int4/64 zeros")), example("int8")):
        plain = QuantizedWeight(matrix)
        weight = on_device(plain)
        assert isinstance(weight, PackedWeight)
        assert torch.equal(weight.dense(), plain.dense())
        x, bias = random(3, 384), random(72, seed=1)
        torch.testing.assert_close(weight.multiply(x, bias), plain.multiply(x, bias), atol=1e-4, rtol=1e-4)
        assert torch.equal(weight.slice(0, range(8, 24)).dense(), plain.dense()[8:24])
        assert torch.equal(weight.slice(1, range(128)).dense(), plain.dense()[:, :128])
        assert isinstance(weight.remade(random(72, 384)), PackedWeight)
        assert weight.multiply(random(0, 384)).shape == (0, 72)
        assert 0.5 * plain.nbytes < weight.nbytes < 1.5 * plain.nbytes


def test_stacked_parts_are_put_on_the_device_one_by_one_and_what_has_no_form_stays() -> None:
    odd = QuantizedWeight(
        replace(quantized(random(8, 96), Format("int4", 32)), groups=torch.zeros(96, dtype=torch.int64))
    )
    four = QuantizedWeight(quantized(random(8, 96), Format("int4", 32)))
    stacked = on_device(StackedWeight([odd, four]))
    assert isinstance(stacked, StackedWeight)
    assert stacked.parts[0] is odd
    assert isinstance(stacked.parts[1], PackedWeight)


@interpreter
def test_a_matrix_too_large_for_kernels_to_index_is_several_under_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the head of Command-R is: 256,000 x 8,192."""
    monkeypatch.setattr(packed_module, "INDEXED", 300 * (96 + 256))
    plain = QuantizedWeight(quantized(random(600, 96), Format("int8")))
    weight = on_device(plain)
    assert isinstance(weight, StackedWeight)
    assert [(type(part), part.out_features) for part in weight.parts] == [(PackedWeight, n) for n in (256, 256, 88)]
    assert torch.equal(weight.dense(), plain.dense())
    x, bias = random(3, 96), random(600, seed=1)
    torch.testing.assert_close(weight.multiply(x, bias), plain.multiply(x, bias), atol=1e-4, rtol=1e-4)


def test_a_choice_is_looked_up_by_shape_format_and_group() -> None:
    asked: list[Shape] = []
    wanted = QuantizedChoice((4,), (Tiles(32, 8, 2, 1),))

    def choice_of(shape: Shape) -> QuantizedChoice:
        asked.append(shape)
        return wanted

    weight = on_device(QuantizedWeight(example("int4/64 zeros")), choice_of)
    assert isinstance(weight, PackedWeight)
    assert asked == [Shape(72, 384, "int4", 64)]
    assert weight.choice == wanted
    half = torch.zeros((4, 384), dtype=torch.float16)
    assert weight.kernel(half) == wanted.kernels[0]
    assert weight.kernel(torch.zeros((5, 384), dtype=torch.float16)) is None
    assert weight.kernel(half.float()) is None, "of float32 the library knows exact ways"


def test_int8_on_hopper_has_a_kernel_for_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = QuantizedChoice((32, 64), (Tiles(32, 8, 2, 1), Mixed(64, 2, 1, 2)))
    weight = on_device(QuantizedWeight(example("int8")), lambda shape: choice)
    assert isinstance(weight, PackedWeight)
    assert weight.choice.all_are(Tiles), "on this machine"
    monkeypatch.setattr(spans_module, "hopper_serves", lambda device: True)
    weight = on_device(QuantizedWeight(example("int8")), lambda shape: choice)
    assert isinstance(weight, PackedWeight)
    assert weight.choice == choice
    assert weight.kernel(torch.zeros((40, 384), dtype=torch.float16)) == Mixed(64, 2, 1, 2)
    assert weight.kernel(torch.zeros((40, 384))) is None
    assert weight.multiply(torch.empty((40, 384), dtype=torch.float16, device="meta")).shape == (40, 72)
    *alone, (source, constants) = weight.sources(bias=False, dtype=torch.float16, gate=True)
    assert "mixed_product" in source
    assert (constants["BITS"], constants["TOKENS"]) == (8, 64)
    assert [(c["KEPT"], c["NORMED"], c["GATED"]) for _, c in alone] == [(24, 0, 0), (24, 1, 1)]
    assert weight.asks_ahead == 1
    token, norm = torch.empty((1, 384), dtype=torch.float16, device="meta"), torch.ones(384, dtype=torch.float16)
    assert weight.multiply(token).shape == (1, 72)
    found, total = weight.norm_gated_multiply(token, token, norm, 1e-5, None, "silu")
    assert (found.shape, total.shape) == ((1, 36), (1, 384))
    for other in ("int8 zeros", "int8/32", "fp8"):
        found = on_device(QuantizedWeight(example(other)), lambda shape: choice)
        assert isinstance(found, PackedWeight)
        assert found.choice.all_are(Tiles)
        assert not found.asks_ahead, other


def test_defaults_for_hopper_are_sizes_that_fit() -> None:
    """At every number of tokens; small matrices, and those whose results are not on 16 bytes, keep what they had."""
    four, eight = Kind(4, 32, torch.float16, True), Kind(8, 0, torch.float32, False)
    for n, k in ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (1024, 2048)):
        for kind, choice in ((four, default_nibbles(n, k)), (eight, default_spans(n, k))):
            found = [kernel for kernel in choice.kernels if isinstance(kernel, Mixed)]
            assert isinstance(choice.at(256), Mixed)
            assert not isinstance(choice.at(16), Mixed)
            assert all(kernel.fits(kind) and kernel.parts <= k // 128 for kernel in found)
    for n, k in ((1020, 2048), (512, 4096), (4096, 1024)):
        assert default_nibbles(n, k).all_are(Nibbles)
        assert default_spans(n, k) == default_choice(Format("int8"), n, k)


def test_a_profile_keeps_what_was_measured() -> None:
    shape = Shape(4096, 4096, "int4", 64)
    timings = [QuantizedTiming(1, Tiles(64, 8, 4, 4, 4), 1e-5, 2e-5), QuantizedTiming(512, None, 3e-5, 3e-5)]
    fours = [QuantizedTiming(8, Nibbles(2, 8, 1, 2, 2, 2), 1e-5, 2e-5)]
    fours += [QuantizedTiming(64, Mixed(64, 2, 4, 3, 2), 1e-5, 2e-5)]
    assert quantized_timings(tables_with({}, {shape: fours})) == {shape: fours}
    tables = tables_with({}, {shape: timings})
    assert quantized_timings(tables) == {shape: timings}
    assert quantized_choices(tables) == {shape: QuantizedChoice((1, 512), (timings[0].kernel, None))}
    again = tables_with(tables, {shape: timings[:1], Shape(8, 64, "fp8"): timings[1:]})
    assert list(quantized_timings(again)) == [Shape(8, 64, "fp8"), shape]
    name, table = next(iter(tables.items()))
    with pytest.raises(ConfigError, match="measure it again"):
        quantized_timings({name: Table(table.columns[1:], ())})
    row = list(table.rows[0])
    row[5] = "gemv"
    with pytest.raises(ConfigError, match="only tiles, nibbles, mixed and library"):
        quantized_timings({name: Table(table.columns, (tuple(row),))})
    row[5:7] = "tiles", "64/32/4"
    with pytest.raises(ConfigError, match="5 numbers are wanted"):
        quantized_timings({name: Table(table.columns, (tuple(row),))})


@pytest.mark.parametrize("sizes", [(48, 8, 2, 1), (16, 8, 2, 1), (32, 4, 2, 1), (32, 8, 0, 1), (32, 8, 2, 0)])
def test_sizes_that_no_kernel_has_are_refused(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError):
        Tiles(*sizes)
    with pytest.raises(ConfigError, match="ascending"):
        QuantizedChoice((8, 8), (None, None))


def test_tiles_shrink_until_a_device_has_room_for_them() -> None:
    format, large = Format("int4", 64), Tiles(128, 128, 3, 1, 8)
    assert large.fitting(format, 128, room_on(90)) == large
    for architecture in (86, 89, "gfx942"):
        room = room_on(architecture)
        assert large.fitting(format, 128, room).shared(format, 128, room) <= room.shared
    tried, sizes = [], large
    while (smaller := sizes.smaller()) is not None:
        sizes = smaller
        tried.append((sizes.rows, sizes.tokens, sizes.stages, sizes.warps))
    assert tried == [(128, 128, 2, 8), (128, 64, 2, 8), (128, 32, 2, 8), (64, 32, 2, 4), (32, 32, 2, 4)]


@interpreter
def test_what_a_device_refuses_is_computed_in_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    kernel, tried = kernels._tiles_kernel, []

    class Refusing:
        def __getitem__(self, grid):  # type: ignore[no-untyped-def]
            def launch(*args, **kwargs):  # type: ignore[no-untyped-def]
                tried.append(kwargs["STAGES"])
                if kwargs["STAGES"] > 2:
                    raise OutOfResources(131_072, 101_376, "shared memory")
                return kernel[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(kernels, "_tiles_kernel", Refusing())
    matrix, x = example("int8"), random(5, 384)
    got = multiply_packed(x, packed(matrix), None, Tiles(64, 16, 4, 1))
    assert tried == [4, 3, 2]
    torch.testing.assert_close(got, x @ dequantized(matrix).T, atol=1e-4, rtol=1e-4)


META = torch.device("meta")


def launches(format: Format, architecture: int | str, dtype: torch.dtype = torch.bfloat16):  # type: ignore[no-untyped-def]
    """Of every default size, as a weight on that device has them, and of the expanded matrix."""
    n = k = 4096
    matrix = packed(empty_quantized(format, (n, k), META))
    choice = default_choice(format, n, k).fitting(format, room_on(architecture))
    with noted_launches() as notes:
        for m in (1, 20, 64, 600):
            multiply_packed(torch.empty((m, k), dtype=dtype, device=META), matrix, None, choice.at(m))
    return notes


def check(format: Format, architecture: int | str, dtype: torch.dtype = torch.bfloat16) -> None:
    from triton.backends.compiler import GPUTarget

    if isinstance(architecture, int):
        target = GPUTarget("cuda", architecture, 32)
    else:
        target = GPUTarget("hip", architecture, 64 if architecture.startswith("gfx9") else 32)
    room = room_on(architecture)
    jobs = jobs_of(launches(format, architecture, dtype), target)
    assert {job.kernel.__name__ for job in jobs} == {"_tiles_kernel", "_expand_kernel"}
    for job in jobs:
        compiled = job.compile()
        assert compiled.metadata.shared <= room.shared, f"{job.key}: {compiled.metadata.shared} bytes of shared memory"
        assert compiled.metadata.num_warps <= room.warps


@pytest.mark.parametrize(
    ("name", "architecture", "dtype"),
    [("int4/64 zeros", 90, torch.bfloat16), ("int8", 89, torch.bfloat16), ("int4/64 zeros", 86, torch.float16)],
)
def test_some_products_compile_and_fit(name: str, architecture: int | str, dtype: torch.dtype) -> None:
    check(FORMATS[name], architecture, dtype)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        *(("int4/64 zeros", 80), ("int4/64 zeros", 86), ("int4/64 zeros", 120), ("int4/64 zeros", "gfx942")),
        *(("int8", 120), ("int8", "gfx942"), ("fp8 blocks", 89), ("fp8 blocks", 90), ("mxfp4", 89), ("mxfp4", 90)),
    ],
)
def test_every_product_compiles_and_fits(name: str, architecture: int | str) -> None:
    check(FORMATS[name], architecture)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "architecture"), [("int4/32", 89), ("int8", 86), ("fp8 blocks", 89), ("mxfp4", 80), ("fp8", "gfx942")]
)
def test_every_product_compiles_for_half_precision(name: str, architecture: int | str) -> None:
    check(FORMATS[name], architecture, torch.float16)


def test_instructions_of_nvidias_are_left_out_elsewhere() -> None:
    from triton.backends.compiler import GPUTarget

    (first, *_) = launches(FORMATS["int8"], 90)
    assert first.kwargs["PTX"]
    for target, has in ((GPUTarget("cuda", 90, 32), True), (GPUTarget("cuda", 75, 32), False)):
        assert on_target(first.kwargs, target)["PTX"] is has
    assert on_target(first.kwargs, GPUTarget("hip", "gfx942", 64))["PTX"] is False


def test_a_matrix_without_memory_has_the_types_of_a_real_one() -> None:
    for format in FORMATS.values():
        real, empty = quantized(random(256, 256), format), empty_quantized(format, (256, 256), META)
        for one, other in ((real, empty), (packed(real), packed(empty))):
            for name in ("scales", "zeros", "codes" if isinstance(one, Quantized) else "words"):
                a, b = getattr(one, name), getattr(other, name)
                assert (a is None) == (b is None), (format, name)
                assert a is None or (a.dtype == b.dtype and a.shape == b.shape), (format, name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", [*FORMATS, "int8 zeros"])
def test_on_a_device_codes_become_the_numbers_that_they_stand_for(name: str, dtype: torch.dtype) -> None:
    """A token that is 1 in one place gets the numbers of a column, rounded once; by few tokens and by many."""
    given = example(name)
    matrix, columns = given.put(lambda tensor: tensor.cuda()), given.shape[1]
    wanted = dequantized(given).T.to(dtype).cuda()
    eye, there = torch.eye(columns, dtype=dtype, device="cuda"), packed(matrix)
    for at_once, sizes in (
        (8, Tiles(64, 32, 4, 4)),
        (32, Tiles(64, 32, 4, 1)),
        (96, Tiles(64, 128, 3, 1)),
        (columns, None),
    ):
        found = torch.cat([multiply_packed(part, there, None, sizes) for part in eye.split(at_once)])
        assert torch.equal(found, wanted), (at_once, (found - wanted).abs().max())
    x = random(20, columns, seed=3).to(dtype).cuda()
    exact = x.double() @ dequantized(given).T.double().cuda()
    for few in (x[:1], x[:8], x):
        found = multiply_packed(few, there, None, Tiles(64, 32, 4, 1)).double()
        error = (found - exact[: len(few)]).norm() / exact[: len(few)].norm()
        assert error < (4e-4 if dtype == torch.float16 else 3e-3)
