"""A stream that waits until a number in host memory has grown: CUDA's stream memory operations, by its driver.

The second version of these calls (CUDA 11.7 and later) is there on every device; the first one wants a setting of the
kernel's module, and is not used.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from cellar.ops.cuda.driver import check, driver_available, loaded

_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: the difference as a signed number, so that counters may begin again


def streams_wait(stream: int, address: int) -> bool:
    """True if streams of the current device can wait for numbers in host memory: tried with one that is there, the
    int32 at `address`, which is 0.
    """
    if not driver_available():
        return False
    call = _wait_value()
    return call is not None and not call(stream, address, 0, _AT_LEAST)


def wait_for(stream: int, address: int, value: int) -> None:
    """Have what comes behind this on a stream (its handle) wait until the int32 at `address`, in pinned memory, is
    `value` or has gone beyond it, both modulo 2**32.

    Raises DeviceError.
    """
    call = _wait_value()
    assert call is not None, "`streams_wait` has said so"
    check(call(stream, address, value & 0xFFFFFFFF, _AT_LEAST))


@functools.cache
def _wait_value() -> Callable[[int, int, int, int], int] | None:
    """The driver's function; None: it is older."""
    try:
        call = loaded().cuStreamWaitValue32_v2
    except AttributeError:
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    call.restype = ctypes.c_int
    return call
