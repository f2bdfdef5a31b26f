"""Choosing the next token of each row: one call per step. What is chosen, and in which order, says `definition.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from cellar.ops.registry import Op, Variant
from cellar.ops.sampling import cases
from cellar.ops.sampling.cpu import choose_cpu, forbid_cpu, target_logprobs_cpu
from cellar.ops.sampling.definition import (
    choose_definition,
    forbid_definition,
    penalize_definition,
    target_logprobs_definition,
)
from cellar.ops.sampling.random import uniform_cpu, uniform_definition
from cellar.ops.sampling.rows import (
    LEAST_TEMPERATURE,
    Bans,
    Biases,
    Choice,
    Masks,
    Penalties,
    Sampled,
    SamplingRows,
    TokenLogprobs,
)
from cellar.ops.sampling.triton import (
    choose_kernel,
    forbid_kernel,
    penalize_kernel,
    target_logprobs_kernel,
    uniform_kernel,
)

__all__ = [
    "LEAST_TEMPERATURE",
    "OPS",
    "Bans",
    "Biases",
    "Choice",
    "Masks",
    "Penalties",
    "Sampled",
    "SamplingRows",
    "TokenLogprobs",
    "ban",
    "bias",
    "choose",
    "forbid",
    "penalize",
    "sample",
    "target_logprobs",
    "uniform",
]

_CHOOSE = Op("choose", choose_definition, (Variant("triton", choose_kernel), Variant("cpu", choose_cpu)), cases.CHOOSE)
_PENALIZE = Op(
    "penalize", penalize_definition, (Variant("triton", penalize_kernel),), cases.PENALIZE, changes=("logits",)
)
_FORBID = Op(
    "forbid",
    forbid_definition,
    (Variant("triton", forbid_kernel), Variant("cpu", forbid_cpu)),
    cases.FORBID,
    changes=("logits",),
)
_TARGET_LOGPROBS = Op(
    "target_logprobs",
    target_logprobs_definition,
    (Variant("triton", target_logprobs_kernel), Variant("cpu", target_logprobs_cpu)),
    cases.TARGET_LOGPROBS,
)
_UNIFORM = Op(
    "uniform", uniform_definition, (Variant("triton", uniform_kernel), Variant("cpu", uniform_cpu)), cases.UNIFORM
)
OPS = (_CHOOSE, _PENALIZE, _FORBID, _TARGET_LOGPROBS, _UNIFORM)


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
    """One token per row of logits [n, vocab]; the other arguments are those of `SamplingRows`."""
    run = _CHOOSE.on_cpu if logits.is_cpu else _CHOOSE.on_gpu
    return run(logits, temperature, top_k, top_p, min_p, seed, output_index, greedy, cut)


def penalize(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    prompt: Tensor,
    output: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Lower the logits of tokens that have been used, in place; the arguments are those of `Penalties`."""
    run = _PENALIZE.on_cpu if logits.is_cpu else _PENALIZE.on_gpu
    run(logits, rows, slots, prompt, output, repetition, frequency, presence)


def forbid(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Make tokens whose bit is not set impossible (-inf), in place; the arguments are those of `Masks`."""
    (_FORBID.on_cpu if logits.is_cpu else _FORBID.on_gpu)(logits, rows, bits)


def bias(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Add to single logits, in place; the arguments are those of `Biases`. A few elements: torch's scatter will do."""
    logits.index_put_((rows, tokens), values, accumulate=True)


def ban(logits: Tensor, rows: Tensor, tokens: Tensor, until: Tensor, output_index: Tensor) -> None:
    """Make tokens impossible in rows that are too short to end, in place.

    output_index: int64 [n], how many tokens each row has put out; the other arguments are those of `Bans`.
    """
    now = logits[rows, tokens]
    logits[rows, tokens] = torch.where(output_index.index_select(0, rows) < until, -torch.inf, now)


def target_logprobs(logits: Tensor, targets: Tensor, n: int) -> TokenLogprobs:
    """Natural-log probabilities of targets [t] and of the n best tokens under softmax(logits [t, vocab])."""
    return (_TARGET_LOGPROBS.on_cpu if logits.is_cpu else _TARGET_LOGPROBS.on_gpu)(logits, targets, n)


def uniform(seed: Tensor, index: Tensor) -> Tensor:
    """u(seed, index) in [0, 1): seed, index: int64 [n] -> float64 [n], the same bits on every device."""
    return (_UNIFORM.on_cpu if seed.is_cpu else _UNIFORM.on_gpu)(seed, index)
