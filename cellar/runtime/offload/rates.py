"""Rates of the channels of an offloaded model, measured at the start, each beside what it will be busy with: the link
to an accelerator, or the disk from which a processor's slots are filled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import median
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from cellar.core.kv_formats import kv_format
from cellar.core.pieces import ALIGNMENT, rows_nbytes
from cellar.core.specs import ModelSpec
from cellar.ops.attention import decode_attention, plan_attention
from cellar.ops.cpu.launch import use_threads
from cellar.ops.kv_format import quantized_cache
from cellar.ops.linear.weight import LinearWeight
from cellar.runtime.offload.channels import Channel
from cellar.runtime.offload.cpu_jobs import CpuJobs, threads_beside
from cellar.runtime.offload.held import HeldMemory
from cellar.runtime.offload.host_rows import Exchange, HostRows
from cellar.runtime.offload.layout import aligned
from cellar.runtime.offload.mover import mover_for
from cellar.runtime.offload.reads import DiskReads
from cellar.runtime.offload.signal import Signal, signal_for
from cellar.runtime.offload.specimens import largest_matrix, matrices
from cellar.runtime.steps.arena import cache_type

CONTEXT = 512
COPIED_NBYTES = 2**28
"""Most bytes of a device into which copies go."""
MANY = 64
"""Tokens of a product that memory does not bound."""
CHAINED = 8
"""Products in a row, each of what the one before gave: the last one, for which a thread waits, is a part of them."""
AGREED, WINDOWS = 0.05, 9
WORTH = 1.03
"""Times the rate of all threads, what fewer of them must have to be taken: attention, which computes more than it
reads, is not asked.
"""


Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """Bytes/s: `alone` over the link, or of a processor's disk; the same while the CPU multiplies; of its products, and
    of its attention, beside them. And the FLOP/s of the CPU's products of many tokens, and the seconds in which an
    x comes from the accelerator and its product goes back, the CPU's own left out. What there is not has 0.
    `few_multiply`: of products of as many tokens as were asked for.
    `runs_ahead`: launches go on while the CPU computes for the accelerator (`signal.py`). `threads`: of the CPU, with
    which all this was measured beside an accelerator.
    """

    alone: float
    link: float
    disk: float
    multiply: float
    attention: float
    flops: float
    exchange: float
    runs_ahead: bool = False
    threads: int = 0
    few_multiply: float = 0.0


def measured_rates(
    spec: ModelSpec,
    device: torch.device,
    nbytes: int = 2**30,
    seconds: float = 0.15,
    num_threads: int | None = None,
    sparse_v: float | None = None,
    reads: DiskReads | None = None,
    ranks: int = 1,
    few: int = 0,
) -> MeasuredRates:
    """Measure for `seconds` each, and beside an accelerator until that has settled, with the matrices and the attention
    of this model's layers, on `nbytes` (and no less than a matrix) each, with so many threads of the CPU (None: torch's
    number; beside one accelerator as many as read most together with the link, of those that its jobs may get).
    With several `ranks` on as many accelerators, the first ones, copies go to all of them at once, and the CPU's rates
    are those of all ranks' threads together. With `sparse_v` attention reads that share of the values, and its rate is
    still that of all keys and values. Of products of `few` tokens there is a rate, too, if these are several, and
    there is an accelerator. Beside them goes on: on an accelerator copies, on a processor `reads` of the disk (None:
    nothing).

    Raises CapacityError if the host has not so much.
    """
    threads = threads_beside(num_threads)
    if device.type == "cpu" and num_threads is not None:
        use_threads(num_threads)
    largest = largest_matrix(spec)
    nbytes = max(nbytes, aligned(rows_nbytes(largest, 0, largest.shape[0], "cpu")))
    memory = HeldMemory("host", 2 * nbytes)
    others: list[torch.device] = []
    beside: _Beside = reads or _Nothing()
    if device.type != "cpu":
        memory.register(device)
    try:
        moved, read = memory.carve(nbytes), memory.carve(nbytes)
        for part in (moved, read):
            fill_with_ones(part, getattr(torch, spec.dtype))  # pages that nobody has written are one and the same
        if device.type != "cpu":
            others = [torch.device(device.type, k) for k in range(ranks)] if ranks > 1 else [device]
            beside = _Link(moved, others)
        alone, _ = beside.rate_while(lambda: time.sleep(seconds))
        of_cpu = partial(_attention, spec, read, seconds, sparse_v)
        if device.type == "cpu":
            disk, products = beside.rate_while(lambda: _products(spec, read, seconds, 1))
            _, attention = beside.rate_while(lambda: of_cpu(alone=False))
            _, flops = beside.rate_while(lambda: _flops(spec, read, seconds))
            return MeasuredRates(alone, 0.0, disk, products, attention, flops, 0.0)
        work = partial(measured_left, matrices(spec, read), getattr(torch, spec.dtype), device)
        if num_threads is None and ranks == 1:
            rates = {count: beside.rate_while(partial(work, count, seconds / 2)) for count in shares_of(threads)}
            threads = chosen({count: link + left.multiply for count, (link, left) in rates.items()})
        left_to_cpu = partial(work, threads * ranks, seconds)
        link, left = settled(lambda: beside.rate_while(left_to_cpu), lambda found: found[1].multiply)
        use_threads(threads * ranks)
        # What is left to the CPU are decodes.
        _, attention = settled(lambda: beside.rate_while(lambda: of_cpu(alone=True)), lambda found: found[1])
        _, flops = beside.rate_while(lambda: _flops(spec, read, seconds))
        several = 0.0
        if few > 1:
            several = settled(
                lambda: beside.rate_while(lambda: _products(spec, read, seconds, few)), lambda found: found[1]
            )[1]
        shared = (link, 0.0, left.multiply, attention, flops, left.exchange, left.runs_ahead, threads, several)
        return MeasuredRates(alone, *shared)
    finally:
        for other in others:
            torch.cuda.synchronize(other)
        if isinstance(beside, _Link):
            beside.close()
        memory.close()


def settled(window: Callable[[], Found], rate: Callable[[Found], float]) -> Found:
    """The first that has the rate of the one before, within `AGREED`; of `WINDOWS` that never agree the one between.
    Behind other programs a host is slow for a while, and one that others use is so now and then.
    """
    found = [window()]
    while len(found) < WINDOWS:
        found.append(window())
        before, now = rate(found[-2]), rate(found[-1])
        if abs(now - before) <= AGREED * max(now, before):
            return found[-1]
    return sorted(found, key=rate)[len(found) // 2]


def shares_of(threads: int) -> list[int]:
    """A half, three quarters and all of them."""
    return sorted({max(1, threads * part // 4) for part in (2, 3, 4)})


def chosen(rates: Mapping[int, float]) -> int:
    """Of numbers of threads the one with the best rate, if that is worth it, else the largest."""
    best, most = max(rates, key=lambda number: rates[number]), max(rates)
    return best if rates[best] >= WORTH * rates[most] else most


class _Beside(Protocol):
    """Something that goes on while something else is measured."""

    def rate_while(self, work: Callable[[], Found]) -> tuple[float, Found]:
        """Bytes/s of it while `work` goes on, and what that found."""


class _Nothing:
    """Goes on beside what has the machine for itself."""

    def rate_while(self, work: Callable[[], Found]) -> tuple[float, Found]:
        """None, and what the work found."""
        return 0.0, work()


class _Link:
    """Copies memory to each of the devices again and again: an equal part of the memory, all at once, one piece after
    another to the same place, since a device may be held to less than the host's caches have.
    """

    def __init__(self, memory: Tensor, devices: Sequence[torch.device]) -> None:
        pieces = -(-memory.nbytes // (len(devices) * COPIED_NBYTES))
        piece = memory.nbytes // (len(devices) * pieces) // ALIGNMENT * ALIGNMENT
        self._parts = memory[: piece * pieces * len(devices)].view(len(devices), pieces, piece)
        self._there = [torch.zeros(piece, dtype=memory.dtype, device=device) for device in devices]
        self._movers = [mover_for(device) for device in devices]

    def rate_while(self, work: Callable[[], Found]) -> tuple[float, Found]:
        """Bytes/s of copies to each device while `work` goes on, and what that found."""
        ended, taken = threading.Event(), list[float]()

        def copies() -> None:
            while not ended.is_set():
                begin = time.perf_counter()
                for mover, part, there in zip(self._movers, self._parts, self._there, strict=True):
                    for piece in part:  # none waits for this thread, which may have to wait for a core
                        mover.move(piece, there)
                for mover in self._movers:
                    mover.over()()
                taken.append(time.perf_counter() - begin)

        thread = threading.Thread(target=copies, name="cellar-rates", daemon=True)
        thread.start()
        try:
            found = work()
        finally:
            ended.set()
            thread.join()
        # The last one went on alone for a while.
        kept = sorted(taken[:-1] or taken)
        return self._parts[0].nbytes / kept[len(kept) // 2], found

    def close(self) -> None:
        """Give the devices' memory back, for weights that would lie in what is kept of it."""
        self._there.clear()
        torch.cuda.empty_cache()


def fill_with_ones(memory: Tensor, dtype: torch.dtype) -> None:
    """Numbers of the type of a plain matrix or cache. Not just any bytes: those that mean subnormal numbers, or whose
    products do, are computed up to fifteen times more slowly.
    """
    whole = memory.nbytes // dtype.itemsize * dtype.itemsize
    memory[:whole].view(dtype).fill_(1)


def _products(spec: ModelSpec, memory: Tensor, seconds: float, tokens: int) -> float:
    """Products of so many tokens with the largest matrix of a layer."""
    weights = matrices(spec, memory)
    x = torch.ones(tokens, weights[0].in_features, dtype=getattr(torch, largest_matrix(spec).dtype))
    return _rate(lambda k: weights[k % len(weights)].multiply(x), weights[0].nbytes, seconds)


def _flops(spec: ModelSpec, memory: Tensor, seconds: float) -> float:
    """FLOP/s of products of many tokens."""
    largest = largest_matrix(spec)
    return _products(spec, memory, seconds, MANY) * 2 * MANY * largest.size / largest.nbytes


class Left(NamedTuple):
    """Bytes/s of the CPU's products for a device, and the seconds between them; `runs_ahead`: see `MeasuredRates`."""

    multiply: float
    exchange: float
    runs_ahead: bool


def measured_left(
    weights: Sequence[LinearWeight],
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
    seconds: float,
    signal: Signal | None = None,
) -> Left:
    """What is left to `threads` of the CPU, measured as in a pass: products of a token, each of what the one before
    gave on the device, so that launches run ahead of them, and long enough to hide what those take. `signal`: a new
    one, since its jobs are counted from the first on; by default the device's.
    """
    signal = signal or signal_for(device)
    jobs, channel, turns = CpuJobs(signal, threads), Channel(), count()
    step, between_both = jobs.begin(), Exchange(device, channel, jobs)
    rows = [HostRows(weight, between_both) for weight in weights]
    few, columns = min(16, weights[0].out_features), weights[0].in_features
    x = torch.ones((1, columns), dtype=dtype, device=device)

    def chained() -> None:
        for _ in range(CHAINED):
            jobs.part()
            product = rows[next(turns) % len(rows)].multiply(x)
            x[:, :few] = product[:, :few] / columns
        if device.type != "cpu":
            torch.cuda.current_stream(device).synchronize()  # not what is copied beside
        step.check()

    try:
        chained()
        busy, between = list[float](), list[float]()
        while sum(busy) + sum(between) < seconds or not busy:
            before, begin = channel.seconds, time.perf_counter()
            chained()
            busy.append(channel.seconds - before)
            between.append(time.perf_counter() - begin - busy[-1])
        rate, exchange = CHAINED * weights[0].nbytes / median(busy), max(0.0, median(between)) / CHAINED
        return Left(rate, exchange, signal.runs_ahead)
    finally:
        jobs.close()


def _attention(spec: ModelSpec, memory: Tensor, seconds: float, sparse_v: float | None, *, alone: bool) -> float:
    """Decodes of a few sequences, in one layer after another."""
    layer, size = spec.layers[0], spec.kv.chunk_size
    (name, row), format = _kv_rows(spec), kv_format(spec.kv.groups[0].dtype)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    context = min(CONTEXT, spec.max_position)
    columns = -(-context // size)
    of_row = columns * layer.num_kv_heads * size * row
    rows = max(1, min(16, memory.nbytes // (2 * of_row)))
    half = rows * of_row
    count = max(1, memory.nbytes // (2 * half))
    inner = (layer.num_kv_heads, size, row // name.itemsize)
    caches = [memory[k * half : (k + 1) * half].view(name).view(rows * columns, *inner) for k in range(2 * count)]
    if sparse_v is not None or format != "plain":
        # To choose among equal scores takes longer; and bytes of fewer bits have to mean numbers.
        numbers = torch.randn((*caches[0].shape[:-1], layer.head_dim), dtype=dtype)
        filled = quantized_cache(numbers, format)
        for cache in caches:
            cache.copy_(filled)
    table = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
    own, ends = np.arange(rows, dtype=np.int32), np.full(rows, context, np.int32)
    shape = (layer.num_heads, layer.num_kv_heads, layer.head_dim, size)
    work = plan_attention(own, ends - 1, ends, *shape, kv_format=format, sparse_v=sparse_v)
    work.alone = alone
    q = torch.ones(rows, layer.num_heads, layer.head_dim, dtype=dtype)
    new = torch.ones(rows, layer.num_kv_heads, layer.head_dim, dtype=dtype)

    def attend(k: int) -> Tensor:
        keys, values = caches[2 * (k % count)], caches[2 * (k % count) + 1]
        return decode_attention(q, new, new, None, keys, values, table, work, 1.0)

    return _rate(attend, 2 * half, seconds)


def _kv_rows(spec: ModelSpec) -> tuple[torch.dtype, int]:
    """The type of a cache's elements, and bytes of a row of K or V."""
    group = spec.kv.groups[0]
    return cache_type(group.dtype), group.row_nbytes


def usual_seconds(work: Callable[[], object], seconds: float) -> float:
    """What a call takes, the median over `seconds` of them: one that stood still for a moment does not count."""
    work()
    took, begin = list[float](), time.perf_counter()
    while not took or sum(took) < seconds:
        work()
        took.append(time.perf_counter() - begin)
        begin += took[-1]
    return median(took)


def _rate(work: Callable[[int], object], nbytes: int, seconds: float) -> float:
    """Bytes/s of calls that read so many each, one piece of memory after another."""
    turns = count()
    return nbytes / usual_seconds(lambda: work(next(turns)), seconds)
