"""The points of a model's functions at which ranks may act: plain operations on one device, collectives on several.

`comm` is None for one device, a plain `Comm` where the residual stream is repeated on every rank (tensor parallelism),
or `Laid`, a layout of `core/layouts.py`.
"""

from __future__ import annotations

from torch import Tensor

from cellar.models.laid import Laid
from cellar.models.model import Comm
from cellar.ops.activation import activate, gated
from cellar.ops.embedding import embedding
from cellar.ops.linear import fused
from cellar.ops.linear.definition import linear
from cellar.ops.linear.weight import Weight
from cellar.ops.norm import add_layer_norm, add_rms_norm


def embedded(tokens: Tensor, table: Tensor, comm: Comm | None) -> Tensor:
    """The words of a step's tokens, int64 [tokens] -> [tokens, E], or this rank's part of the stream."""
    return comm.embedded(tokens, table) if isinstance(comm, Laid) else embedding(tokens, table)


def looked_up(tokens: Tensor, table: Tensor, comm: Comm | None) -> Tensor:
    """The words of a step's tokens, whole, to be projected: [tokens, words]."""
    return comm.looked_up(tokens, table) if isinstance(comm, Laid) else embedding(tokens, table)


def entered(x: Tensor, comm: Comm | None) -> Tensor:
    """The stream, to be multiplied: [tokens, E]."""
    return comm.entered(x) if isinstance(comm, Laid) else x


def kept(x: Tensor, comm: Comm | None) -> Tensor:
    """What products take, as the stream again."""
    return comm.kept(x) if isinstance(comm, Laid) else x


def rms_norm(
    residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, comm: Comm | None
) -> tuple[Tensor, Tensor]:
    """-> (rms_norm(residual + delta), residual + delta): all [tokens, E]."""
    if isinstance(comm, Laid):
        return comm.rms_norm(residual, delta, norm, eps)
    return add_rms_norm(residual, delta, norm, eps)


def layer_norm(
    residual: Tensor, delta: Tensor | None, norm: Tensor, bias: Tensor | None, eps: float, comm: Comm | None
) -> tuple[Tensor, Tensor]:
    """-> (layer_norm(residual + delta), residual + delta): all [tokens, E]."""
    if isinstance(comm, Laid):
        return comm.layer_norm(residual, delta, norm, bias, eps)
    return add_layer_norm(residual, delta, norm, bias, eps)


def norm_linear(
    residual: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    comm: Comm | None,
) -> tuple[Tensor, Tensor]:
    """-> (rms_norm(residual + delta) W^T + b, residual + delta)."""
    if not isinstance(comm, Laid):
        return fused.norm_linear(residual, delta, norm, eps, weight, bias)
    x, total = comm.rms_norm(residual, delta, norm, eps)
    return linear(x, weight, bias), total


def norm_gated_linear(
    residual: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    kind: str,
    comm: Comm | None,
) -> tuple[Tensor, Tensor]:
    """-> (act(gate) * up, residual + delta), gate and up the halves of rms_norm(residual + delta) W^T + b."""
    if not isinstance(comm, Laid):
        return fused.norm_gated_linear(residual, delta, norm, eps, weight, bias, kind)
    x, total = comm.rms_norm(residual, delta, norm, eps)
    return gated_linear(x, weight, bias, kind, comm), total


def norm_feed_forward(
    residual: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    kind: str,
    down: Weight,
    down_bias: Tensor | None,
    comm: Comm | None,
) -> tuple[Tensor, Tensor]:
    """-> ((act(gate) * up) D^T + d, residual + delta), gate and up as in `norm_gated_linear`: of a rank its part."""
    if not isinstance(comm, Laid):
        return fused.norm_feed_forward(residual, delta, norm, eps, weight, bias, kind, down, down_bias)
    x, total = norm_gated_linear(residual, delta, norm, eps, weight, bias, kind, comm)
    return linear(x, down, down_bias), total


def activated_linear(x: Tensor, weight: Weight, bias: Tensor | None, kind: str, comm: Comm | None) -> Tensor:
    """act(x W^T + b): [tokens, E] -> [tokens, F]."""
    h = linear(x, weight, bias)
    if not isinstance(comm, Laid):
        return activate(h, kind)
    return comm.widened(activate(comm.narrowed(h, 1), kind))


def gated_linear(x: Tensor, weight: Weight, bias: Tensor | None, kind: str, comm: Comm | None) -> Tensor:
    """act(gate) * up, gate and up the halves of x W^T + b: [tokens, E] -> [tokens, F]."""
    h = linear(x, weight, bias)
    if not isinstance(comm, Laid):
        return gated(h, kind)
    return comm.widened(gated(comm.narrowed(h, 2), kind))


def spread(q: Tensor, k: Tensor, v: Tensor, comm: Comm | None) -> tuple[Tensor, Tensor, Tensor]:
    """q [tokens, heads, head_dim], k, v [tokens, kv_heads, head_dim] of products -> of attention."""
    return comm.spread(q, k, v) if isinstance(comm, Laid) else (q, k, v)


def returned(attended: Tensor, comm: Comm | None) -> Tensor:
    """What attention leaves, [tokens, heads, head_dim], back to where products take it."""
    return comm.returned(attended) if isinstance(comm, Laid) else attended


def wide(x: Tensor, comm: Comm | None) -> Tensor:
    """Hidden rows after the last norm, whole: [rows, E]."""
    return comm.wide(x) if isinstance(comm, Laid) else x


def whole_rows(x: Tensor, comm: Comm | None) -> Tensor:
    """Hidden rows [rows, E] of every home."""
    return comm.whole_rows(x) if isinstance(comm, Laid) else x


def summed(x: Tensor, comm: Comm | None) -> Tensor:
    """A product of which every rank has computed a part."""
    return x if comm is None else comm.all_reduce(x)


def gathered(x: Tensor, comm: Comm | None) -> Tensor:
    """A product of which every rank has computed some columns."""
    return x if comm is None else comm.all_gather(x)
