"""How much memory there is: of this process's host, and of a device."""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator
from pathlib import Path

import torch

GIB = 2**30

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")

_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of a control group, version 2 or 1: its limit, what counts against it, and of that the files nobody reads now."""


def host_available(meminfo: Path = Path("/proc/meminfo"), groups: Path = _GROUPS, own: Path = _OWN_GROUPS) -> int:
    """Bytes that this process may still take without swapping: the system's, or less if its control group, or one above
    that, says so.
    """
    rooms = (_room(folder) for folder in _group_folders(groups, own))
    return int(min(_meminfo(meminfo, "MemAvailable"), *rooms))


def _group_folders(groups: Path, own: Path) -> Iterator[Path]:
    """Of this process's control groups that may limit memory, and all above them. In a container the paths are
    often those of the host, which are not there: then its topmost group is its own.
    """
    yield from (groups, groups / "memory")
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            top = groups / "memory" if controllers else groups
            folder = top / path.lstrip("/")
            while folder != top and top in folder.parents:
                yield folder
                folder = folder.parent


def _room(folder: Path) -> float:
    """Bytes that are left in a control group; infinity where nothing says so."""
    for limit, used, spare in _LIMITS:
        try:
            room = int((folder / limit).read_text()) - int((folder / used).read_text())
        except (OSError, ValueError):
            continue  # no such control group, or no limit ("max")
        return max(room + _field(folder / "memory.stat", spare), 0)
    return math.inf


def _field(file: Path, name: str) -> int:
    """A number of a file that has one behind each name; 0 if it is not there."""
    try:
        return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(name + " "))
    except (OSError, ValueError, IndexError, StopIteration):
        return 0


def resident(status: Path = Path("/proc/self/status")) -> int:
    """Bytes of memory that this process has taken; where the system has no such file (macOS), the most it ever had."""
    try:
        for line in status.read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource
    import sys

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def host_total(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes of the host's memory."""
    return _meminfo(meminfo, "MemTotal")


def device_used(device: torch.device) -> int:
    """Bytes of an accelerator's memory that anyone uses now, this process's allocator cache included."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def device_total(device: torch.device) -> int:
    """Bytes of a device's memory."""
    if device.type == "cpu":
        return host_total()
    return int(torch.cuda.mem_get_info(device)[1])


def device_free(device: torch.device) -> int:
    """Bytes that may still be allocated on a device."""
    return host_available() if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[0])


def device_left(device: torch.device, held: int | None) -> int:
    """Bytes that this process may still allocate on an accelerator, of `held` bytes in all; None: what is free."""
    return device_free(device) if held is None else held - int(torch.cuda.memory_reserved(device))


def is_out_of_memory(error: BaseException) -> bool:
    """True if an allocation failed: on an accelerator, in NumPy, of a mapping, or in torch on the CPU, which has no
    type for it.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def last_cache(caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of the processor's largest cache, or 0 if the system does not say."""
    found = 0
    for file in caches.glob("index*/size"):
        text = file.read_text().strip()
        number, unit = text.rstrip("KMG"), text[-1:]
        if number.isdigit():
            found = max(found, int(number) * {"K": 2**10, "M": 2**20, "G": 2**30}.get(unit, 1))
    return found


def human(nbytes: float) -> str:
    """`1.5 GiB`, `20 MiB`, `512 B`: for messages."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def _meminfo(file: Path, name: str) -> int:
    """A field of /proc/meminfo in bytes; where there is none (macOS), what sysconf says of the whole memory."""
    try:
        for line in file.read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
