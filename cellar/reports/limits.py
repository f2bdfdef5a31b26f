"""What this machine could do at best: bytes and FLOPs per second, from its Profile or from two quick probes."""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from cellar.core.errors import ConfigError
from cellar.core.hardware import Profile
from cellar.runtime.probes import matmul, memory
from cellar.runtime.probes.context import ProbeContext, best_seconds
from cellar.runtime.probes.registry import default_path, machine_name, measure, profiles_of


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates of one device for one dtype: bytes/s of memory reads, FLOP/s of matrix products; and who says so."""

    device: str
    bandwidth: float
    flops: float
    source: str


def limits_of(device: str, dtype: str, profile: Profile | None = None) -> Limits:
    """From a given profile, else from this machine's own or a shipped one of the same accelerator, else measured now.

    Raises ConfigError if `profile` lacks the device or the dtype.
    """
    if profile is not None:
        found = _limits(profile, device, dtype, f"profile of {profile.machine}")
        if found is None:
            raise ConfigError(f"the profile has no figures for {dtype} on {device}; make one with `cellar profile`.")
        return found
    if device == "cpu":
        own = default_path(machine_name(None))
        profiles: tuple[Profile, ...] = (Profile.load(own),) if own.is_file() else ()
    else:
        profiles = profiles_of("auto", torch.device(device))
    known = (_limits(p, device, dtype, f"profile of {p.machine}") for p in profiles)
    found = next(filter(None, known), None)
    if found is not None:
        return found
    # In a thread that ends: its idle OpenMP team would slow an engine beside it (docs/log/cpu-engine.md).
    with ThreadPoolExecutor(1, "cellar-probe") as thread:
        return thread.submit(_probed, None if device == "cpu" else torch.device(device), device, dtype).result()


def _probed(accelerator: torch.device | None, device: str, dtype: str) -> Limits:
    """The memory probe, and a product in the one dtype that is asked about."""
    context = ProbeContext(accelerator, Path.cwd())
    known = measure(context, probes=(("memory", memory.probe),)).device("cpu" if accelerator is None else "gpu")
    assert known is not None
    size = context.matmul_size if accelerator is None else matmul.GPU_SIZE
    matrix = torch.randn((size, size), device=device).to(getattr(torch, dtype))
    out = torch.empty_like(matrix)
    seconds = best_seconds(lambda: torch.mm(matrix, matrix, out=out), context.seconds, matrix.device)
    return Limits(device, known.bandwidth.value, 2 * size**3 / seconds, "quick probe")


def _limits(profile: Profile, device: str, dtype: str, source: str) -> Limits | None:
    known = profile.device("cpu" if device == "cpu" else "gpu")
    if known is None or dtype not in known.flops:
        return None
    return Limits(device, known.bandwidth.value, known.flops[dtype].value, source)


def describe(device: torch.device) -> str:
    """Name of the processor."""
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return str(torch.get_device_module(device).get_device_name(device))
