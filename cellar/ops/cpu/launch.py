"""Calling the kernels of the CPU: which one, with what arguments, on how many threads.

A large call is divided among the threads that torch computes with: the same OpenMP library, so the same team, found
where torch itself finds it. (A second team would stand in the first one's way, docs/log/cpu-engine.md.) Where torch has
no such library, as on macOS and Windows, kernels run on the thread that calls them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

LEAST_SHARED = 1 << 14
"""Numbers to be read from which on it pays to wake the team: about 3 us on one thread."""

NAMES = ("norm", "activation", "rotary_kv", "attention")
SPARSE = "sparse_attention"
DECODES, SHORT_FLOATS, NIBBLES = "decode_attention", "short_float_attention", "nibble_attention"

Kernel = Callable[[bytes, int], None]


def prepare(dtype: torch.dtype, *, sparse: bool = False) -> None:
    """Have all kernels ready for tensors of `dtype`: seconds the first time on a machine, else less than one.

    `sparse`: that of attention to a share of the values, too.
    """
    for name in (*NAMES, SPARSE) if sparse else NAMES:
        kernel(name, dtype)


@functools.cache
def kernel(name: str, dtype: torch.dtype) -> Kernel:
    """A kernel of `kernels_cpu` for tensors of `dtype`, compiled or read from disk when it is first asked for.

    To be called with its arguments, packed as it wants them, and about how many numbers it reads.
    """
    # Numba is imported here: whoever computes on a GPU needs none.
    from cellar.ops.cpu.kernels import compiled, launcher

    shape = (None, ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64)
    share = ctypes.CFUNCTYPE(*shape)(launcher().address)
    # Short calls keep the interpreter: waiting for its return could take longer than they do.
    stay = ctypes.PYFUNCTYPE(*shape)(launcher().address)
    address, region = compiled(name, dtype).address, _region()
    threads = torch.get_num_threads

    def call(arguments: bytes, size: int) -> None:
        if _is_profiled():
            with torch._C._profiler._RecordFunctionFast(f"cellar::{name}"):
                share(region, address, arguments, threads())
        elif size < LEAST_SHARED:
            stay(0, address, arguments, 1)
        else:
            share(region, address, arguments, threads())

    return call


@functools.cache
def attends_to_decodes() -> bool:
    """True if the kernels of `decodes.py` run on this processor."""
    from cellar.ops.cpu.decodes import runs_here

    return runs_here()


@functools.cache
def takes_fours() -> bool:
    """True if `eights.py` multiplies codes here, which wants tokens in an order of its own (`rows_by_eights`)."""
    from cellar.ops.cpu.wide import has

    return not has("avx512f")


@functools.cache
def multiplies_bytes() -> bool:
    """True if kernels of `planes.py` and `panels.py` run on this processor."""
    from cellar.ops.cpu.dots import has_dots

    return has_dots()


@functools.cache
def multiplies_in_units() -> bool:
    """True if the kernel of `amx.py` runs on this processor."""
    from cellar.ops.cpu.amx import has_units

    return has_units()


_is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled


def _region() -> int:
    """The address of GOMP_parallel in the library that torch is linked with, 0 if there is none."""
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p).value or 0
    except (AttributeError, OSError):
        return 0


def use_threads(count: int) -> None:
    """Have the operations that the calling thread begins divided among `count` threads.

    torch's own setting reaches threads that begin later, too: another engine's, or a peer's under measurement.
    """
    torch.get_num_threads()  # what torch does in a thread before its first operation: it would undo ours
    for setter in _thread_setters():
        setter(count)


@functools.cache
def _thread_setters() -> tuple[Callable[[int], object], ...]:
    """OpenMP's and MKL's, of the libraries that torch is linked with; torch's where they are not to be found."""
    try:
        library = ctypes.CDLL(torch._C.__file__)
        return library.omp_set_num_threads, library.MKL_Set_Num_Threads_Local
    except (AttributeError, OSError):
        return (torch.set_num_threads,)


def rows_at_a_time(columns: int) -> int:
    """How many rows of so many numbers a thread takes per turn."""
    return max(1, 4096 // max(1, columns))


def with_unit_stride(x: Tensor) -> Tensor:
    """x, or a copy if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
