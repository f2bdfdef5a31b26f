"""Attention of decodes on Hopper: what it takes, that it compiles, that it is right: in an emulator, and on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from cellar.ops import attention as module
from cellar.ops.attention import OPS, decode_attention_definition, decode_attention_kernel
from cellar.ops.attention_hopper import (
    MAX_SHARED,
    Sizes,
    arguments_of,
    decode_source,
    default_sizes,
    hopper_decode,
    hopper_takes,
)
from cellar.ops.attention_plan import AttentionShape
from cellar.ops.cuda_compiler import compile_cuda, compiler_available
from cellar.ops.cuda_driver import hopper_available
from cellar.ops.registry import Case
from tests.ops import emulated

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
SIZES = (Sizes(4, 3, 2), Sizes(8, 4, 1), Sizes(4, 1, 2))
LENGTHS = ((1, 5, 31, 32, 33, 64, 65, 100, 300), (700,), tuple(range(1, 200, 19)))
HEADS = ((8, 2, 128), (8, 8, 64), (14, 2, 64), (2, 2, 128))

compiled = pytest.mark.skipif(emulated.compiler() is None, reason="this machine has no C++ compiler (g++)")
hopper = pytest.mark.skipif(
    not hopper_available(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    reason="gpu: this machine has no Hopper GPU",
)
CASES = [case for op in OPS if op.name == "decode_attention" for case in op.cases]


def _cases(programs: int, each: int = 1) -> list[Case]:
    """Rows of many lengths, cut for so many programs; of the forms that the kernel takes every `each`-th."""
    found = [case for case in CASES if not case.heavy]
    forms = [(lengths, heads, chunk) for lengths in LENGTHS for heads in HEADS for chunk in (16, 32, 64)]
    for lengths, heads, chunk in forms[::each]:
        name = f"{len(lengths)} rows, {heads}, chunks of {chunk}"
        found.append(module._decode_case(name, lengths, heads[2], heads=heads, chunk=chunk, programs=programs))
    return found


def _takes(case: Case) -> bool:
    shape = case.make(torch.device("cpu"), torch.bfloat16)["work"].shape
    return shape.head_dim in (64, 128, 256) and shape.group <= 8


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        ((32, 8, 128), Sizes(4, 3, 2)),
        ((32, 32, 128), Sizes(4, 3, 2)),
        ((14, 2, 64), Sizes(4, 4, 2)),
        ((8, 2, 256), Sizes(8, 2, 1)),
    ],
)
def test_sizes_fit_the_shared_memory(heads: tuple[int, int, int], expected: Sizes) -> None:
    shape = AttentionShape(*heads, 32)
    assert default_sizes(shape) == expected
    assert expected.shared(shape) <= MAX_SHARED[expected.at_once]


def test_no_other_device_is_taken() -> None:
    q = torch.zeros(1, 8, 128, dtype=torch.bfloat16)
    cache = torch.zeros(4, 2, 32, 128, dtype=torch.bfloat16)
    assert not hopper_takes(q, cache, cache, AttentionShape(8, 2, 128, 32))


@pytest.mark.skipif(not compiler_available(), reason="NVRTC is not installed; it comes with CUDA builds of torch")
@pytest.mark.parametrize("heads", [*HEADS, (8, 2, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_it_compiles(
    heads: tuple[int, int, int], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    shape = AttentionShape(*heads, 32)
    assert compile_cuda(*decode_source(shape, default_sizes(shape), dtype)).startswith(b"\x7fELF")


def _emulated(
    case: Case,
    dtype: torch.dtype,
    sizes: Sizes,
    blocks: int,
    seeds: int = 1,
    edits: Sequence[tuple[str, str]] = (),
) -> None:
    """Run the kernel in the emulator, and compare results and cache with the definition's."""
    for seed in range(seeds):
        given, wanted = (case.make(torch.device("cpu"), dtype) for _ in range(2))
        work, table = given["work"], given["table"]
        _, constants = decode_source(work.shape, sizes, dtype)
        takes = [("const TensorMap&*", "keys"), ("const TensorMap&*", "values"), ("const Arguments&*", "arguments")]
        library = emulated.build("attention_hopper.cu", constants, "decode_attention", takes, edits)
        q, k, v, cos_sin, k_cache, v_cache = (given[n] for n in ("q", "k", "v", "cos_sin", "k_cache", "v_cache"))
        out = torch.full(q.shape, torch.nan, dtype=dtype)
        arguments = arguments_of(q, k, v, cos_sin, k_cache, v_cache, table, work, given["scale"], out)
        maps = []
        for cache in (k_cache, v_cache):
            slots, heads, chunk, dim = cache.shape
            strides = (64, dim, cache.stride(1), cache.stride(0))
            maps.append(emulated.tensor_map(cache, (64, dim // 64, chunk, heads, slots), strides, (64, 1, chunk, 1, 1)))
        shared, threads = sizes.shared(work.shape), 32 * sizes.warps + 32
        emulated.launch(library, blocks, 1, threads, shared, (*maps, ctypes.byref(arguments)), seed)
        _compare(out, given, wanted, dtype)


def _compare(out: torch.Tensor, given: dict, wanted: dict, dtype: torch.dtype) -> None:  # type: ignore[type-arg]
    expected = decode_attention_definition(**wanted)
    torch.testing.assert_close(out.float(), expected.float(), rtol=0, atol=TOLERANCE[dtype])
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(given[name], wanted[name], rtol=2e-2, atol=2e-2, equal_nan=True)
    assert not given["work"].resident.counters.any(), "counters are zero between launches"


@compiled
@pytest.mark.parametrize("case", [case for case in _cases(24, each=5) if _takes(case)], ids=lambda case: case.name)
def test_emulated(case: Case) -> None:
    number = sum(map(ord, case.name))
    _emulated(case, (torch.bfloat16, torch.float16)[number % 2], SIZES[number % 3], blocks=(1, 5, 24)[number % 3])


LONG = module._decode_case("long", (600, 33, 1, 70), 128, heads=(8, 2, 128), chunk=16, programs=4)
ALONE = module._decode_case("the newest alone", (161, 40), 128, heads=(8, 2, 128), chunk=64, split=32)


def _far(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    found = LONG.make(device, dtype)
    found["k_cache"] *= 6
    found["scale"] = 2.0
    return found


FAR = Case("scores far apart", _far)

# What is wrong, the text, what stands there instead, and with what it shows.
PLANTED = (
    ("teams share stages", "static_assert(STAGES % TEAMS == 0);", "", LONG),
    ("a stage is loaded before it was read", "(at / STAGES - 1) & 1", "at / STAGES & 1", LONG),
    ("values that nobody wrote are multiplied", "if (high < 16) clear_values(values, high, lane);", "", LONG),
    ("tokens that nobody wrote count", "mine + 8 < high", "true", LONG),
    ("an item without older tokens waits", "item.first < item.stop ? item.first /", "true ? item.first /", ALONE),
    ("sums keep their old reference", "sums.total[i] *= shrink;", "", FAR),
    ("queries are overwritten while they are read", "sync_computing();  // of the item before", "//", LONG),
    ("slots of the next chunks are those of the first", "(ahead + which) % 32", "which", LONG),
    ("the newest is not rotated", "narrow(rotated(k, a.cos_sin, a.rotary_dim, item.start, d))", "k[d]", LONG),
    ("the counter is not set back", "if (thread == 0) *counter = 0;", "", LONG),
)


@compiled
@pytest.mark.parametrize(("what", "old", "new", "case"), PLANTED, ids=[planted[0] for planted in PLANTED])
def test_the_emulator_finds_planted_defects(what: str, old: str, new: str, case: Case) -> None:
    sizes = Sizes(8, 3, 1) if what == "teams share stages" else Sizes(4, 2, 2)
    with pytest.raises(AssertionError):
        _emulated(case, torch.bfloat16, sizes, blocks=2, seeds=8, edits=((old, new),))


@compiled
@pytest.mark.parametrize("case", [LONG, ALONE, FAR], ids=lambda case: case.name)
def test_without_defects_the_same_passes(case: Case) -> None:
    _emulated(case, torch.bfloat16, Sizes(4, 2, 2), blocks=2, seeds=2)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("sizes", [None, Sizes(4, 3, 2), Sizes(8, 4, 1), Sizes(4, 2, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_on_the_device(dtype: torch.dtype, sizes: Sizes | None) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    long = module._decode_case("long", (8000, 3000, 10, 700, 512, 513), 128, heads=(32, 8, 128), programs=264)
    wide = module._decode_case("wide heads", (900, 20), 256, heads=(8, 2, 256), programs=264)
    for case in [case for case in [*_cases(264), *CASES, long] if _takes(case)] + ([wide] if sizes is None else []):
        given, wanted = (case.make(device, dtype) for _ in range(2))
        assert hopper_takes(given["q"], given["k_cache"], given["v_cache"], given["work"].shape)
        for _ in range(2):
            out = hopper_decode(**given, sizes=sizes)
        _compare(out, given, wanted, dtype)


@pytest.mark.gpu
@hopper
def test_shapes_that_it_does_not_take_go_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "hopper_takes", lambda *_: False)
    device = torch.device("cuda", torch.cuda.current_device())
    for case in CASES:
        given, wanted = (case.make(device, torch.bfloat16) for _ in range(2))
        _compare(decode_attention_kernel(**given), given, wanted, torch.bfloat16)
