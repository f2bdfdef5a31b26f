"""What an accelerator itself reads and computes with matrices as a model's are streamed, measured at the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cellar.core.specs import ModelSpec
from cellar.ops.linear.weight import LinearWeight
from cellar.runtime.offload.specimens import device_matrices

ROTATED = 2**28
"""Bytes of matrices that are read in turn: more than caches hold."""

AHEAD, TIMED = 8, 16
"""Products that are launched before those that count, so that the device falls behind whoever launches, and these."""


class DeviceRates(NamedTuple):
    """Bytes/s of products of one token, and FLOP/s of those of many tokens, and of few."""

    device: float
    flops: float
    few_flops: float


NO_DEVICE = DeviceRates(0.0, 0.0, 0.0)


def device_rates(spec: ModelSpec, device: torch.device, few: int, many: int) -> DeviceRates:
    """Measure with matrices in the format of a layer's largest, and so many tokens. Launches are priced apart.

    No graph is recorded: the library keeps memory for every stream that it has ever computed on.
    """
    with torch.cuda.device(device):
        weights = device_matrices(spec, device, ROTATED)
        first, columns, dtype = weights[0], weights[0].in_features, getattr(torch, spec.dtype)
        x = torch.randn((max(few, many), columns), dtype=dtype, device=device)
        read = _seconds(weights, x[:1], AHEAD, TIMED)
        product, short = _seconds(weights, x[:many], 2, 4), _seconds(weights, x[:few], AHEAD, TIMED)
    each = 2.0 * columns * first.out_features
    return DeviceRates(first.nbytes / read, many * each / product, few * each / short)


def _seconds(weights: Sequence[LinearWeight], x: Tensor, ahead: int, timed: int) -> float:
    """Of a product, one after another."""
    weights[0].multiply(x)  # whatever is compiled or chosen for it
    torch.cuda.synchronize(x.device)
    _multiply(weights, x, ahead)
    begun, ended = _event(), _event()
    begun.record()
    _multiply(weights, x, timed)
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3 / timed


def _multiply(weights: Sequence[LinearWeight], x: Tensor, count: int) -> None:
    for number in range(count):
        weights[number % len(weights)].multiply(x)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
