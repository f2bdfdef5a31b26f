"""A stream that waits until a number in memory has grown, and one that writes such a number: CUDA's stream memory
operations, by its driver. The number lies in pinned memory, or on a device that the current one reaches.

The second version of these calls (CUDA 11.7 and later) is there on every device; the first one wants a setting of the
kernel's module, and is not used.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TypeAlias

from cellar.ops.cuda.driver import check, driver_available, loaded

_Call: TypeAlias = Callable[[int, int, int, int], int]

_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: the difference as a signed number, so that counters may begin again
_BEHIND_ALL = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: what the stream has written before is there before it


def streams_wait(stream: int, address: int) -> bool:
    """True if streams of the current device can wait for numbers in such memory and write them: tried with the int32 at
    `address`, which is 0 and stays so.
    """
    if not driver_available():
        return False
    calls = _wait_value(), _write_value()
    return all(call is not None and not call(stream, address, 0, 0) for call in calls)


def wait_for(stream: int, address: int, value: int) -> None:
    """Have what comes behind this on a stream (its handle) wait until the int32 at `address` is `value` or has gone
    beyond it, both modulo 2**32.

    Raises DeviceError.
    """
    call = _wait_value()
    assert call is not None, "`streams_wait` has said so"
    check(call(stream, address, value & 0xFFFFFFFF, _AT_LEAST))


def write(stream: int, address: int, value: int) -> None:
    """Have a stream (its handle) write `value`, modulo 2**32, to the int32 at `address` when all is done that comes
    before this. Raises DeviceError.
    """
    call = _write_value()
    assert call is not None, "`streams_wait` has said so"
    check(call(stream, address, value & 0xFFFFFFFF, _BEHIND_ALL))


@functools.cache
def _wait_value() -> _Call | None:
    return _found("cuStreamWaitValue32_v2")


@functools.cache
def _write_value() -> _Call | None:
    return _found("cuStreamWriteValue32_v2")


def _found(name: str) -> _Call | None:
    """The driver's function; None: it is older."""
    try:
        call = getattr(loaded(), name)
    except AttributeError:
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    call.restype = ctypes.c_int
    return call  # type: ignore[no-any-return]
