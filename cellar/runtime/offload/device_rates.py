"""What an accelerator itself reads and computes with matrices as a model's are streamed, measured at the start."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cellar.core.kv_formats import kv_format
from cellar.core.specs import ModelSpec
from cellar.ops.attention import attention, decode_attention, decodes_at_once, plan_attention
from cellar.ops.kv_format import quantized_cache
from cellar.ops.linear.weight import LinearWeight
from cellar.runtime.offload.specimens import device_matrices

ROTATED = 2**28
"""Bytes of matrices that are read in turn: more than caches hold."""

TIMED = 16
"""Launches that count, but for those of many tokens, which take long."""

BEHIND, MOST_BEHIND = 6e-3, 64
"""Seconds, about, by which the device is behind whoever launches when those begin that count, and products of many
tokens that keep it busy till then, at most: a product of one token in eight bits takes less time than its launches.
"""

SEQUENCES, CONTEXT = 1024, 512
"""Of decodes whose attention is measured, at most: they read as much as is read of matrices, if that many do."""


class DeviceRates(NamedTuple):
    """Bytes/s of products of one token, FLOP/s of those of many tokens and of few, and bytes/s of attention of decodes,
    of what the cache takes.
    """

    device: float
    flops: float
    few_flops: float
    attention: float


NO_DEVICE = DeviceRates(0.0, 0.0, 0.0, 0.0)


def device_rates(spec: ModelSpec, device: torch.device, few: int, many: int) -> DeviceRates:
    """Measure with matrices in the format of a layer's largest and so many tokens, and with K and V as the first layer
    keeps them. Launches are priced apart.

    No graph is recorded: the library keeps memory for every stream that it has ever computed on.
    """
    with torch.cuda.device(device):
        read, product, short, busy = _products(spec, device, few, many)
        attended = _attention(spec, device, busy)
        del busy
        torch.cuda.empty_cache()  # who asks the driver what is free is not to find less
    return DeviceRates(read, product, short, attended)


def _products(
    spec: ModelSpec, device: torch.device, few: int, many: int
) -> tuple[float, float, float, Callable[[], None]]:
    """Bytes/s of a product of one token, FLOP/s of many and of few, and what keeps the device busy."""
    weights = device_matrices(spec, device, ROTATED)
    first, columns = weights[0], weights[0].in_features
    x = torch.randn((max(few, many), columns), dtype=getattr(torch, spec.dtype), device=device)
    multiply = _multiply(weights, x[:many])
    product = _seconds(multiply, device, 4, partial(multiply, 0))
    count = min(MOST_BEHIND, math.ceil(BEHIND / product))

    def busy() -> None:
        for number in range(count):
            multiply(number)

    read = _seconds(_multiply(weights, x[:1]), device, TIMED, busy)
    short = _seconds(_multiply(weights, x[:few]), device, TIMED, busy)
    each = 2.0 * columns * first.out_features
    return first.nbytes / read, many * each / product, few * each / short, busy


def _attention(spec: ModelSpec, device: torch.device, busy: Callable[[], None]) -> float:
    """Bytes/s of attention of decodes."""
    attend, nbytes = _decodes(spec, device)
    return nbytes / _seconds(attend, device, TIMED, busy)


def _seconds(launch: Callable[[int], object], device: torch.device, timed: int, busy: Callable[[], object]) -> float:
    """Of a launch, one after another, each with its number, behind what keeps the device busy meanwhile."""
    launch(0)  # whatever is compiled or chosen for it
    torch.cuda.synchronize(device)
    busy()
    launch(0)
    begun, ended = _event(), _event()
    begun.record()
    for number in range(timed):
        launch(number)
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3 / timed


def _multiply(weights: Sequence[LinearWeight], x: Tensor) -> Callable[[int], object]:
    """Products with one matrix after another."""
    return lambda number: weights[number % len(weights)].multiply(x)


def _decodes(spec: ModelSpec, device: torch.device) -> tuple[Callable[[int], object], int]:
    """Attention of decodes over random K and V of the first layer, and the bytes that it reads."""
    layer, group, size = spec.layers[0], spec.kv.groups[0], spec.kv.chunk_size
    form, dtype, heads = kv_format(group.dtype), getattr(torch, spec.dtype), layer.num_kv_heads
    context = min(CONTEXT, spec.max_position)
    columns, row = -(-context // size), 2 * heads * group.row_nbytes
    rows = max(1, min(SEQUENCES, ROTATED // (columns * size * row)))
    one = torch.randn((2, columns, heads, size, layer.head_dim), dtype=dtype, device=device)
    keys, values = (quantized_cache(each, form).repeat(rows, 1, 1, 1) for each in one)
    table = torch.arange(rows * columns, dtype=torch.int32, device=device).view(rows, columns)
    own, ends = np.arange(rows, dtype=np.int32), np.full(rows, context, np.int32)
    shape = (layer.num_heads, heads, layer.head_dim, size, layer.window)
    work = plan_attention(own, ends - 1, ends, *shape, device=device, kv_format=form)
    q = torch.randn((rows, layer.num_heads, layer.head_dim), dtype=dtype, device=device)
    new, scale = torch.randn((rows, heads, layer.head_dim), dtype=dtype, device=device), layer.head_dim**-0.5

    def attend(_: int) -> Tensor:
        if decodes_at_once(q, keys, values, work):
            return decode_attention(q, new, new, None, keys, values, table, work, scale)
        return attention(q, keys, values, table, work, scale)

    return attend, rows * min(context, layer.window or context) * row


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
