"""CUDA C++ to machine code by NVRTC, the compiler that CUDA builds of torch bring along; results are kept on disk.

Triton is what kernels are written in. CUDA C++ is for the few that need what Triton does not have: clusters, loads for
several blocks at once, tiles whose width is no power of two (docs/decisions/0016-hopper-kernels.md).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from cellar.core.errors import DeviceError


def compiler_available() -> bool:
    """True if NVRTC can be loaded."""
    return _library() is not None


def compile_cuda(source: str, constants: Mapping[str, int], architecture: str = "sm_90a") -> bytes:
    """The cubin of `source` with the constants defined; about 0.4 s, or what the disk keeps from an earlier run.

    Raises DeviceError if there is no NVRTC, or if it refuses the source.
    """
    library = _library()
    if library is None:
        raise DeviceError("NVRTC cannot be loaded, but this kernel is compiled by it; install a CUDA build of torch.")
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{k}={v}" for k, v in constants.items())]
    version = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(version[0]), ctypes.byref(version[1]))
    key = "\0".join([f"{version[0].value}.{version[1].value}", *options, source])
    kept = Path.home() / ".cache" / "cellar" / "kernels" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    with suppress(OSError):
        return kept.read_bytes()
    cubin = _compiled(library, source, options)
    with suppress(OSError):
        _keep(kept, cubin)
    return cubin


def _compiled(library: ctypes.CDLL, source: str, options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    try:
        given = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        size = ctypes.c_size_t()
        if library.nvrtcCompileProgram(program, len(options), given):
            _check(library, library.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            _check(library, library.nvrtcGetProgramLog(program, log))
            raise DeviceError(f"NVRTC refuses a kernel: {log.value.decode(errors='replace')}")
        _check(library, library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        _check(library, library.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _check(library: ctypes.CDLL, code: int) -> None:
    if code:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise DeviceError(f"NVRTC: {library.nvrtcGetErrorString(code).decode()}.")


def _keep(path: Path, content: bytes) -> None:
    """Whole or not at all: other processes may write the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(name, path)


@functools.cache
def _library() -> ctypes.CDLL | None:
    major = (torch.version.cuda or "13").split(".")[0]
    for name in (f"libnvrtc.so.{major}", "libnvrtc.so"):
        with suppress(OSError):
            return ctypes.CDLL(name)
    return None
