"""What changes logits before a token is chosen: penalties, logit bias, tokens banned for a while, and bit masks.

All of these work in place on float32 logits [n, vocab] and touch only the rows that they are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cellar.ops.registry import Case, Op
from cellar.ops.triton_support import kernel

if TYPE_CHECKING:
    import triton.language as tl

_BLOCK = 1024
# Logits that are masked at a time on the CPU: what stays in its cache.
_PART = 1 << 17
# What the 8 bits of a byte of a mask, the lowest first, leave of 8 logits: the lesser of each and its limit.
_LIMITS = np.where((np.arange(256)[:, None] >> np.arange(8)) & 1, np.float32(np.inf), np.float32(-np.inf))


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of p rows of a batch.

    Row `rows[i]` of the batch has its tokens in row `slots[i]` of two stores that live as long as requests do.
    rows, slots: int64 [p]; prompt: bool [slots, vocab], the prompt's tokens; output: int32 [slots, vocab], how often
    each token was put out; repetition, frequency, presence: float32 [p].
    """

    rows: Tensor
    slots: Tensor
    prompt: Tensor
    output: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


@dataclass(frozen=True, slots=True)
class Biases:
    """values[i] is added to logits[rows[i], tokens[i]]: int64, int64, float32, all [b]."""

    rows: Tensor
    tokens: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Bans:
    """Token tokens[i] is impossible in row rows[i] while its output index is below until[i]: int64, all [b]."""

    rows: Tensor
    tokens: Tensor
    until: Tensor


@dataclass(frozen=True, slots=True)
class Masks:
    """Row rows[i] may choose token t only if bit t % 32 of bits[i, t // 32] is set: int64 [m], int32 [m, words]."""

    rows: Tensor
    bits: Tensor


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
    """Lower the logits of tokens that have been used, in place; the arguments are those of `Penalties`.

    With c the token's count in the output and s whether it is in prompt or output:
    x <- x / repetition if x > 0 else x * repetition, where s;  x <- x - frequency c - presence [c > 0].
    """
    change = penalize_kernel if logits.is_cuda else penalize_definition
    change(logits, rows, slots, prompt, output, repetition, frequency, presence)


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
    """The penalties in plain torch."""
    x = logits.index_select(0, rows)
    count = output.index_select(0, slots)
    used = count > 0
    seen = prompt.index_select(0, slots) | used
    repetition = repetition.unsqueeze(1)
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x -= frequency.unsqueeze(1) * count
    x -= presence.unsqueeze(1) * used
    logits[rows] = x


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


def forbid(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Make tokens whose bit is not set impossible (-inf), in place; the arguments are those of `Masks`.

    What becomes of a forbidden NaN differs from device to device.
    """
    change = forbid_kernel if logits.is_cuda else _forbid_on_cpu
    change(logits, rows, bits)


def forbid_definition(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """The masks in plain torch."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits.unsqueeze(-1) >> places) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits.index_select(0, rows).masked_fill_(~allowed, -torch.inf)


def _forbid_on_cpu(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """A byte of bits at a time, from a table: a seventh of the definition's time, which moves 4 bytes for each bit."""
    array, every = logits.numpy(), rows.numpy()
    vocab = array.shape[1]
    packed = bits.numpy().astype("<i4", order="C", copy=False).view(np.uint8)
    step = max(1, _PART // vocab)
    for begin in range(0, len(every), step):
        part = slice(begin, begin + step)
        limits = _LIMITS.take(packed[part], axis=0).reshape(len(packed[part]), -1)[:, :vocab]
        array[every[part]] = np.minimum(array[every[part]], limits)


def forbid_kernel(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """The masks in Triton: only forbidden tokens are written."""
    vocab = logits.shape[1]
    if rows.numel():
        _forbid_kernel[rows.numel(), -(-vocab // _BLOCK)](
            logits, rows, bits, vocab, logits.stride(0), bits.stride(0), BLOCK=_BLOCK
        )


@kernel
def _forbid_kernel(logits, rows, bits, vocab, stride, stride_bits, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab
    word = tl.load(bits + i.to(tl.int64) * stride_bits + token // 32, mask=mask, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    at = logits + tl.load(rows + i) * stride + token
    tl.store(at, tl.full((BLOCK,), float("-inf"), tl.float32), mask=mask & forbidden)


def bias(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Add to single logits, in place; the arguments are those of `Biases`. A few elements: torch's scatter will do."""
    logits.index_put_((rows, tokens), values, accumulate=True)


def ban(logits: Tensor, rows: Tensor, tokens: Tensor, until: Tensor, output_index: Tensor) -> None:
    """Make tokens impossible in rows that are too short to end, in place.

    output_index: int64 [n], how many tokens each row has put out; the other arguments are those of `Bans`.
    """
    now = logits[rows, tokens]
    logits[rows, tokens] = torch.where(output_index.index_select(0, rows) < until, -torch.inf, now)


def _penalty_case(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    vocab = 1100
    return {
        "logits": torch.randn((4, vocab), generator=generator).to(device),
        "rows": torch.tensor([3, 0], device=device),
        "slots": torch.tensor([1, 4], device=device),
        "prompt": (torch.rand((5, vocab), generator=generator) < 0.2).to(device),
        "output": torch.randint(0, 3, (5, vocab), generator=generator, dtype=torch.int32).to(device),
        "repetition": torch.tensor([1.3, 0.8], device=device),
        "frequency": torch.tensor([0.5, -0.25], device=device),
        "presence": torch.tensor([-0.1, 2.0], device=device),
    }


def _mask_case(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    vocab = 1100
    return {
        "logits": torch.randn((4, vocab), generator=generator).to(device),
        "rows": torch.tensor([2, 1], device=device),
        "bits": torch.randint(-(2**31), 2**31, (2, -(-vocab // 32)), generator=generator).to(torch.int32).to(device),
    }


_FLOAT32 = (torch.float32,)

OPS = (
    Op(
        "penalize",
        penalize,
        penalize_definition,
        penalize_kernel,
        (Case("two of four rows", _penalty_case, _FLOAT32),),
        changes=("logits",),
    ),
    Op(
        "forbid",
        forbid,
        forbid_definition,
        forbid_kernel,
        (Case("two of four rows", _mask_case, _FLOAT32),),
        ("logits",),
    ),
)
