"""Dense matrix products: FLOP/s per dtype."""

from __future__ import annotations

from dataclasses import replace

import torch

from cellar.core.hardware import Profile
from cellar.runtime.probes.context import ProbeContext, best_seconds, measured

GPU_SIZE = 8192
DTYPES = ("float32", "bfloat16", "float16")


def probe(context: ProbeContext, profile: Profile) -> Profile:
    """Adds `flops` to each processor: n^3 products through torch, 2 FLOPs per multiply-add.

    float16 is left out on the CPU, where no run computes in it. float32 on the GPU is without TF32.
    """
    found = []
    for name, device in context.devices().items():
        known = next(d for d in profile.devices if d.name == name)
        n = context.matmul_size if device.type == "cpu" else max(context.matmul_size, GPU_SIZE)
        rates = {}
        for dtype in DTYPES:
            if device.type == "cpu" and dtype == "float16":
                continue
            rates[dtype] = measured(_rate(n, dtype, device, context.seconds / len(DTYPES)), "FLOP/s")
        found.append(replace(known, flops=rates))
    return profile.merged(devices=found)


def _rate(n: int, dtype: str, device: torch.device, seconds: float) -> float:
    # Random, because a product of equal numbers draws less power and runs at a higher clock.
    a = torch.randn((n, n), device=device).to(getattr(torch, dtype))
    out = torch.empty_like(a)
    return 2 * n**3 / best_seconds(lambda: torch.mm(a, a, out=out), seconds, device)
