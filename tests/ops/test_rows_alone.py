"""A row's result is the same bits alone and in company, on any number of threads: float32 on the CPU.

That a request gets the same tokens whoever runs beside it rests on this. Libraries choose the order of a sum by
processor, rows and threads, so what is used of them is tried here on every machine, and by
`test_other_processors.py` as other processors would have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from cellar.core.formats import Format
from cellar.ops.activation import activate, gated, kinds
from cellar.ops.linear.half import PERIOD, HalfWeight, half_works
from cellar.ops.linear.in_place import InPlaceWeight, in_place
from cellar.ops.linear.onednn import OneDnnWeight, onednn_packs
from cellar.ops.linear.weight import LinearWeight
from cellar.ops.norm import add_layer_norm, add_rms_norm, rms_norm
from cellar.ops.sampling import choose
from cellar.quant.matrix import quantized
from cellar.quant.weight import QuantizedWeight, on_cpu

ROWS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 65, 128, 300)
THREADS = (1, 2, 7, 24)

RowFunction = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_alone(function: RowFunction, columns: int) -> None:
    """The first, a middle and the last row of every batch, against each of them alone on one thread."""
    x = random(max(ROWS), columns)
    torch.set_num_threads(1)
    alone: dict[int, Tensor] = {}
    for threads in THREADS:
        torch.set_num_threads(threads)
        for rows in ROWS:
            result = function(x[:rows])
            for row in (0, rows // 2, rows - 1):
                wanted = alone.setdefault(row, function(x[row : row + 1])[0])
                assert torch.equal(result[row], wanted), f"row {row} of {rows} on {threads} threads"


FORMATS: dict[str, tuple[Callable[[Tensor], LinearWeight], Callable[[], bool]]] = {
    "half": (HalfWeight, half_works),
    "onednn": (OneDnnWeight, lambda: onednn_packs(torch.float32)),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("n", "k"), [(384, 384), (48, 1000), (1000, 1024), (48, 1025), (384, 1536), (40, 2048), (1000, 2500), (33, 8200)]
)
def test_products(form: str, n: int, k: int) -> None:
    make, is_there = FORMATS[form]
    if is_there():  # where the library lacks it nobody is given one
        weight = make(random(n, k, seed=1) / k**0.5)
        check_alone(partial(weight.multiply, bias=random(n, seed=2)), k)


@pytest.mark.skipif(not half_works(), reason="this build of torch has no products with 16-bit floats")
def test_every_number_of_rows_has_the_bits_of_three() -> None:
    weight, x = HalfWeight(random(64, 256, seed=1)), random(3 * PERIOD, 256)
    usual = torch.cat([weight.multiply(x[start : start + 3]) for start in range(0, 3 * PERIOD, 3)])
    assert all(torch.equal(weight.multiply(x[:rows]), usual[:rows]) for rows in range(1, 3 * PERIOD + 1))


@pytest.mark.parametrize(("n", "k"), [(384, 384), (48, 1000), (1000, 1024), (1, 300), (3, 1024)])
def test_products_as_matrices_lie(n: int, k: int) -> None:
    if onednn_packs(torch.float32):
        weight = in_place(random(n, k, seed=1) / k**0.5)
        assert isinstance(weight, InPlaceWeight)
        check_alone(partial(weight.multiply, bias=random(n, seed=2)), k)


def test_wide_matrices_are_multiplied_as_they_lie_by_always_as_many_rows() -> None:
    """On one number of threads, which an offloaded model keeps."""
    x, weight = random(70, 2500), in_place(random(40, 2500, seed=1) / 50)
    whole = weight.multiply(x)
    for rows in (1, 2, 15, 17, 33):
        assert torch.equal(weight.multiply(x[:rows]), whole[:rows])


QUANTIZED = {
    "int4": Format("int4", 64, zero_points=True),
    "int4/32": Format("int4", 32),
    "int8": Format("int8"),
    "fp8": Format("fp8"),
    "fp8 blocks": Format("fp8", 128, rows=128),
    "mxfp4": Format("mxfp4", 32),
    "int8, activations too": Format("int8", activations="int8"),
}


@pytest.mark.parametrize("form", QUANTIZED)
@pytest.mark.parametrize(("n", "k"), [(33, 384), (1000, 1024), (70, 2048)])
def test_quantized_products(form: str, n: int, k: int) -> None:
    weight = QuantizedWeight(quantized(random(n, k, seed=1) / k**0.5, QUANTIZED[form]))
    check_alone(partial(weight.multiply, bias=random(n, seed=2)), k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(33, 384), (1000, 1024), (70, 2048)])
def test_products_in_whole_numbers(n: int, k: int, dtype: torch.dtype) -> None:
    """Where the processor has none, the kernel that multiplies the codes as floats: in bfloat16 of the run, too."""
    weight = on_cpu(QuantizedWeight(quantized(random(n, k, seed=1) / k**0.5, Format("int8", activations="int8"))))
    check_alone(lambda x: weight.multiply(x.to(dtype), random(n, seed=2)), k)


@pytest.mark.parametrize("columns", [384, 77, 1000])
def test_norms(columns: int) -> None:
    weight, bias = random(columns, seed=1), random(columns, seed=2)
    check_alone(lambda x: rms_norm(x, weight, 1e-5), columns)
    check_alone(lambda x: add_rms_norm(x, x * 0.5, weight, 1e-5)[0], columns)
    check_alone(lambda x: add_layer_norm(x, x * 0.5, weight, bias, 1e-5)[0], columns)


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("columns", [64, 1024, 78, 1002])
def test_activations(kind: str, columns: int) -> None:
    check_alone(lambda x: activate(x, kind), columns)
    check_alone(lambda x: gated(x, kind), columns)


@pytest.mark.parametrize("vocab", [384, 1001])
def test_choices(vocab: int) -> None:
    """Temperature alone, with filters, and greedy: each row with a seed of its own."""

    def chosen(cut: bool, greedy: bool, x: Tensor) -> Tensor:
        n = len(x)
        # What a row asks for follows from its logits: it must not follow from its place.
        seed = (x[:, 0].abs() * 1e6).long()
        return choose(
            x * 3,
            torch.full((n,), 0.0 if greedy else 0.8),
            torch.full((n,), 40 if cut else 0),
            torch.full((n,), 0.9 if cut else 1.0),
            torch.full((n,), 0.01 if cut else 0.0),
            seed,
            torch.zeros(n, dtype=torch.int64),
            greedy,
            cut,
        ).tokens

    for cut, greedy in ((False, False), (True, False), (False, True)):
        check_alone(partial(chosen, cut, greedy), vocab)
