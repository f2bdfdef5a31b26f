"""Kernels of a cubin through CUDA's driver: load, describe tensors to the copy engine, launch in clusters.

torch has made the context; every call here uses the one that is current.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

import torch

from cellar.core.errors import DeviceError

# From cuda.h.
_MAX_DYNAMIC_SHARED = 8
_PREFERRED_SHARED = 9
_SHARED_OF_ALL = 228 << 10  # bytes that blocks of one of Hopper's multiprocessors can share
_CLUSTER_DIMENSION = 4
_DEPENDENT_LAUNCH = 6
_DTYPES = {torch.float16: 6, torch.bfloat16: 9}
_SWIZZLES = {0: 0, 64: 2, 128: 3}
_PROMOTE_256 = 3

Argument: TypeAlias = ctypes.c_int | ctypes.c_float | ctypes.c_void_p | ctypes.Structure


class TensorMap(ctypes.Structure):
    """What the copy engine knows of a tensor (CUtensorMap); made by `tensor_map`."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def driver_available() -> bool:
    """True if CUDA's driver is there."""
    return _driver() is not None


@functools.lru_cache(maxsize=4096)
def tensor_map(
    address: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 128,
) -> TensorMap:
    """Of 16-bit floats at an address: sizes and box from the innermost dimension on, strides (elements) from the next.

    swizzle: bytes of a box's row, 128 or 64, whose 16-byte pieces change places by the row; 0: they lie as they come.
    What lies outside of the tensor is read as zeros. The address and the strides' bytes must be multiples of 16. Who
    uses it keeps the memory; the same arguments give the same map.
    """
    rank = len(sizes)
    raw = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 64)
    # The driver wants it on a multiple of 64.
    made = TensorMap.from_buffer(raw, -ctypes.addressof(raw) % 64)
    check(
        loaded().cuTensorMapEncodeTiled(
            ctypes.byref(made),
            _DTYPES[dtype],
            rank,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*sizes),
            (ctypes.c_uint64 * (rank - 1))(*(stride * dtype.itemsize for stride in strides)),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,
            _SWIZZLES[swizzle],
            _PROMOTE_256,
            0,
        )
    )
    return made


class Function:
    """A kernel of a cubin on the current device, with so much dynamic shared memory, in clusters of a size.

    `room`: of the memory that a multiprocessor divides between its cache and what blocks share, the bytes for blocks;
    None: what the driver takes this kernel to want. The division changes only when a multiprocessor is empty. Kernels
    that begin before the ones in front have ended find what those wanted, and no room for their own blocks if that is
    less; so they should ask for the same.
    """

    def __init__(
        self, cubin: bytes, name: str, threads: int, shared: int, cluster: int, room: int | None = None
    ) -> None:
        self._threads, self._shared, self._cluster = threads, shared, cluster
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        driver = loaded()
        check(driver.cuModuleLoadData(ctypes.byref(self._module), cubin))
        check(driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()))
        check(driver.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared))
        if room is not None:
            percent = min(-(-100 * room // _SHARED_OF_ALL), 100)
            check(driver.cuFuncSetAttribute(self._function, _PREFERRED_SHARED, percent))

    def clusters_at_once(self) -> int:
        """How many clusters the device runs side by side."""
        config, _attributes = self._config(self._cluster, 0, dependent=False, cluster=True)
        count = ctypes.c_int()
        check(loaded().cuOccupancyMaxActiveClusters(ctypes.byref(count), self._function, ctypes.byref(config)))
        return count.value

    def launch(self, clusters: int, arguments: Sequence[Argument], stream: int, *, dependent: bool) -> None:
        """Launch on a stream (its handle), if `dependent` before the kernel in front has ended: it waits by itself."""
        config, _attributes = self._config(
            clusters * self._cluster, stream, dependent=dependent, cluster=self._cluster > 1
        )
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        check(loaded().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None))

    def _config(
        self, blocks: int, stream: int, *, dependent: bool, cluster: bool
    ) -> tuple[_Config, ctypes.Array[_Attribute]]:
        """The launch, and the attributes to which it points: they must outlive it."""
        attributes = (_Attribute * 2)()
        count = 0
        if cluster:
            attributes[count].id = _CLUSTER_DIMENSION
            attributes[count].value[0:3] = [self._cluster, 1, 1]
            count += 1
        if dependent:
            attributes[count].id = _DEPENDENT_LAUNCH
            attributes[count].value[0] = 1
            count += 1
        config = _Config(shared=self._shared, stream=stream, attributes=attributes, count=count)
        config.grid[:] = [blocks, 1, 1]
        config.block[:] = [self._threads, 1, 1]
        return config, attributes


def check(code: int) -> None:
    """Raise DeviceError with the driver's words if a call of it failed."""
    if code:
        text = ctypes.c_char_p()
        loaded().cuGetErrorString(code, ctypes.byref(text))
        raise DeviceError(f"CUDA's driver: {(text.value or b'unknown error').decode()} ({code}).")


def loaded() -> ctypes.CDLL:
    """The driver. Raises DeviceError if there is none."""
    driver = _driver()
    if driver is None:
        raise DeviceError("CUDA's driver cannot be loaded, but a kernel wants it; install it or run on the CPU.")
    return driver


@functools.cache
def _driver() -> ctypes.CDLL | None:
    with suppress(OSError):
        return ctypes.CDLL("libcuda.so.1")
    return None
