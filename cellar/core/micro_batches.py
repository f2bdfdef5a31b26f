"""How a long step's tokens are cut where the sums of one micro-batch are on their way while another is multiplied.

The planner prices this rule and ranks follow it (`runtime/ranks/micro_batches.py`), so both count the same parts.
"""

from __future__ import annotations

from dataclasses import dataclass

LANES = 2
"""Micro-batches side by side, and so the fewest."""

PART_NBYTES = 32 * 2**20
"""Of the largest part of a sum for which there is room: 2,048 tokens of 8,192 numbers in 16 bits."""

LEAST_WORK = 35 * 10**10
"""Multiplications of a micro-batch in a layer of a rank, at the least: in less time than a GPU takes for them its host
does not launch the layer of another.
"""

MOST_RANKS = 4
"""With more, nobody has measured whether it pays."""

LEAST_TOKENS = 513
"""Products of fewer tokens may be split, and then count in memory of their matrix, which two at once would share."""


@dataclass(frozen=True, slots=True)
class MicroBatchSizes:
    """Micro-batches have `most` tokens at most (0: no step is cut); where there are only `LANES`, `least` at least."""

    least: int
    most: int

    @classmethod
    def of(cls, layer_elements: float, row_nbytes: int, ranks: int) -> MicroBatchSizes:
        """Of a model whose layers have so many weights, shared by ranks; a token has `row_nbytes` of a sum."""
        by_work = -int(-LEAST_WORK * ranks // layer_elements)
        return cls(max(LEAST_TOKENS, by_work), PART_NBYTES // row_nbytes if ranks <= MOST_RANKS else 0)

    def count(self, tokens: int) -> int:
        """Micro-batches of a step; 1: it is computed whole."""
        return 1 if self.never or tokens < LANES * self.least else max(LANES, -(-tokens // self.most))

    @property
    def never(self) -> bool:
        """Whether no step is cut, however long it is."""
        return self.most < self.least

    def cut(self, tokens: int) -> list[int]:
        """Tokens of each, as equal as may be, the longer ones first."""
        count = self.count(tokens)
        each, more = divmod(tokens, count)
        return [each + (k < more) for k in range(count)]
