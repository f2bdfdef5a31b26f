"""Copies by CUDA's driver: many with one call (12.8 and later), since one by one each costs several microseconds, and
one to another device, which the copy engines make.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np
from numpy.typing import NDArray

from cellar.ops.cuda.driver import check, driver_available, loaded

# From cuda.h.
_IN_STREAM_ORDER = 1
_NAME = "cuMemcpyBatchAsync_v2"


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: of all copies of a call. The hints of where memory lies are for managed memory alone."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


@functools.cache
def copies_at_once() -> bool:
    """Whether the driver takes many copies with one call."""
    return driver_available() and hasattr(loaded(), _NAME)


def copy_at_once(targets: NDArray[np.uint64], sources: NDArray[np.uint64], nbytes: int, stream: int) -> None:
    """Copy `nbytes` from each address of `sources` [n] to that of `targets` [n], in any order; behind what the stream
    (its handle, not the default one) has so far.

    Raises DeviceError if the driver does not take them.
    """
    count = len(targets)
    if not count:
        return
    sizes = np.full(count, nbytes, np.uint64)
    attributes, first = _Attributes(source_order=_IN_STREAM_ORDER), ctypes.c_size_t(0)
    pointers = (ctypes.c_void_p(np.ascontiguousarray(each).ctypes.data) for each in (targets, sources, sizes))
    call = getattr(loaded(), _NAME)
    check(
        call(
            *pointers,
            ctypes.c_size_t(count),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            ctypes.c_void_p(stream),
        )
    )


def copy_far(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy `nbytes` between two addresses that the current device reaches, of two devices, behind what the stream (its
    handle) has so far. Raises DeviceError.
    """
    check(
        loaded().cuMemcpyDtoDAsync_v2(
            ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes), ctypes.c_void_p(stream)
        )
    )
