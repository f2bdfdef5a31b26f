"""Stagger: starts spread evenly over passes, so that the sequences that run are of all ages (FlexGen §A.2).

The diagonal block schedule as an admission rule. Sequences that begin together need the memory of their full length
together; of sequences of all ages each needs that of its mean length at any time, so (2s + 2n) / (2s + n) times as many
share each pass's weights. If all have prompts of s tokens and n of output, bls/n of them begin a pass:

    pass    1  2  3  4  5  6          memory: the sum of a column
    a       s ....n
    b          s ....n
    c             s ....n

Lengths differ, so a start is paid for: a sequence takes so many rows and chunks of so many passes, and each pass pays
for the rows and chunks that there are. Whoever is next begins when those before it are paid for.
"""

from __future__ import annotations


class Stagger:
    """`chunks` of `chunk_size` tokens and `rows` may be taken at a time.

    What a pass pays too much is kept for the next one, and no longer.
    """

    def __init__(self, chunks: int, rows: int, chunk_size: int) -> None:
        self._each = (max(1, rows), max(1, chunks))
        self._size = chunk_size
        self._owed = [0.0, 0.0]  # row-passes and chunk-passes that no pass has paid for

    def passed(self) -> None:
        """A pass was planned."""
        self._pay(*self._each)

    def may_begin(self, busy: bool) -> bool:
        """True if another sequence may begin now; whoever finds nobody there always may."""
        if not busy:
            self._owed = [0.0, 0.0]
        return max(self._owed) <= 0

    def began(self, num_prompt: int, limit: int) -> None:
        """A sequence with so many tokens of prompt, which may grow up to `limit`."""
        for k, cost in enumerate(self._costs(num_prompt, limit)):
            self._owed[k] += cost

    def ended(self, length: int, limit: int) -> None:
        """A sequence that might have grown up to `limit` has ended with `length` tokens, or has been dropped."""
        self._pay(*self._costs(length, limit))

    def _pay(self, rows: float, chunks: float) -> None:
        paid = (rows, chunks)
        self._owed = [max(owed - pay, -each) for owed, pay, each in zip(self._owed, paid, self._each, strict=True)]

    def _costs(self, length: int, limit: int) -> tuple[float, float]:
        """Row-passes and chunk-passes of growing from `length` to `limit`, a token a pass; the last one is not kept."""
        passes = max(0, limit - length)
        if not passes:
            return 0.0, 0.0
        return float(passes), float(self._chunk_sum(limit - 1) - self._chunk_sum(length - 1))

    def _chunk_sum(self, tokens: int) -> int:
        """Chunks of 1, 2, ... `tokens` tokens, added up."""
        whole, rest = divmod(max(0, tokens), self._size)
        return self._size * whole * (whole + 1) // 2 + rest * (whole + 1)
