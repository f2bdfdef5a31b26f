"""Attention on the CPU: decodes as weighted sums over rows of the cache in place, prompts through torch's fused kernel.

Decoding is bound by memory: 64 sequences of 330 tokens read 23 MB of float32 a layer. Gathering chunks first would
triple that, and batched products of [group, dim] x [dim, 32] run at a tenth of the arithmetic peak. Two operations
of torch take listed rows of a table as they lie, so the list of rows, made once a step and used by all layers, *is*
the slot table, and what is not listed is not read:

    sampled_addmm(Q, K)       scores at listed (query, key) pairs
    embedding_bag(V, P)       output: the sum of listed rows of V, weighted by P

Between them stands a softmax over rows of different lengths: chunk-wise maxima and sums, combined per row.

A single sequence has another way, for there the number of calls counts: its chunks, if they lie in a row, are one
matrix of all heads' keys, and a mask hides other heads' keys and unwritten ones.

A row's result depends on its own context alone, bit for bit, but for two things: where all decodes of a step see
equally many positions the sums of softmax are taken in another order, and so are all sums of a decode that is alone
(about 1e-7 in float32).
"""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cellar.ops.attention_plan import AttentionShape, AttentionWork, IntArray

SHORT = 2
"""Spans of up to so many tokens are decodes: measured, longer ones are faster gathered."""

BLOCK = 128
"""Queries of a prompt that are handled at once; a block sees no keys behind its last query."""

ALONE_KV_HEADS = 4
"""Up to so many KV heads computing all heads against all keys is cheaper than lists."""

_NOTHING = torch.empty(0)


def attention_cpu(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """`attention` for CPU tensors. Computes in float32; chunks of another dtype are converted before use."""
    layout = (q.dtype, k_cache.stride(0), v_cache.stride(0))
    plan = work.prepared.get(layout)
    if plan is None:
        plan = work.prepared[layout] = _Plan(work, table.numpy(), k_cache, v_cache)
    if plan.alone is not None:
        result = plan.alone.attend(q, k_cache, v_cache, scale)
        if result is not None:
            return result if out is None else out.copy_(result)
    if not plan.prompts and q.dtype == torch.float32:
        result = plan.decodes(table, k_cache, v_cache).attend(q, k_cache, v_cache, scale).view(q.shape)
        return result if out is None else out.copy_(result)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if plan.has_short:
        decodes = plan.decodes(table, k_cache, v_cache)
        short = decodes.attend(q.index_select(0, decodes.tokens).float(), k_cache, v_cache, scale)
        out.index_copy_(0, decodes.tokens, short.view(-1, *q.shape[1:]).to(out.dtype))
    for prompt in plan.prompts:
        prompt.attend(q, k_cache, v_cache, plan.mask, scale, out)
    return out


class _Plan:
    """What the layers of a step share: `mask` is for the prompts, see `_band`."""

    def __init__(self, work: AttentionWork, slots: IntArray, k_cache: Tensor, v_cache: Tensor) -> None:
        is_short = work.stop - work.start <= SHORT
        self.has_short = bool(is_short.any())
        self.prompts: tuple[_Prompt, ...] = ()
        self.mask = _NOTHING
        if not is_short.all():
            self.prompts = tuple(
                _prompt(work.shape, slots, int(work.row[s]), int(work.start[s]), int(work.stop[s]), int(work.offset[s]))
                for s in np.flatnonzero(~is_short)
            )
            self.mask = _band(work.shape, self.prompts)
        self.alone = _alone(work, slots, k_cache, v_cache) if work.num_tokens == 1 else None
        self._work = work
        self._short = is_short
        self._decodes: _Decodes | None = None

    def decodes(self, table: Tensor, k_cache: Tensor, v_cache: Tensor) -> _Decodes:
        """The lists for short spans, made when they are first needed."""
        if self._decodes is None:
            self._decodes = _decodes(self._work, table.numpy(), np.flatnonzero(self._short), k_cache, v_cache)
        return self._decodes


@dataclass(frozen=True, slots=True)
class _Alone:
    """One query whose chunks lie in a row: all heads against all heads' keys, most of which `bias` hides."""

    size: tuple[int, int]
    first: int
    bias: Tensor  # float32 [heads, chunks * kv_heads * chunk_size]: 0 or -inf

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor | None:
        """q float32 [1, heads, dim] -> the same shape. None if garbage in unwritten memory came through: use lists."""
        dim = self.size[1]
        keys = k_cache.as_strided(self.size, (dim, 1), k_cache.storage_offset() + self.first)
        scores = torch.addmm(self.bias, q.view(-1, dim), keys.t(), alpha=scale)
        values = v_cache.as_strided(self.size, (dim, 1), v_cache.storage_offset() + self.first)
        result = torch.mm(scores.softmax(1), values)
        # What is hidden counts 0 times, which makes NaN of garbage that is not finite.
        return result.view(q.shape) if math.isfinite(result.sum().item()) else None


def _alone(work: AttentionWork, slots: IntArray, k_cache: Tensor, v_cache: Tensor) -> _Alone | None:
    shape, size = work.shape, work.shape.chunk_size
    position = int(work.start[0])
    low = 0 if shape.window is None else max(0, position - shape.window + 1)
    chunks = slots[work.row[0], low // size : position // size + 1]
    in_place = k_cache.dtype == torch.float32 and k_cache.is_contiguous() and v_cache.is_contiguous()
    if shape.kv_heads > ALONE_KV_HEADS or not in_place or int(chunks[-1]) - int(chunks[0]) != len(chunks) - 1:
        return None
    if len(chunks) > 2 and not (np.diff(chunks) == 1).all():
        return None
    bias = torch.full((shape.kv_heads, shape.group, len(chunks), shape.kv_heads, size), -torch.inf)
    bias.diagonal(0, 0, 3).zero_()
    bias[..., -1, :, position % size + 1 :] = -torch.inf
    if low % size:
        bias[..., 0, :, : low % size] = -torch.inf
    rows = len(chunks) * shape.kv_heads * size
    return _Alone(
        (rows, shape.head_dim), int(chunks[0]) * shape.kv_heads * size * shape.head_dim, bias.view(shape.heads, rows)
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """A cache as a float32 table of rows [count, dim]: in place, or (`gathered`) these slots copied and converted."""

    count: int
    per_slot: int
    gathered: Tensor | None = None

    def of(self, cache: Tensor) -> Tensor:
        """float32 [count, dim]."""
        dim = cache.shape[3]
        if self.gathered is not None:
            return cache.index_select(0, self.gathered).float().view(-1, dim)
        return cache.as_strided((self.count, dim), (dim, 1))


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Short spans. A *bag* is one (token, head); its *segments* are the chunks that it sees, chunk_size entries each.

    Entries that the query must not see name a row that it does see; their score is set to -inf (`padding`). In an
    *even* step, where all bags see equally many positions, a bag is one segment without padding.
    """

    tokens: Tensor  # int64 [T]
    rows: _Rows
    even: bool
    scores: Tensor  # float32 [segments, entries of each]
    pairs: Tensor  # sparse CSR [bags, rows], `scores` being its values
    index: Tensor  # int32 [entries], the row of each
    begins: Tensor  # int32 [bags], first entry of each
    bag_of_segment: Tensor  # int64 [segments]
    padding: Tensor  # int64 [hidden entries]
    segments_max: Tensor  # int64 [bags, most segments], filled up with the bag's own first
    segments_sum: Tensor  # int64 [bags, most segments], filled up with one that is zero
    extents: Tensor  # float32 [segments + 1], the last one zero

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        """q float32 [T, heads, dim] -> [bags, dim]."""
        scores, queries, keys = self.scores, q.reshape(-1, q.shape[2]), self.rows.of(k_cache)
        torch.sparse.sampled_addmm(self.pairs, queries, keys.t(), beta=0.0, alpha=scale, out=self.pairs)
        values = self.rows.of(v_cache)
        if self.even:
            weights = scores.softmax(1).view(-1)
            return torch.embedding_bag(values, self.index, self.begins, False, 0, False, weights)[0]
        weights, extents = scores.view(-1), self.extents[:-1]
        weights.index_fill_(0, self.padding, -torch.inf)
        torch.amax(scores, 1, out=extents)
        top = extents.take(self.segments_max).amax(1)
        scores.sub_(top.index_select(0, self.bag_of_segment).unsqueeze(1)).exp_()
        torch.sum(scores, 1, out=extents)
        total = self.extents.take(self.segments_sum).sum(1, keepdim=True)
        return torch.embedding_bag(values, self.index, self.begins, False, 0, False, weights)[0].div_(total)


def _decodes(
    work: AttentionWork, slots: IntArray, short: NDArray[np.intp], k_cache: Tensor, v_cache: Tensor
) -> _Decodes:
    """Lists for the spans `short`."""
    shape, size = work.shape, work.shape.chunk_size
    row, position, tokens = work.row, work.start, np.arange(len(short))
    if work.num_tokens != len(work.row):
        length = (work.stop - work.start)[short]
        step = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
        tokens = np.repeat(work.offset[short], length) + step
        row, position = np.repeat(work.row[short], length), np.repeat(work.start[short], length) + step
    low = np.zeros_like(position) if shape.window is None else np.maximum(position - shape.window + 1, 0)
    seen = position + 1 - low

    # Chunks: token by token. Their slots name rows of the table that K and V are read as.
    of_token = position // size - low // size + 1
    token = np.repeat(np.arange(len(tokens)), of_token)
    chunk = np.arange(len(token)) - (np.cumsum(of_token) - of_token - low // size)[token]
    rows, slot = _table(shape, slots[row[token], chunk], k_cache, v_cache)
    heads = (np.arange(shape.heads) // shape.group * size).astype(np.int32)
    places = (slot * rows.per_slot)[:, None] + np.arange(size, dtype=np.int32)

    even = bool((seen == seen[0]).all())
    if even:
        n = low[:, None] + np.arange(seen[0])
        ahead = np.cumsum(of_token) - of_token - low // size
        entry = places[ahead[:, None] + n // size, n % size]
        index = (entry[:, None, :] + heads[:, None]).reshape(-1, int(seen[0]))
        nothing = np.zeros(0, np.int64)
        begins = np.arange(len(index)) * seen[0]
        bag = padding = by_bag = by_bag_sum = nothing
    else:
        first, last = low[token] - chunk * size, position[token] - chunk * size
        partly = np.flatnonzero((first > 0) | (last < size - 1))
        inside = np.clip(np.arange(size), np.maximum(first, 0)[partly, None], np.minimum(last, size - 1)[partly, None])
        hidden = np.zeros((len(token), size), np.bool_)
        hidden[partly] = inside != np.arange(size)
        places[partly] = places[partly, :1] + inside
        # Segments: the same for each head, (token, head) by (token, head).
        per_bag = np.repeat(of_token, shape.heads)
        ends = np.cumsum(per_bag)
        bag = np.repeat(np.arange(len(per_bag)), per_bag)
        source = np.arange(len(bag)) - (ends - per_bag - np.repeat(np.cumsum(of_token) - of_token, shape.heads))[bag]
        index = places[source]
        index += heads[bag % shape.heads, None]
        padding = np.flatnonzero(hidden[source])
        begins = (ends - per_bag) * size
        most = np.arange(int(per_bag.max()))
        in_bag = most < per_bag[:, None]
        by_bag = np.where(in_bag, (ends - per_bag)[:, None] + most, (ends - per_bag)[:, None])
        by_bag_sum = np.where(in_bag, by_bag, len(bag))
    scores = torch.zeros(index.shape)
    flat = torch.from_numpy(index.astype(np.int32, copy=False).reshape(-1))
    bounds = torch.from_numpy(np.append(begins, index.size).astype(np.int32))
    return _Decodes(
        tokens=torch.from_numpy(tokens.astype(np.int64, copy=False)),
        rows=rows,
        even=even,
        scores=scores,
        pairs=_csr(bounds, flat, scores.view(-1), (len(begins), rows.count)),
        index=flat,
        begins=bounds[:-1],
        bag_of_segment=torch.from_numpy(bag),
        padding=torch.from_numpy(padding),
        segments_max=torch.from_numpy(by_bag),
        segments_sum=torch.from_numpy(by_bag_sum),
        extents=_NOTHING if even else torch.zeros(len(bag) + 1),
    )


def _table(shape: AttentionShape, slot: IntArray, k_cache: Tensor, v_cache: Tensor) -> tuple[_Rows, IntArray]:
    """How K and V are read as tables of rows, and `slot` in terms of them."""
    size, dim = shape.chunk_size, shape.head_dim
    in_place = k_cache.dtype == torch.float32 and k_cache.stride() == v_cache.stride()
    if in_place and k_cache.stride()[1:] == (size * dim, dim, 1) and k_cache.stride(0) % dim == 0:
        per_slot = k_cache.stride(0) // dim
        return _Rows((len(k_cache) - 1) * per_slot + shape.kv_heads * size, per_slot), slot
    used, place = np.unique(slot, return_inverse=True)
    per_slot = shape.kv_heads * size
    return _Rows(len(used) * per_slot, per_slot, torch.from_numpy(used.astype(np.int64))), place.astype(np.int32)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A long span: its chunks are gathered and laid out by heads, then blocks of queries go through torch's kernel."""

    slots: Tensor | slice
    low: int
    start: int
    stop: int
    token: int
    chunk_size: int

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, mask: Tensor, scale: float, out: Tensor) -> None:
        """Write this span's tokens of `out`."""
        k, v = self._gathered(k_cache), self._gathered(v_cache)
        for begin in range(self.start, self.stop, BLOCK):
            end = min(begin + BLOCK, self.stop)
            tokens = slice(self.token + begin - self.start, self.token + end - self.start)
            keys = end - self.low
            result = scaled_dot_product_attention(
                q[tokens].float().transpose(0, 1).unsqueeze(0),
                k[:, :, :keys],
                v[:, :, :keys],
                attn_mask=mask[begin - end :, mask.shape[1] - keys :],
                scale=scale,
                enable_gqa=True,
            )
            out[tokens] = result[0].transpose(0, 1)

    def _gathered(self, cache: Tensor) -> Tensor:
        """float32 [1, kv_heads, positions low..stop, dim]."""
        chunks = cache[self.slots] if isinstance(self.slots, slice) else cache.index_select(0, self.slots)
        skipped = self.low % self.chunk_size
        by_head = chunks.transpose(0, 1).flatten(1, 2)[:, skipped : skipped + self.stop - self.low]
        return by_head.float().unsqueeze(0)


def _prompt(shape: AttentionShape, slots: IntArray, row: int, start: int, stop: int, token: int) -> _Prompt:
    low = 0 if shape.window is None else max(0, start - shape.window + 1)
    chunks = slots[row, low // shape.chunk_size : -(-stop // shape.chunk_size)]
    in_order = bool((np.diff(chunks) == 1).all())
    where = slice(int(chunks[0]), int(chunks[0]) + len(chunks)) if in_order else torch.from_numpy(chunks.copy())
    return _Prompt(where, low, start, stop, token, shape.chunk_size)


def _band(shape: AttentionShape, prompts: tuple[_Prompt, ...]) -> Tensor:
    """One mask for all blocks, float32 [BLOCK, longest context]: its last rows and columns belong to a block's last.

    What a query sees depends on the distance to a key alone, so every block's mask is a corner of this one.
    """
    width = max(p.stop - p.low for p in prompts)
    distance = torch.arange(width, width - BLOCK, -1).flip(0)[:, None] - 1 - torch.arange(width)[None, :]
    hidden = distance < 0
    if shape.window is not None:
        hidden |= distance >= shape.window
    return torch.zeros(BLOCK, width).masked_fill_(hidden, -torch.inf)


def _csr(row_ends: Tensor, columns: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    _hush_beta_notice()
    return torch.sparse_csr_tensor(row_ends, columns, values, size=size, check_invariants=False)


@functools.cache
def _hush_beta_notice() -> None:
    """torch says once a process that sparse CSR is in beta; what is used of it here is covered by tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([0.0]), size=(1, 1))
