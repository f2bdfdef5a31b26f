"""Choosing the next token of each row: one call per step.

The order of operations, as in vLLM: log-probabilities are of the raw logits; then penalties, logit bias, banned tokens
and masks change the logits (`penalties.py`); then temperature, min-p, top-k, top-p; then one token is drawn.

Weights. With m the row's largest logit, token i weighs w_i = exp((x_i - m) / temperature), so the best weighs 1. All
three filters are thresholds on w, and so keep or drop equal tokens together:

    min-p   w_i >= min_p
    top-k   w_i >= the k-th largest weight
    top-p   the tokens heavier than i make up less than top_p of what min-p and top-k left

Drawing. Inverse transform with one uniform number u(seed, output index) per row (`random.py`) over the kept tokens in
order of their ids. Nothing depends on the other rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.core.sampling import SamplingParams
from cellar.ops.logprobs import TokenLogprobs, target_logprobs
from cellar.ops.penalties import Bans, Biases, Masks, Penalties, ban, bias, forbid, penalize
from cellar.ops.random import uniform, uniform_definition, uniform_of
from cellar.ops.registry import Case, Op
from cellar.ops.triton_support import dependent_launch, kernel

if TYPE_CHECKING:
    import triton.language as tl

# Rows below this temperature take the best token: (x - m) / temperature would overflow.
LEAST_TEMPERATURE = 1e-5
# Tokens that are looked at before a whole row is sorted; most nuclei are smaller.
_HEAD = 512
# Tokens that are summed together before one is drawn.
_GROUP = 128
# Logits that are worked on at a time: what stays in the processor's cache.
_PART = 1 << 17
_EMPTY = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """How the n rows of one step sample. Tensors lie on the logits' device; `greedy` and `cut` are known to the host.

    seed, output_index: int64 [n]; temperature, top_p, min_p: float32 [n]; top_k: int64 [n], 0 for all tokens.
    greedy: no row draws (all temperatures are 0); cut: some row that draws has top_k or top_p.
    logprob_rows: int64 [m], the rows that want log-probabilities, with the num_logprobs best tokens; None for none.
    """

    seed: Tensor
    output_index: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    greedy: bool
    cut: bool
    penalties: Penalties | None = None
    biases: Biases | None = None
    bans: Bans | None = None
    masks: Masks | None = None
    logprob_rows: Tensor | None = None
    num_logprobs: int = 0

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        output_index: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        stop_ids: Mapping[int, Sequence[int]] | None = None,
        penalties: Penalties | None = None,
    ) -> SamplingRows:
        """Rows that sample by `params` (seeds set), having put out `output_index` tokens each.

        stop_ids: by row, the tokens that are banned until min_tokens. penalties: of the rows whose params are
        `penalized`; their stores live longer than a step, so the caller has them.
        """
        draws = [p.temperature >= LEAST_TEMPERATURE for p in params]
        floats = np.array([(p.temperature, p.top_p, p.min_p) for p in params], np.float32).reshape(-1, 3)
        integers = np.array(
            [(p.seed or 0, k, max(p.top_k, 0)) for p, k in zip(params, output_index, strict=True)], np.int64
        )
        temperature, top_p, min_p = torch.from_numpy(np.ascontiguousarray(floats.T)).to(device)
        seed, index, top_k = torch.from_numpy(np.ascontiguousarray(integers.reshape(-1, 3).T)).to(device)

        def integer_tensor(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64).to(device)

        added = [(r, t, v) for r, p in enumerate(params) for t, v in (p.logit_bias or {}).items()]
        banned = [
            (r, t, params[r].min_tokens) for r, ids in (stop_ids or {}).items() for t in ids if params[r].min_tokens
        ]
        asking = [r for r, p in enumerate(params) if p.logprobs is not None]
        return cls(
            seed=seed,
            output_index=index,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            greedy=not any(draws),
            cut=any(d and (p.top_k > 0 or p.top_p < 1) for d, p in zip(draws, params, strict=True)),
            penalties=penalties,
            biases=Biases(
                integer_tensor([r for r, _, _ in added]),
                integer_tensor([t for _, t, _ in added]),
                torch.tensor([v for _, _, v in added], dtype=torch.float32).to(device),
            )
            if added
            else None,
            bans=Bans(*(integer_tensor(column) for column in zip(*banned, strict=True))) if banned else None,
            logprob_rows=integer_tensor(asking) if asking else None,
            num_logprobs=max((params[r].logprobs or 0 for r in asking), default=0),
        )

    @property
    def adjusted(self) -> bool:
        """True if logits change before the choice."""
        return not (self.penalties is None and self.biases is None and self.bans is None and self.masks is None)


class Choice(NamedTuple):
    """tokens: int64 [n]; finite: bool [n], False where the row has no token to choose, which is then 0."""

    tokens: Tensor
    finite: Tensor


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens: int64 [n]; finite: bool [n]; logprobs: of the rows that asked, in the order of `logprob_rows`."""

    tokens: Tensor
    finite: Tensor
    logprobs: TokenLogprobs | None = None


def sample(logits: Tensor, rows: SamplingRows) -> Sampled:
    """Choose one token for each row of logits [n, vocab]; the logits are not changed.

    A row with NaN or +inf among its logits, or with nothing but -inf, is not finite: its token is 0. (A single -inf is
    a token that cannot be chosen.) Log-probabilities are of the raw logits: before penalties, bias, masks, temperature.
    """
    x, sound = logits, None
    if rows.adjusted:
        x = logits.to(torch.float32, copy=True)
        sound = x.amax(dim=-1).isfinite()
        _adjust(x, rows)
    tokens, finite = choose(
        x,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seed,
        rows.output_index,
        rows.greedy,
        rows.cut,
    )
    if sound is not None:
        finite = finite & sound
        tokens = tokens * finite
    logprobs = None
    if rows.logprob_rows is not None:
        everyone = rows.logprob_rows.shape[0] == logits.shape[0]
        of = logits if everyone else logits.index_select(0, rows.logprob_rows)
        logprobs = target_logprobs(of, tokens if everyone else tokens[rows.logprob_rows], rows.num_logprobs)
    return Sampled(tokens, finite, logprobs)


def _adjust(x: Tensor, rows: SamplingRows) -> None:
    """Penalties, bias, bans, masks, in place."""
    if (p := rows.penalties) is not None:
        penalize(x, p.rows, p.slots, p.prompt, p.output, p.repetition, p.frequency, p.presence)
    if (b := rows.biases) is not None:
        bias(x, b.rows, b.tokens, b.values)
    if (bans := rows.bans) is not None:
        ban(x, bans.rows, bans.tokens, bans.until, rows.output_index)
    if (m := rows.masks) is not None:
        forbid(x, m.rows, m.bits)


def choose(
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
    """One token per row of logits [n, vocab]; the other arguments are those of `SamplingRows`.

    The best token (the first of equals) where the temperature is 0, else a drawn one.
    """
    way = choose_kernel if logits.is_cuda else _choose_on_cpu
    return way(logits, temperature, top_k, top_p, min_p, seed, output_index, greedy, cut)


def choose_definition(
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
    """The choice in plain torch: every row is sorted."""
    x = logits.float()
    top, best = x.max(dim=-1)
    finite = top.isfinite()
    draws = (temperature >= LEAST_TEMPERATURE) & finite
    # Rows that do not draw go along with harmless numbers.
    top, scale = torch.where(finite, top, 0.0), torch.where(draws, temperature, 1.0).reciprocal()
    weights = ((x - top.unsqueeze(1)) * scale.unsqueeze(1)).exp()
    least = thresholds(weights, top_k, top_p, min_p)
    kept = torch.where(weights >= least.unsqueeze(1), weights, 0.0)
    drawn = draw(kept, uniform_definition(seed, output_index))
    return Choice(torch.where(finite, torch.where(draws, drawn, best), 0), finite)


def thresholds(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The least weight that each row keeps: weights: float32 [n, vocab], the largest 1; the rest [n] -> float32 [n]."""
    vocab = weights.shape[1]
    ordered = weights.sort(dim=-1, descending=True).values
    k = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    kth = ordered.gather(1, (k - 1).unsqueeze(1)).squeeze(1)
    least = torch.maximum(kth, min_p)
    left = torch.where(ordered >= least.unsqueeze(1), ordered, 0.0).double()
    up_to = left.cumsum(dim=-1)
    # Position 0 is always kept: nothing is heavier.
    inside = (up_to - left) < top_p.double().unsqueeze(1) * up_to[:, -1:]
    last = inside.sum(dim=-1).clamp_(min=1) - 1
    nucleus = ordered.gather(1, last.unsqueeze(1)).squeeze(1)
    return torch.where(top_p < 1, torch.maximum(least, nucleus), least)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse transform in order of ids: weights: float32 [n, vocab] >= 0; u: float64 [n] in [0, 1) -> int64 [n].

    The first token whose cumulative weight exceeds u times the total; where rounding leaves none, the last token with
    any weight. So a token of weight 0 is never drawn.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    token = torch.searchsorted(cumulative, u.unsqueeze(1) * total, right=True)
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(token, last).squeeze(1)


def _choose_on_cpu(
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
    """The definition, but rows pay only for what they ask.

    In NumPy: its argmax, sort and partition are several times faster than torch's, and for so little work one thread
    does better than several that wait for each other.
    """
    x = logits.float()
    array = x.numpy()
    best = array.argmax(axis=1)
    top = array[np.arange(len(array)), best]  # argmax stops at the first NaN
    finite = np.isfinite(top)
    best *= finite
    if not greedy:
        rows = np.flatnonzero((temperature.numpy() >= LEAST_TEMPERATURE) & finite)
        u = uniform(seed, output_index).numpy()
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


def choose_kernel(
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
    """The choice in Triton: one program per row, which reads its row several times and sorts nothing."""
    n, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    finite = torch.empty(n, dtype=torch.bool, device=logits.device)
    if n:
        # Readings and searches are bound by latency, so they want all the warps that a program can have (measured).
        block = min(8192, 1 << max(5, (vocab - 1).bit_length()))
        _choose_kernel[(n,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            output_index,
            tokens,
            finite.view(torch.uint8),
            vocab,
            logits.stride(0),
            LEAST_TEMPERATURE,
            DRAW=not greedy,
            CUT=cut,
            BLOCK=block,
            BLOCKS=1 << (-(-vocab // block) - 1).bit_length(),
            num_warps=max(1, block // 256),
            **dependent_launch(logits),
        )
    return Choice(tokens, finite)


@kernel
def _choose_kernel(  # type: ignore[no-untyped-def]
    logits,  # [n, vocab]
    temperature,  # [n]
    top_k,  # [n]
    top_p,  # [n]
    min_p,  # [n]
    seed,  # [n]
    output_index,  # [n]
    tokens,  # [n]
    finite,  # [n]
    vocab,
    stride,
    least_temperature,
    DRAW: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # a power of 2 that is at least vocab / BLOCK
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    # The best token of each lane, then of all; the lowest id wins among equals.
    best = tl.full((BLOCK,), -3.4e38, tl.float32)
    where = tl.full((BLOCK,), 2147483647, tl.int32)
    wrong = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, vocab, BLOCK, loop_unroll_factor=4):
        token = start + lane
        x = tl.load(line + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        # A NaN is unequal to itself.
        wrong |= ((x != x) | (x == float("inf"))).to(tl.int32)
        better = x > best
        best = tl.where(better, x, best)
        where = tl.where(better, token, where)
    top = tl.max(best, 0)
    choice = tl.min(tl.where(best == top, where, 2147483647), 0)
    good = (tl.max(wrong, 0) == 0) & (choice < vocab)
    choice = tl.where(good, choice, 0)
    if DRAW:
        degree = tl.load(temperature + row)
        if good & (degree >= least_temperature):
            scale = 1.0 / degree
            least = tl.load(min_p + row)
            if CUT:
                k = tl.load(top_k + row)
                p = tl.load(top_p + row)
                least = _cut(line, lane, vocab, top, scale, least, k, p, BLOCK)
            u = uniform_of(tl.load(seed + row), tl.load(output_index + row))
            choice = _draw(line, lane, vocab, top, scale, least, u, BLOCK, BLOCKS)
    tl.store(tokens + row, choice.to(tl.int64))
    tl.store(finite + row, good.to(tl.uint8))


@kernel
def _weights(line, token, vocab, top, scale):  # type: ignore[no-untyped-def]
    """exp((x - top) scale) of some tokens, 0 beyond the vocabulary."""
    inside = token < vocab
    x = tl.load(line + token, mask=inside, other=0.0).to(tl.float32)
    return tl.exp(tl.where(inside, (x - top) * scale, -1.0e4))


@kernel
def _cut(line, lane, vocab, top, scale, least, k, p, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The least weight that min-p, top-k and top-p keep.

    A non-negative float orders as its bits do, so both searches cut the range of bits from 0 to those of 1.0: for the
    largest value with at least k weights not below it, and for the smallest that has less than its share above it.
    Each reading of the row tests three values, so 15 readings do.
    """
    if (k > 0) & (k < vocab):
        low = tl.full((), 0, tl.int32)
        high = tl.full((), 0x3F800001, tl.int32)
        while high - low > 1:
            a, b, c = _quarters(low, high)
            count_a = tl.zeros((BLOCK,), tl.int32)
            count_b = tl.zeros((BLOCK,), tl.int32)
            count_c = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, vocab, BLOCK):
                token = start + lane
                # Compared as bits; -1 beyond the vocabulary, where even a bound of 0 must not count.
                w = _weights(line, token, vocab, top, scale).to(tl.int32, bitcast=True)
                w = tl.where(token < vocab, w, -1)
                count_a += (w >= a).to(tl.int32)
                count_b += (w >= b).to(tl.int32)
                count_c += (w >= c).to(tl.int32)
            enough_a, enough_b, enough_c = tl.sum(count_a, 0) >= k, tl.sum(count_b, 0) >= k, tl.sum(count_c, 0) >= k
            low = tl.where(enough_c, c, tl.where(enough_b, b, tl.where(enough_a, a, low)))
            high = tl.where(enough_a, tl.where(enough_b, tl.where(enough_c, high, c), b), a)
        least = tl.maximum(least, low.to(tl.float32, bitcast=True))
    if p < 1.0:
        mass = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            w = _weights(line, start + lane, vocab, top, scale)
            mass += tl.where(w >= least, w, 0.0)
        share = tl.sum(mass, 0) * p
        # Nothing is heavier than 1.0, so its value is kept for sure; what is below `least` goes anyway.
        low = tl.maximum(least, 0.0).to(tl.int32, bitcast=True) - 1
        high = tl.full((), 0x3F800000, tl.int32)
        while high - low > 1:
            a, b, c = _quarters(low, high)
            mass_a = tl.zeros((BLOCK,), tl.float32)
            mass_b = tl.zeros((BLOCK,), tl.float32)
            mass_c = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, vocab, BLOCK):
                w = _weights(line, start + lane, vocab, top, scale)
                bits = w.to(tl.int32, bitcast=True)
                mass_a += tl.where(bits > a, w, 0.0)
                mass_b += tl.where(bits > b, w, 0.0)
                mass_c += tl.where(bits > c, w, 0.0)
            less_a, less_b, less_c = tl.sum(mass_a, 0) < share, tl.sum(mass_b, 0) < share, tl.sum(mass_c, 0) < share
            high = tl.where(less_a, a, tl.where(less_b, b, tl.where(less_c, c, high)))
            low = tl.where(less_c, tl.where(less_b, tl.where(less_a, low, a), b), c)
        least = high.to(tl.float32, bitcast=True)
    return least


@kernel
def _quarters(low, high):  # type: ignore[no-untyped-def]
    """Three ascending integers strictly between low and high, which are at least 2 apart; they may be equal."""
    width = high - low
    first = low + tl.maximum(width // 4, 1)
    second = low + tl.maximum(width // 2, 1)
    third = low + tl.maximum(width // 2 + width // 4, 1)
    return first, second, third


@kernel
def _draw(line, lane, vocab, top, scale, least, u, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Inverse transform in two levels: first the block in which u times the total falls, then the token in it."""
    number = tl.arange(0, BLOCKS)
    sums = tl.zeros((BLOCKS,), tl.float64)
    for start in range(0, vocab, BLOCK):
        w = _weights(line, start + lane, vocab, top, scale)
        sums = tl.where(number == start // BLOCK, tl.sum(tl.where(w >= least, w, 0.0).to(tl.float64), 0), sums)
    up_to = tl.cumsum(sums, 0)
    goal = u * tl.sum(sums, 0)
    last = tl.max(tl.where(sums > 0, number, 0), 0)
    block = tl.minimum(tl.sum((up_to <= goal).to(tl.int32), 0), last)
    before = tl.sum(tl.where(number < block, sums, 0.0), 0)
    w = _weights(line, block * BLOCK + lane, vocab, top, scale)
    w = tl.where(w >= least, w, 0.0).to(tl.float64)
    last = tl.max(tl.where(w > 0, lane, 0), 0)
    within = tl.minimum(tl.sum((before + tl.cumsum(w, 0) <= goal).to(tl.int32), 0), last)
    return block * BLOCK + within


def _case(
    name: str, n: int, vocab: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Case:
    """Row 0 is greedy, row 1 (if there is one) draws from all tokens, the others do as they are told."""

    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(vocab)
        told = torch.arange(n) >= 2

        def column(value: float, otherwise: float, kind: torch.dtype) -> Tensor:
            return torch.where(told, value, otherwise).to(kind).to(device)

        degrees = column(temperature, 0.7, torch.float32)
        degrees[0] = 0.0
        return {
            "logits": (3 * torch.randn((n, vocab), generator=generator)).to(dtype).to(device),
            "temperature": degrees,
            "top_k": column(top_k, 0, torch.int64),
            "top_p": column(top_p, 1.0, torch.float32),
            "min_p": column(min_p, 0.0, torch.float32),
            "seed": torch.arange(n, dtype=torch.int64).to(device),
            "output_index": torch.arange(100, 100 + n).to(device),
            "greedy": temperature == 0,
            "cut": top_k > 0 or top_p < 1,
        }

    return Case(name, make)


OPS = (
    Op(
        "choose",
        choose,
        choose_definition,
        choose_kernel,
        (
            _case("greedy", 1, 300, temperature=0.0),
            _case("temperature", 5, 300, temperature=1.5),
            _case("min-p", 5, 100, min_p=0.05),
            _case("top-k", 5, 100, top_k=7),
            _case("top-p", 5, 100, top_p=0.8),
            _case("all filters", 6, 70, temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
        ),
    ),
)
