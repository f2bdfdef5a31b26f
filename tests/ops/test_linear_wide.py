"""The wide product of Hopper: what it takes, that it compiles, and that it is right: in an emulator, and on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cellar.core.errors import DeviceError
from cellar.ops.cuda import compiler as cuda_compiler
from cellar.ops.cuda.compiler import compile_cuda, compiler_available
from cellar.ops.cuda.hopper import hopper_available
from cellar.ops.linear.choice import LinearChoice, Wide
from cellar.ops.linear.definition import linear, linear_definition
from cellar.ops.linear.device import prepare
from cellar.ops.linear.fused import norm_gated_linear, norm_gated_linear_definition
from cellar.ops.linear.hopper import wide, wide_source, wide_takes
from cellar.ops.linear.triton import multiply
from cellar.ops.norm import add_rms_norm
from cellar.ops.norm.triton import add_rms_norm_behind_sum
from tests.ops import emulated

# Of every kind one: clusters that share rows, tokens, sums, and all of them; persistent; with less than 64 tokens.
SIZES = (
    Wide(128, 224, 5),
    Wide(128, 224, 4, sharing_tokens=2),
    Wide(128, 224, 4, sharing_tokens=4),
    Wide(128, 256, 2, parts=8),
    Wide(128, 128, 5, sharing_tokens=2, parts=4),
    Wide(128, 192, 3, parts=4),
    Wide(128, 96, 7, sharing_tokens=4, parts=2),
    Wide(128, 224, 4, sharing_rows=2, persistent=True),
    Wide(128, 192, 3, sharing_rows=2, sharing_tokens=2, persistent=True),
    Wide(128, 128, 6, sharing_rows=2, sharing_tokens=2, parts=2),
    Wide(192, 112, 5, sharing_tokens=2, persistent=True),
    Wide(192, 192, 4),
    Wide(192, 96, 4, parts=4),
    Wide(64, 224, 6, sharing_tokens=2),
    Wide(64, 16, 10),
    Wide(64, 112, 9, sharing_tokens=4, persistent=True),
    Wide(64, 128, 8, sharing_tokens=2, parts=4),
)
# (m, n, k): even and ragged in each direction, one row, more tiles than a device runs at once.
SHAPES = (
    (128, 448, 4096),
    (1, 224, 1024),
    (100, 6144, 4096),
    (7, 328, 1032),
    (65, 48, 1000),
    (200, 1008, 1096),
    (256, 4096, 1024),
    (300, 16384, 512),
)
compiled = pytest.mark.skipif(emulated.compiler() is None, reason="this machine has no C++ compiler (g++)")
hopper = pytest.mark.skipif(
    not hopper_available(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    reason="gpu: this machine has no Hopper GPU",
)


def test_no_other_device_and_no_other_form_is_taken() -> None:
    x, weight = torch.zeros(4, 16, dtype=torch.bfloat16), torch.zeros(24, 16, dtype=torch.bfloat16)
    assert not hopper_available(torch.device("cpu"))
    assert not wide_takes(x, weight)
    choice = LinearChoice((), (), wide=((128, Wide(128, 224, 4)),))
    assert prepare(weight, choice).kernel(x) is None


@pytest.mark.parametrize(
    ("sizes", "gate", "expected"),
    [
        (Wide(128, 224, 4), False, 1024 + 4 * (352 * 128 + 16)),
        (Wide(128, 256, 1), False, 1024 + 128 * 264 * 2),
        (Wide(128, 256, 2, parts=8), False, 1024 + 2 * (384 * 128 + 16) + 128 * 256 * 4 * 7 // 8),
        (Wide(128, 224, 4, persistent=True), True, 1024 + 4 * (352 * 128 + 16) + 128 * 72 * 2),
        (Wide(64, 48, 3, persistent=True), False, 1024 + 3 * (112 * 128 + 16) + 64 * 56 * 2),
    ],
)
def test_shared_memory(sizes: Wide, gate: bool, expected: int) -> None:
    assert sizes.shared(gate) == expected


def test_the_instruction_names_all_of_its_registers() -> None:
    text, constants = wide_source(Wide(128, 48, 4, sharing_tokens=2), True, False, torch.float16)
    assert "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16" in text
    assert '"{%0, %1, %2' in text
    assert '"+f"(sum[23])' in text
    assert '"+f"(sum[24])' not in text
    assert (constants["BN"], constants["CN"], constants["GATED"], constants["BF16"]) == (48, 2, 1, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not compiler_available(), reason="gpu: NVRTC is not installed; CUDA builds of torch bring it")
@pytest.mark.parametrize(
    ("sizes", "gate"), [(sizes, gate) for sizes in SIZES for gate in (False, True) if not gate or sizes.parts == 1]
)
def test_it_compiles(sizes: Wide, gate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    cubin = compile_cuda(*wide_source(sizes, gate, True, torch.bfloat16))
    assert cubin.startswith(b"\x7fELF")
    (kept,) = (tmp_path / ".cache" / "cellar" / "kernels").iterdir()
    assert kept.read_bytes() == cubin


@pytest.mark.gpu
@pytest.mark.skipif(not compiler_available(), reason="gpu: NVRTC is not installed; CUDA builds of torch bring it")
def test_what_the_compiler_refuses_is_told() -> None:
    with pytest.raises(DeviceError, match="identifier"):
        compile_cuda("__global__ void f() { nonsense; }", {})


def test_without_the_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_compiler, "_library", lambda: None)
    with pytest.raises(DeviceError, match="CUDA build of torch"):
        compile_cuda("", {})


def _operands(
    m: int, n: int, k: int, dtype: torch.dtype, device: str = "cuda"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(m + n + k)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    return random(m, k).to(dtype), (random(n, k) / k**0.5).to(dtype), random(n).to(dtype)


def _wanted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gate: bool) -> torch.Tensor:
    product = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if not gate:
        return product
    first, second = product.chunk(2, dim=1)
    return functional.silu(first) * second


def _emulated(
    sizes: Wide,
    shape: tuple[int, int, int],
    *,
    gate: bool = False,
    with_bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    seeds: int = 1,
    edits: Sequence[tuple[str, str]] = (),
) -> None:
    """Run the kernel in the emulator, with two persistent clusters, and compare."""
    m, n, k = shape
    x, weight, bias = _operands(m, 2 * n if gate else n, k, dtype, "cpu")
    given = bias if with_bias else None
    _, constants = wide_source(sizes, gate, with_bias, dtype)
    maps = [("const TensorMap&*", "xs"), ("const TensorMap&*", "ws"), ("const u16*", "bias"), ("u16*", "out")]
    counts = [("int", name) for name in ("m", "n", "steps", "down", "clusters")]
    library = emulated.build(("linear/wide.cu",), constants, "product", [*maps, *counts], edits)
    out = torch.empty((m, n), dtype=dtype)
    down = -(-m // (sizes.tokens * sizes.sharing_rows))
    clusters = down * -(-n // (sizes.columns(gate) * sizes.sharing_tokens))
    boxes = (sizes.tokens // sizes.sharing_tokens, sizes.columns(gate) // sizes.sharing_rows)
    arguments = (
        emulated.tensor_map(x, (k, m), (k,), (64, boxes[0])),
        emulated.tensor_map(weight, (k, weight.shape[0]), (k,), (64, boxes[1])),
        emulated.pointer(given),
        emulated.pointer(out),
        *(ctypes.c_int(count) for count in (m, n, -(-k // 64), down, clusters)),
    )
    blocks = (min(clusters, 2) if sizes.persistent else clusters) * sizes.cluster
    for seed in range(seeds):
        out.fill_(torch.nan)
        emulated.launch(library, blocks, sizes.cluster, sizes.threads, sizes.shared(gate), arguments, seed)
        torch.testing.assert_close(out.float(), _wanted(x, weight, given, gate), rtol=1e-2, atol=1e-2)


# Small relatives of SIZES, with fewer stages than steps.
SMALL = (
    (Wide(64, 32, 3), (5, 48, 200)),
    (Wide(64, 64, 4, sharing_tokens=2), (64, 120, 520)),
    (Wide(128, 64, 4, sharing_tokens=4), (100, 120, 520)),
    (Wide(128, 32, 3, parts=8), (128, 64, 1024)),
    (Wide(128, 64, 3, sharing_tokens=2, parts=4), (100, 136, 1000)),
    (Wide(128, 64, 3, sharing_rows=2, sharing_tokens=2, parts=2), (200, 136, 520)),
    (Wide(128, 32, 2, sharing_rows=2, sharing_tokens=2, persistent=True), (300, 200, 456)),
    (Wide(64, 48, 2, persistent=True), (70, 200, 456)),
    (Wide(192, 112, 2, sharing_tokens=2, persistent=True), (180, 456, 456)),
    (Wide(192, 64, 3, parts=4), (150, 136, 520)),
    (Wide(192, 48, 3), (200, 120, 200)),
    (Wide(128, 160, 2, sharing_rows=2, persistent=True), (130, 328, 200)),
)


@pytest.mark.long
@compiled
@pytest.mark.parametrize(("sizes", "shape"), SMALL, ids=str)
def test_emulated(sizes: Wide, shape: tuple[int, int, int]) -> None:
    _emulated(sizes, shape, seeds=3)
    if sizes.persistent or sizes.parts > 1:
        _emulated(sizes, shape, with_bias=True, dtype=torch.float16, gate=sizes.parts == 1)


# What is wrong, the text, what stands there instead, and with which of SMALL it shows.
PLANTED = (
    ("a stage is loaded before it was read", "(at / STAGES - 1) & 1", "at / STAGES & 1", 1),
    ("a stage is given back before it was read", "                products_done<1>();\n", "", 1),
    (
        "one stage of a tile is never given back",
        "        products_used(sum);\n        if (tells)",
        "        if (false)",
        6,
    ),
    ("arrivals are counted of too many", "(CM + CN - 1) * MULTIPLIERS", "CM * CN * MULTIPLIERS", 5),
    ("arrivals are told to the wrong blocks", "(lane - CN >= task.rm)", "0", 5),
    ("a part of x is for this block alone", "load_box<CN>(task.xs", "load_box<1>(task.xs", 1),
    ("all blocks load the same rows of w", "task.n + tile.column + task.rm * W_ROWS", "task.n + tile.column", 5),
    (
        "parts are added before they are there",
        "            send(task, sum, warp, lane);\n            cluster_sync<true>();",
        "            cluster_sync<true>();\n            send(task, sum, warp, lane);",
        3,
    ),
    ("parts are sent to oneself", "rank_of(task.rm, task.rn, owner)", "rank_of(task.rm, task.rn, task.rk)", 3),
    ("parts lie on one another", "(part - (part > owner))", "0", 3),
    ("the tile before is overwritten", "if (PERSIST || piece) __syncwarp();", "", 8),
)


@pytest.mark.long
@compiled
@pytest.mark.parametrize(("what", "old", "new", "at"), PLANTED, ids=[planted[0] for planted in PLANTED])
def test_the_emulator_finds_planted_defects(what: str, old: str, new: str, at: int) -> None:
    sizes, shape = SMALL[at]
    with pytest.raises(AssertionError):
        _emulated(sizes, shape, seeds=5, edits=((old, new),))


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_multiplies(sizes: Wide, dtype: torch.dtype) -> None:
    for m, n, k in SHAPES:
        x, weight, bias = _operands(m, n, k, dtype)
        for b in (None, bias):
            got = wide(x, weight, b, sizes)
            torch.testing.assert_close(got.float(), _wanted(x, weight, b, False), rtol=1e-2, atol=1e-2)
            assert torch.equal(wide(x, weight, b, sizes), got), "the same bits every time"


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("sizes", [sizes for sizes in SIZES if sizes.parts == 1], ids=str)
def test_it_gates(sizes: Wide) -> None:
    for m, n, k in SHAPES:
        x, weight, bias = _operands(m, 2 * n, k, torch.bfloat16)
        for b in (None, bias):
            got = wide(x, weight, b, sizes, gate=True)
            torch.testing.assert_close(got.float(), _wanted(x, weight, b, True), rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@hopper
def test_a_chain_of_dependent_launches_in_a_graph_is_right() -> None:
    """Each product begins before the one in front of it has ended: its weights early, its tokens not."""
    sizes = [Wide(128, 128, 5, parts=4), Wide(128, 64, 8, sharing_tokens=2, parts=2), Wide(128, 32, 8, 1, 4)]
    x, *_ = _operands(96, 8, 4096, torch.bfloat16)
    weights = [_operands(1, 4096, 4096, torch.bfloat16)[1].roll(i, 0) for i in range(9)]

    def chain(multiplied) -> torch.Tensor:  # type: ignore[no-untyped-def]
        y = x
        for number, weight in enumerate(weights):
            y = multiplied(y, weight, None, sizes[number % 3])
            y = functional.layer_norm(y, (4096,)) if number % 2 else y
        return y

    chain(multiply)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(multiply)
    first = None
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        first = got.clone() if first is None else first
        assert torch.equal(got, first)
    wanted = chain(lambda y, weight, bias, _: linear_definition(y, weight, bias))
    torch.testing.assert_close(first, wanted, rtol=5e-2, atol=5e-2)


@pytest.mark.gpu
@hopper
def test_a_prepared_matrix_uses_it_for_the_tokens_that_its_choice_says() -> None:
    x, weight, _ = _operands(128, 1024, 512, torch.bfloat16)
    sizes = Wide(128, 128, 6, sharing_tokens=2)
    choice = LinearChoice((), (), wide=((64, None), (128, sizes)))
    prepared = prepare(weight, choice)
    assert prepared.kernel(x) == sizes
    assert prepared.kernel(x[:64]) is None
    torch.testing.assert_close(linear(x, prepared), linear_definition(x, weight), rtol=1e-2, atol=1e-2)
    parts = (x, None, torch.ones(512, device="cuda", dtype=x.dtype), 1e-5, prepared, None, "silu")
    got, _ = norm_gated_linear(*parts)
    wanted, _ = norm_gated_linear_definition(*parts)
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@hopper
def test_products_that_begin_before_a_norm_behind_a_sum_wait_for_it() -> None:
    """Forty layers in a graph, of which each norm lets the product behind it begin while what it adds is computed."""
    layers, tokens, width = 40, 96, 4096
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    given, norm, matrices = random(tokens, width), random(width), random(4, width, width) / 64
    sizes = Wide(128, 32, 6)

    def run(add: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        residual = x = given
        for j in range(layers):
            x, residual = add(residual, wide(x, matrices[j % 4], None, sizes), norm, 1e-5)
        return x

    wanted = run(add_rms_norm)
    assert torch.equal(run(add_rms_norm_behind_sum), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(add_rms_norm_behind_sum)
    for _ in range(20):
        found.zero_()
        graph.replay()
        assert torch.equal(found, wanted)
