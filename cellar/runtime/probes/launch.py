"""What it costs the host to start one operation, whatever the operation does (s)."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from cellar.core.hardware import Profile
from cellar.runtime.probes.context import ProbeContext, measured, synchronize

CALLS = 500


def probe(context: ProbeContext, profile: Profile) -> Profile:
    """Adds `launch` to each processor: the mean of an eager torch call on one element, host side."""
    found = []
    for name, device in context.devices().items():
        known = next(d for d in profile.devices if d.name == name)
        found.append(replace(known, launch=measured(_seconds(device), "s")))
    return profile.merged(devices=found)


def _seconds(device: torch.device) -> float:
    x = torch.zeros(1, device=device)
    best = float("inf")
    for _ in range(4):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(CALLS):
            x.add_(1)
        best = min(best, time.perf_counter() - start)
    synchronize(device)
    return best / CALLS
