"""Which kernel multiplies by a quantized matrix at how many tokens: a lookup, as for plain ones (`ops/linear/choice.py`).

The library's product of the expanded matrix is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from cellar.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rows:
    """Sizes of the kernel for one token: rows per program, blocks of columns a turn, turns requested ahead, warps."""

    rows: int
    blocks: int
    ahead: int
    warps: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of tiles: rows, tokens (of fewer tokens the next power of two), stages in flight, splits along K, warps."""

    rows: int
    tokens: int
    stages: int
    splits: int
    warps: int = 4

    def smaller(self) -> Tiles | None:
        """The next sizes to try where a device refuses these; None: no smaller ones."""
        if self.stages > 2:
            return Tiles(self.rows, self.tokens, self.stages - 1, self.splits, self.warps)
        if self.tokens > 32:
            return Tiles(self.rows, self.tokens // 2, self.stages, self.splits, self.warps)
        if self.rows > 32:
            return Tiles(self.rows // 2, self.tokens, self.stages, self.splits, self.warps)
        return None


Kernel: TypeAlias = Rows | Tiles | None


# Tokens beyond which the matrix is written out for the library's product: to write it takes as long as 500 tokens do.
_MOST_TILED = 512


def default_kernel(n: int, k: int, m: int) -> Kernel:
    """What was fastest on an H200 for matrices of about this shape, in all formats (docs/log/quantized-gpu.md)."""
    if m == 1:
        return Rows(8, 4, 1, 4)
    if m <= 64:
        splits = 1 if n > 12_000 else 4 if k > 8192 else 2
        return Tiles(64, 64, 4, splits)
    return Tiles(128, 64, 3, 1, 8) if m <= _MOST_TILED else None
