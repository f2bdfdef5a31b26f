"""Device memory that other processes of the machine write to, over CUDA's driver."""

from __future__ import annotations

import ctypes

from cellar.core.errors import DeviceError
from cellar.ops.cuda.driver import check, loaded

_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("opaque", ctypes.c_char * 64),)


class SharedMemory:
    """`nbytes` zeros on the current device. `handle` opens them in another process (`opened`); they last as long as
    this process, since others may write at any time.
    """

    def __init__(self, nbytes: int) -> None:
        driver, address, handle = loaded(), ctypes.c_uint64(), _Handle()
        check(driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes)))
        check(driver.cuMemsetD8_v2(address, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes)))
        check(driver.cuCtxSynchronize())
        check(driver.cuIpcGetMemHandle(ctypes.byref(handle), address))
        self.address = address.value
        self.handle = bytes(handle)


def opened(handle: bytes) -> int:
    """The address, on the current device, of what another process shares.

    Raises DeviceError if this device cannot reach that one.
    """
    address = ctypes.c_uint64()
    found = _Handle.from_buffer_copy(handle)
    check(loaded().cuIpcOpenMemHandle_v2(ctypes.byref(address), found, _LAZY_PEER_ACCESS))
    if not address.value:
        raise DeviceError("CUDA's driver opened another device's memory at no address.")
    return address.value
