"""Multi-token attention over non-contiguous chunks of KV cache; what it means stands in `definition.py`."""

from __future__ import annotations

from torch import Tensor

from cellar.ops.attention import cases
from cellar.ops.attention.cpu import attention_cpu, decode_attention_cpu
from cellar.ops.attention.definition import attention_definition, decode_attention_definition
from cellar.ops.attention.hopper import (
    attention_hopper,
    decode_attention_hopper,
    hopper_takes_decodes,
    takes_attention,
    takes_decode_attention,
)
from cellar.ops.attention.plan import AttentionBuffers, AttentionShape, AttentionWork, Softmax, plan_attention
from cellar.ops.attention.triton import attention_kernel, decode_attention_kernel
from cellar.ops.registry import Op, Variant

__all__ = [
    "OPS",
    "AttentionBuffers",
    "AttentionShape",
    "AttentionWork",
    "Softmax",
    "attention",
    "decode_attention",
    "decodes_at_once",
    "plan_attention",
]

_ATTENTION = Op(
    "attention",
    attention_definition,
    (
        Variant("hopper", attention_hopper, takes_attention),
        Variant("triton", attention_kernel),
        Variant("cpu", attention_cpu),
    ),
    cases.ATTENTION,
)
_DECODE_ATTENTION = Op(
    "decode_attention",
    decode_attention_definition,
    (
        Variant("hopper", decode_attention_hopper, takes_decode_attention),
        Variant("triton", decode_attention_kernel),
        Variant("cpu", decode_attention_cpu),
    ),
    cases.DECODE_ATTENTION,
    changes=("k_cache", "v_cache"),
)
OPS = (_ATTENTION, _DECODE_ATTENTION)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    work: AttentionWork,
    scale: float,
    out: Tensor | None = None,
    new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of all spans of a step: q: [tokens, heads, head_dim] -> like q.

    How a result depends on the rest of the batch: on the CPU not at all, on the GPU by rounding alone (float32: about
    1e-6), for the cut of KV into pieces follows the load unless the plan fixed `split`.
    """
    run = _ATTENTION.on_cpu if q.is_cpu else _ATTENTION.on_gpu
    return run(q, k_cache, v_cache, table, work, scale, out, new)


def decode_attention(
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
    """Rotary embedding, the write of the new K and V, and `attention` at once, for steps of decodes alone."""
    run = _DECODE_ATTENTION.on_cpu if q.is_cpu else _DECODE_ATTENTION.on_gpu
    return run(q, k, v, cos_sin, k_cache, v_cache, table, work, scale)


def decodes_at_once(q: Tensor, k_cache: Tensor, v_cache: Tensor, work: AttentionWork) -> bool:
    """Whether `decode_attention` is for this step: it is one of decodes, and its kernel writes K and V of the cache's
    format. Otherwise they are written first, then `attention` is called.
    """
    return work.is_decode and (work.shape.kv_format == "plain" or hopper_takes_decodes(q, k_cache, v_cache, work.shape))
