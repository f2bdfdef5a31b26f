"""Memory: how much each processor has, and how fast it reads and copies it (bytes/s)."""

from __future__ import annotations

import os

import torch

from cellar.core.hardware import Device, Profile, Table
from cellar.runtime.memory import device_total
from cellar.runtime.probes.context import ProbeContext, best_seconds, measured

GPU_NBYTES = 2**30


def probe(context: ProbeContext, profile: Profile) -> Profile:
    """Adds each processor with its bandwidth: the faster of a sum and a matrix-vector product.

    `tables["memory"]` has both, and the rate of a copy. A copy counts the bytes read and the bytes written.
    """
    devices, rows = [], []
    for name, device in context.devices().items():
        nbytes = context.nbytes if device.type == "cpu" else max(context.nbytes, GPU_NBYTES)
        rates = _rates(device, nbytes, context.seconds)
        rows += [(name, pattern, float(f"{rate:.3g}")) for pattern, rate in rates.items()]
        devices.append(
            Device(
                name=name,
                kind="cpu" if device.type == "cpu" else "gpu",
                capacity=measured(device_total(device), "bytes"),
                bandwidth=measured(max(rates["sum"], rates["matvec"]), "bytes/s"),
                cores=os.cpu_count() if device.type == "cpu" else None,
            )
        )
    table = Table(("device", "pattern", "bytes/s"), tuple(rows))
    return profile.merged(devices=devices, tables={"memory": table})


def _rates(device: torch.device, nbytes: int, seconds: float) -> dict[str, float]:
    width = 4096
    # The dtype that the processor multiplies best; a sum in float32 everywhere.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    matrix = torch.ones((nbytes // (width * dtype.itemsize), width), dtype=dtype, device=device)
    vector = torch.ones(width, dtype=dtype, device=device)
    plain = matrix.view(torch.float32).view(-1)
    target = torch.empty_like(matrix)
    size = matrix.nbytes
    return {
        "sum": size / best_seconds(lambda: plain.sum(), seconds / 3, device),
        "matvec": size / best_seconds(lambda: torch.mv(matrix, vector), seconds / 3, device),
        "copy": 2 * size / best_seconds(lambda: target.copy_(matrix), seconds / 3, device),
    }
