"""How a step's tokens are cut where a chunk is sent while the next is multiplied (Pope et al. §3.5).

The planner prices this rule and ranks follow it, so both count the same chunks.
"""

from __future__ import annotations

LOOP_TOKENS = 1024
"""Tokens that a chunk has at least: with half as many, by the planner's prices, reading weights again takes what is
hidden.
"""

LOOP_CHUNKS = 4
"""Chunks at most: what is not hidden is the last one's sum, and every chunk more waits for a collective to begin."""


def loop_chunks(tokens: int, least: int = LOOP_TOKENS) -> int:
    """How many chunks so many tokens make, of `least` at least."""
    return max(1, min(LOOP_CHUNKS, tokens // least))


def chunk_sizes(tokens: int, least: int = LOOP_TOKENS) -> list[int]:
    """Tokens of each chunk, as equal as may be, the longer ones first."""
    count = loop_chunks(tokens, least)
    each, more = divmod(tokens, count)
    return [each + (k < more) for k in range(count)]
