"""Attention on Hopper: what its kernels take, that they compile, that they are right: in an emulator, and on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cellar.core.kv_formats import KVFormat
from cellar.core.specs import RopeSpec
from cellar.ops.attention import (
    OPS,
    AttentionShape,
    AttentionWork,
    attention,
    decode_attention,
    decodes_at_once,
    plan_attention,
)
from cellar.ops.attention import cases as attention_cases
from cellar.ops.attention.definition import attention_definition, decode_attention_definition
from cellar.ops.attention.hopper import (
    DecodeArguments,
    Sizes,
    attention_hopper,
    cache_map,
    decode_arguments,
    decode_files,
    decode_name,
    decode_source,
    default_sizes,
    hopper_decode,
    hopper_prompts,
    hopper_takes_decodes,
    hopper_takes_prompts,
    prompt_arguments,
    prompt_shared,
    prompt_source,
    query_map,
    sizes_for,
    takes_attention,
)
from cellar.ops.attention.plan import LAST, NARROW_TILE, work_items
from cellar.ops.cuda.compiler import compile_cuda, compiler_available
from cellar.ops.cuda.hopper import MAX_SHARED, hopper_available
from cellar.ops.kv_format import quantized_cache
from cellar.ops.registry import Case
from cellar.ops.rotary import rope_table, rotary_kv
from tests.ops import emulated

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
SIZES = (Sizes(4, 3, 2), Sizes(8, 4, 1), Sizes(4, 1, 2))
LENGTHS = ((1, 5, 31, 32, 33, 64, 65, 100, 300), (700,), tuple(range(1, 200, 19)))
FORMS: tuple[KVFormat, ...] = ("fp8", "int4")
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
        found.append(attention_cases.decode_case(name, lengths, heads[2], heads=heads, chunk=chunk, programs=programs))
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
    _fits(AttentionShape(*heads, 32), expected)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [((32, 8, 128), Sizes(4, 3, 2, 2)), ((64, 8, 128), Sizes(4, 2, 2, 2)), ((14, 2, 64), Sizes(4, 3, 2, 2))],
)
def test_sizes_of_fp8_fit_the_shared_memory(heads: tuple[int, int, int], expected: Sizes) -> None:
    _fits(AttentionShape(*heads, 32, kv_format="fp8"), expected)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [((32, 32, 128), Sizes(4, 4, 2, 2)), ((64, 8, 128), Sizes(4, 4, 2, 2)), ((14, 2, 64), Sizes(4, 4, 2, 2))],
)
def test_sizes_of_int4_fit_the_shared_memory(heads: tuple[int, int, int], expected: Sizes) -> None:
    _fits(AttentionShape(*heads, 32, kv_format="int4"), expected)


def test_chunks_of_codes_fill_lines() -> None:
    assert AttentionShape(8, 2, 64, 32, kv_format="int4").decodes_on_hopper
    assert not AttentionShape(8, 2, 64, 16, kv_format="int4").decodes_on_hopper
    assert AttentionShape(8, 2, 64, 16, kv_format="fp8").decodes_on_hopper
    assert not AttentionShape(8, 2, 256, 32, kv_format="int4").decodes_on_hopper


def _fits(shape: AttentionShape, expected: Sizes) -> None:
    assert default_sizes(shape) == expected
    assert expected.shared(shape) <= MAX_SHARED[expected.at_once]


def test_no_other_device_is_taken() -> None:
    q = torch.zeros(1, 8, 128, dtype=torch.bfloat16)
    cache = torch.zeros(4, 2, 32, 128, dtype=torch.bfloat16)
    assert not hopper_takes_decodes(q, cache, cache, AttentionShape(8, 2, 128, 32))


@pytest.mark.gpu
@pytest.mark.skipif(not compiler_available(), reason="gpu: NVRTC is not installed; CUDA builds of torch bring it")
@pytest.mark.parametrize("heads", [*HEADS, (8, 2, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_it_compiles(
    heads: tuple[int, int, int], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    shape = AttentionShape(*heads, 32)
    coded = (replace(shape, kv_format=form) for form in FORMS) if shape.head_dim <= 128 else ()
    for of in (shape, *coded):
        assert compile_cuda(*decode_source(of, default_sizes(of), dtype)).startswith(b"\x7fELF")
    for tile in (64, 128):
        if shape.head_dim <= 128 and 64 % shape.group == 0:
            assert compile_cuda(*prompt_source(shape, tile, dtype)).startswith(b"\x7fELF")


def _emulated(
    case: Case,
    dtype: torch.dtype,
    sizes: Sizes,
    blocks: int,
    seeds: int = 1,
    edits: Sequence[tuple[str, str]] = (),
    padding: int = 0,
) -> None:
    """Run the kernel in the emulator, and compare results and cache with the definition's. So many tokens more, which
    are in no list, must be left as they are.
    """
    for seed in range(seeds):
        given, wanted = (case.make(torch.device("cpu"), dtype) for _ in range(2))
        out = _run(given, sizes, blocks, seed, edits, padding)
        tokens = len(out) - padding
        assert out[tokens:].isnan().all()
        _compare(out[:tokens], given, wanted, dtype)


def _run(
    given: dict[str, Any],
    sizes: Sizes,
    blocks: int,
    seed: int = 0,
    edits: Sequence[tuple[str, str]] = (),
    padding: int = 0,
) -> torch.Tensor:
    """In the emulator; -> results, NaN where none was written."""
    work, table = given["work"], given["table"]
    q, k, v = (torch.cat((given[n], given[n][:1].expand(padding, -1, -1))) for n in "qkv")
    k_cache, v_cache = given["k_cache"], given["v_cache"]
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    arguments = decode_arguments(q, k, v, given["cos_sin"], k_cache, v_cache, table, work, given["scale"], out)
    blocks = min(blocks, len(work.items.table) * work.shape.kv_heads)
    if sizes.sharers > 1:
        blocks = len(q) * work.shape.kv_heads * sizes.sharers
    _launch_emulated(given, sizes, blocks, arguments, edits, seed)
    return out


def _launch_emulated(
    given: dict[str, Any],
    sizes: Sizes,
    blocks: int,
    arguments: DecodeArguments,
    edits: Sequence[tuple[str, str]] = (),
    seed: int = 0,
) -> None:
    shape = given["work"].shape
    _, constants = decode_source(shape, sizes, given["q"].dtype)
    takes = [("const TensorMap&*", "keys"), ("const TensorMap&*", "values"), ("const Arguments&*", "arguments")]
    files = decode_files(shape.kv_format, sizes)
    library = emulated.build(files, constants, decode_name(sizes), takes, edits)
    maps = [emulated.tensor_map(given[name], *cache_map(given[name])) for name in ("k_cache", "v_cache")]
    shared, threads = sizes.shared(shape), 32 * sizes.warps + 32
    emulated.launch(library, blocks, sizes.sharers, threads, shared, (*maps, ctypes.byref(arguments)), seed)


def _compare(out: torch.Tensor, given: dict, wanted: dict, dtype: torch.dtype) -> None:  # type: ignore[type-arg]
    expected = decode_attention_definition(**wanted)
    torch.testing.assert_close(out.float(), expected.float(), rtol=0, atol=TOLERANCE[dtype])
    for name in ("k_cache", "v_cache"):
        if given[name].element_size() == 1:
            # What a rotation's last bit changes may be another code, seldom.
            differ = given[name].view(torch.uint8) != wanted[name].view(torch.uint8)
            assert int(differ.sum()) <= 0.002 * out.shape[0] * given[name].shape[1] * given[name].shape[3]
            continue
        torch.testing.assert_close(given[name], wanted[name], rtol=2e-2, atol=2e-2, equal_nan=True)
    buffers = given["work"].resident
    assert not buffers.counters.any(), "counters are zero between launches"
    assert not buffers.claimed.any(), "and so is what programs have taken"


@pytest.mark.long
@compiled
@pytest.mark.parametrize("case", [case for case in _cases(24, each=5) if _takes(case)], ids=lambda case: case.name)
def test_emulated(case: Case) -> None:
    number = sum(map(ord, case.name))
    _emulated(case, (torch.bfloat16, torch.float16)[number % 2], SIZES[number % 3], blocks=(1, 5, 24)[number % 3])


LONG = attention_cases.decode_case("long", (600, 33, 1, 70), 128, heads=(8, 2, 128), chunk=16, programs=4)
ALONE = attention_cases.decode_case("the newest alone", (161, 40), 128, heads=(8, 2, 128), chunk=64, split=32)


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
    ("an item without older tokens waits", "none ? 0 : turns_of(", "false ? 0 : turns_of(", ALONE),
    ("sums keep their old reference", "sums.total[i] *= shrink;", "", FAR),
    ("queries are overwritten while they are read", "sync_computing();  // of the item before", "//", LONG),
    ("slots of the next chunks are those of the first", "(ahead + which) % 32", "which", LONG),
    ("the newest is not rotated", "narrow(rotated(k, a.cos_sin, a.rotary_dim, item.start, d))", "k[d]", LONG),
    ("the counter is not set back", "if (thread == 0) *counter = 0;", "", LONG),
    ("what is claimed is not set back", "atomicExch(a.claimed, 0);", "", LONG),
    (
        "an item is overwritten before it is read",
        "if (items >= 2) barrier_wait(heard",
        "if (false) barrier_wait(heard",
        LONG,
    ),
    ("an item is read before it is told", "barrier_wait(told + 8 * (items % 2), items / 2 & 1);", "", LONG),
)


@pytest.mark.long
@compiled
@pytest.mark.parametrize(("what", "old", "new", "case"), PLANTED, ids=[planted[0] for planted in PLANTED])
def test_the_emulator_finds_planted_defects(what: str, old: str, new: str, case: Case) -> None:
    sizes = Sizes(8, 3, 1) if what == "teams share stages" else Sizes(4, 2, 2)
    with pytest.raises(AssertionError):
        _emulated(case, torch.bfloat16, sizes, blocks=2, seeds=60, edits=((old, new),))


@compiled
@pytest.mark.parametrize("sizes", [Sizes(8, 4, 1), Sizes(4, 2, 2)], ids=str)
def test_sums_have_the_same_bits_whatever_a_block_did_before(sizes: Sizes) -> None:
    assert _repeats(sizes)


@compiled
def test_without_whole_rounds_of_the_teams_they_do_not() -> None:
    rounds = "(chunks + PER_TURN * TEAMS - 1) / (PER_TURN * TEAMS) * TEAMS"
    assert not _repeats(Sizes(8, 4, 1), edits=((rounds, "(chunks + PER_TURN - 1) / PER_TURN"),))


def _repeats(sizes: Sizes, edits: Sequence[tuple[str, str]] = ()) -> bool:
    """Parts of sums are left in float32, which shows what rounding to 16 bits would hide."""
    case = attention_cases.decode_case("odd", (401, 330, 700, 193), 128, heads=(16, 2, 128), split=192)
    found = []
    for blocks in (26, 1):
        given = case.make(torch.device("cpu"), torch.bfloat16)
        buffers = given["work"].resident
        buffers.partial.zero_()
        buffers.extents.zero_()
        _run(given, sizes, blocks, edits=edits)
        found.append((buffers.partial, buffers.extents))
    return all(torch.equal(alone, after_others) for alone, after_others in zip(*found, strict=True))


@compiled
@pytest.mark.parametrize("case", [LONG, ALONE, FAR], ids=lambda case: case.name)
def test_without_defects_the_same_passes(case: Case) -> None:
    _emulated(case, torch.bfloat16, Sizes(4, 2, 2), blocks=2, seeds=2)


# -- few tokens, a cluster for each and each KV head ------------------------------------------------------------------

ONE = attention_cases.decode_case("one", (1024,), 128, heads=(8, 2, 128), chunk=32)
SEVEN = attention_cases.decode_case("groups of seven", (65, 1, 300, 64, 129), 64, heads=(14, 2, 64), chunk=64)
EACH = attention_cases.decode_case("as many KV heads", (77, 500), 128, heads=(2, 2, 128), chunk=16)
OF_FP8, OF_INT4 = (
    attention_cases.decode_case(f"few, {form}", (300, 17), 128, heads=(8, 2, 128), chunk=32, kv_format=form)
    for form in FORMS
)
FEW_CASES = (
    (LONG, Sizes(4, 2, 2, sharers=8)),
    (ALONE, Sizes(4, 3, 2, sharers=4)),
    (ONE, Sizes(4, 3, 2, sharers=8)),
    (SEVEN, Sizes(4, 1, 2, sharers=2)),
    (EACH, Sizes(4, 3, 2, sharers=8)),
    (FAR, Sizes(4, 2, 2, sharers=2)),
    (OF_FP8, Sizes(4, 2, 2, 2, sharers=8)),
    (OF_INT4, Sizes(4, 2, 2, 2, sharers=8)),
)


@compiled
@pytest.mark.parametrize(("case", "sizes"), FEW_CASES, ids=[case.name for case, _ in FEW_CASES])
def test_blocks_of_a_cluster_share_a_token(case: Case, sizes: Sizes) -> None:
    _emulated(case, torch.bfloat16, sizes, blocks=0, seeds=2)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize(("case", "sizes"), FEW_CASES, ids=[case.name for case, _ in FEW_CASES])
def test_blocks_of_a_cluster_share_a_token_on_the_device(case: Case, sizes: Sizes, dtype: torch.dtype) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for of in (None, sizes):
        given, wanted = (case.make(device, dtype) for _ in range(2))
        for _ in range(2):
            out = hopper_decode(**given, sizes=of)
        _compare(out, given, wanted, dtype)


@compiled
def test_a_list_of_zeros_has_nothing_to_do() -> None:
    given = LONG.make(torch.device("cpu"), torch.bfloat16)
    given["work"].resident.meta.zero_()
    kept = given["k_cache"].clone(), given["v_cache"].clone()
    assert _run(given, Sizes(4, 2, 2, sharers=8), blocks=0).isnan().all(), "nothing is computed"
    for cache, before in zip((given["k_cache"], given["v_cache"]), kept, strict=True):
        torch.testing.assert_close(cache, before, rtol=0, atol=0, equal_nan=True)


@compiled
def test_padding_is_in_no_list_and_is_left_alone() -> None:
    given = LONG.make(torch.device("cpu"), torch.bfloat16)
    words = np.zeros(given["work"].items.num_words, np.int32)
    given["work"].items.write(words)
    assert words[2:12].tolist() == [1, 599, 2, 32, 3, 0, 4, 69, 0, 0]
    _emulated(LONG, torch.bfloat16, Sizes(4, 2, 2, sharers=8), blocks=0, padding=2)


@pytest.mark.parametrize(
    ("sizes", "early", "tokens", "expected"),
    [
        (Sizes(4, 3, 1, sharers=8), 1, 1, 1),
        (Sizes(4, 3, 1, sharers=8), 0, 1, 0),
        (Sizes(4, 3, 2), 8, 1, 0),
        (Sizes(4, 3, 1, sharers=2), 8, 8, 1),
        (Sizes(4, 3, 1, sharers=2), 8, 9, 0),
        (Sizes(4, 3, 1, sharers=2), 1, 2, 0),
    ],
)
def test_the_next_product_begins_early_where_it_is_made_for_it(
    sizes: Sizes, early: int, tokens: int, expected: int
) -> None:
    case = attention_cases.decode_case("some", (40,) * tokens, 128, heads=(8, 2, 128), chunk=32)
    given = case.make(torch.device("cpu"), torch.bfloat16)
    given["work"].early = early
    arguments = decode_arguments(**given, out=torch.empty_like(given["q"]), few=sizes.sharers > 1)
    assert arguments.early == expected


@pytest.mark.gpu
@hopper
def test_a_list_of_zeros_leaves_everything_as_it_is() -> None:
    """What graphs are recorded over, and padding is launched over: no token stands anywhere."""
    device = torch.device("cuda", torch.cuda.current_device())
    given = ONE.make(device, torch.bfloat16)
    before = given["k_cache"].clone(), given["v_cache"].clone()
    given["work"].resident.meta.zero_()
    for sizes in (None, default_sizes(given["work"].shape)):
        hopper_decode(**given, sizes=sizes)
    assert torch.equal(given["k_cache"].nan_to_num(), before[0].nan_to_num())
    assert torch.equal(given["v_cache"].nan_to_num(), before[1].nan_to_num())


def test_few_tokens_are_shared_where_their_blocks_fill_half_of_the_device() -> None:
    shape = AttentionShape(32, 8, 128, 32)
    assert [sizes_for(shape, n, 132).sharers for n in (1, 2, 3, 4, 8, 9, 16, 132)] == [8, 4, 4, 2, 2, 1, 1, 1]
    assert sizes_for(AttentionShape(32, 32, 128, 32), 1, 132).sharers == 2
    assert sizes_for(AttentionShape(8, 1, 128, 32), 1, 132).sharers == 1, "eight blocks would be too few"
    assert sizes_for(replace(shape, window=100), 1, 132) == default_sizes(shape)
    for form in FORMS:
        assert sizes_for(replace(shape, kv_format=form), 1, 132) == default_sizes(replace(shape, kv_format=form))
    for n in range(1, 20):
        for of in (shape, AttentionShape(14, 2, 64, 32), AttentionShape(8, 2, 256, 32)):
            sizes = sizes_for(of, n, 132)
            assert sizes.shared(of) <= MAX_SHARED[sizes.at_once]
            assert sizes.sharers == 1 or n * of.kv_heads * sizes.sharers <= 132


PLANTED_FEW = (
    ("sums are read before they have come", "cluster_sync<true>();", "sync_threads(0, THREADS + 32);", LONG),
    ("who adds up has another's dimensions", "place = rank * OWN_SLOTS + slot", "place = slot", LONG),
    ("each block adds the newest", "rank == CLUSTER - 1 ? start + 1 : stop", "start + 1", LONG),
    ("no block adds the newest", "rank == CLUSTER - 1 ? start + 1 : stop", "stop", LONG),
    ("a stage is loaded before it was read", "(at / STAGES - 1) & 1", "at / STAGES & 1", LONG),
    (
        "what lies behind the last token counts",
        "const int stop = end < start ? end : start;",
        "const int stop = end;",
        LONG,
    ),
    ("all blocks take the same turns", "turns * rank / CLUSTER * TURN", "0", LONG),
    ("of the weights' sum only this block's", "found.extents[i][slot][1]", "found.extents[rank][slot][1]", LONG),
)


@pytest.mark.long
@compiled
@pytest.mark.parametrize(("what", "old", "new", "case"), PLANTED_FEW, ids=[planted[0] for planted in PLANTED_FEW])
def test_the_emulator_finds_planted_defects_of_few(what: str, old: str, new: str, case: Case) -> None:
    with pytest.raises(AssertionError):
        _emulated(case, torch.bfloat16, Sizes(4, 1, 2, sharers=4), blocks=0, seeds=30, edits=((old, new),))


# -- decodes beside prompts -------------------------------------------------------------------------------------------

BESIDE = ((0, 130, 131), (1, 0, 45), (2, 70, 72), (3, 32, 33), (4, 600, 601), (5, 0, 1), (6, 160, 164))
BESIDE_CASES = (
    attention_cases.case("beside", BESIDE, (8, 2, 128), 32, programs=24),
    attention_cases.case("beside, chunks of 16", BESIDE, (14, 2, 64), 16, programs=4),
    attention_cases.case("beside, cut", BESIDE, (4, 4, 128), 64, programs=4, split=48),
    attention_cases.case("beside, window", BESIDE, (4, 2, 64), 16, window=40, programs=8),
    *(attention_cases.case(f"beside, {form}", BESIDE, (8, 2, 128), 32, programs=24, kv_format=form) for form in FORMS),
    attention_cases.case("decodes in the cache", ((0, 40, 41), (1, 299, 300)), (8, 2, 128), 32, programs=24),
)


def _emulated_beside(case: Case, dtype: torch.dtype, sizes: Sizes, edits: Sequence[tuple[str, str]] = ()) -> None:
    """Decodes of a step with prompts: q is rotated, all of K and V is in the cache, which stays as it is."""
    for blocks, beside in ((2, True), (24, False)):
        given = case.make(torch.device("cpu"), dtype)
        q, k_cache, v_cache, table = (given[name] for name in ("q", "k_cache", "v_cache", "table"))
        shape = given["work"].shape
        work = _in_tiles(given["work"], 128 if shape.suits_hopper else None, torch.device("cpu"), shape.group)
        kept = k_cache.clone(), v_cache.clone()
        out = torch.full(q.shape, torch.nan, dtype=dtype)
        arguments = decode_arguments(
            q, None, None, None, k_cache, v_cache, table, work, given["scale"], out, beside=beside
        )
        _launch_emulated(given | {"work": work}, sizes, blocks, arguments, edits)
        mine = torch.from_numpy(work.stop - work.start).repeat_interleave(torch.from_numpy(np.diff(work.offset))) == 1
        expected = attention_definition(**given)
        torch.testing.assert_close(out[mine].float(), expected[mine].float(), rtol=0, atol=TOLERANCE[dtype])
        assert out[~mine].isnan().all(), "prompts are not for this kernel"
        for cache, before in zip((k_cache, v_cache), kept, strict=True):
            assert torch.equal(cache.view(torch.uint8), before.view(torch.uint8))
        assert not work.resident.counters.any(), "counters are zero between launches"
        assert not work.resident.claimed.any()


def _sizes_beside(case: Case) -> Sizes:
    return Sizes(4, 3, 2, 2) if any(form in case.name for form in FORMS) else Sizes(4, 2, 2)


@compiled
@pytest.mark.parametrize("case", BESIDE_CASES, ids=lambda case: case.name)
def test_decodes_beside_prompts_emulated(case: Case) -> None:
    _emulated_beside(case, torch.bfloat16, _sizes_beside(case))


@pytest.mark.long
@compiled
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("stop = a.k && start < last ? start : last", "stop = start < last ? start : last"),
        ("item.stop = item.newest ? item.start : item.last;", "item.stop = item.start;"),
    ],
    ids=["the newest chunk is not loaded", "the newest is not seen"],
)
def test_the_emulator_finds_planted_defects_beside_prompts(old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        _emulated_beside(BESIDE_CASES[0], torch.bfloat16, Sizes(4, 2, 2), edits=((old, new),))


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_decodes_beside_prompts_on_the_device(dtype: torch.dtype) -> None:
    """In one step and many times over, launched one by one and as a graph: results do not change by a bit."""
    device = torch.device("cuda", torch.cuda.current_device())
    decodes = tuple((r, 37 * r + 900, 37 * r + 901) for r in range(96))
    spans = (*decodes, (96, 0, 150), (97, 3000, 3070), (98, 5, 8))
    long = ((0, 0, 3000), (1, 7000, 7001), (2, 40, 41), (3, 5000, 5600), (4, 100, 101))
    cases = [*BESIDE_CASES]
    for heads, chunk in (((32, 8, 128), 32), ((8, 8, 64), 16), ((16, 2, 128), 64)):
        for each in (spans, long, BESIDE):
            cases.append(attention_cases.case("on the device", each, heads, chunk, programs=264))
    for form in FORMS:
        kind = {"programs": 264, "kv_format": form}
        cases.append(attention_cases.case(f"on the device, {form}", spans, (32, 8, 128), 32, **kind))
    for case in cases:
        given = case.make(device, dtype)
        del given["new"]
        work = given["work"]
        narrow = work.items.table[: work.items.narrow]
        assert (narrow[:, LAST] == work.shape.group).all(), "decodes alone are narrow"
        assert takes_attention(*(given[name] for name in ("q", "k_cache", "v_cache", "table", "work", "scale")))
        first = attention_hopper(**given)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(first.float(), attention_definition(**given).float(), rtol=0, atol=tolerance)
        for _ in range(20):
            assert torch.equal(attention_hopper(**given), first)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                again = attention_hopper(**given)
        graph.replay()
        assert torch.equal(again, first)
        assert not work.resident.counters.any()
        assert not work.resident.claimed.any()


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        pytest.param("cuda", marks=[pytest.mark.gpu, hopper]),
    ],
)
@pytest.mark.parametrize("kv_format", ["plain", *FORMS])
def test_decodes_beside_prompts_see_what_was_just_written(name: str, kv_format: KVFormat) -> None:
    """Steps in a row, each with other tokens in the same places, with a pause before attention and without: nothing of
    the step before is seen.
    """
    device, dtype = torch.device(name), torch.bfloat16
    decodes = tuple((r, 11 * r, 11 * r + 1) for r in range(40 if name == "cuda" else 5))
    spans = (*decodes, (40, 0, 70), (41, 90, 200))
    given = attention_cases.case("written", spans, (8, 2, 128), 32, programs=264, kv_format=kv_format).make(
        device, dtype
    )
    work, table, scale = given["work"], given["table"], given["scale"]
    k_cache, v_cache = given["k_cache"].clone(), given["v_cache"].clone()
    each = work.stop - work.start
    row = torch.from_numpy(work.row).repeat_interleave(torch.from_numpy(each)).long()
    places = np.concatenate([np.arange(start, stop) for _, start, stop in spans])
    positions = torch.from_numpy(places).long().to(device)
    slots = table[row.to(device), positions // 32].long() * 32 + positions % 32
    cos_sin = rope_table(RopeSpec(128, 128, 10_000.0, max_position=512), device)
    noise = torch.Generator().manual_seed(1)
    steps = 40 if name == "cuda" else 3
    tokens = [torch.randn(len(places), 12, 128, generator=noise).to(device, dtype) for _ in range(steps)]

    def run(pause: bool) -> list[torch.Tensor]:
        k, v, found = k_cache.clone(), v_cache.clone(), []
        for x in tokens:
            q = rotary_kv(x[:, :8], x[:, 8:10], x[:, 10:], positions, cos_sin, k, v, slots)
            if pause and name == "cuda":
                torch.cuda.synchronize()
            found.append(attention(q, k, v, table, work, scale))
        return found

    for apart, at_once in zip(run(True), run(False), strict=True):
        assert bool(apart.isfinite().all())
        assert torch.equal(apart, at_once)


# -- K and V in codes -------------------------------------------------------------------------------------------------


def _unequal(device: torch.device, dtype: torch.dtype, form: KVFormat) -> dict[str, object]:
    """Scores far apart, values of a chunk up to 4,096 times smaller than another's, queries beyond float16's range."""
    found = LONG.make(device, dtype)
    smaller = torch.exp2(-torch.randint(0, 13, (len(found["v_cache"]),), generator=torch.Generator().manual_seed(2)))
    values = found["v_cache"] * smaller.to(device, dtype)[:, None, None, None]
    arena = quantized_cache(torch.stack((found["k_cache"] * 6, values), 1), form)
    work = found["work"]
    shape = work.shape
    found["work"] = plan_attention(
        *(work.row, work.start, work.stop),
        *(shape.heads, shape.kv_heads, shape.head_dim, shape.chunk_size),
        device=device,
        programs=4,
        kv_format=form,
    )
    tiny = 2.0**-20 if dtype == torch.bfloat16 else 2.0**-6
    return found | {"q": found["q"] * tiny, "scale": 2 / tiny, "k_cache": arena[:, 0], "v_cache": arena[:, 1]}


def _rising(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    """Values of int4 that grow from chunk to chunk, and halves of a row of which one is a hundred times the other."""
    found = _unequal(device, dtype, "int4")
    table, values = found["table"].cpu(), LONG.make(device, dtype)["v_cache"]
    growth = torch.exp2(torch.linspace(-12, 0, table.shape[1]))
    factors = torch.ones(len(values)).index_put((table.flatten().long(),), growth.repeat(len(table)))
    values = values * factors.to(device, dtype)[:, None, None, None]
    values[..., : values.shape[-1] // 2] /= 100
    return found | {"v_cache": quantized_cache(torch.stack((values, values), 1), "int4")[:, 0]}


UNEQUAL = Case("fp8: numbers far apart", partial(_unequal, form="fp8"))
UNEQUAL_INT4 = Case("int4: numbers far apart", partial(_unequal, form="int4"))
RISING = Case("int4: values that grow", _rising)
LONG_FP8, LONG_INT4 = (
    attention_cases.decode_case(f"{form}: long", (600, 33, 1, 70), 128, heads=(8, 2, 128), chunk=16, kv_format=form)
    for form in FORMS
)
ALONE_FP8, ALONE_INT4 = (
    attention_cases.decode_case(
        f"{form}: the newest alone", (161, 40), 64, heads=(14, 2, 64), chunk=64, split=32, kv_format=form
    )
    for form in FORMS
)
WINDOW_FP8, WINDOW_INT4 = (
    attention_cases.decode_case(
        f"{form}: window", (75, 11, 300), 32, heads=(8, 8, 64), window=24, chunk=chunk, kv_format=form
    )
    for form, chunk in zip(FORMS, (16, 32), strict=True)
)
CODED = {
    "fp8": (LONG_FP8, ALONE_FP8, WINDOW_FP8, UNEQUAL),
    "int4": (LONG_INT4, ALONE_INT4, WINDOW_INT4, UNEQUAL_INT4, RISING),
}


@pytest.mark.long
@compiled
@pytest.mark.parametrize(
    ("case", "dtype", "sizes"),
    [
        (LONG_FP8, torch.float16, Sizes(4, 2, 2, 2)),
        (ALONE_FP8, torch.bfloat16, Sizes(8, 4, 1)),
        (WINDOW_FP8, torch.float16, Sizes(4, 1, 2)),
        (UNEQUAL, torch.bfloat16, Sizes(4, 3, 2)),
        (LONG_INT4, torch.float16, Sizes(4, 2, 2, 2)),
        (ALONE_INT4, torch.bfloat16, Sizes(8, 4, 1)),
        (WINDOW_INT4, torch.float16, Sizes(4, 1, 2, 2)),
        (UNEQUAL_INT4, torch.bfloat16, Sizes(4, 3, 2)),
        (RISING, torch.bfloat16, Sizes(4, 3, 2, 2)),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_codes_emulated(case: Case, dtype: torch.dtype, sizes: Sizes) -> None:
    _emulated(case, dtype, sizes, blocks=3, seeds=2)


PLANTED_IN_FP8 = (
    ("keys are taken for codes", "const float unit = power_at(key_power[t][half]);", "const float unit = 1.0f;"),
    ("values have the keys' exponents", "load_byte(powers + TURN + t * 16", "load_byte(powers + t * 16"),
    ("nobody waits for exponents", "here * 2 * (CHUNK_BYTES + CHUNK * SCALE)", "here * 2 * CHUNK_BYTES"),
    ("values that nobody wrote are multiplied", "if (high < OWN) clear_values(", "if (false) clear_values("),
    ("tokens that nobody wrote count", "token >= low && token < high", "token >= low"),
    ("sums keep their old unit", "const float smaller = power_of_2(", "const float smaller = 1.0f + 0 * power_of_2("),
    ("neighbours are exchanged", "(v[t][u / 2][u % 2 * 2], 0, 0x3120)", "(v[t][u / 2][u % 2 * 2], 0, 0x2031)"),
    ("queries are not made large", "const float larger = power_at(up);", "const float larger = 1.0f;"),
    ("the newest is in other units", "two_codes(x[i] * inverse, x", "two_codes(x[i], x"),
)
PLANTED_IN_INT4 = (
    ("keys have the values' scales", "load_two(scales + (t * 16 + i", "load_two(scales + (TURN + t * 16 + i"),
    ("nobody waits for scales", "here * 2 * (CHUNK_BYTES + CHUNK * SCALE)", "here * 2 * CHUNK_BYTES"),
    ("tokens that nobody wrote count", "token >= low && token < high", "token >= low"),
    ("least numbers of keys are left out", "+ q.halves[half][i] * base_of(both)", ""),
    ("halves of a query are exchanged", "shared.halves[query][half]", "shared.halves[query][1 - half]"),
    ("least numbers of values are left out", "counts[t][row] ? one * base_of(both)", "false ? one * base_of(both)"),
    ("offsets keep their old reference", "sums.offset[1][i] *= shrink;", ""),
    ("offsets are in the sums' unit", "* unit + offset;", "* unit + offset * unit;"),
    ("both halves have the lower one's weights", "words, by[0], by[1]", "words, by[0], by[0]"),
    ("upper codes are not made smaller", "0x2C002C00, 0xD480D480", "0x3C003C00, 0xE408E408"),
    ("sums keep their old unit", "const float smaller = power_of_2(", "const float smaller = 1.0f + 0 * power_of_2("),
    ("scales are not in the sums' unit", "((127 - power) << 23)", "0"),
    (
        "the newest has one half's scale",
        "distance = 8; distance; distance /= 2) {  // a",
        "distance = 16; distance; distance /= 2) {  // a",
    ),
    ("the newest's upper codes are lost", "(mine | upper << 4)", "(mine)"),
)


@pytest.mark.long
@compiled
@pytest.mark.parametrize(
    ("form", "what", "old", "new"),
    [(form, *one) for form, all in (("fp8", PLANTED_IN_FP8), ("int4", PLANTED_IN_INT4)) for one in all],
    ids=[f"{form}: {one[0]}" for form, all in (("fp8", PLANTED_IN_FP8), ("int4", PLANTED_IN_INT4)) for one in all],
)
def test_the_emulator_finds_planted_defects_in_codes(form: str, what: str, old: str, new: str) -> None:
    long, unequal = (LONG_FP8, UNEQUAL) if form == "fp8" else (LONG_INT4, RISING)
    case = unequal if any(word in what for word in ("unit", "large", "offsets")) else long
    with pytest.raises(AssertionError):
        _emulated(case, torch.bfloat16, Sizes(4, 3, 2), blocks=2, seeds=8, edits=((old, new),))


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("sizes", [None, Sizes(4, 6, 2), Sizes(8, 4, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("form", FORMS)
def test_codes_on_the_device(form: KVFormat, dtype: torch.dtype, sizes: Sizes | None) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    forms = [(lengths, heads, chunk) for lengths in LENGTHS for heads in HEADS for chunk in (16, 32, 64)]
    forms.append(((8000, 3000, 10, 700, 512, 513), (32, 8, 128), 32))
    cases = [*CODED[form]]
    for lengths, heads, chunk in forms:
        kind = {"heads": heads, "chunk": chunk, "programs": 264, "kv_format": form}
        if AttentionShape(*heads, chunk, kv_format=form).decodes_on_hopper:
            cases.append(attention_cases.decode_case(f"{len(lengths)} {heads} {chunk}", lengths, heads[2], **kind))
    assert len(cases) > len(forms) // 2
    for case in cases:
        given, wanted = (case.make(device, dtype) for _ in range(2))
        assert decodes_at_once(given["q"], given["k_cache"], given["v_cache"], given["work"])
        for _ in range(2):
            out = hopper_decode(**given, sizes=sizes)
        _compare(out, given, wanted, dtype)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("sizes", [None, Sizes(4, 3, 2), Sizes(8, 4, 1), Sizes(4, 2, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_on_the_device(dtype: torch.dtype, sizes: Sizes | None) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    long = attention_cases.decode_case("long", (8000, 3000, 10, 700, 512, 513), 128, heads=(32, 8, 128), programs=264)
    wide = attention_cases.decode_case("wide heads", (900, 20), 256, heads=(8, 2, 256), programs=264)
    for case in [case for case in [*_cases(264), *CASES, long] if _takes(case)] + ([wide] if sizes is None else []):
        given, wanted = (case.make(device, dtype) for _ in range(2))
        assert hopper_takes_decodes(given["q"], given["k_cache"], given["v_cache"], given["work"].shape)
        for _ in range(2):
            out = hopper_decode(**given, sizes=sizes)
        _compare(out, given, wanted, dtype)


@pytest.mark.gpu
@hopper
def test_shapes_that_it_does_not_take_go_to_triton() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for case in CASES:
        given, wanted = (case.make(device, torch.bfloat16) for _ in range(2))
        _compare(decode_attention(**given), given, wanted, torch.bfloat16)


# -- prompts ----------------------------------------------------------------------------------------------------------

PROMPTS = (
    ("one prompt", ((0, 0, 70),), 8),
    ("behind others", ((0, 130, 290),), 8),
    ("three", ((0, 0, 200), (1, 64, 150), (2, 0, 7)), 8),
    ("in parts", ((0, 0, 300), (1, 1100, 1220)), 64),
)


def _prompt(number: int, heads: tuple[int, int, int], chunk: int) -> Case:
    name, spans, programs = PROMPTS[number]
    return attention_cases.case(name, spans, heads=heads, chunk=chunk, programs=programs)


def _in_tiles(
    work: AttentionWork, tile: int | None, device: torch.device, most_narrow: int = NARROW_TILE
) -> AttentionWork:
    """The same plan with wide tiles of so many rows, and narrow spans of at most so many, its list on the device."""
    shape, programs = work.shape, work.programs
    items = work_items(shape, work.row, work.start, work.stop, work.offset, programs, work.split, tile, most_narrow)
    found = AttentionWork(shape, work.row, work.start, work.stop, work.offset, device, programs, work.split)
    found.__dict__["items"] = items
    return found


def _wide_tokens(work: AttentionWork) -> torch.Tensor:
    spans = [s for s in range(len(work.row)) if (work.stop[s] - work.start[s]) * work.shape.group > 16]
    return torch.cat([torch.arange(int(work.offset[s]), int(work.offset[s + 1])) for s in spans])


def _emulated_prompt(
    case: Case, dtype: torch.dtype, tile: int, seeds: int = 1, edits: Sequence[tuple[str, str]] = ()
) -> None:
    cpu = torch.device("cpu")
    for seed in range(seeds):
        given = case.make(cpu, dtype)
        del given["new"]
        q, k_cache, v_cache, table = (given[name] for name in ("q", "k_cache", "v_cache", "table"))
        work = _in_tiles(given["work"], tile, cpu)
        shape, wide = work.shape, len(work.items.table) - work.items.narrow
        _, constants = prompt_source(shape, tile, dtype)
        takes = [("const TensorMap&*", name) for name in ("queries", "keys", "values")]
        takes.append(("const Arguments&*", "arguments"))
        constants["STAGES"] = 2
        files = ("attention/parts.cuh", "attention/prompt.cu")
        library = emulated.build(files, constants, "prompt_attention", takes, edits)
        out = torch.full(q.shape, torch.nan, dtype=dtype)
        arguments = prompt_arguments(table, work, given["scale"], out)
        maps = [emulated.tensor_map(q, *query_map(q, shape, tile))]
        maps += [emulated.tensor_map(cache, *cache_map(cache)) for cache in (k_cache, v_cache)]
        shared = prompt_shared(shape, tile, 2)
        blocks = (wide + 1) * shape.kv_heads  # a captured launch has some to spare
        emulated.launch(library, blocks, 1, 2 * tile + 128, shared, (*maps, ctypes.byref(arguments)), seed)
        _compare_prompt(out, given, work, dtype)


def _compare_prompt(out: torch.Tensor, given: dict, work: AttentionWork, dtype: torch.dtype) -> None:  # type: ignore[type-arg]
    mine = _wide_tokens(work).to(out.device)
    expected = attention_definition(**given)[mine]
    torch.testing.assert_close(out[mine].float(), expected.float(), rtol=0, atol=TOLERANCE[dtype])
    assert not work.resident.counters.any(), "counters are zero between launches"


@pytest.mark.long
@compiled
@pytest.mark.parametrize("number", range(len(PROMPTS)), ids=[name for name, *_ in PROMPTS])
def test_prompts_emulated(number: int) -> None:
    heads = ((8, 2, 128), (2, 2, 64), (8, 1, 64), (4, 4, 128))[number]
    case = _prompt(number, heads, (32, 16, 64)[number % 3])
    _emulated_prompt(case, (torch.bfloat16, torch.float16)[number % 2], 128, seeds=2)
    _emulated_prompt(case, torch.bfloat16, 64)


# What is wrong, the text, what stands there instead.
PLANTED_IN_PROMPTS = (
    ("keys are loaded before they were read", "keys_read[s]), (turn / STAGES - 1)", "keys_read[s]), (turn / STAGES)"),
    ("values that nobody wrote are multiplied", "if (from < TURN) clear_values", "if (false) clear_values"),
    ("sums keep their old reference", "if (rows.moved) shrink(sum, rows);", ""),
    (
        "weights change while they are multiplied",
        "products_done<1>();",
        "products_done<1>(), weights[3][0] ^= 1 << 14;",
    ),
    ("later tokens are seen", "n > rows.position[row]", "false"),
    ("turns that are seen in part are taken for whole", "at + TURN > seen, false", "false, false"),
    ("parts keep their old reference", "sum[i] = sum[i] * shrink + other", "sum[i] = sum[i] + other"),
)


@pytest.mark.long
@compiled
@pytest.mark.parametrize(("what", "old", "new"), PLANTED_IN_PROMPTS, ids=[planted[0] for planted in PLANTED_IN_PROMPTS])
def test_the_emulator_finds_planted_defects_in_prompts(what: str, old: str, new: str) -> None:
    spans, programs = (((0, 900, 1100),), 40) if "parts" in what else (((0, 0, 600),), 2)
    plain = attention_cases.case("planted", spans, heads=(2, 1, 64), chunk=32, programs=programs)

    def make(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
        found = plain.make(device, dtype)
        found["k_cache"] *= 4
        found["scale"] = 1.0
        return found

    _emulated_prompt(Case("without", make), torch.bfloat16, 128)
    with pytest.raises(AssertionError):
        _emulated_prompt(Case("planted", make), torch.bfloat16, 128, seeds=6, edits=((old, new),))


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("tile", [64, 128])
def test_prompts_on_the_device(tile: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    spans = ((0, 0, 3000), (1, 5000, 5620), (2, 31, 900), (3, 0, 64))
    for heads in ((32, 8, 128), (8, 2, 128), (2, 2, 64), (8, 1, 64), (4, 4, 128)):
        for chunk in (16, 32, 64):
            cases = [_prompt(number, heads, chunk) for number in range(len(PROMPTS))]
            cases.append(attention_cases.case("long", spans, heads=heads, chunk=chunk, programs=264))
            for case in cases:
                given = case.make(device, dtype)
                del given["new"]
                q, k_cache, v_cache = given["q"], given["k_cache"], given["v_cache"]
                work = _in_tiles(given["work"], tile, device)
                assert hopper_takes_prompts(q, k_cache, v_cache, work.shape)
                out = torch.full(q.shape, torch.nan, dtype=dtype, device=device)
                blocks = (len(work.items.table) - work.items.narrow) * work.shape.kv_heads
                for _ in range(2):
                    hopper_prompts(q, k_cache, v_cache, given["table"], work, given["scale"], out, tile, blocks)
                _compare_prompt(out, given, work, dtype)
