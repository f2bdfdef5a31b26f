"""Kernels for Hopper in an emulator: CUDA C++ compiled by the C++ compiler of this machine (`hopper_emulated.h`)."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "cellar" / "ops"

# What stands behind a kernel: its arguments as C++ declares them, and their names.
_RUN = """
extern "C" int run(u32 blocks, u32 size, u32 threads, u32 shared, u32 seed, char* message, {declared}) {{
    try {{
        emulated::launch(blocks, size, threads, shared, seed, [=] {{ {kernel}({names}); }});
    }} catch (const std::exception& error) {{
        std::strncpy(message, error.what(), 255);
        return 1;
    }}
    return 0;
}}
"""


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which("g++")


@functools.cache
def folder() -> Path:
    """Where compiled kernels are for as long as the tests run."""
    return Path(tempfile.mkdtemp(prefix="emulated-"))


def build(
    files: Sequence[str],
    constants: Mapping[str, int],
    kernel: str,
    arguments: Sequence[tuple[str, str]],
    edits: Sequence[tuple[str, str]] = (),
) -> ctypes.CDLL:
    """A kernel of cellar/ops (its files) as a library whose `run` launches it. `arguments`: type and name of each.

    What the kernel takes by value is given by address. `edits`: text to be replaced, for defects that tests plant.
    """
    body = "\n".join((SOURCES / name).read_text() for name in files)
    for old, new in edits:
        assert body.count(old) == 1, old
        body = body.replace(old, new)
    declared = ", ".join(f"{kind} {name}" for kind, name in arguments)
    names = ", ".join(f"*{name}" if kind.endswith("&*") else name for kind, name in arguments)
    declared = declared.replace("&*", "*")
    text = (HERE / "hopper_emulated.h").read_text() + body
    text += _RUN.format(declared=declared, names=names, kernel=kernel)
    options = [f"-D{name}={value}" for name, value in sorted(constants.items())]
    name = hashlib.sha256("\0".join([text, *options]).encode()).hexdigest()[:24]
    library, source = folder() / f"{name}.so", folder() / f"{name}.cpp"
    if not library.exists():
        source.write_text(text)
        command = [str(compiler()), "-std=c++17", "-O1", "-shared", "-fPIC", "-w", *options, str(source)]
        done = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(str(library))


def launch(
    library: ctypes.CDLL, blocks: int, size: int, threads: int, shared: int, arguments: Sequence[object], seed: int = 0
) -> None:
    """Run all blocks, in clusters of `size`. Raises AssertionError with what went wrong."""
    message = ctypes.create_string_buffer(256)
    failed = library.run(blocks, size, threads, shared, seed, message, *arguments)
    assert not failed, message.value.decode()


def tensor_map(
    tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int = 128
) -> ctypes.Array[ctypes.c_uint64]:
    """As `cuda_driver.tensor_map`, in the emulator's form."""
    made = (ctypes.c_uint64 * 16)()
    made[0], made[1] = tensor.data_ptr(), len(sizes) + 256 * swizzle
    for i, size in enumerate(sizes):
        made[2 + i], made[11 + i] = size, box[i]
    for i, stride in enumerate(strides):
        made[7 + i] = stride * 2  # elements of 16 bits, whatever the tensor's are
    return made


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Its address."""
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())
