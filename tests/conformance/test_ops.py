"""Every registered operation: public function and kernel against the definition.

Here kernels run in Triton's interpreter (float32 and float16: its bfloat16 arithmetic is garbage) and public functions
on the CPU; with marker `gpu` both run on the device in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cellar.ops.registry import FLOATS, Case, Op, all_ops
from cellar.ops.triton_support import triton_available

INTERPRETED = (torch.float32, torch.float16)


def examples(*dtypes: torch.dtype, heavy: bool = False) -> list[Any]:
    return list(_examples(dtypes, heavy))


def _examples(dtypes: tuple[torch.dtype, ...], heavy: bool) -> Iterator[Any]:
    for op in all_ops():
        for case in op.cases:
            for dtype in dtypes:
                if dtype in case.dtypes and (heavy or not case.heavy):
                    yield pytest.param(op, case, dtype, id=f"{op.name}-{case.name}-{dtype}".replace("torch.", ""))


def outcome(op: Op, call: Callable[..., Any], case: Case, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Tensors that a call returns or changes."""
    arguments = case.make(torch.device(device), dtype)
    result = call(**arguments)
    if result is None:
        results = []
    elif isinstance(result, Tensor):
        results = [result]
    else:
        results = [r for r in result if isinstance(r, Tensor)]
    return results + [arguments[name] for name in op.changes if arguments[name] is not None]


def compare(op: Op, case: Case, call: Callable[..., Any], device: str, dtype: torch.dtype) -> None:
    wanted = outcome(op, op.definition, case, device, dtype)
    got = outcome(op, call, case, device, dtype)
    assert wanted, f"{op.name} returns nothing and changes nothing"
    assert len(got) == len(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        if ours.is_floating_point():
            limit = op.tolerance[dtype]
            torch.testing.assert_close(ours, theirs, atol=limit, rtol=limit, equal_nan=True)
        else:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("op", "case", "dtype"), examples(*FLOATS))
def test_public_function_on_the_cpu(op: Op, case: Case, dtype: torch.dtype) -> None:
    compare(op, case, op.function, "cpu", dtype)


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
@pytest.mark.parametrize(("op", "case", "dtype"), examples(*INTERPRETED))
def test_kernel_in_the_interpreter(op: Op, case: Case, dtype: torch.dtype) -> None:
    if op.kernel is None:
        return
    assert triton_available(), "the kernels of this machine's tests need Triton; install the package triton"
    compare(op, case, op.kernel, "cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "case", "dtype"), examples(*FLOATS, heavy=True))
def test_on_the_device(op: Op, case: Case, dtype: torch.dtype) -> None:
    compare(op, case, op.function, "cuda", dtype)
    if op.kernel is not None:
        compare(op, case, op.kernel, "cuda", dtype)


def test_an_operation_needs_a_definition_of_the_same_signature() -> None:
    def twice(x: Tensor) -> Tensor:
        return x + x

    def double(y: Tensor) -> Tensor:
        return 2 * y

    case = Case("one", lambda device, dtype: {"x": torch.ones(1, device=device, dtype=dtype)})
    with pytest.raises(TypeError, match="definition"):
        Op("twice", twice, None, twice, (case,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="parameters"):
        Op("twice", twice, twice, double, (case,))
    with pytest.raises(TypeError, match="cases"):
        Op("twice", twice, twice, None, ())
