"""The points of a model's functions at which ranks may act: plain operations on one device, collectives on several.

`comm` is None for one device, a plain `Comm` where the residual stream is repeated on every rank (tensor parallelism),
or `Laid`, a layout of `core/layouts.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from cellar.models.laid import Laid, sent
from cellar.models.loop import Loop, Steps, alone, looped
from cellar.models.model import Comm, Hidden, NormedSums, Part
from cellar.ops.activation import activate, gated
from cellar.ops.embedding import embedding
from cellar.ops.linear import fused
from cellar.ops.linear.definition import as_linear, linear
from cellar.ops.linear.weight import Weight
from cellar.ops.norm import add_layer_norm, add_rms_norm


class FeedForward(NamedTuple):
    """A layer's feed-forward: act(x W^T + b) D^T + d, or of halves act(gate) * up if it is `gated`."""

    weight: Weight
    bias: Tensor | None
    kind: str
    down: Weight
    down_bias: Tensor | None
    gated: bool = True


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


def whole(h: Hidden, comm: Comm | None) -> Hidden:
    """The hidden state with nothing left to be added up."""
    if h.part is None:
        return h
    assert comm is not None, "who leaves parts has other ranks"
    return Hidden(h.residual, comm.all_reduce(h.part.x))


def rms_norm(
    residual: Tensor, delta: Tensor | None, norm: Tensor, eps: float, comm: Comm | None
) -> tuple[Tensor, Tensor]:
    """-> (rms_norm(residual + delta), residual + delta): all [tokens, E]."""
    if isinstance(comm, Laid):
        return alone(comm.rms_norm(residual, delta, norm, eps))
    return add_rms_norm(residual, delta, norm, eps)


def layer_norm(
    residual: Tensor, delta: Tensor | None, norm: Tensor, bias: Tensor | None, eps: float, comm: Comm | None
) -> tuple[Tensor, Tensor]:
    """-> (layer_norm(residual + delta), residual + delta): all [tokens, E]."""
    if isinstance(comm, Laid):
        return alone(comm.layer_norm(residual, delta, norm, bias, eps))
    return add_layer_norm(residual, delta, norm, bias, eps)


def norm_linear(
    residual: Tensor,
    delta: Tensor | Part | None,
    norm: Tensor,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    comm: Comm | None,
) -> tuple[Tensor, Tensor]:
    """-> (rms_norm(residual + delta) W^T + b, residual + delta)."""
    if isinstance(delta, Part):
        x, total = _add_rms_norm(delta, residual, norm, eps, comm)
        return linear(x, weight, bias), total
    if not isinstance(comm, Laid):
        return fused.norm_linear(residual, delta, norm, eps, weight, bias)

    def steps(residual: Tensor, delta: Tensor | None) -> Steps[tuple[Tensor, Tensor]]:
        x, total = yield from comm.rms_norm(residual, delta, norm, eps)
        return linear(x, weight, bias), total

    return looped(_loop(comm, comm.layout.stream), steps, residual, delta)


def layer_norm_linear(
    residual: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    comm: Comm | None,
) -> tuple[Tensor, Tensor]:
    """-> (layer_norm(residual + delta) W^T + b, residual + delta)."""
    if not isinstance(comm, Laid):
        x, total = add_layer_norm(residual, delta, norm, norm_bias, eps)
        return linear(x, weight, bias), total

    def steps(residual: Tensor, delta: Tensor | None) -> Steps[tuple[Tensor, Tensor]]:
        x, total = yield from comm.layer_norm(residual, delta, norm, norm_bias, eps)
        return linear(x, weight, bias), total

    return looped(_loop(comm, comm.layout.stream), steps, residual, delta)


def norm_feed_forward(
    residual: Tensor,
    delta: Tensor | Part | None,
    norm: Tensor,
    eps: float,
    up: FeedForward,
    comm: Comm | None,
) -> tuple[Tensor | Part, Tensor]:
    """-> (the sum over ranks of a gated feed-forward of rms_norm(residual + delta), residual + delta); of the sum a
    `Part` if `delta` is one.
    """

    assert up.gated, "what norms so is gated"
    if isinstance(delta, Part):
        x, total = _add_rms_norm(delta, residual, norm, eps, comm)
        return Part(fused.feed_forward(x, up.weight, up.bias, up.kind, up.down, up.down_bias)), total

    def all_of_it(residual: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        return fused.norm_feed_forward(residual, delta, norm, eps, up.weight, up.bias, up.kind, up.down, up.down_bias)

    if comm is None:
        return all_of_it(residual, delta)

    def steps(residual: Tensor, delta: Tensor | None) -> Steps[tuple[Tensor, Tensor]]:
        if isinstance(comm, Laid):
            x, total = yield from comm.rms_norm(residual, delta, norm, eps)
            fed = yield from _fed(x, up, comm)
        else:
            fed, total = all_of_it(residual, delta)
        return (yield from _summed(fed, comm)), total

    return looped(_loop(comm), steps, residual, delta)


def feed_forward(x: Tensor, up: FeedForward, comm: Comm | None, beside: Tensor | None = None) -> Tensor:
    """The sum over ranks of the feed-forward of x [tokens, E], and of what is computed beside it, [tokens, E]."""

    def steps(x: Tensor, beside: Tensor | None) -> Steps[Tensor]:
        fed = yield from _fed(x, up, comm)
        return (yield from _summed(fed if beside is None else beside + fed, comm))

    return looped(_loop(comm), steps, x, beside)


def _fed(x: Tensor, up: FeedForward, comm: Comm | None) -> Steps[Tensor]:
    """(act(x W^T + b)) D^T + d, of a rank its part."""
    h = linear(x, up.weight, up.bias)
    if not isinstance(comm, Laid):
        return linear(gated(h, up.kind) if up.gated else activate(h, up.kind), up.down, up.down_bias)
    h = yield from sent(comm.layout.mesh, comm.x, lambda: comm.narrowed(h, 2 if up.gated else 1))
    f = gated(h, up.kind) if up.gated else activate(h, up.kind)
    f = yield from sent(comm.layout.mesh, comm.x, lambda: comm.widened(f))
    return linear(f, up.down, up.down_bias)


def summed_linear(x: Tensor, weight: Weight, bias: Tensor | None, comm: Comm | None) -> Tensor:
    """The sum over ranks of x W^T + b."""
    if comm is None:
        return linear(x, weight, bias)

    def steps(x: Tensor) -> Steps[Tensor]:
        return (yield from _summed(linear(x, weight, bias), comm))

    return looped(_loop(comm, comm.layout.rest if isinstance(comm, Laid) else ""), steps, x)


def parted_linear(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor, comm: Comm | None) -> Tensor | Part:
    """`summed_linear`, or this rank's part of it where the norm of what is added to `residual` adds it up."""
    sums = _normed_sums(comm)
    # What the norm is in front of has the format of this matrix, as all of a layer mostly have.
    if sums is None or not sums.take(residual, not as_linear(weight).norms_itself):
        return summed_linear(x, weight, bias, comm)
    return Part(linear(x, weight, bias))


def _normed_sums(comm: Comm | None) -> NormedSums | None:
    return None if comm is None or isinstance(comm, Laid) else comm.normed_sums


def _add_rms_norm(delta: Part, residual: Tensor, norm: Tensor, eps: float, comm: Comm | None) -> tuple[Tensor, Tensor]:
    sums = _normed_sums(comm)
    assert sums is not None, "it was there when the part was left"
    return sums.add_rms_norm(delta.x, residual, norm, eps)


def _summed(x: Tensor, comm: Comm | None) -> Steps[Tensor]:
    """A product of which every rank has computed a part."""
    if comm is None:
        return x
    if isinstance(comm, Laid):
        return (yield from sent(comm.layout.mesh, comm.layout.rest, lambda: comm.all_reduce(x)))
    return (yield lambda: comm.all_reduce(x))


def _loop(comm: Comm | None, axes: str | None = None) -> Loop | None:
    """How a computation is cut whose collectives go along these axes of a layout; by default all but those that weights
    are gathered over.
    """
    if not isinstance(comm, Laid):
        return None if comm is None else comm.loop
    return comm.loop if comm.layout.mesh.count(comm.layout.stream if axes is None else axes) > 1 else None


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


def gathered(x: Tensor, comm: Comm | None) -> Tensor:
    """A product of which every rank has computed some columns."""
    return x if comm is None else comm.all_gather(x)
