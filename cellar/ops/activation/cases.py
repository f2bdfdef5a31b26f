"""Example calls of activations."""

from __future__ import annotations

import torch

from cellar.ops.activation.definition import kinds
from cellar.ops.registry import Case


def _case(kind: str, t: int, n: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
        generator = torch.Generator().manual_seed(n)
        return {"x": (3 * torch.randn((t, n), generator=generator)).to(dtype).to(device), "kind": kind}

    return Case(f"{kind} {t}x{n}", make)


GATED = tuple(_case(kind, 3, 2 * 70) for kind in kinds())
ACTIVATE = tuple(_case(kind, 2, 1100) for kind in kinds())
