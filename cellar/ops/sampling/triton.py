"""Choosing tokens in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cellar.ops.room import room_of
from cellar.ops.sampling.rows import LEAST_TEMPERATURE, Choice, TokenLogprobs
from cellar.ops.triton_support import dependent_launch, kernel

if TYPE_CHECKING:
    import triton.language as tl

_BLOCK = 1024
_NUMBERS = 256


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
            num_warps=min(max(1, block // 256), room_of(logits.device).warps),
            **dependent_launch(logits),
        )
    return Choice(tokens, finite)


def penalize_kernel(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    prompt: Tensor,
    output: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """The penalties in Triton, in one pass."""
    vocab = logits.shape[1]
    if rows.numel():
        _penalize_kernel[rows.numel(), -(-vocab // _BLOCK)](
            logits,
            rows,
            slots,
            prompt.view(torch.uint8),
            output,
            repetition,
            frequency,
            presence,
            vocab,
            logits.stride(0),
            BLOCK=_BLOCK,
        )


def forbid_kernel(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """The masks in Triton: only forbidden tokens are written."""
    vocab = logits.shape[1]
    if rows.numel():
        _forbid_kernel[rows.numel(), -(-vocab // _BLOCK)](
            logits, rows, bits, vocab, logits.stride(0), bits.stride(0), BLOCK=_BLOCK
        )


def target_logprobs_kernel(logits: Tensor, targets: Tensor, n: int) -> TokenLogprobs:
    """The same in Triton, one program per row and no copy of the logits in float32; the n best are torch's topk."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    normalizer, logprob, rank = score_targets(logits, targets)
    best = logits.topk(n, dim=-1)
    return TokenLogprobs(logprob, rank, best.indices, best.values.float() - normalizer.unsqueeze(1))


def score_targets(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: the logarithm of its sum of exponentials, its target's log-probability and rank."""
    t, vocab = logits.shape
    normalizer = torch.empty(t, dtype=torch.float32, device=logits.device)
    logprob = normalizer.new_empty(t)
    rank = torch.empty(t, dtype=torch.int64, device=logits.device)
    if t:
        block = min(4096, 1 << max(0, vocab - 1).bit_length())
        _target_kernel[(t,)](
            logits, targets, normalizer, logprob, rank, vocab, logits.stride(0), BLOCK=block, num_warps=8
        )
    return normalizer, logprob, rank


def uniform_kernel(seed: Tensor, index: Tensor) -> Tensor:
    """u(seed, index) in Triton."""
    out = torch.empty(seed.shape, dtype=torch.float64, device=seed.device)
    n = seed.numel()
    if n:
        _uniform_kernel[(-(-n // _NUMBERS),)](seed.contiguous(), index.contiguous(), out, n, BLOCK=_NUMBERS)
    return out


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


@kernel
def _penalize_kernel(  # type: ignore[no-untyped-def]
    logits,  # [n, vocab]
    rows,  # [p]
    slots,  # [p]
    prompt,  # [slots, vocab]
    output,  # [slots, vocab]
    repetition,  # [p]
    frequency,  # [p]
    presence,  # [p]
    vocab,
    stride,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab
    at = logits + tl.load(rows + i) * stride + token
    slot = tl.load(slots + i) * vocab + token
    x = tl.load(at, mask=mask, other=0.0)
    count = tl.load(output + slot, mask=mask, other=0)
    seen = (tl.load(prompt + slot, mask=mask, other=0) != 0) | (count > 0)
    factor = tl.load(repetition + i)
    x = tl.where(seen, tl.where(x > 0, x / factor, x * factor), x)
    x -= tl.load(frequency + i) * count.to(tl.float32)
    x -= tl.where(count > 0, tl.load(presence + i), 0.0)
    tl.store(at, x, mask=mask)


@kernel
def _forbid_kernel(logits, rows, bits, vocab, stride, stride_bits, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab
    word = tl.load(bits + i.to(tl.int64) * stride_bits + token // 32, mask=mask, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    at = logits + tl.load(rows + i) * stride + token
    tl.store(at, tl.full((BLOCK,), float("-inf"), tl.float32), mask=mask & forbidden)


@kernel
def _target_kernel(  # type: ignore[no-untyped-def]
    logits,  # [t, vocab]
    targets,  # [t]
    normalizer,  # [t]
    logprob,  # [t]
    rank,  # [t]
    vocab,
    stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -3.0e38, tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + lane
        x = tl.load(line + token, mask=token < vocab, other=0.0).to(tl.float32)
        best = tl.maximum(best, tl.where(token < vocab, x, -3.0e38))
    top = tl.max(best, 0)
    target = tl.load(line + tl.load(targets + row)).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + lane
        inside = token < vocab
        x = tl.load(line + token, mask=inside, other=0.0).to(tl.float32)
        total += tl.exp(tl.where(inside, x - top, -1.0e4))
        count += (inside & (x >= target)).to(tl.int32)
    norm = top + tl.log(tl.sum(total, 0))
    tl.store(normalizer + row, norm)
    tl.store(logprob + row, target - norm)
    tl.store(rank + row, tl.sum(count, 0).to(tl.int64))


@kernel
def _uniform_kernel(seed, index, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    u = uniform_of(tl.load(seed + i, mask=mask, other=0), tl.load(index + i, mask=mask, other=0))
    tl.store(out + i, u, mask=mask)


@kernel
def uniform_of(seed, index):  # type: ignore[no-untyped-def]
    """u(seed, index) inside a kernel: int64 in, float64 out."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    z = mix_bits(seed.to(tl.uint64) + golden)
    z = mix_bits(z + (index.to(tl.uint64) + 1) * golden)
    # 2^-53; the shifted number has 53 bits, so nothing is rounded.
    return (z >> 11).to(tl.float64) * 1.1102230246251565e-16


@kernel
def mix_bits(z):  # type: ignore[no-untyped-def]
    """SplitMix64's output function on uint64."""
    z = (z ^ (z >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)
