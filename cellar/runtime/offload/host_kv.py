"""A KV cache in host memory: the CPU attends to it for decodes, the device writes prompts to it.

    decode:  q, k, v of the step --copy--> CPU: rotate, write, attend over [layer][K/V][slot] --copy--> device
             (a share of the sequences is attended to by the device at the same time, over the link: in fewer bits,
             whose rows are read in small pieces, what they hold is brought to a staged cache first)
    prompt:  attention over a staged cache on the device, of this pass alone; its chunks --> host memory
             by copies, while the layer and the next one go on
             (one that goes on, or shares chunks of others, is attended to in host memory, over the link, beside those)

A decode reads its sequence's whole cache once, and the processor's memory is nearer to it than the link (FlexGen §4.3,
"delegate attention computation"); a prompt's K and V are made where it is attended to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.core.specs import KVSpec
from cellar.models.model import Comm, LayerContext
from cellar.ops.attention import AttentionWork, decode_attention
from cellar.runtime.offload.channels import Channel
from cellar.runtime.offload.cpu_jobs import CpuJobs
from cellar.runtime.offload.held import HOST, HeldMemory
from cellar.runtime.offload.rooms import Rooms, fetched
from cellar.runtime.offload.staged import Stores
from cellar.runtime.registered import mapped
from cellar.runtime.steps.arena import Arena

SPUN_TOKENS = 64
"""Decodes of up to so many sequences are waited for by spinning: what is on its way is small, and a thread that sleeps
is woken late in each layer.
"""

LongArray = NDArray[np.int64]
IntArray = NDArray[np.int32]


class HostKV:
    """`num_slots` chunks in host memory: `here` is the CPU's arena, `there` the same bytes as the device sees them.
    `by_cpu`: the CPU attends to them for decodes, and `channel` says how long; `over_link`: the share of the positions
    that the device attends to instead, in passes without fresh prompts.

    Raises CapacityError if the host has not so much memory, or the device's driver does not let it read that.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_slots: int,
        device: torch.device,
        *,
        by_cpu: bool,
        channel: Channel,
        over_link: float = 0.0,
    ) -> None:
        self.by_cpu = by_cpu
        self.over_link = over_link
        self.channel = channel
        self._memory = HeldMemory("host", num_slots * spec.chunk_nbytes() + 64 * len(spec.groups))
        if device.type != "cpu":
            self._memory.share(device, "K and V")
        self.here = Arena(spec, num_slots, HOST, self._memory.carve)
        self.stores = Stores(self.here, device)
        self.there = self.here.seen([mapped(buffer, device) for buffer in self.here.buffers])

    def close(self) -> None:
        """Undo what the device was told. Nobody computes any more."""
        self._memory.close()


Plan = Callable[[IntArray, IntArray, IntArray, torch.device], list[AttentionWork]]
"""Attention work of spans (row, start, stop) on a device, one for each shape of layer."""


@dataclass(frozen=True, slots=True)
class Divided:
    """The spans of a GPU batch, divided: decodes alone in their rows for the CPU, by `cpu_works`, whose rows are those
    of `table`; the rest for the device, in `parts`. `tokens` and `rest` are their tokens among the batch's.
    """

    table: IntArray
    cpu_works: list[AttentionWork]
    parts: list[DevicePart]
    tokens: LongArray
    rest: LongArray


@dataclass(frozen=True, slots=True)
class DevicePart:
    """Spans that the device attends to together, by `works`. `tokens` are theirs among those of the device.

    `staged`: they begin at position 0, one span a row, so that they need no chunk of before, or what they need is
    brought: the slots of their chunks, and each token's place among these. None: they attend to host memory, where
    they read the slots `reads`.
    """

    works: list[AttentionWork]
    tokens: LongArray
    staged: Staged | None = None
    reads: IntArray | None = None


@dataclass(frozen=True, slots=True)
class Staged:
    """`slots` int64 [chunks]; `table` int32 [rows, columns] and `mapping` int64 [tokens] number these chunks. All of
    them are written, or those that are `grown`, int64 [n], while all were brought before.
    """

    slots: LongArray
    table: IntArray
    mapping: LongArray
    grown: LongArray | None = None


def divided(
    row: IntArray,
    start: IntArray,
    stop: IntArray,
    table: IntArray,
    size: int,
    plan: Plan,
    device: torch.device,
    by_cpu: bool,
    over_link: float = 0.0,
    brings: bool = False,
) -> Divided:
    """Divide spans; `table` [rows, columns] says the slots of their chunks of `size`, and is kept. `by_cpu`: the CPU
    attends, but to the share `over_link` of the positions of decodes, if no fresh prompts are beside them. Those are
    staged, and what goes on is apart from them: it reads chunks of before. `brings`: decodes of the device that have
    nothing else beside them are staged, too, and what they attend to is brought.
    """
    _, inverse, counts = np.unique(row, return_inverse=True, return_counts=True)
    alone, length = counts[inverse] == 1, stop - start
    decodes = alone & (length == 1) & (start > 0)
    here = decodes & by_cpu
    if over_link and not (~here & (start == 0)).any():
        positions = np.where(here, stop, 0)
        seen = positions.cumsum()
        here &= seen - positions / 2 <= (1 - over_link) * seen[-1]
    fresh = ~here & alone & (start == 0)
    going = ~here & ~fresh
    brought = brings and by_cpu and bool(decodes[~here].all())
    parts: list[DevicePart] = []
    rest = length[~here]
    for spans, stage in ((fresh, _staged), (going, _brought if brought else None)):
        if not spans.any():
            continue
        own = row[spans] if stage is None else np.arange(int(spans.sum()), dtype=np.int32)
        works, tokens = plan(own, start[spans], stop[spans], device), np.flatnonzero(spans[~here].repeat(rest))
        if stage is None:
            chunks = zip(own, -(-stop[spans] // size), strict=True)
            parts.append(DevicePart(works, tokens, reads=np.concatenate([table[r, :count] for r, count in chunks])))
        else:
            parts.append(DevicePart(works, tokens, stage(row[spans], stop[spans], table, size)))
    return Divided(
        table,
        plan(row[here], start[here], stop[here], HOST) if here.any() else [],
        parts,
        np.flatnonzero(here.repeat(length)),
        np.flatnonzero((~here).repeat(length)),
    )


def wait_for_each_other(found: Sequence[Divided]) -> bool:
    """True if the device reads in host memory, in a layer of this pass, what the same pass stages and keeps there."""
    parts = [part for one in found for part in one.parts]
    staged = [part.staged for part in parts if part.staged is not None]
    kept = [one.slots for one in staged if one.grown is None]
    reads: list[NDArray[Any]] = [part.reads for part in parts if part.reads is not None]
    reads += [one.slots for one in staged if one.grown is not None]
    return bool(kept and reads and np.isin(np.concatenate(kept), np.concatenate(reads)).any())


def _staged(row: IntArray, stop: IntArray, table: IntArray, size: int) -> Staged:
    """Chunks are numbered as their slots ascend, so that those behind one another are copied together."""
    columns = -(-stop // size)
    first = np.cumsum(columns) - columns
    slots = np.concatenate([table[r, :count] for r, count in zip(row, columns, strict=True)]).astype(np.int64)
    order = slots.argsort()
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    numbers, mapping = np.full((len(row), int(columns.max())), -1, np.int32), []
    for n, (count, begin, tokens) in enumerate(zip(columns, first, stop, strict=True)):
        own = number[begin : begin + count]
        numbers[n, :count] = own
        mapping.append((own[:, None] * size + np.arange(size)).reshape(-1)[:tokens])
    return Staged(slots[order], numbers, np.concatenate(mapping))


def _brought(row: IntArray, stop: IntArray, table: IntArray, size: int) -> Staged:
    """The last token of each row is new, and so its last chunk is written."""
    found = _staged(row, stop, table, size)
    ends = np.cumsum(stop, dtype=np.int64) - 1
    mapping = found.mapping[ends]
    return Staged(found.slots, found.table, mapping, mapping // size)


class CpuAttention:
    """Attention of decodes by the CPU, by `jobs` beside an accelerator; on a CPU, which has none, by who calls."""

    def __init__(
        self, kv: HostKV, cos_sin: Tensor | None, scale: float, device: torch.device, jobs: CpuJobs | None
    ) -> None:
        self._arena = kv.here
        self._channel = kv.channel
        self._jobs = jobs
        self._cos_sin = None if cos_sin is None else cos_sin.cpu()
        self._scale = scale
        self._rooms = Rooms(device)

    def begin(
        self,
        j: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Tensor,
        work: AttentionWork,
        number: int = 0,
        *,
        rotate: bool,
    ) -> Callable[[], Tensor]:
        """Begin to bring q, k and v [tokens, heads, head_dim] here, to rotate, to write and to attend. `table`: int32
        [rows, columns] in host memory, which nobody changes. `number`: of the GPU batch, of which another one may be
        begun before this one is fetched.

        -> a function that gives [tokens, heads, head_dim] on the device, on its way.
        """
        jobs = self._jobs
        if jobs is None:
            return lambda: self._attend(j, q, k, v, table, work, rotate)
        sizes, soon = [x.shape[1] for x in (q, k, v)], len(q) <= SPUN_TOKENS
        together = torch.cat((q, k, v), 1)
        # What the job of the layer before reads and writes, the stream comes to only behind that job.
        here = self._rooms.room(f"in {number}", together.shape, together.dtype).here
        out = self._rooms.room(f"out {number}", q.shape, q.dtype)
        here.copy_(together, non_blocking=True)

        def attend() -> None:
            own_q, own_k, own_v = here.split_with_sizes(sizes, 1)
            out.here.copy_(self._attend(j, own_q, own_k, own_v, table, work, rotate))

        job = jobs.submit(jobs.arrived(soon=soon), attend)

        def fetch() -> Tensor:
            jobs.hold(job)
            return fetched(out.there)

        return fetch

    def _attend(
        self, j: int, q: Tensor, k: Tensor, v: Tensor, table: Tensor, work: AttentionWork, rotate: bool
    ) -> Tensor:
        cos_sin, keys, values = self._cos_sin if rotate else None, self._arena.k[j], self._arena.v[j]
        work.alone = self._jobs is not None  # the device attends to prompts
        with self._channel.busy():
            return decode_attention(q, k, v, cos_sin, keys, values, table, work, self._scale)


@dataclass(frozen=True, slots=True)
class CpuShare:
    """What the CPU attends to of a GPU batch, which is the pass's `number`: `tokens` of it (on the device; None: all),
    by `works`, one a layer, whose rows are those of `table`.
    """

    attention: CpuAttention
    works: Sequence[AttentionWork]
    table: Tensor
    tokens: Tensor | None
    rest: Tensor | None
    number: int = 0


class DividedContext:
    """A `LayerContext` whose attention is divided: the CPU's share, and the rest by `inner` (None: there is none).

    The CPU's part is begun first; the device computes while the CPU does.
    """

    def __init__(
        self, share: CpuShare, inner: LayerContext | None, positions: Tensor, cos_sin: Tensor | None, comm: Comm | None
    ) -> None:
        self.positions = positions
        self.cos_sin = cos_sin
        self.comm = comm
        self._share = share
        self._inner = inner

    def attend(self, j: int, q: Tensor, k: Tensor, v: Tensor, *, rotate: bool = False) -> Tensor:
        """Each part where its cache lies."""
        return self.begin(j, q, k, v, rotate=rotate)()

    def begin(self, j: int, q: Tensor, k: Tensor, v: Tensor, *, rotate: bool = False) -> Callable[[], Tensor]:
        """The same, and what is called for the result waits for the CPU."""
        share = self._share
        begun = partial(share.attention.begin, j, table=share.table, work=share.works[j], number=share.number)
        if self._inner is None or share.tokens is None or share.rest is None:
            return begun(q=q, k=k, v=v, rotate=rotate)
        tokens, rest = share.tokens, share.rest
        own_q, own_k, own_v = (x.index_select(0, tokens) for x in (q, k, v))
        attended = begun(q=own_q, k=own_k, v=own_v, rotate=rotate)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        mine = (x.index_select(0, rest) for x in (q, k, v))
        out.index_copy_(0, rest, self._inner.attend(j, *mine, rotate=rotate))
        return lambda: out.index_copy_(0, tokens, attended())


class PartedContext:
    """A `LayerContext` of which each part is attended to by one of its own: `tokens` of it, a tensor or a slice."""

    def __init__(
        self,
        parts: Sequence[tuple[Tensor | slice, LayerContext]],
        positions: Tensor,
        cos_sin: Tensor | None,
        comm: Comm | None,
    ) -> None:
        self.positions = positions
        self.cos_sin = cos_sin
        self.comm = comm
        self._parts = parts

    def attend(self, j: int, q: Tensor, k: Tensor, v: Tensor, *, rotate: bool = False) -> Tensor:
        """Part after part."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for tokens, context in self._parts:
            out[tokens] = context.attend(j, q[tokens], k[tokens], v[tokens], rotate=rotate)
        return out
