"""The plan of one step's attention: a work list that is made once on the host and used by every layer.

A *packed row* is one query of one head: a span of n tokens has n * group rows per KV head (group = heads / kv_heads),
row r being token r // group and head r % group of the KV head's group. A work item is a tile of packed rows against
a range of KV positions, for each KV head. Two classes of tiles: NARROW (all rows of the span fit one tile of 16, or, on
Hopper, are one token's: decodes) and WIDE (64 or 128 rows: prompts). A tile is cut into several items along KV where
whole tiles would not fill the device; its partial results are summed up by whichever program arrives last.

    meta    [ 0: narrow items | 1: wide items | 1 + ROW, START of token 0 | of token 1 ... | item | item | ... ]  int32

Narrow items stand first. Of the first FEW tokens the header says where each stands, if it is a narrow span of its own,
else 0: a list of zeros has nothing to do.
    item    ROW, TOKEN, FIRST, LAST, START, KV_FIRST, KV_LAST, PARTIAL, PART, PARTS, COUNTER (ITEM_FIELDS each)

Within a class the costly items stand first: cost = 2 * tile + KV length.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.core.errors import CapacityError, ConfigError
from cellar.core.kv_formats import KVFormat, codes_nbytes
from cellar.ops.cuda.hopper import hopper_available
from cellar.ops.upload import Upload, by_copies

IntArray = NDArray[np.int32]

HEADER = 32
ITEM_FIELDS = 16
FEW = (HEADER - 2) // 2
ROW, TOKEN, FIRST, LAST, START, KV_FIRST, KV_LAST, PARTIAL, PART, PARTS, COUNTER = range(11)

NARROW_TILE = 16
MAX_PARTS = 64
PIECE = 128

MILLION = 1_000_000

# Query heads of a KV head that Hopper's kernel for decodes takes at most.
MAX_GROUP = 8

# Rows of the wide tiles in captured steps, which are too short for larger ones, and on Hopper.
GRAPH_TILE, HOPPER_TILE = 64, 128


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What all steps of a model have in common. `window` W: a query at position p sees (p - W, p]; None: [0, p].

    `kv_format`: how the cache's rows are written. `sparse_v`: of the positions before its own a query reads the values
    of this share alone, those with the largest scores (FlexGen §5); None: of all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    chunk_size: int
    window: int | None = None
    kv_format: KVFormat = "plain"
    sparse_v: float | None = None

    @property
    def millionths(self) -> int:
        """`sparse_v` as kernels have it: in whole millionths, so that all count alike; 0 if all values are read."""
        return 0 if self.sparse_v is None else max(1, round(self.sparse_v * MILLION))

    def values_read(self, before: int) -> int:
        """Of how many of the `before` positions before its own a query reads the values: the share, rounded up."""
        return before if self.sparse_v is None else -(-before * self.millionths // MILLION)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def reads_new(self) -> bool:
        """Whether kernels read K and V of spans from position 0 on where the step computed them: the copy engine takes
        powers of 2. Never past a quantized cache: an answer must not depend on whether its prompt was cached.
        """
        if self.kv_format != "plain":
            return False
        return self.window is None and self.head_dim >= 16 and self.head_dim & (self.head_dim - 1) == 0

    @property
    def decodes_on_hopper(self) -> bool:
        """Whether decodes of this shape run on Hopper by a kernel of its own: groups up to MAX_GROUP; heads of 64, 128
        or, of plain K and V, 256. Chunks of codes fill lines of the copy engine, eight by eight.
        """
        dims = (64, 128, 256) if self.kv_format == "plain" else (64, 128)
        fits = self.kv_format == "plain" or self.chunk_size * codes_nbytes(self.kv_format, self.head_dim) % 1024 == 0
        return self.head_dim in dims and self.group <= MAX_GROUP and fits

    @property
    def suits_hopper(self) -> bool:
        """Whether prompts of this shape run on Hopper by a kernel of its own (`attention_hopper`)."""
        has_shape = self.head_dim in (64, 128) and 64 % self.group == 0 and self.window is None
        return has_shape and self.kv_format == "plain"


@dataclass(frozen=True, slots=True)
class Items:
    """The host's work list. `table` is int32 [items, ITEM_FIELDS], the `narrow` first ones of class NARROW.

    An item covers packed rows [FIRST, LAST) of the span whose tokens begin at TOKEN of the step and at position START
    of table row ROW, against positions [KV_FIRST, KV_LAST). If PARTS > 1 it is the PART-th of that many: it leaves
    its partial result in rows PARTIAL + PART * tile of the scratch and counts at COUNTER.
    """

    table: IntArray
    narrow: int
    wide_tile: int
    partial_rows: int
    counters: int
    places: IntArray  # [HEADER - 2], of the header

    @property
    def num_words(self) -> int:
        """What `write` fills."""
        return HEADER + self.table.size

    def write(self, words: IntArray) -> int:
        """Put the list there as kernels read it; -> how many words it takes."""
        size = self.num_words
        words[0] = self.narrow
        words[1] = len(self.table) - self.narrow
        words[2:HEADER] = self.places
        words[HEADER:size] = self.table.reshape(-1)
        return size


class AttentionBuffers:
    """Device memory at fixed addresses for the work lists of successive steps, so that a captured graph can read them.

    `meta` is filled by one copy from pinned memory; a ring of `depth` host buffers lets as many steps be in flight. Of
    one step alone `meta` may be given, filled.
    `partial` float32 [rows, kv_heads, head_dim]: sums of P V. `extents` float32 [rows, kv_heads, 2]: their maximum
    score and sum of P. `counters` int32 [counters * kv_heads] and `claimed` int32 [1], items that programs have taken:
    all zero between launches.
    """

    def __init__(
        self,
        items: int,
        partial_rows: int,
        counters: int,
        shape: AttentionShape,
        device: torch.device,
        depth: int = 3,
        meta: Tensor | None = None,
    ) -> None:
        self.device = device
        self.capacity = (items, partial_rows, counters)
        size = HEADER + items * ITEM_FIELDS
        self.meta = torch.zeros(size, dtype=torch.int32, device=device) if meta is None else meta
        scratch = (max(partial_rows, 1), shape.kv_heads)
        self.partial = torch.empty((*scratch, shape.head_dim), dtype=torch.float32, device=device)
        self.extents = torch.empty((*scratch, 2), dtype=torch.float32, device=device)
        self.counters = torch.zeros(max(counters, 1) * shape.kv_heads, dtype=torch.int32, device=device)
        self.claimed = torch.zeros(1, dtype=torch.int32, device=device)
        self._pinned = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=self._pinned) for _ in range(depth)]
        event: Any = torch.cuda.Event
        self._copied = [event() if self._pinned else None for _ in range(depth)]
        self._next = 0

    @classmethod
    def for_limits(
        cls, shape: AttentionShape, max_tokens: int, max_spans: int, programs: int, device: torch.device, depth: int = 3
    ) -> AttentionBuffers:
        """Buffers that hold every plan of at most so many tokens and spans that is split by load (no `split`)."""
        tiles = max_spans + -(-max_tokens * shape.group // 64)
        pieces = 2 * -(-2 * programs // shape.kv_heads)
        return cls(tiles + pieces, pieces * 128, pieces, shape, device, depth)

    def holds(self, items: Items) -> bool:
        """Whether there is room for such a list."""
        needed = (len(items.table), items.partial_rows, items.counters)
        return all(n <= c for n, c in zip(needed, self.capacity, strict=True))

    def placed_at(self, meta: Tensor) -> AttentionBuffers:
        """The same scratch for lists that somebody else copies to `meta`."""
        other = copy(self)
        other.meta = meta
        return other

    def fill(self, items: Items) -> None:
        """Copy a work list to the device, in stream order. Raises CapacityError if it is larger than the buffers."""
        if not self.holds(items):
            needed = (len(items.table), items.partial_rows, items.counters)
            raise CapacityError(
                f"the step needs {needed} attention items, partial rows and counters, but {self.capacity} are "
                "reserved; lower max_num_batched_tokens or max_num_seqs."
            )
        host, copied = self._hosts[self._next], self._copied[self._next]
        self._next = (self._next + 1) % len(self._hosts)
        if copied is not None:
            copied.synchronize()
        size = items.write(host.numpy())
        self.meta[:size].copy_(host[:size], non_blocking=True)
        if copied is not None:
            copied.record()


@dataclass(frozen=True, slots=True)
class Captured:
    """How many items of each class a graph computes at most. The wide ones are tiles of `tile` rows."""

    narrow: int
    wide: int = 0
    tile: int = GRAPH_TILE

    @classmethod
    def decodes(cls, rows: int, shape: AttentionShape, programs: int, tile: int = GRAPH_TILE) -> Captured:
        """Enough for every plan by load of `rows` spans of one token. Groups beyond the narrow tile take wide ones."""
        cuts = _cuts(shape, programs)
        if shape.group <= NARROW_TILE:
            return cls(rows + cuts)
        return cls(0, rows * -(-shape.group // tile) + cuts, tile)

    @classmethod
    def prompts(cls, tokens: int, rows: int, shape: AttentionShape, programs: int, tile: int = GRAPH_TILE) -> Captured:
        """Enough for every plan by load of `tokens` in at most `rows` spans."""
        spans, cuts = min(tokens, rows), _cuts(shape, programs)
        return cls(spans + cuts, -(-tokens * shape.group // tile) + spans + cuts, tile)

    def holds(self, items: Items) -> bool:
        """Whether the graph computes all of the list."""
        return items.narrow <= self.narrow and len(items.table) - items.narrow <= self.wide


def _cuts(shape: AttentionShape, programs: int) -> int:
    """By how many more items than tiles a plan by load has at most.

    A tile of length n is cut into at most max(1, n / share + 1/2) < 1 + n / share parts, and with the share rounded
    down the sum of n / share is at most programs / kv_heads (1 + 1 / PIECE).
    """
    return -(-programs * (PIECE + 1) // (PIECE * shape.kv_heads))


Softmax: TypeAlias = Literal["auto", "unified", "maximum"]
"""How weights are made on a GPU: with a running maximum; without one, where the kernel can (FlashDecoding++ §3); or
whichever was measured to be faster.
"""


@dataclass
class AttentionWork:
    """One step's plan, shared by all layers of one shape. Span s owns tokens [offset[s], offset[s + 1]) of the step.

    `alone`: other tokens of these rows are attended to elsewhere, so a decode's sums may have an order of their own.
    `early`: up to so many tokens the product behind begins by asking for its weights, and may before attention ends.
    `prepared` is where a path keeps what it derives from plan and slot table in the first layer and uses again in the
    others; therefore all calls with one work must pass the same, unchanged table, and not at the same time.
    """

    shape: AttentionShape
    row: IntArray
    start: IntArray
    stop: IntArray
    offset: IntArray
    device: torch.device
    programs: int
    split: int | None = None
    buffers: AttentionBuffers | None = None
    prepared: dict[Any, Any] = field(default_factory=dict)
    captured: Captured | None = None
    softmax: Softmax = "auto"
    alone: bool = False
    early: int = 0
    upload: Upload | None = None

    @classmethod
    def for_graph(cls, shape: AttentionShape, buffers: AttentionBuffers, captured: Captured) -> AttentionWork:
        """Work for a graph: the list is what `buffers` hold when it is replayed."""
        none = np.zeros(0, np.int32)
        device = buffers.device
        programs = default_programs(device)
        offset = np.zeros(1, np.int32)
        return cls(shape, none, none, none, offset, device, programs, buffers=buffers, captured=captured)

    @property
    def launches(self) -> list[tuple[bool, int, int]]:
        """One launch per class of tiles that the list has: (wide, rows of a tile, programs).

        A program for each (item, KV head), the long ones first: what the device cannot run at once starts when others
        end. A captured launch has as many as its steps may need.
        """
        if self.captured is not None:
            counts, wide_tile = (self.captured.narrow, self.captured.wide), self.captured.tile
        else:
            counts = (self.items.narrow, len(self.items.table) - self.items.narrow)
            wide_tile = self.items.wide_tile
        classes = zip((False, True), (NARROW_TILE, wide_tile), counts, strict=True)
        return [(wide, tile, n * self.shape.kv_heads) for wide, tile, n in classes if n]

    @cached_property
    def is_decode(self) -> bool:
        """True if spans are one token each, and the group fits the narrow tile: what `decode_attention` computes."""
        if self.shape.group > NARROW_TILE:
            return False
        if self.captured is not None:
            return self.captured.wide == 0
        return bool((self.stop - self.start == 1).all())

    @property
    def reads_new(self) -> bool:
        """Whether `attention` wants the step's own K and V, too: on a GPU, in steps too long to be captured, where it
        does not read the cache by the copy engine.
        """
        eager = self.captured is None and self.device.type == "cuda"
        return eager and self.shape.reads_new and not on_hopper(self.shape, self.device)

    @cached_property
    def with_maximum(self) -> AttentionWork:
        """The same plan, list and scratch, for layers whose scores are too wide to leave the maximum out."""
        other = copy(self)
        other.softmax = "maximum"
        return other

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return int(self.offset[-1])

    @cached_property
    def items(self) -> Items:
        """The work list on the host."""
        tile = HOPPER_TILE if on_hopper(self.shape, self.device) else None
        spans = self.row, self.start, self.stop, self.offset
        return work_items(self.shape, *spans, self.programs, self.split, tile, narrow_rows(self.shape, self.device))

    @cached_property
    def resident(self) -> AttentionBuffers:
        """The work list on the device."""
        buffers = self.buffers
        if self.captured is not None:
            assert buffers is not None
            return buffers
        items = self.items
        if buffers is None:
            words = np.zeros(items.num_words, np.int32)
            items.write(words)
            (meta,) = self.sent([words])
            sizes = (len(items.table), items.partial_rows, items.counters)
            return AttentionBuffers(*sizes, self.shape, self.device, depth=0, meta=meta)
        buffers.fill(items)
        return buffers

    def sent(self, arrays: Sequence[NDArray[np.integer]]) -> list[Tensor]:
        """Arrays of the plan on its device."""
        return (self.upload or by_copies(self.device))(arrays)


def plan_attention(
    row: Sequence[int] | IntArray,
    start: Sequence[int] | IntArray,
    stop: Sequence[int] | IntArray,
    heads: int,
    kv_heads: int,
    head_dim: int,
    chunk_size: int,
    window: int | None = None,
    device: torch.device | str = "cpu",
    programs: int | None = None,
    split: int | None = None,
    buffers: AttentionBuffers | None = None,
    kv_format: KVFormat = "plain",
    sparse_v: float | None = None,
    upload: Upload | None = None,
) -> AttentionWork:
    """Plan the attention of one step; span s computes positions [start[s], stop[s]) of table row row[s].

    `programs`: how many the device runs at once (default: two per multiprocessor). `split`: cut KV every so many
    positions whatever the batch is, so that a request's result does not depend on its company; None: by load.
    `buffers`: where on the device the list is put; None allocates, and `upload` brings it there (None: a copy, which
    waits behind all others that the device's copy engine was asked for). `kv_format`: how the cache's rows are
    written. `sparse_v`: the share of values that are read (None: all), on a CPU. Raises ConfigError for impossible
    shapes, and for shares of values on a device that has no kernel for them.
    """
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ConfigError(f"{heads} heads over {kv_heads} KV heads; the first must be a multiple of the second.")
    if window is not None and window < 1:
        raise ConfigError(f"the attention window is {window}; it must be at least 1, or None.")
    if split is not None and split < 1:
        raise ConfigError(f"split is {split}; it must be at least 1, or None.")
    device = torch.device(device)
    if sparse_v is not None and not 0 < sparse_v <= 1:
        raise ConfigError(f"sparse_v is {sparse_v}; it must be a share of the values, above 0 and at most 1, or None.")
    if sparse_v is not None and device.type != "cpu":
        raise ConfigError(f"sparse_v is attention of the CPU, but the device is {device}; leave it out there.")
    starts, stops = np.asarray(start, np.int32), np.asarray(stop, np.int32)
    offset = np.zeros(len(starts) + 1, np.int32)
    np.cumsum(stops - starts, out=offset[1:])
    work = AttentionWork(
        AttentionShape(heads, kv_heads, head_dim, chunk_size, window, kv_format, sparse_v),
        np.asarray(row, np.int32),
        starts,
        stops,
        offset,
        device,
        default_programs(device) if programs is None else programs,
        split,
        buffers,
        upload=upload,
    )
    if device.type == "cuda":
        work.resident  # noqa: B018  the copy starts now, not in the first layer
    return work


def on_hopper(shape: AttentionShape, device: torch.device) -> bool:
    """Whether 16-bit prompts run by the kernel for Hopper: it takes tiles of HOPPER_TILE rows, and reads the cache."""
    return shape.suits_hopper and hopper_available(device)


def narrow_rows(shape: AttentionShape, device: torch.device) -> int:
    """The most packed rows of a narrow span: a token's where Hopper's kernel for decodes takes them, else a tile's."""
    return shape.group if shape.decodes_on_hopper and hopper_available(device) else NARROW_TILE


def default_programs(device: torch.device) -> int:
    """Programs that a device runs at once: two per multiprocessor."""
    if device.type != "cuda":
        return 8
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def work_items(
    shape: AttentionShape,
    row: IntArray,
    start: IntArray,
    stop: IntArray,
    offset: IntArray,
    programs: int,
    split: int | None = None,
    wide_tile: int | None = None,
    most_narrow: int = NARROW_TILE,
) -> Items:
    """The work list of a step: every (tile, KV range) once, narrow items first, longest first in each class.

    `wide_tile`: rows of wide tiles, 64 or, for Hopper's kernel, HOPPER_TILE; None: by load. `most_narrow`: the packed
    rows of a narrow span (`narrow_rows`).
    """
    programs_of_wide = -(-programs // 2) if wide_tile == HOPPER_TILE else programs
    rows = (stop - start) * shape.group
    narrow = rows <= most_narrow
    places = _places(row, start, offset, narrow)
    if wide_tile is None:
        fills = int(rows[~narrow].sum()) * shape.kv_heads >= 128 * programs
        by_slots = not (shape.reads_new and (start[~narrow] == 0).all())
        wide_tile = 128 if fills and by_slots and split is None and shape.head_dim <= 128 else 64

    token, kv_last, first = offset[:-1], stop, np.zeros(len(rows), np.int32)
    last = rows
    tiles = np.where(narrow, 1, -(-rows // wide_tile))
    if (count := int(tiles.sum())) > len(rows):
        span = np.arange(len(rows)).repeat(tiles)
        first = (np.arange(count) - (tiles.cumsum() - tiles)[span]) * wide_tile
        narrow, start, rows, row, token = narrow[span], start[span], rows[span], row[span], token[span]
        last = np.minimum(first + wide_tile, rows)
        kv_last = start + (last - 1) // shape.group + 1
    if shape.window is None:
        kv_first, length = None, kv_last
    else:
        kv_first = np.maximum(start + first // shape.group - shape.window + 1, 0)
        length = kv_last - kv_first

    # A tile's item, of which it is the only one for now.
    table = np.zeros((len(rows), ITEM_FIELDS), np.int32)
    for column, values in ((ROW, row), (TOKEN, token), (FIRST, first), (LAST, last), (START, start)):
        table[:, column] = values
    table[:, KV_LAST] = kv_last
    table[:, PARTS] = 1
    if kv_first is not None:
        table[:, KV_FIRST] = kv_first

    piece = _pieces(length, narrow, shape.kv_heads, programs, programs_of_wide, split)
    # Narrow items first, then by falling cost; stable, so that equal plans give equal lists.
    weight = np.where(narrow, (1 << 30) + 2 * NARROW_TILE, 2 * wide_tile)
    partial_rows = counters = 0
    if (length > piece).any():
        parts = -(-length // piece)
        is_split = parts > 1
        partial = np.where(is_split, parts * np.where(narrow, NARROW_TILE, wide_tile), 0)
        partial_rows, counters = int(partial.sum()), int(np.count_nonzero(is_split))
        table[:, PARTIAL] = partial.cumsum() - partial
        table[:, PARTS] = parts
        table[:, COUNTER] = is_split.cumsum() - is_split
        of = np.arange(len(rows)).repeat(parts)
        part = np.arange(len(of)) - (parts.cumsum() - parts)[of]
        table, narrow, weight = table[of], narrow[of], weight[of]
        table[:, PART] = part
        table[:, KV_FIRST] += part * piece[of]
        table[:, KV_LAST] = np.minimum(table[:, KV_FIRST] + piece[of], table[:, KV_LAST])
        length = table[:, KV_LAST] - table[:, KV_FIRST]
    order = (-weight - length).argsort(kind="stable")
    return Items(table[order], int(np.count_nonzero(narrow)), wide_tile, partial_rows, counters, places)


def _places(row: IntArray, start: IntArray, offset: IntArray, narrow: NDArray[np.bool_]) -> IntArray:
    """1 + ROW and START of each of the first FEW tokens that begins a narrow span; zeros if there are more spans."""
    places = np.zeros(HEADER - 2, np.int32)
    if len(row) <= FEW:
        spans = zip(offset[:-1].tolist(), row.tolist(), start.tolist(), narrow.tolist(), strict=True)
        for token, of, at, is_narrow in spans:
            if is_narrow and token < FEW:
                places[2 * token : 2 * token + 2] = 1 + of, at
    return places


def _pieces(
    length: IntArray, narrow: NDArray[np.bool_], kv_heads: int, programs: int, programs_of_wide: int, split: int | None
) -> IntArray:
    """KV positions per item: `split`, or even parts of about what is each program's equal share.

    A part has at least about PIECE positions, a tile at most MAX_PARTS parts. Wide tiles that have a multiprocessor for
    themselves have parts four times as long: to add two of them up takes as long as to compute one.
    """
    if split is not None:
        return np.full(len(length), split, np.int32)
    least_of_wide = PIECE if programs_of_wide == programs else 4 * PIECE
    total, of_narrow = int(length.sum()), int(length[narrow].sum())
    share = np.where(
        narrow,
        max(PIECE, of_narrow * kv_heads // programs),
        max(least_of_wide, (total - of_narrow) * kv_heads // programs_of_wide),
    )
    # Rounded, not up: a tile little longer than its share is left whole, for two halves would take two turns.
    parts = np.clip((length + share // 2) // share, 1, MAX_PARTS)
    even: IntArray = -(-length // (16 * parts)) * 16
    return even
