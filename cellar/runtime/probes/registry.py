"""The list of all probes, in the order in which they run; a feature that needs a figure adds one file and one line."""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from cellar.core.errors import ConfigError
from cellar.core.hardware import Profile
from cellar.runtime.probes import launch, links, matmul, memory
from cellar.runtime.probes.context import Probe, ProbeContext

# `memory` makes the devices that the others complete.
PROBES: Sequence[tuple[str, Probe]] = (
    ("memory", memory.probe),
    ("matmul", matmul.probe),
    ("links", links.probe),
    ("launch", launch.probe),
)


def measure(
    context: ProbeContext,
    report: Callable[[str], None] = lambda name: None,
    probes: Sequence[tuple[str, Probe]] = PROBES,
) -> Profile:
    """A profile of this machine; `report` hears the name of each probe before it runs."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    profile = Profile(machine=machine_name(context.accelerator), devices=(), created=now)
    for name, probe in probes:
        report(name)
        profile = probe(context, profile)
    return profile


def machine_name(accelerator: torch.device | None) -> str:
    """A name that is the same for machines of one kind, e.g. `nvidia-h200-amd-epyc-16`: no host name."""
    parts = [_processor(), str(os.cpu_count())]
    if accelerator is not None:
        parts.insert(0, torch.cuda.get_device_name(accelerator))
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def shipped(name: str) -> Profile:
    """A profile that comes with the package. Raises ConfigError if there is none of that name."""
    folder = Path(__file__).parent.parent / "profiles"
    file = folder / f"{name}.json"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("*.json")))
        raise ConfigError(
            f"no profile {name!r} comes with the package; there is {known}, or make one with `cellar profile`."
        )
    return Profile.load(file)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
