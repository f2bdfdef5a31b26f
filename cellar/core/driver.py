"""NVIDIA's driver, asked for a device's context before the library that computes there is imported.

Both take their time, 0.4 s and some seconds, and neither needs the other: in a thread beside an import the context
costs nothing. The library finds it there, for a device has one context in each process.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

from cellar.core.config import DeviceConfig


def load_driver() -> Any:
    """The driver's library; OSError if this machine has none."""
    return ctypes.CDLL("libcuda.so.1")


def retain_context(config: DeviceConfig, load: Callable[[], Any] = load_driver) -> threading.Thread | None:
    """Begin to make the context of the device that a model is to run on, and go on; None: this process needs none.

    For `auto` it is that of the first device, if there is a driver. Whatever fails is left to the library, which does
    the same and says what is wrong. Of several ranks each has a process and a device of its own.
    """
    kind, _, index = config.device.partition(":")
    if kind == "cpu" or config.num_ranks > 1:
        return None
    # As the library has it: kernels are loaded when they are first launched, not all of them now.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    # No daemon: a process that ends at once must not do so in the middle of the driver's first call.
    thread = threading.Thread(target=_retain, args=(load, int(index or 0)), name="cellar-context")
    thread.start()
    return thread


def _retain(load: Callable[[], Any], index: int) -> None:
    try:
        driver = load()
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
