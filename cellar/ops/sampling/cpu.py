"""Choosing tokens on the CPU.

In NumPy: its argmax, sort and partition are several times faster than torch's, and for so little work one thread does
better than several that wait for each other.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.ops.sampling.definition import target_logprobs_definition
from cellar.ops.sampling.random import uniform_cpu
from cellar.ops.sampling.rows import LEAST_TEMPERATURE, Choice, TokenLogprobs

# Tokens that are looked at before a whole row is sorted; most nuclei are smaller.
_HEAD = 512
# Tokens that are summed together before one is drawn.
_GROUP = 128
# Logits that are worked on at a time: what stays in the processor's cache.
_PART = 1 << 17
_EMPTY = np.empty(0, np.int64)
# What the 8 bits of a byte of a mask, the lowest first, leave of 8 logits: the lesser of each and its limit.
_LIMITS = np.where((np.arange(256)[:, None] >> np.arange(8)) & 1, np.float32(np.inf), np.float32(-np.inf))
# Logits up to which one thread is best on a CPU.
_FEW = 1 << 20


def choose_cpu(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    output_index: Tensor,
    greedy: bool,
    cut: bool,
) -> Choice:
    """The definition, but rows pay only for what they ask."""
    x = logits.float()
    array = x.numpy()
    best = array.argmax(axis=1)
    top = array[np.arange(len(array)), best]  # argmax stops at the first NaN
    finite = np.isfinite(top)
    best *= finite
    if not greedy:
        rows = np.flatnonzero((temperature.numpy() >= LEAST_TEMPERATURE) & finite)
        u = uniform_cpu(seed, output_index).numpy()
        columns = [column.numpy() for column in (temperature, top_k, top_p, min_p)]
        step = max(1, _PART // array.shape[1])
        for part in (rows[start : start + step] for start in range(0, len(rows), step)):
            degree, ks, ps, least = (column[part] for column in columns)
            weights = _weights_on_cpu(array[part], top[part], degree)
            limited = _limited(ks, ps, array.shape[1]) if cut else _EMPTY
            if len(limited):
                least[limited] = _thresholds_on_cpu(weights, limited, ks, ps, least)
            if least.any():
                np.multiply(weights, weights >= least[:, None], out=weights)
            best[part] = _draw_on_cpu(weights, u[part])
    return Choice(torch.from_numpy(best), torch.from_numpy(finite))


def _weights_on_cpu(
    logits: NDArray[np.float32], top: NDArray[np.float32], temperature: NDArray[np.float32]
) -> NDArray[np.float32]:
    """exp((x - top) / temperature), with zeros added so that _GROUP divides the number of columns."""
    n, vocab = logits.shape
    weights = np.empty((n, -(-vocab // _GROUP) * _GROUP), np.float32)
    weights[:, vocab:] = 0
    used = weights[:, :vocab]
    np.subtract(logits, top[:, None], out=used)
    used *= 1 / temperature[:, None]
    np.exp(used, out=used)
    return weights


def _draw_on_cpu(weights: NDArray[np.float32], u: NDArray[np.float64]) -> NDArray[np.int64]:
    """`draw`, for a number of weights that _GROUP divides."""
    sums = weights.reshape(len(weights), -1, _GROUP).sum(axis=-1).astype(np.float64)
    return _first_above(weights, sums, u * sums.sum(axis=1))


def _first_above(
    weights: NDArray[np.float32], sums: NDArray[np.float64], goal: NDArray[np.float64], *, equal: bool = False
) -> NDArray[np.int64]:
    """In each row the first place whose cumulative weight is above its goal (or equal to it, if `equal`).

    Where there is none, the last place with any weight. `sums` are of the groups of _GROUP weights: first the group is
    found, then the place in it.
    """
    every = np.arange(len(weights))
    up_to = np.cumsum(sums, axis=1)
    group = _place(up_to, goal, equal)
    inside = weights.reshape(len(weights), -1, _GROUP)[every, group].astype(np.float64)
    return group * _GROUP + _place(np.cumsum(inside, axis=1), goal - (up_to[every, group] - sums[every, group]), equal)


def _place(up_to: NDArray[np.float64], goal: NDArray[np.float64], equal: bool) -> NDArray[np.int64]:
    below = np.less if equal else np.less_equal
    place: NDArray[np.int64] = below(up_to, goal[:, None]).sum(axis=1)
    if (place == up_to.shape[1]).any():
        place = np.minimum(place, (up_to < up_to[:, -1:]).sum(axis=1))
    return place


def _limited(top_k: NDArray[np.int64], top_p: NDArray[np.float32], vocab: int) -> NDArray[np.int64]:
    """Rows that top-k or top-p concerns."""
    return np.flatnonzero(((top_k > 0) & (top_k < vocab)) | (top_p < 1))


def _thresholds_on_cpu(
    weights: NDArray[np.float32],
    rows: NDArray[np.int64],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float32],
    min_p: NDArray[np.float32],
) -> NDArray[np.float32]:
    """`thresholds` of some rows, sorting a whole row only if its heaviest tokens do not suffice.

    weights: [n, vocab], zeros added so that _GROUP divides vocab; the rest [n]. -> [len(rows)].
    """
    vocab = weights.shape[1]
    least = np.empty(len(rows), np.float32)
    open_, head = np.arange(len(rows)), min(_HEAD, vocab)
    while len(open_):
        at = rows[open_]
        chosen = weights if len(at) == len(weights) else weights[at]
        done, found = _head_thresholds(chosen, head, top_k[at], top_p[at], min_p[at])
        least[open_] = found
        open_, head = open_[~done], vocab
    return least


def _head_thresholds(
    weights: NDArray[np.float32],
    head: int,
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float32],
    min_p: NDArray[np.float32],
) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """Thresholds from the `head` heaviest tokens of each row, and for which rows these suffice."""
    vocab = weights.shape[1]
    part = weights if head == vocab else np.partition(weights, vocab - head, axis=1)[:, vocab - head :]
    ordered = np.ascontiguousarray(np.sort(part, axis=1)[:, ::-1])
    every = np.arange(len(weights))
    limited = (top_k > 0) & (top_k < vocab)
    least = np.where(limited, ordered[every, np.minimum(np.maximum(top_k, 1), head) - 1], np.float32(0))
    np.maximum(least, min_p, out=least)
    done = ~limited | (top_k <= head)
    nuclear = top_p < 1
    if not nuclear.any():
        return done, least
    # What min-p and top-k leave may go on beyond the head, if only by equal weights, so all of the row is summed.
    left = weights * (weights >= least[:, None]) if least.any() else weights
    goal = top_p * left.sum(axis=1).astype(np.float64)
    sums = ordered.reshape(len(ordered), -1, _GROUP).sum(axis=-1).astype(np.float64)
    # The last token with less than its share above it is the first that makes up the share.
    nucleus = ordered[every, _first_above(ordered, sums, goal, equal=True)]
    done &= ~nuclear | (sums.sum(axis=1) >= goal) | (head == vocab)
    return done, np.where(nuclear, np.maximum(least, nucleus), least)


def forbid_cpu(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """A byte of bits at a time, from a table: a seventh of the definition's time, which moves 4 bytes for each bit."""
    array, every = logits.numpy(), rows.numpy()
    vocab = array.shape[1]
    packed = bits.numpy().astype("<i4", order="C", copy=False).view(np.uint8)
    step = max(1, _PART // vocab)
    for begin in range(0, len(every), step):
        part = slice(begin, begin + step)
        limits = _LIMITS.take(packed[part], axis=0).reshape(len(packed[part]), -1)[:, :vocab]
        array[every[part]] = np.minimum(array[every[part]], limits)


def target_logprobs_cpu(logits: Tensor, targets: Tensor, n: int) -> TokenLogprobs:
    """`target_logprobs` for CPU tensors."""
    few = logits.numel() <= _FEW
    return (_logprobs_of_few if few else target_logprobs_definition)(logits, targets, n)


def _logprobs_of_few(logits: Tensor, targets: Tensor, n: int) -> TokenLogprobs:
    """The definition in NumPy, on one thread, which serves a step's few rows better than several."""
    x = logits.float().numpy()
    every = np.arange(len(x))
    top = x.max(axis=1, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        normalizer = top + np.log(np.exp(x - top[:, None]).sum(axis=1))
    target = x[every, targets.numpy()]
    best = np.argpartition(x, x.shape[1] - n, axis=1)[:, x.shape[1] - n :] if n else np.empty((len(x), 0), np.int64)
    best = np.take_along_axis(best, np.argsort(-np.take_along_axis(x, best, axis=1), axis=1, kind="stable"), axis=1)
    return TokenLogprobs(
        logprob=torch.from_numpy(target - normalizer),
        rank=torch.from_numpy((x >= target[:, None]).sum(axis=1)),
        top_ids=torch.from_numpy(best),
        top_logprobs=torch.from_numpy(np.take_along_axis(x, best, axis=1) - normalizer[:, None]),
    )
