"""Decodes alone by kernels of their own on the CPU, over plain K and V and in 4 bits: numbers, bytes, company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cellar.ops.attention import cpu as attention_cpu
from cellar.ops.attention import decode_attention, plan_attention
from cellar.ops.attention.cases import decode_case
from cellar.ops.attention.definition import decode_attention_definition
from cellar.ops.cpu.launch import DECODES, NIBBLES, SHORT_FLOATS, attends_to_decodes

CPU = torch.device("cpu")
here = pytest.mark.skipif(not attends_to_decodes(), reason="this processor has no registers of 64 bytes (AVX-512)")
BOUND = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}

SHAPES: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "heads of their own": ((40, 1, 33, 97), 0, {"heads": (4, 4, 128), "chunk": 32}),
    "shared, rotated": ((700, 31, 32, 64), 128, {"heads": (8, 2, 128), "chunk": 32}),
    "partly rotated, chunks of 16": ((5, 130), 64, {"heads": (6, 2, 128), "chunk": 16}),
    "wide heads": ((77, 20), 256, {"heads": (2, 1, 256), "chunk": 32}),
    "window": ((300, 90, 7), 128, {"heads": (4, 2, 128), "chunk": 32, "window": 70}),
}


FORMATS = ("plain", "fp8", "int4")


def example(name: str, dtype: torch.dtype, kv_format: str = "int4") -> dict[str, Any]:
    lengths, rotary_dim, options = SHAPES[name]
    made: dict[str, Any] = decode_case(name, lengths, rotary_dim, kv_format=kv_format, **options).make(CPU, dtype)
    made["work"].alone = True
    return made


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in given.items()}


@here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_it_attends_and_writes(kv_format: str, name: str, dtype: torch.dtype) -> None:
    given = example(name, dtype, kv_format)
    assert attention_cpu._alone(given["work"]) == {"plain": DECODES, "fp8": SHORT_FLOATS, "int4": NIBBLES}[kv_format]
    meant = copied(given)
    found, wanted = decode_attention(**given), decode_attention_definition(**meant)
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert float(error) < BOUND[dtype]
    for cache in ("k_cache", "v_cache"):
        if kv_format != "plain":
            assert torch.equal(given[cache].view(torch.uint8), meant[cache].view(torch.uint8)), "byte for byte"
        else:  # a rotation has one rounding less; the rest of a cache may be none
            torch.testing.assert_close(given[cache], meant[cache], equal_nan=True)


@here
@pytest.mark.parametrize("kv_format", FORMATS)
def test_rows_alone_have_the_bits_that_they_have_in_company(kv_format: Any) -> None:
    given = example("shared, rotated", torch.bfloat16, kv_format)
    together = decode_attention(**copied(given))
    work = given["work"]
    for i in range(len(work.row)):
        one = copied(given)
        spans = tuple(x[i : i + 1] for x in (work.row, work.start, work.stop))
        shape = (work.shape.heads, work.shape.kv_heads, work.shape.head_dim, work.shape.chunk_size)
        one |= {key: one[key][i : i + 1] for key in ("q", "k", "v")}
        one["work"] = plan_attention(*spans, *shape, kv_format=kv_format)
        one["work"].alone = True
        assert torch.equal(decode_attention(**one), together[i : i + 1])


NO_NUMBERS = [
    (kv_format, name, what)
    for kv_format in FORMATS
    for name in ("q", "k", "v")
    for what in (torch.inf, torch.nan)
    if (kv_format, name, what) != ("plain", "k", torch.inf)  # the least of all scores, if it is not the largest
]


@here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kv_format", "name", "what"), NO_NUMBERS)
def test_what_is_no_number_is_none_afterwards(kv_format: str, name: str, what: float, dtype: torch.dtype) -> None:
    given = example("heads of their own", dtype, kv_format)
    given[name] = given[name].clone()
    given[name][2, 1, 5] = what
    found = decode_attention(**given)
    assert not found[2, 1].isfinite().all()
    assert found[[0, 1, 3]].isfinite().all()
    assert found[2, [0, 2, 3]].isfinite().all()


@here
@pytest.mark.parametrize("outlier", [1.0, 60.0])
def test_whole_numbers_are_as_good_as_the_codes(outlier: float) -> None:
    """A query is rounded to a 32,512th of its largest number, and so are weights: little beside 4 bits of K and V."""
    given = example("shared, rotated", torch.float16)
    given["q"] = given["q"].clone()
    given["q"][..., 3] *= outlier
    wanted = decode_attention_definition(**copied(given)).double()
    error = (decode_attention(**given).double() - wanted).norm() / wanted.norm()
    assert float(error) < 2e-3


@here
@pytest.mark.parametrize("kv_format", FORMATS)
def test_equal_numbers_of_a_half_stay_what_they_are(kv_format: str) -> None:
    given = example("heads of their own", torch.float32, kv_format)
    given["k"], given["v"] = torch.full_like(given["k"], 0.0), torch.full_like(given["v"], -2.5)
    meant = copied(given)
    decode_attention(**given)
    decode_attention_definition(**meant)
    for cache in ("k_cache", "v_cache"):
        found, wanted = (x[cache].view(torch.uint8) for x in (given, meant))
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("alone", "kv_format", "dim", "chunk"),
    [
        (False, "int4", 128, 32),
        (False, "plain", 128, 32),
        (True, "fp8", 64, 32),
        (True, "int4", 64, 32),
        (True, "plain", 64, 32),
        (True, "int4", 128, 8),
    ],
)
def test_everything_else_goes_as_before(alone: bool, kv_format: str, dim: int, chunk: int) -> None:
    options: Any = {"heads": (4, 2, dim), "chunk": chunk, "kv_format": kv_format}
    given = decode_case("some", (40, 3), 0, **options).make(CPU, torch.float32)
    given["work"].alone = alone
    assert attention_cpu._alone(given["work"]) is None
    wanted = decode_attention_definition(**copied(given))
    torch.testing.assert_close(decode_attention(**given), wanted, rtol=1e-4, atol=1e-5)
