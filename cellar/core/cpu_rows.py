"""Which passes leave rows in host memory to the CPU, while the link to an accelerator brings the others."""

from __future__ import annotations

MOST, MOST_IN_CODES, MOST_IN_UNITS = 16, 4, 64
"""Tokens of such a pass: of more of them the CPU computes plain rows for longer than it reads them, quantized ones
sooner, and those that matrix units multiply (docs/decisions/0113-few-tokens-by-matrix-units.md) later.
"""


def most_tokens(*, codes: bool, units: bool) -> int:
    """Those of the largest, if some rows are in `codes`, or a CPU with matrix `units` has all of them in bfloat16."""
    if codes:
        return MOST_IN_CODES
    return MOST_IN_UNITS if units else MOST
