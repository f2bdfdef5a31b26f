"""Bits in words: how codes of 4 and 8 bits lie in bytes here, and in the 32-bit words of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""In a word of AWQ's the bits from 4 i on are those of element AWQ_ORDER[i]."""


def to_bytes(codes: Tensor) -> Tensor:
    """codes: uint8 [..., n] below 16, n even -> uint8 [..., n / 2], the first of two in the low bits."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def from_bytes(packed: Tensor) -> Tensor:
    """The other way: uint8 [..., n / 2] -> [..., n]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def from_words(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """words: int32 [..., n] -> codes uint8 [..., 32 n / bits], from the lowest bits up; `order` as in AWQ_ORDER."""
    count = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes = ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8)
    if order is not None:
        codes = codes[..., torch.tensor(order, device=words.device).argsort()]
    return codes.reshape(*words.shape[:-1], words.shape[-1] * count)
