"""Choosing the next token of each row: one call per step.

The order of operations, as in vLLM: log-probabilities are of the raw logits; then penalties, logit bias, banned tokens
and masks change the logits; then temperature, min-p, top-k, top-p; then one token is drawn.

Weights. With m the row's largest logit, token i weighs w_i = exp((x_i - m) / temperature), so the best weighs 1. All
three filters are thresholds on w, and so keep or drop equal tokens together:

    min-p   w_i >= min_p
    top-k   w_i >= the k-th largest weight
    top-p   the tokens heavier than i make up less than top_p of what min-p and top-k left

Drawing. Inverse transform with one uniform number u(seed, output index) per row (`random.py`) over the kept tokens in
order of their ids. Nothing depends on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cellar.ops.sampling.random import uniform_definition
from cellar.ops.sampling.rows import LEAST_TEMPERATURE, Choice, TokenLogprobs


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
    """One token per row of logits [n, vocab]; the other arguments are those of `SamplingRows`.

    The best token (the first of equals) where the temperature is 0, else a drawn one. Every row is sorted.
    """
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


def penalize_definition(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    prompt: Tensor,
    output: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Lower the logits of tokens that have been used, in place; the arguments are those of `Penalties`.

    With c the token's count in the output and s whether it is in prompt or output:
    x <- x / repetition if x > 0 else x * repetition, where s;  x <- x - frequency c - presence [c > 0].
    """
    x = logits.index_select(0, rows)
    count = output.index_select(0, slots)
    used = count > 0
    seen = prompt.index_select(0, slots) | used
    repetition = repetition.unsqueeze(1)
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x -= frequency.unsqueeze(1) * count
    x -= presence.unsqueeze(1) * used
    logits[rows] = x


def forbid_definition(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Make tokens whose bit is not set impossible (-inf), in place; the arguments are those of `Masks`.

    What becomes of a forbidden NaN differs from device to device.
    """
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits.unsqueeze(-1) >> places) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits.index_select(0, rows).masked_fill_(~allowed, -torch.inf)


def target_logprobs_definition(logits: Tensor, targets: Tensor, n: int) -> TokenLogprobs:
    """Natural-log probabilities under softmax(logits), of the targets and of the n best tokens.

    logits: [t, vocab]; targets: int64 [t]. In float32.
    """
    x = logits.float()
    normalizer = x.logsumexp(dim=-1, keepdim=True)
    target = x.gather(1, targets.unsqueeze(1))
    best = x.topk(n, dim=-1)
    return TokenLogprobs(
        logprob=(target - normalizer).squeeze(1),
        rank=(x >= target).sum(dim=-1),
        top_ids=best.indices,
        top_logprobs=best.values - normalizer,
    )
