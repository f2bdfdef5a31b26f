"""Example calls of sampling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cellar.ops.registry import Case


def _choice(
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


def _logprobs(t: int, vocab: int, n: int) -> Case:
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


def _seeds(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 42]
    return {
        "seed": torch.tensor(seeds, device=device),
        "index": torch.tensor([0, 1, 2, 1_000_000, 7, 3], device=device),
    }


_FLOAT32 = (torch.float32,)

CHOOSE = (
    _choice("greedy", 1, 300, temperature=0.0),
    _choice("temperature", 5, 300, temperature=1.5),
    _choice("min-p", 5, 100, min_p=0.05),
    _choice("top-k", 5, 100, top_k=7),
    _choice("top-p", 5, 100, top_p=0.8),
    _choice("all filters", 6, 70, temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
)
PENALIZE = (Case("two of four rows", _penalty_case, _FLOAT32),)
FORBID = (Case("two of four rows", _mask_case, _FLOAT32),)
TARGET_LOGPROBS = (_logprobs(3, 250, 5), _logprobs(2, 33, 0))
UNIFORM = (Case("extremes", _seeds, _FLOAT32),)
