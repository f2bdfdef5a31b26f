"""Teams: which rows decode in a plan where several plans pass the stages of a pipeline at once (Pensieve §4.1.1).

A row's next token can be computed when its last one has passed all stages. So plans share the rows that decode: each
takes as many, and none that is in a plan still on its way while there are others. Unequal plans would leave stages
waiting; the longest one is what all of them take.
"""

from __future__ import annotations

import numpy as np

from cellar.schedule.steps.rows import Index, Rows

_NEVER = -(2**31)


class Teams:
    """Over `rows`, for so many `stages`; with one stage all rows that are ready decode."""

    def __init__(self, rows: Rows, stages: int) -> None:
        self._rows = rows
        self._stages = stages
        self._made = 0
        self._latest = np.full(rows.num_rows, _NEVER)  # of each row, the number of the latest plan that names it

    def of(self, ready: Index, again: bool) -> Index:
        """Those of `ready` that decode in the next plan, in ascending order. `again`: there is nothing else to compute,
        so rows whose last token is still on its way may wait for it at the first stage.
        """
        if self._stages == 1:
            return ready
        rows, stages = self._rows, self._stages
        latest = self._latest[ready]
        free = (rows.in_flight[ready] == 0) | (latest <= self._made - stages)
        if free.any() or not again:
            ready, latest = ready[free], latest[free]
        # Any so many plans one after another have room for all that decode.
        count, turn = int(np.count_nonzero(rows.decodes & (rows.planned < rows.last))), self._made % stages
        most = max(1, -(-count * (turn + 1) // stages) - -(-count * turn // stages))
        return np.sort(ready[np.argsort(latest, kind="stable")[:most]])

    def planned(self, rows: Index) -> None:
        """A plan was made that names these rows: the ends of prompts among them are fed their tokens next."""
        self._latest[rows] = self._made
        self._made += 1
