"""How codes of quantized matrices are taken by the kernels: sizes that their callers know, too, without Numba."""

from __future__ import annotations

SIZE = 16
"""Numbers that are computed with at once."""

BLOCK = 2 * SIZE
"""Codes that are decoded at once. Of those with 4 bits the first half are the low bits of sixteen bytes."""

ROWS = 4
"""Rows of the matrix that are multiplied at once: as many sums as hide a multiplication's latency."""

FOUR = 4
"""Tokens that are multiplied at once: so many, or fewer, by numbers as they are decoded, for more a tile is first."""

COLUMNS = 128
"""That are multiplied in whole numbers at once: of 4 bits the bytes of a register."""

PANEL = 2 * SIZE
"""Rows of the matrix that many tokens are multiplied by at once."""

PLACE = 512
"""Bytes of COLUMNS numbers of a token among many: three of each, and what belongs to all."""

UNIT = 4 * SIZE
"""Rows of the matrix that matrix units multiply at once."""
