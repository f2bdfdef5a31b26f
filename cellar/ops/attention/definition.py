"""Multi-token attention over non-contiguous chunks of KV cache (Pensieve §3.4.4).

For the query of head h at position p of a sequence, with g = h // (heads / kv_heads) and n running over the positions
that it may see (0..p, or the last `window` of them):

    out = sum_n softmax_n(scale * q . K[n, g]) V[n, g]

With `sparse_v` (FlexGen §5) the softmax is that of all these positions, but the sum runs over the query's own one and
the share of those before it that have the largest scores, of equal ones the first; what is left out is not made up for.

Position n of table row r lies in slot table[r, n // chunk_size] at offset n % chunk_size. A decode is a span of one
token, a prompt chunk is longer, a request whose old KV was dropped has a span per hole: all are the same to this
operation, because the K and V of every span of the step are written before it runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cellar.ops.attention.plan import AttentionShape, AttentionWork
from cellar.ops.kv_format import dequantized
from cellar.ops.rotary.definition import rotary_definition, write_kv_definition


def attention_definition(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    out: Tensor | None = None,
    new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of all spans of a step, span by span, gathered, with a mask, in float32 (float64 inputs: in float64).

    q: [tokens, heads, head_dim], any stride of tokens and heads. k_cache, v_cache: [slots, kv_heads, chunk_size,
    head_dim], any stride of slots; or in fewer bits, as `shape.kv_format` says (`ops/kv_format.py`). table: int32
    [rows, chunks]; only entries that a query may see are read, and of those chunks only positions that are
    written: garbage elsewhere, NaN included, does no harm. out: [tokens, heads, head_dim], made if None, in q's dtype.
    All calls with one `work` must pass the same table.
    new: the step's own K and V once more, [tokens, kv_heads, head_dim], as they were written to the cache. A span that
    begins at position 0 sees nothing else, and a kernel may read them there, where they lie in a row.

    How a result depends on the rest of the batch: on the CPU not at all, on the GPU by rounding alone (float32: about
    1e-6), for the cut of KV into pieces follows the load unless the plan fixed `split`.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    wide = torch.promote_types(q.dtype, torch.float32)
    shape = work.shape
    # Elements of one byte are copied as bytes.
    raw = torch.uint8 if k_cache.element_size() == 1 else k_cache.dtype
    for s in range(len(work.row)):
        start, stop = int(work.start[s]), int(work.stop[s])
        low = 0 if shape.window is None else max(0, start - shape.window + 1)
        first_chunk = low // shape.chunk_size
        slots = table[int(work.row[s]), first_chunk : -(-stop // shape.chunk_size)].long()
        seen = slice(low - first_chunk * shape.chunk_size, stop - first_chunk * shape.chunk_size)
        # [chunks, kv_heads, chunk_size, dim] -> [heads, positions, dim]
        k, v = (
            dequantized(cache.view(raw)[slots].view(cache.dtype), shape.head_dim)
            .transpose(0, 1)
            .flatten(1, 2)[:, seen]
            .to(wide)
            .repeat_interleave(shape.group, 0)
            for cache in (k_cache, v_cache)
        )
        tokens = slice(int(work.offset[s]), int(work.offset[s + 1]))
        scores = scale * (q[tokens].to(wide).transpose(0, 1) @ k.transpose(1, 2))
        query = torch.arange(start, stop, device=q.device)[:, None]
        position = torch.arange(low, stop, device=q.device)[None, :]
        hidden = position > query
        if shape.window is not None:
            hidden |= position <= query - shape.window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        if shape.sparse_v is not None:
            weights = weights * _read(scores.masked_fill(hidden | (position == query), -torch.inf), hidden, shape)
        out[tokens] = (weights @ v).transpose(0, 1).to(out.dtype)
    return out


def _read(before: Tensor, hidden: Tensor, shape: AttentionShape) -> Tensor:
    """Which values are read, as bool [heads, queries, positions].

    before: scores, -inf for the query's own position and those that are hidden [queries, positions] from it.
    """
    order = before.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
    counts = [shape.values_read(int(n) - 1) for n in (~hidden).sum(-1)]
    most = torch.tensor(counts, device=order.device)[:, None]
    return ((rank < most) | before.isneginf()) & ~hidden


def decode_attention_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
) -> Tensor:
    """Rotary embedding, the write of the new K and V, and `attention` at once, for steps of decodes alone.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], as they come from the projection; span s of `work`
    is one token at position start[s], whose chunk stands in the table already. cos_sin: float32 [max_position,
    rotary_dim], or None to turn nothing. The group must fit the narrow tile (16). -> [tokens, heads, head_dim].
    """
    rows = torch.from_numpy(work.row).to(q.device, torch.int64)
    positions = torch.from_numpy(work.start).to(q.device, torch.int64)
    size = work.shape.chunk_size
    slots = table[rows, positions // size].long()
    if cos_sin is not None:
        q, k = rotary_definition(q, k, positions, cos_sin)
    write_kv_definition(k, v, k_cache, v_cache, slots * size + positions % size)
    return attention_definition(q, k_cache, v_cache, table, work, scale)
