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
from cellar.runtime.probes import cells, collectives, launch, linear, links, matmul, memory, quantized, scores
from cellar.runtime.probes.context import Probe, ProbeContext

# `memory` makes the devices that the others complete.
PROBES: Sequence[tuple[str, Probe]] = (
    ("memory", memory.probe),
    ("matmul", matmul.probe),
    ("links", links.probe),
    ("launch", launch.probe),
    ("cells", cells.probe),
)

# These measure a model on the machine; they run if the context has one.
RANK_PROBES: Sequence[tuple[str, Probe]] = (("collectives", collectives.probe),)
"""These measure several ranks; they run if the context asks for some."""

MODEL_PROBES: Sequence[tuple[str, Probe]] = (
    ("linear", linear.probe),
    ("quantized", quantized.probe),
    ("scores", scores.probe),
)


def measure(
    context: ProbeContext,
    report: Callable[[str], None] = lambda name: None,
    probes: Sequence[tuple[str, Probe]] | None = None,
) -> Profile:
    """A profile of this machine, by all probes unless some are given; `report` hears each one's name before it runs."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    profile = Profile(machine=machine_name(context.accelerator), devices=(), model=context.model, created=now)
    if probes is None:
        probes = (*PROBES, *(RANK_PROBES if context.ranks else ()), *(MODEL_PROBES if context.spec else ()))
    for name, probe in probes:
        report(name)
        profile = probe(context, profile)
    return profile


def machine_name(accelerator: torch.device | None) -> str:
    """A name that is the same for machines of one kind, e.g. `nvidia-h200-amd-epyc-16`: no host name."""
    parts = [_processor(), str(os.cpu_count())]
    if accelerator is not None:
        parts.insert(0, torch.cuda.get_device_name(accelerator))
    return _slug("-".join(parts))


def default_path(machine: str) -> Path:
    """Where the profile of a machine lies unless the user says otherwise."""
    return Path.home() / ".cache" / "cellar" / f"profile-{machine}.json"


def profiles_of(choice: str, accelerator: torch.device) -> tuple[Profile, ...]:
    """What is known of a machine with this accelerator, the best first.

    `choice`: auto is the machine's own profile, if `cellar profile` has written one, and the shipped ones of the same
    accelerator; none is nothing; else a file, or the name of a shipped profile. Raises ConfigError if that is missing
    or no profile.
    """
    if choice == "none":
        return ()
    if choice != "auto":
        return (Profile.load(Path(choice)) if Path(choice).is_file() else shipped(choice),)
    own = default_path(machine_name(accelerator))
    start = _slug(torch.cuda.get_device_name(accelerator)) + "-"
    others = [shipped(file.stem) for file in sorted(_SHIPPED.glob("*.json"))]
    return (*([Profile.load(own)] if own.is_file() else []), *(p for p in others if p.machine.startswith(start)))


def shipped(name: str) -> Profile:
    """A profile that comes with the package. Raises ConfigError if there is none of that name."""
    file = _SHIPPED / f"{name}.json"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in _SHIPPED.glob("*.json")))
        raise ConfigError(
            f"no profile {name!r} comes with the package; there is {known}, or make one with `cellar profile`."
        )
    return Profile.load(file)


_SHIPPED = Path(__file__).parent.parent / "profiles"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
