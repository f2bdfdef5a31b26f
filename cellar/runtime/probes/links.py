"""Links: host to device and back, both at once, in pieces of several sizes; disk write and read (bytes/s)."""

from __future__ import annotations

import io
import mmap
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch

from cellar.core.hardware import Curve, Device, Link, Profile
from cellar.runtime.probes.context import CPU, DISK, GPU, ProbeContext, best_seconds, measured

PIECES = tuple(2**k for k in (14, 16, 18, 20, 22, 24))
BLOCK = 4 * 2**20


def probe(context: ProbeContext, profile: Profile) -> Profile:
    """Adds the disk and its links, and those of the accelerator if there is one.

    `curves["link.cpu.gpu"]` is the rate of copies to the device in pieces of x bytes through `copy_`.
    """
    profile = _disk(context, profile)
    return profile if context.accelerator is None else _accelerator(context, profile, context.accelerator)


def _accelerator(context: ProbeContext, profile: Profile, device: torch.device) -> Profile:
    size, seconds = context.nbytes, context.seconds / 4
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    back = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    away = torch.zeros(size, dtype=torch.uint8, device=device)
    one, other = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def both() -> None:
        with torch.cuda.stream(one):
            there.copy_(host, non_blocking=True)
        with torch.cuda.stream(other):
            back.copy_(away, non_blocking=True)

    into = size / best_seconds(lambda: there.copy_(host, non_blocking=True), seconds, device)
    out = size / best_seconds(lambda: back.copy_(away, non_blocking=True), seconds, device)
    duplex = measured(2 * size / best_seconds(both, seconds, device) / (into + out), "1")
    latency = best_seconds(lambda: there[:1].copy_(host[:1], non_blocking=True), seconds / 4, device)

    def in_pieces(piece: int) -> float:
        count = min(64, size // piece)

        def copies() -> None:
            for k in range(count):
                there[k * piece : (k + 1) * piece].copy_(host[k * piece : (k + 1) * piece], non_blocking=True)

        return count * piece / best_seconds(copies, seconds / len(PIECES), device)

    pieces = [piece for piece in PIECES if piece <= size]
    curves = {}
    if pieces:
        rates = tuple(float(f"{in_pieces(piece):.3g}") for piece in pieces)
        curves["link.cpu.gpu"] = Curve(tuple(map(float, pieces)), rates, "bytes", "bytes/s")
    links = [
        Link(CPU, GPU, measured(into, "bytes/s"), measured(latency, "s"), duplex),
        Link(GPU, CPU, measured(out, "bytes/s"), measured(latency, "s"), duplex),
    ]
    return profile.merged(links=links, curves=curves)


def _disk(context: ProbeContext, profile: Profile) -> Profile:
    """Writing ends with fsync; reading passes by the page cache (O_DIRECT) where the file system can."""
    context.directory.mkdir(parents=True, exist_ok=True)
    usage = shutil.disk_usage(context.directory)
    size = min(context.nbytes, usage.free // 4) // BLOCK * BLOCK or BLOCK
    handle, name = tempfile.mkstemp(dir=context.directory)
    file = Path(name)
    with os.fdopen(handle, "wb", buffering=0) as out:
        try:
            descriptor = _unbuffered(file)
        finally:
            file.unlink()  # now, so that nothing is left of a profiler that is killed
        try:
            written = size / _write_seconds(out, size)
            read = size / _read_seconds(descriptor, size)
        finally:
            os.close(descriptor)
    disk = Device(DISK, "disk", measured(usage.free, "bytes"), measured(read, "bytes/s"))
    links = [Link(CPU, DISK, measured(written, "bytes/s")), Link(DISK, CPU, measured(read, "bytes/s"))]
    return profile.merged(devices=[disk], links=links)


def _unbuffered(file: Path) -> int:
    """A descriptor that reads past the page cache, where the file system can."""
    try:
        return os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:
        return os.open(file, os.O_RDONLY)


def _write_seconds(out: io.FileIO, size: int) -> float:
    block = os.urandom(BLOCK)  # not zeros, which some disks do not store
    start = time.perf_counter()
    for _ in range(size // BLOCK):
        out.write(block)
    os.fsync(out.fileno())
    return time.perf_counter() - start


def _read_seconds(descriptor: int, size: int) -> float:
    buffer = mmap.mmap(-1, BLOCK)  # page-aligned, as O_DIRECT wants it
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        for _ in range(size // BLOCK):
            os.readv(descriptor, [buffer])
        return time.perf_counter() - start
    finally:
        buffer.close()
