"""Kernels for Hopper in an emulator: CUDA C++ compiled by the C++ compiler of this machine (`hopper_emulated.h`)."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "cellar" / "ops"
# With what `pytest --cache-clear` takes away.
KEPT = HERE.parents[1] / ".pytest_cache" / "d" / "emulated"
KEPT_DAYS = 14
HEADER = HERE / "hopper_emulated.h"
OPTIONS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-w")

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
def version() -> str:
    """The compiler's."""
    return subprocess.run([str(compiler()), "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def folder() -> Path:
    """Where compiled kernels are kept from one run to the next; those that no run has used for long are removed."""
    try:
        KEPT.mkdir(parents=True, exist_ok=True)
        for file in KEPT.iterdir():
            if file.is_file() and file.stat().st_mtime < time.time() - 86400 * KEPT_DAYS:
                file.unlink(missing_ok=True)
        return KEPT
    except OSError:  # a tree that may not be written
        return Path(tempfile.mkdtemp(prefix="emulated-"))


def name_of(text: str) -> str:
    """Of what the text is compiled to here."""
    return hashlib.sha256("\0".join([text, version(), *OPTIONS]).encode()).hexdigest()[:24]


def compile_to(place: Path, source: Path, *options: str) -> None:
    """Compile, and put the result there when it is whole: other test processes may look for it."""
    with tempfile.TemporaryDirectory(dir=place.parent) as beside:
        made = Path(beside) / place.name
        command = [str(compiler()), *OPTIONS, *options, str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:  # no AssertionError: a planted defect that does not compile is not found
            raise RuntimeError(done.stderr[-3000:])
        os.replace(made, place)


@functools.cache
def library_headers() -> Path:
    """What the emulator includes of the standard library, compiled once for all kernels: a .gch beside this file."""
    text = "".join(f"{line}\n" for line in HEADER.read_text().splitlines() if line.startswith("#include <"))
    place = folder() / f"{name_of(text)}.h"
    ahead = place.with_suffix(".h.gch")
    if not ahead.exists():
        with tempfile.TemporaryDirectory(dir=folder()) as aside:
            source = Path(aside) / place.name
            source.write_text(text)
            compile_to(ahead, source, "-x", "c++-header")
            os.replace(source, place)
    os.utime(place)
    os.utime(ahead)
    return place


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
    text = "".join(f"#define {name} {value}\n" for name, value in sorted(constants.items()))
    text += HEADER.read_text() + body + _RUN.format(declared=declared, names=names, kernel=kernel)
    library = folder() / f"{name_of(text)}.so"
    if library.exists():
        os.utime(library)
    else:
        with tempfile.TemporaryDirectory() as aside:
            source = Path(aside) / "kernel.cpp"
            source.write_text(f'#include "{library_headers()}"\n{text}')
            compile_to(library, source)
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
