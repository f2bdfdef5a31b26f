"""Portions: how many rows of an owner decode in one step while somebody with few of them waits for it, or may be back.

A step lasts as long as all of its rows take, so who has one row among 255 of another's waits for these 256 times to get
256 tokens. Where steps take longer the more rows they have, those with many take turns: a step has fewer of them, each
of them is in every third or so, and together they lose little, since a step costs little beside its rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from cellar.schedule.steps.holders import Holders
from cellar.schedule.steps.pace import Pace
from cellar.schedule.steps.rows import Index


class Portions:
    """Over the rows of `holders`."""

    def __init__(self, holders: Holders) -> None:
        self._holders = holders
        self._made = 0
        self._last = np.zeros(holders.rows.num_rows, np.int64)  # a row's latest turn: greater is later

    def of(self, ready: Index, pace: Pace) -> Index:
        """Those of `ready` that are in the next step: who has not been for longest, as many of each owner. `pace` says
        how many rows are enough.
        """
        self._made += 1
        shares, most = self._holders.shares, pace.enough(len(ready), self._holders.are_arriving)
        if most >= len(ready):
            return ready
        comes = self._holders.queue.first(shares) is not None or self._holders.few_may_return
        if len(shares) + comes < 2 or max(shares.values()) == 1:
            return ready  # nobody to take turns for, or nobody who can
        each = level(shares.values(), most)
        if not comes and min(shares.values()) > each:
            return ready  # nobody has few
        taken, chosen = Counter[str](), list[int]()
        for row in ready[np.argsort(self._last[ready], kind="stable")].tolist():
            owner = self._holders.rows.state(row).owner
            taken[owner] += 1
            if taken[owner] <= each:
                chosen.append(row)
        found = np.array(chosen, np.intp)
        self._last[found] = self._made * len(self._last) + np.arange(len(found))
        return np.sort(found)


def level(shares: Iterable[int], most: int) -> int:
    """The most rows that each owner may have if they are to be `most` together; one at least."""
    ordered = sorted(shares)
    for k, share in enumerate(ordered):
        even = most // (len(ordered) - k)
        if share > even:
            return max(1, even)
        most -= share
    return ordered[-1]
