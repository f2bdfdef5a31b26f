"""What a probe is, what it gets, and how it takes time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from cellar.core.hardware import Measure, Origin, Profile
from cellar.core.specs import ModelSpec

CPU = "cpu"
GPU = "gpu"
DISK = "disk"


@dataclass(frozen=True)
class ProbeContext:
    """Where and how long to measure.

    `accelerator` None measures the host alone. `directory` is on the disk to be measured. Each rate is taken
    over buffers of `nbytes` (at most), matrices of `matmul_size`, and for about `seconds`. `model` is the model that
    the profile is for, as its user names it, and `spec` what it is; None: the machine alone. `checkpoint` is where its
    weights lie; None: there are none, only the sizes are known. `ranks`: among how many collectives are measured; None:
    they are not.
    """

    accelerator: torch.device | None
    directory: Path
    nbytes: int = 256 * 2**20
    matmul_size: int = 1024
    seconds: float = 0.4
    model: str | None = None
    spec: ModelSpec | None = None
    checkpoint: Path | None = None
    ranks: int | None = None

    def devices(self) -> dict[str, torch.device]:
        """Name in the profile -> processor."""
        found = {CPU: torch.device("cpu")}
        if self.accelerator is not None:
            found[GPU] = self.accelerator
        return found


# Adds what one probe measured to a profile. Probes that complete a device run after the one that made it.
Probe = Callable[[ProbeContext, Profile], Profile]


def measured(value: float, unit: str, source: Origin = "measured") -> Measure:
    """A number with its unit; three digits, more would be noise."""
    return Measure(float(f"{value:.3g}"), unit, source)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was told."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def best_seconds(work: Callable[[], object], seconds: float, *devices: torch.device, least: int = 3) -> float:
    """The shortest of the times that `work` takes, tried for about `seconds` and at least `least` times, warm.

    The shortest, because disturbances only ever add: the figure is the machine's limit, not its usual day.
    """
    work()
    for device in devices:
        synchronize(device)
    best, count, end = float("inf"), 0, time.perf_counter() + seconds
    while count < least or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        for device in devices:
            synchronize(device)
        best = min(best, time.perf_counter() - start)
        count += 1
    return best
