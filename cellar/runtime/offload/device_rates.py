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
from cellar.core.specs import ModelSpec, TensorSpec
from cellar.ops.attention import attention, decode_attention, decodes_at_once, plan_attention
from cellar.ops.kv_format import quantized_cache
from cellar.ops.linear.weight import LinearWeight
from cellar.runtime.offload.specimens import device_matrices

ROTATED = 2**28
"""Bytes of matrices that are read in turn: more than caches hold."""

TIMED, TIMED_OF_MANY = 16, 4
"""Launches that count; of many tokens, which take long, fewer."""

BEHIND, MOST_BEHIND = 6e-3, 64
"""Seconds, about, by which the device is behind whoever launches when those begin that count, and products of many
tokens that keep it busy till then, at most: a product of one token in eight bits takes less time than its launches.
"""

WARM = 5e-2
"""The same before products of many tokens: a device computes at a lower clock once it has done so for a while."""

COPIED = 2**27
"""Bytes that are copied within the device's memory."""

SEQUENCES, CONTEXT = 1024, 512
"""Of decodes whose attention is measured, at most: they read as much as is read of matrices, if that many do."""


class DeviceRates(NamedTuple):
    """Bytes/s of a layer's products of one token, FLOP/s of those of many tokens and of few, bytes/s of attention of
    decodes, of what the cache takes, and of copies within the memory, which read and write them.
    """

    device: float
    flops: float
    few_flops: float
    attention: float
    copies: float


def device_rates(spec: ModelSpec, device: torch.device, few: int, many: int) -> DeviceRates:
    """Measure with matrices as those of the first layer, each in turn, and so many tokens, and with K and V as that
    layer keeps them. Launches are priced apart.

    No graph is recorded: the library keeps memory for every stream that it has ever computed on.
    """
    with torch.cuda.device(device):
        matrices = sorted((t for t in spec.layers[0].tensors if len(t.shape) == 2), key=lambda t: -t.nbytes)
        busy = _Busy(matrices[0], device, many)
        found = [_products(tensor, spec.dtype, device, few, many, busy) for tensor in matrices]
        attended, copied = _attention(spec, device, busy), _copies(device, busy)
        del busy
        torch.cuda.empty_cache()  # who asks the driver what is free is not to find less
    one, short, long = (sum(times) for times in zip(*found, strict=True))
    each = 2.0 * sum(tensor.size for tensor in matrices)
    read = sum(tensor.nbytes for tensor in matrices)
    return DeviceRates(read / one, many * each / long, few * each / short, attended, copied)


class _Busy:
    """Keeps the device at work for about so many seconds, by products of many tokens with copies of one matrix."""

    def __init__(self, tensor: TensorSpec, device: torch.device, many: int) -> None:
        weights = device_matrices(tensor, device, ROTATED)
        x = torch.randn((many, tensor.shape[1]), dtype=getattr(torch, tensor.dtype), device=device)
        self._multiply = _multiply(weights, x)
        self._product = 0.0
        self._product = _seconds(self._multiply, device, TIMED_OF_MANY, lambda: self(0.0))

    def __call__(self, seconds: float = BEHIND) -> None:
        """One product at least."""
        count = math.ceil(seconds / self._product) if self._product else 1
        for number in range(min(MOST_BEHIND, max(1, count))):
            self._multiply(number)


def _products(
    tensor: TensorSpec, dtype: str, device: torch.device, few: int, many: int, busy: _Busy
) -> tuple[float, float, float]:
    """Seconds of products of one, few and many tokens with a whole matrix of this kind."""
    weights = device_matrices(tensor, device, ROTATED)
    whole = tensor.size / (weights[0].out_features * weights[0].in_features)
    x = torch.randn((max(few, many), tensor.shape[1]), dtype=getattr(torch, dtype), device=device)
    one, short = (_seconds(_multiply(weights, x[:count]), device, TIMED, busy) for count in (1, few))
    long = _seconds(_multiply(weights, x[:many]), device, TIMED_OF_MANY, partial(busy, WARM))
    return whole * one, whole * short, whole * long


def _copies(device: torch.device, busy: _Busy) -> float:
    """Bytes/s that copies read and write."""
    here, there = (torch.zeros(COPIED, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * COPIED / _seconds(lambda _: there.copy_(here), device, TIMED, busy)


def _attention(spec: ModelSpec, device: torch.device, busy: _Busy) -> float:
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
