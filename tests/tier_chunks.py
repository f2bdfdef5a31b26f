"""Chunks that tests put into a tier and read back."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from cellar.core.messages import ChunkLabel

NBYTES = 10_000
"""Of a chunk."""


class Tier(Protocol):
    """What is read of a tier."""

    def read(self, slot: int, out: np.ndarray, label: ChunkLabel) -> None: ...


def label(number: int, tokens: bytes = b"") -> ChunkLabel:
    return ChunkLabel(bytes([number]) * 16, b"p" * 15 + bytes([number]), 32 * number, b"", tokens)


def chunk(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, NBYTES, dtype=np.uint8)


def comes_back(tier: Tier, slot: int, number: int | None = None) -> bool:
    number = slot if number is None else number
    out = np.zeros(NBYTES, np.uint8)
    try:
        tier.read(slot, out, label(number))
    except OSError:
        return False
    assert np.array_equal(out, chunk(number)), "damage got through"
    return True
