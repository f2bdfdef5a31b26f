"""What kernels for Hopper (sm_90) have in common: where they run, and the source in front of each (`hopper.cuh`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.resources import files

import torch

from cellar.ops.cuda.compiler import compiler_available
from cellar.ops.cuda.driver import driver_available

DTYPES = (torch.bfloat16, torch.float16)

# Bytes of shared memory for a block, by how many blocks share a multiprocessor.
MAX_SHARED = {1: 231_424, 2: 114_688}


@functools.cache
def hopper_available(device: torch.device) -> bool:
    """True on a Hopper GPU whose driver and NVRTC can be loaded."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0) and driver_available() and compiler_available()


def hopper_serves(device: torch.device) -> bool:
    """The same; of the meta device, where kernels are only listed, what is true of the GPU that is here."""
    if device.type == "meta" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return hopper_available(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many the GPU has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def hopper_source(*names: str, instructions: Sequence[str] = ()) -> str:
    """A kernel under `ops/`, and what it includes, behind Hopper's instructions and some more of them."""
    folder = files("cellar.ops")
    included = (folder.joinpath(name).read_text() for name in names)
    return "\n".join((folder.joinpath("cuda/hopper.cuh").read_text(), *instructions, *included))


def multiply_wide(columns: int, dtype: torch.dtype) -> str:
    """`multiply_wide`: 64 rows by so many columns, 16 deep, both operands in shared memory."""
    sums = columns // 2
    return _product(
        f"multiply_wide(float (&sum)[{sums}], u64 a, u64 b, bool add)",
        columns,
        dtype,
        first=f"%{sums}",
        second=f"%{sums + 1}",
        add=f"%{sums + 2}",
        forms="1, 1, 0, 0",
        given='"l"(a), "l"(b)',
    )


def multiply_turned(columns: int, dtype: torch.dtype) -> str:
    """`multiply_turned`: the same with the first operand in registers, and rows of the second one for its columns."""
    return _from_registers("multiply_turned", columns, dtype, turned=True)


def multiply_across(columns: int, dtype: torch.dtype) -> str:
    """`multiply_across`: as `multiply_wide`, with the first operand in registers."""
    return _from_registers("multiply_across", columns, dtype, turned=False)


def _from_registers(name: str, columns: int, dtype: torch.dtype, *, turned: bool) -> str:
    sums = columns // 2
    return _product(
        f"{name}(float (&sum)[{sums}], const u32 (&a)[4], u64 b, bool add)",
        columns,
        dtype,
        first="{" + ", ".join(f"%{sums + i}" for i in range(4)) + "}",
        second=f"%{sums + 4}",
        add=f"%{sums + 5}",
        forms=f"1, 1, {int(turned)}",
        given=", ".join(f'"r"(a[{i}])' for i in range(4)) + ', "l"(b)',
    )


def _product(
    head: str, columns: int, dtype: torch.dtype, *, first: str, second: str, add: str, forms: str, given: str
) -> str:
    """A function around one instruction, which names each of its registers."""
    sums, kind = columns // 2, "bf16" if dtype == torch.bfloat16 else "f16"
    places = ", ".join(f"%{i}" for i in range(sums))
    operands = ", ".join(f'"+f"(sum[{i}])' for i in range(sums))
    return f"""
__device__ __forceinline__ void {head} {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, {add}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
        "{{{places}}}, {first}, {second}, p, {forms};\\n}}"
        : {operands}
        : {given}, "r"(static_cast<int>(add)));
}}
"""
