"""Every registered operation: public function and variants against the definition.

Here Triton's kernels run in its interpreter (float32 and float16: its bfloat16 arithmetic is garbage), variants for the
CPU and public functions on the CPU; with marker `gpu` those for a GPU run on the device in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cellar.ops
import cellar.quant
from cellar.ops.cuda.hopper import hopper_available
from cellar.ops.registry import FLOATS, Case, Op, PublicOp, Variant, VariantName, all_ops
from cellar.ops.triton_support import triton_available

INTERPRETED = (torch.float32, torch.float16)


EVERY_OP = all_ops() + all_ops(cellar.quant)


def examples(*dtypes: torch.dtype, heavy: bool = False) -> list[Any]:
    return list(_examples(dtypes, heavy))


def _examples(dtypes: tuple[torch.dtype, ...], heavy: bool) -> Iterator[Any]:
    for entry in EVERY_OP:
        for case in entry.op.cases:
            for dtype in dtypes:
                if dtype in case.dtypes and (heavy or not case.heavy):
                    name = f"{entry.op.name}-{case.name}-{dtype}".replace("torch.", "")
                    yield pytest.param(entry, case, dtype, id=name)


def variants(op: Op[..., Any], *names: VariantName) -> list[Variant[..., Any]]:
    return [variant for variant in op.variants if variant.name in names]


def outcome(op: Op[..., Any], call: Callable[..., Any], case: Case, device: str, dtype: torch.dtype) -> list[Tensor]:
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


def compare(op: Op[..., Any], case: Case, call: Callable[..., Any], device: str, dtype: torch.dtype) -> None:
    wanted = outcome(op, op.definition, case, device, dtype)
    got = outcome(op, call, case, device, dtype)
    assert wanted, f"{op.name} returns nothing and changes nothing"
    assert len(got) == len(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        if ours.element_size() == 1 and ours.dtype != torch.bool:
            # Quantized numbers: what a rotation's last bit changes may be another code, seldom.
            assert (ours.view(torch.uint8) != theirs.view(torch.uint8)).float().mean() <= 0.005
        elif ours.is_floating_point():
            limit = op.tolerance[dtype]
            torch.testing.assert_close(ours, theirs, atol=limit, rtol=limit, equal_nan=True)
        else:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("entry", "case", "dtype"), examples(*FLOATS))
def test_on_the_cpu(entry: PublicOp, case: Case, dtype: torch.dtype) -> None:
    compare(entry.op, case, entry.function, "cpu", dtype)
    for variant in variants(entry.op, "cpu"):
        if takes(variant, case, "cpu", dtype):
            compare(entry.op, case, variant.function, "cpu", dtype)


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
@pytest.mark.parametrize(("entry", "case", "dtype"), examples(*INTERPRETED))
def test_triton_in_the_interpreter(entry: PublicOp, case: Case, dtype: torch.dtype) -> None:
    for variant in variants(entry.op, "triton"):
        assert triton_available(), "the kernels of this machine's tests need Triton; install the package triton"
        compare(entry.op, case, variant.function, "cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("entry", "case", "dtype"), examples(*FLOATS, heavy=True))
def test_on_the_device(entry: PublicOp, case: Case, dtype: torch.dtype) -> None:
    compare(entry.op, case, entry.function, "cuda", dtype)
    for variant in variants(entry.op, "triton", "hopper"):
        if takes(variant, case, "cuda", dtype):
            compare(entry.op, case, variant.function, "cuda", dtype)


def takes(variant: Variant[..., Any], case: Case, device: str, dtype: torch.dtype) -> bool:
    return variant.when is None or variant.when(**case.make(torch.device(device), dtype))


@pytest.mark.gpu
def test_a_case_reaches_every_variant_for_hopper() -> None:
    if not hopper_available(torch.device("cuda", 0)):
        pytest.skip("kernels for Hopper need sm_90 and NVRTC")
    for op in (entry.op for entry in EVERY_OP):
        for variant in variants(op, "hopper"):
            assert any(takes(variant, case, "cuda", torch.bfloat16) for case in op.cases), f"{op.name}: no case"


def test_every_family_is_registered() -> None:
    """A family whose `OPS` are not found would be neither dispatched nor tested, and nothing else would say so."""
    named = {path.parent.name for path in Path(cellar.ops.__path__[0]).glob("*/definition.py")}
    assert len(named) > 5
    assert named <= {entry.function.__module__.split(".")[2] for entry in EVERY_OP}
    names = [entry.op.name for entry in EVERY_OP]
    assert len(set(names)) == len(names)


def test_the_first_variant_that_takes_the_arguments_computes_them() -> None:
    def double(x: int) -> str:
        return f"definition {x}"

    def on_hopper(x: int) -> str:
        return f"hopper {x}"

    def in_triton(x: int) -> str:
        return f"triton {x}"

    def is_even(x: int) -> bool:
        return x % 2 == 0

    case = Case("one", lambda device, dtype: {"x": 1})
    hopper, triton = Variant("hopper", on_hopper, is_even), Variant("triton", in_triton)
    op = Op("double", double, (hopper, triton), (case,))
    assert (op.on_gpu(2), op.on_gpu(3), op.on_cpu(2)) == ("hopper 2", "triton 3", "definition 2")
    # Without a condition the variant itself is called, so that a call costs no more than before.
    assert Op("double", double, (triton,), (case,)).on_gpu is in_triton
    assert Op("double", double, (hopper,), (case,)).on_gpu(3) == "definition 3"


def test_an_operation_needs_a_definition_of_the_same_signature() -> None:
    def twice(x: Tensor) -> Tensor:
        return x + x

    def double(y: Tensor) -> Tensor:
        return 2 * y

    case = Case("one", lambda device, dtype: {"x": torch.ones(1, device=device, dtype=dtype)})
    with pytest.raises(TypeError, match="definition"):
        Op("twice", None, (Variant("cpu", twice),), (case,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="parameters"):
        Op("twice", twice, (Variant("triton", double),), (case,))
    with pytest.raises(TypeError, match="cases"):
        Op("twice", twice, (), ())
