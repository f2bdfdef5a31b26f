"""Collectives through boxes in each other's memory: all kernels with all their ranks in an emulator."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cellar.ops.collectives import all_reduce
from cellar.ops.norm.definition import add_rms_norm_definition
from cellar.ops.peers import (
    MOST_BLOCKS,
    BoxSizes,
    NormSizes,
    norm_shared,
    norm_source,
    peer_boxes,
    peers_source,
)
from tests.ops import emulated

pytestmark = pytest.mark.skipif(emulated.compiler() is None, reason="this machine has no C++ compiler (g++)")

FILES = "peers.cu", str(Path(__file__).parent / "peers_emulated.h")
THREADS, BLOCKS = 32, 2
SMALL, PIECES, ROWS, FIRST, NORM, BLANKS = range(6)
GUARD = 64
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

Call = tuple[int, int]
"""Kind and bytes of a rank's part; of rows there are two."""


class Rank(ctypes.Structure):
    """As `peers_emulated.h` has it."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("normed", ctypes.c_void_p),
        ("boxes", ctypes.c_void_p),
        ("calls", ctypes.c_void_p),
        ("ended", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class Example:
    """Sums one after another over so many ranks, in boxes for sums of `nbytes`; `norm`: those of rows with a norm."""

    ranks: int
    dtype: torch.dtype
    nbytes: int
    calls: tuple[Call, ...]
    norm: NormSizes | None = None


# One unit, ragged pieces, pieces of nobody, more units than threads, both kinds in turns, launches of fewer blocks.
EXAMPLES = (
    Example(2, BF16, 4096, ((SMALL, 16), (SMALL, 4096), (SMALL, 1040), (SMALL, 16), (SMALL, 2048))),
    Example(4, BF16, 8192, ((PIECES, 8192), (PIECES, 16), (PIECES, 8176), (PIECES, 48), (PIECES, 6064))),
    Example(3, F16, 4096, ((SMALL, 1056), (PIECES, 4096), (SMALL, 32), (SMALL, 496), (PIECES, 1040), (PIECES, 3008))),
    Example(4, F32, 4096, ((PIECES, 4096), (SMALL, 4096), (PIECES, 2064), (SMALL, 16), (SMALL, 1600))),
    Example(8, BF16, 4096, ((PIECES, 2048), (SMALL, 1024), (ROWS, 1024), (SMALL, 1024), (PIECES, 2064))),
    Example(4, BF16, 8192, ((NORM, 1024), (SMALL, 64), (NORM, 512), (NORM, 512)), NormSizes(128, 1, 1)),
    Example(2, BF16, 8192, ((NORM, 1024), (NORM, 1024), (SMALL, 64), (NORM, 1024)), NormSizes(512, 2, 1)),
    Example(4, BF16, 8192, ((NORM, 1792), (SMALL, 64), (NORM, 256), (NORM, 512)), NormSizes(128, 1, 2)),
    Example(2, F16, 8192, ((NORM, 1024), (NORM, 1024), (PIECES, 1040), (NORM, 1024)), NormSizes(512, 2, 2)),
    Example(4, F32, 8192, ((NORM, 4096), (NORM, 2048)), NormSizes(256, 1, 2)),
    Example(
        2, BF16, 8192, ((BLANKS, 8192), (BLANKS, 16), (BLANKS, 8176), (BLANKS, 48), (BLANKS, 6064), (BLANKS, 6064))
    ),
    Example(
        4,
        BF16,
        8192,
        ((BLANKS, 8192), (SMALL, 64), (BLANKS, 16), (BLANKS, 8176), (PIECES, 64), (BLANKS, 48), (ROWS, 64)),
    ),
    Example(3, F16, 4096, ((BLANKS, 1056), (BLANKS, 4096), (BLANKS, 4096), (FIRST, 32), (BLANKS, 3008))),
    Example(8, F32, 4096, ((BLANKS, 4096), (BLANKS, 2064), (BLANKS, 2064))),
    Example(
        3, BF16, 4096, ((ROWS, 16), (ROWS, 2048), (FIRST, 8), (SMALL, 1056), (FIRST, 1064), (FIRST, 8), (ROWS, 48))
    ),
)


def run(of: Example, edits: Sequence[tuple[str, str]] = (), seed: int = 0) -> None:
    """All calls of all ranks; each has the sum in the order of ranks."""
    sizes = BoxSizes(of.ranks, of.nbytes)
    most = {PIECES: of.nbytes, BLANKS: sizes.blanks}
    assert all(nbytes <= most.get(kind, sizes.small) for kind, nbytes in of.calls)
    _, constants = (
        peers_source(sizes, of.dtype, THREADS) if of.norm is None else norm_source(of.norm, sizes, of.dtype, THREADS)
    )
    slices = 1 if of.norm is None else of.norm.slices
    files = FILES if of.norm is None else (FILES[0], "peers_norm.cu", FILES[1])
    takes = [("Rank*", "ranks"), ("const u32*", "kinds"), ("const u64*", "nbytes"), ("u32", "count"), ("u32", "each")]
    library = emulated.build(files, constants, "all_ranks", takes, edits)
    generator = torch.Generator().manual_seed(seed)
    each = [nbytes // of.dtype.itemsize for _, nbytes in of.calls]
    parts = [torch.randn(sum(each), generator=generator).to(of.dtype) for _ in range(of.ranks)]
    for part in parts:  # padding is zeros, here in all parts and there in all but one
        part[:: 7 * 32 // of.dtype.itemsize].zero_()
        part[: len(part) // 3].zero_()
    parts[-1][len(parts[-1]) // 4 : len(parts[-1]) // 3] = 1.5
    lengths = [n * of.ranks if kind == ROWS else n for (kind, _), n in zip(of.calls, each, strict=True)]
    outs = [torch.full((sum(lengths) + GUARD,), torch.nan, dtype=of.dtype) for _ in parts]
    wanted = [expected(kind, [part.split(each)[k] for part in parts]) for k, (kind, _) in enumerate(of.calls)]
    width = 1 if of.norm is None else of.norm.width
    residual = torch.randn(sum(each), generator=generator).to(of.dtype)
    weight = torch.randn(width, generator=generator).to(of.dtype)
    normed = [torch.full_like(out, torch.nan) for out in outs]
    memory = [torch.zeros(sizes.total + 16, dtype=torch.uint8) for _ in range(of.ranks)]
    addresses = [-(-box.data_ptr() // 16) * 16 for box in memory]
    boxes = [peer_boxes(addresses, rank, of.nbytes, torch.device("cpu")) for rank in range(of.ranks)]
    ranks = (Rank * of.ranks)(
        *(
            Rank(*map(Tensor.data_ptr, (part, out, residual, weight, other, box.addresses, box.calls)), 0)
            for part, out, other, box in zip(parts, outs, normed, boxes, strict=True)
        )
    )
    kinds = torch.tensor([kind for kind, _ in of.calls], dtype=torch.int32)
    nbytes = torch.tensor([nbytes for _, nbytes in of.calls], dtype=torch.int64)
    given = [ctypes.byref(ranks), emulated.pointer(kinds), emulated.pointer(nbytes)]
    blocks = of.ranks * BLOCKS
    emulated.launch(
        library, blocks, blocks, THREADS, norm_shared(slices, THREADS), [*given, len(of.calls), BLOCKS], seed
    )
    for k, (kind, _) in enumerate(of.calls):
        for rank, (part, out) in enumerate(zip(parts, outs, strict=True)):
            found = part.split(each)[k] if kind == FIRST else out[:-GUARD].split(lengths)[k]
            if kind == NORM:
                rows = (before.view(-1, width) for before in (residual.split(each)[k], wanted[k]))
                normal, total = add_rms_norm_definition(*rows, weight, 1e-5)
                assert torch.equal(found, total.flatten()), (k, rank)
                close(normed[rank][:-GUARD].split(lengths)[k], normal.flatten())
                continue
            assert torch.equal(found, wanted[k]), (k, rank)
            assert out[-GUARD:].isnan().all(), "nobody writes behind the end"
    for box in boxes:
        assert box.calls.tolist()[:BLOCKS] == [len(of.calls)] * BLOCKS


def close(found: Tensor, wanted: Tensor) -> None:
    """Squares are added in another order: by a unit of the last place."""
    unit = {BF16: 2**-7, F16: 2**-10, F32: 2**-21}[found.dtype]
    torch.testing.assert_close(found, wanted, rtol=unit, atol=1e-6)


def expected(kind: int, parts: Sequence[Tensor]) -> Tensor:
    """What every rank has: a sum in float32 and rounded once, or parts as they were."""
    if kind == ROWS:
        return torch.cat([part.view(2, -1) for part in parts], 1).flatten()
    return parts[0].clone() if kind == FIRST else all_reduce([part.float() for part in parts]).to(parts[0].dtype)


@pytest.mark.parametrize("of", EXAMPLES, ids=lambda of: f"{of.ranks}-{of.dtype}-{len(of.calls)}".replace("torch.", ""))
def test_every_rank_has_what_it_asks_for(of: Example) -> None:
    for seed in range(4):
        run(of, seed=seed)


# What is wrong, the text, what stands there instead, and with which of EXAMPLES it shows.
DEFECTS = {
    "small parts of two calls in a row in one slot": (
        "SMALL_PARTS + ((call & 1) * RANKS",
        "SMALL_PARTS + (0 * RANKS",
        0,
    ),
    "pieces of all ranks in one slot": ("box + PIECES + rank * ", "box + PIECES + 0 * ", 1),
    "sums where pieces lie": ("box + SUMS + rank", "box + PIECES + rank", 1),
    "nobody waits for pieces": ("        wait_for_flag(flag_of(mine, 0, thread, block), call);\n", "", 1),
    "nobody waits for sums": ("        wait_for_flag(flag_of(mine, 1, thread, block), call);\n", "", 1),
    "one of two halves twice": ("own[half] : words[r][half]", "own[0] : words[r][half]", 0),
    "counters of blocks that did not run stand still": (
        "block + blocks * threadIdx.x",
        "block + BLOCKS * threadIdx.x",
        0,
    ),
    "the first part is left out": (
        "add_word(low, words[0], r == 0)",
        "add_word(low, words[0], r == 1)",
        2,
    ),
    "own part is waited for": (
        "SLOT, rank, call, words);\n        u32 sum",
        "SLOT, 0, call, words);\n        u32 sum",
        2,
    ),
    "the last piece is as long as all": ("units - at < piece ? units - at : piece", "piece", 1),
    "rows of all ranks behind one another": ("(row * kept + r) * width", "(r * 2 + row) * width", -1),
    "one half of the own part twice": ("own[1] : words[r][1]};", "own[0] : words[r][1]};", -1),
    "sums of a piece that nobody waits for": (
        "wait_for_words(small_sum(mine, call, unit / OWNED) + at, 0, 1, call, sum)",
        "wait_for_words(small_sum(mine, call, unit / OWNED) + at, 0, 0, call, sum)",
        7,
    ),
    "squares of this block's slice alone": ("total += theirs[4 * i]", "total = theirs[4 * slice]", 6),
    "no weight": ("value[k] *= gain[k]", "value[k] *= 1.0f", 5),
    "another row's residual": ("given.residual + start + 8ull * unit", "given.residual + 8ull * unit", 5),
    "blanks of two calls in a row": ("BLANKS + ((call & 1) * 2", "BLANKS + (0 * 2", -5),
    "zeros travel as they are": ("words[i] ? words[i] : 0x80000000u", "words[i]", -4),
    "pieces that were read stay": (
        "if (r != rank) clear_for_others(blank_piece(mine, call, r) + at);\n",
        "\n",
        -4,
    ),
    "sums that were read stay": ("clear_for_others(there + at);", "", -3),
    "sums in blanks for pieces": (
        "blank_piece(box, call, rank) + 1ull * RANKS",
        "blank_piece(box, call, rank) + 0 * RANKS",
        -4,
    ),
    "one unit of two": ("many = left < MANY ? left : MANY;\n        u32 words", "many = 1;\n        u32 words", -5),
    "fewer blocks than that": ("share = (piece + blocks - 1) / blocks", "share = piece / blocks", 1),
}


@pytest.mark.parametrize(("old", "new", "example"), DEFECTS.values(), ids=DEFECTS)
def test_planted_defects_are_found(old: str, new: str, example: int) -> None:
    def hunt() -> None:
        for seed in range(12):
            run(EXAMPLES[example], [(old, new)], seed)

    with pytest.raises(AssertionError):
        hunt()


def test_boxes_take_what_they_have_room_for() -> None:
    boxes = peer_boxes([0, 0, 0], 1, 2**20, torch.device("cpu"))
    assert boxes.sizes.small == 384 * 2**10
    assert boxes.sizes.piece * 3 >= 2**20
    assert boxes.take(torch.empty(2**20, dtype=torch.uint8).view(BF16))
    assert boxes.take(torch.empty(2**21, dtype=torch.uint8).view(BF16)), "in two launches"
    assert not boxes.take(torch.empty(9, dtype=BF16)), "no multiple of 16 bytes"
    assert not boxes.take(torch.empty(0, dtype=BF16))
    assert not boxes.take(torch.empty(8, dtype=torch.float64))
    few = [n for n in range(1, 65) if boxes.take_norm(torch.empty((n, 8184), dtype=BF16))]
    assert few == [1, *range(25, 33)], "one token, and sums of more than 384 KiB up to 512"
    assert not boxes.take_norm(torch.empty((1, 4096), dtype=BF16)), "its product norms it"
    large = [n for n in range(1, 65) if boxes.take_before_norm(torch.empty((n, 8184), dtype=BF16))]
    assert large == list(range(25, 65)), "sums that are not small"
    assert not boxes.take_before_norm(torch.empty((1024, 1001), dtype=torch.float64))
    assert boxes.norm_sizes(torch.empty((1, 8184), dtype=BF16)) == NormSizes(8184, 2, 1)
    assert boxes.norm_sizes(torch.empty((30, 8184), dtype=BF16)) == NormSizes(8184, 2, 2)
    assert boxes.take_rows(torch.empty((2, 3), dtype=torch.int64))
    assert not boxes.take_rows(torch.empty((2, 3), dtype=torch.int32))
    assert not boxes.take_rows(torch.empty((2, boxes.sizes.small), dtype=BF16))
    assert not boxes.take_rows(torch.empty((0, 8), dtype=BF16))
    assert len(boxes.calls) == MOST_BLOCKS
