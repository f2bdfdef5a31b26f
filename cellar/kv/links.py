"""Link: how long loads from a tier take, learned from those that came, and what is queued before the next."""

from __future__ import annotations

import math

MEMORY = 0.9
"""What a measurement weighs after each later one: the last ten or so count."""


class Line:
    """seconds = fixed + each * amount, by least squares over measurements of which the last count most."""

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of 1, x, y, x * x, x * y

    def add(self, amount: float, seconds: float) -> None:
        """A measurement; amounts are positive.

        One that took less than half of what was expected shows what is possible now: those before count no more. Of the
        first two that is said of no more than they had alone: they may not tell what is fixed.
        """
        fixed, each = self.fit()
        n, before, *_ = self._sums
        if n and (n > 2 or amount * n <= before) and seconds < (fixed + each * amount) / 2:
            self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        new = (1.0, amount, seconds, amount * amount, amount * seconds)
        self._sums = tuple(MEMORY * old + more for old, more in zip(self._sums, new, strict=True))  # type: ignore[assignment]

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self._sums[0] > 0

    def fit(self) -> tuple[float, float]:
        """-> fixed, each; neither is negative. Of amounts that were all alike the whole time is `each`."""
        n, x, y, xx, xy = self._sums
        spread = n * xx - x * x
        if not n:
            return 0.0, 0.0
        if spread <= 1e-6 * n * xx:
            return 0.0, y / x
        each = (n * xy - x * y) / spread
        fixed = (y - each * x) / n
        if each < 0:
            return y / n, 0.0
        return (fixed, each) if fixed >= 0 else (0.0, xy / xx)


class Link:
    """The way from one tier to the device. Loads come in the order in which they were ordered, or nearly so.

    A load's seconds count from when it was ordered, or from when the one before it came: what several threads copy at
    a time is then as fast as it helps. They are no more than what the copy says of itself: its result may have lain
    there until a step ended. Times are of the caller's clock.
    """

    def __init__(self) -> None:
        self._line = Line()
        self._ahead: dict[int, tuple[int, float]] = {}  # batch -> chunks, when it was ordered
        self._last = -math.inf  # when a load came last

    @property
    def known(self) -> bool:
        """Whether any load has come."""
        return self._line.known

    @property
    def is_busy(self) -> bool:
        """Whether any load is under way."""
        return bool(self._ahead)

    @property
    def last(self) -> float:
        """When a load was ordered or came last."""
        return max([self._last, *(ordered for _, ordered in self._ahead.values())])

    def ordered(self, batch: int, count: int, now: float) -> None:
        """A load of `count` chunks was ordered."""
        self._ahead[batch] = count, now

    def came(self, batch: int, works: bool, now: float, seconds: float = math.inf) -> None:
        """Its result has come, of a copy that took `seconds`; if it brought nothing, it says nothing of that."""
        count, ordered = self._ahead.pop(batch)
        if works:
            self._line.add(count, max(0.0, min(seconds, now - max(ordered, self._last))))
        self._last = max(now, self._last)

    def seconds(self, count: int) -> float:
        """Of a load of so many chunks by itself."""
        fixed, each = self._line.fit()
        return fixed + count * each

    def rate(self) -> tuple[float, float]:
        """Seconds of a load, and of each of its chunks."""
        return self._line.fit()

    def wait(self, now: float, until: int | None = None) -> float:
        """Seconds until the last load that was ordered has come, or batch `until`.

        One that takes longer than it should takes as long again: nothing else is known of it.
        """
        left = 0.0
        begun = self._last
        for k, (batch, (count, ordered)) in enumerate(self._ahead.items()):
            expected = self.seconds(count)
            left += abs(expected - (now - max(ordered, begun))) if k == 0 else expected
            if batch == until:
                break
        return left
