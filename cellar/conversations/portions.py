"""Portions: how many of the items that a statement finds may be read at once.

What a client has stored piece by piece, 8 MB at a time, is not read in one go: lengths are looked at first, and only
where the whole thread is larger than what is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable

from cellar.conversations.statements import Row


def fitting(rows: Iterable[Row], most: int) -> int:
    """How many of the rows, from the first on, have `most` characters together; each has its `length`."""
    total = count = 0
    for row in rows:
        total += row.length
        if total > most:
            break
        count += 1
    return count
