"""Log-probabilities of given tokens, their ranks, and the best alternatives."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cellar.ops.registry import Case, Op
from cellar.ops.triton_support import kernel

if TYPE_CHECKING:
    import triton.language as tl

# Logits up to which one thread is best on a CPU.
_FEW = 1 << 20


class TokenLogprobs(NamedTuple):
    """Of t tokens. logprob: float32 [t]; rank: int64 [t], how many tokens are at least as probable (1 is best);
    top_ids: int64 [t, n] and top_logprobs: float32 [t, n], the n best, descending."""

    logprob: Tensor
    rank: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def target_logprobs(logits: Tensor, targets: Tensor, n: int) -> TokenLogprobs:
    """Natural-log probabilities under softmax(logits), of the targets and of the n best tokens.

    logits: [t, vocab]; targets: int64 [t].
    """
    if logits.is_cuda:
        return target_logprobs_kernel(logits, targets, n)
    few = logits.numel() <= _FEW
    return _target_logprobs_of_few(logits, targets, n) if few else target_logprobs_definition(logits, targets, n)


def _target_logprobs_of_few(logits: Tensor, targets: Tensor, n: int) -> TokenLogprobs:
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


def target_logprobs_definition(logits: Tensor, targets: Tensor, n: int) -> TokenLogprobs:
    """The log-probabilities in plain torch, in float32."""
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


def target_logprobs_kernel(logits: Tensor, targets: Tensor, n: int) -> TokenLogprobs:
    """The same in Triton, one program per row and no copy of the logits in float32; the n best are torch's topk."""
    t, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    normalizer = torch.empty(t, dtype=torch.float32, device=logits.device)
    logprob = torch.empty_like(normalizer)
    rank = torch.empty(t, dtype=torch.int64, device=logits.device)
    if t:
        block = min(4096, 1 << max(0, vocab - 1).bit_length())
        _target_kernel[(t,)](
            logits, targets, normalizer, logprob, rank, vocab, logits.stride(0), BLOCK=block, num_warps=8
        )
    best = logits.topk(n, dim=-1)
    return TokenLogprobs(logprob, rank, best.indices, best.values.float() - normalizer.unsqueeze(1))


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


def _case(t: int, vocab: int, n: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
        generator = torch.Generator().manual_seed(vocab)
        # Up to 256 different numbers of 8 bits: no two logits of a row are equal in any dtype.
        order = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(t)])
        return {
            "logits": (order.float() / 128).to(dtype).to(device),
            "targets": torch.randint(0, vocab, (t,), generator=generator).to(device),
            "n": n,
        }

    return Case(f"{t}x{vocab}, best {n}", make)


OPS = (
    Op(
        "target_logprobs",
        target_logprobs,
        target_logprobs_definition,
        target_logprobs_kernel,
        (_case(3, 250, 5), _case(2, 33, 0)),
    ),
)
