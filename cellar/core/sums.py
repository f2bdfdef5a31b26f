"""What collectives send: what every algorithm must, and what ranks' own algorithms do (`runtime/ranks`).

Gathers, scatters and exchanges move what they must. A sum in the order of ranks is of two kinds: small ones are one
gather of all parts, large ones an exchange of pieces, each added by one rank, and a gather.
"""

from __future__ import annotations

ONE_SHOT_NBYTES = 256 * 2**10
"""Sums up to this size: every rank gets all parts and adds them. Larger ones: each adds a piece for all."""


def at_once(nbytes: float, chips: int) -> bool:
    """Whether every rank adds all parts of a sum itself."""
    return chips == 2 or nbytes <= ONE_SHOT_NBYTES


def sent_by_all_reduce(nbytes: int, chips: int) -> int:
    """What a chip must send of a sum of so many bytes: a reduce-scatter's and an all-gather's of equal shares."""
    return 2 * nbytes * (chips - 1) // chips


def moved_by_all_reduce(nbytes: int, item: int, chips: int) -> int:
    """What a rank gets from others for a sum of so many bytes, `item` an element; pieces are filled up to be equal."""
    if at_once(nbytes, chips):
        return (chips - 1) * nbytes
    return 2 * (chips - 1) * (-(-(nbytes // item) // chips) * item)
