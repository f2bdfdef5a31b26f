"""Example calls of norms."""

from __future__ import annotations

import torch
from torch import Tensor

from cellar.ops.registry import Case


def _random(shape: tuple[int, ...], seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def _add_case(t: int, d: int, add: bool, bias: bool | None = None) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
        arguments: dict[str, object] = {
            "residual": _random((t, d), 0, device, dtype),
            "delta": _random((t, d), 1, device, dtype) if add else None,
            "weight": _random((d,), 2, device, dtype),
            "eps": 1e-5,
        }
        if bias is not None:
            arguments["bias"] = _random((d,), 3, device, dtype) if bias else None
        return arguments

    return Case(f"{t}x{d}{'+' if add else ''}{'b' if bias else ''}", make)


def _rms_norm() -> tuple[Case, ...]:
    def heads(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
        qkv = _random((5, 4 * 24), 0, device, dtype)
        return {"x": qkv.view(5, 4, 24)[:, 1:], "weight": _random((24,), 1, device, dtype), "eps": 1e-6}

    def rows(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
        return {"x": _random((3, 100), 0, device, dtype), "weight": _random((100,), 1, device, dtype), "eps": 1e-5}

    return (Case("heads of a strided view", heads), Case("3x100", rows))


RMS_NORM = _rms_norm()
ADD_RMS_NORM = (_add_case(3, 96, True), _add_case(1, 130, True), _add_case(2, 64, False))
ADD_LAYER_NORM = (_add_case(3, 96, True, True), _add_case(1, 130, True, False), _add_case(2, 64, False, True))
