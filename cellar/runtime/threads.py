"""How many threads a worker's operations take: chosen by their own times, and changed while they run.

A parallel operation waits for the slowest of its threads. Alone on the cores more threads are faster; beside another
program one of them stands in a queue, and two threads can be twenty times slower than one. Nobody says which it is, so
the worker's own times do: work is cut into laps (a layer of a step, a plan of cells), and now and then some laps are
tried with another number of threads.

A decision: no clock is read here, `now` and all durations are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

BLOCK_SECONDS = 0.03
"""Laps are judged together, for about as long as a system lets one program have a core."""
LEAST_LAPS = 3
BETTER = 0.95
"""Another number is taken if its laps take at most so much of the time."""
CHANGED = 1.5
"""Laps so much slower than usual mean that something else has begun, or ended."""
LOST = 1.5
GRACE = 0.01
"""A try that is so much slower, and has cost so many seconds (one lap alone: ten times as many), ends at once."""
SHARE = 0.04
"""The share of the time that tries may cost."""
PATIENCE_LEAST, PATIENCE_MOST = 0.1, 1.0
"""Seconds until a larger number is tried again: doubled by every try that fails."""
REST = 10.0
"""Seconds until a smaller number is tried again where nothing has changed."""
ALIKE = 4.0
"""A piece of work says how many threads suit another that has up to so many times its work."""
WAIT_MOST = 2.0
"""Seconds after which the next try may begin, whatever the last one has cost."""


class ThreadChoice:
    """Numbers of threads for laps of any kind, from 1 to `most`; the first laps get `most`.

    Call `begin`, then `lap` at the end of each lap; a kind's laps should take the same time per `size`.
    """

    def __init__(self, most: int) -> None:
        self._counts = counts_up_to(most)
        self._counts_beside = counts_up_to(max(1, most - 1))
        self._bill = _Bill()
        self._kinds: dict[tuple[Hashable, bool], _Kind] = {}
        self._now: _Kind | None = None
        self._size = 0.0
        self._begun = 0.0

    def begin(self, kind: Hashable, size: float, now: float, work: float | None = None, *, beside: bool = False) -> int:
        """A piece of work begins whose laps have `size` each. -> threads for its first lap

        `work` compares pieces of different kinds; without it their sizes do. `beside`: others of the same process are
        known to keep a core busy. Then laps are a kind of their own, and leave them that core.
        """
        found = self._kinds.get((kind, beside))
        if found is None:
            work = size if work is None else work
            counts = self._counts_beside if beside else self._counts
            found = self._kinds[kind, beside] = _Kind(counts, self._guess(work, beside), self._bill, work)
        self._now, self._size, self._begun = found, size, now
        return found.running

    def lap(self, now: float) -> int:
        """A lap has ended. -> threads for the next one"""
        kind = self._now
        assert kind is not None, "no piece of work has begun"
        kind.record(now - self._begun, self._size, now)
        self._begun = now
        return kind.running

    def _guess(self, work: float, beside: bool) -> int:
        """What suits the kind whose work is most like it; all threads if every one has far less. A single token goes
        best on one thread, and a prompt of 2,000 after it would take twice as long there."""
        alike = [kind for (_, there), kind in self._kinds.items() if there == beside]
        likest = min(alike, key=lambda one: abs(math.log(one.work / work)), default=None)
        if likest is None or likest.work * ALIKE < work:
            return self._counts_beside[-1] if beside else self._counts[-1]
        return likest.settled


def counts_up_to(most: int) -> tuple[int, ...]:
    """What is tried: powers of two, all threads, and all but one, in order."""
    powers = {1 << k for k in range(most.bit_length())}
    return tuple(sorted(count for count in powers | {most, most - 1} if 1 <= count <= most))


@dataclass(slots=True)
class _Bill:
    """What tries have cost, of all kinds together: the next one waits until the last is paid for."""

    due: float = 0.0


class _Kind:
    """Laps of one kind: the number that is `settled`, and the one that is `running`, which is another during a try."""

    def __init__(self, counts: tuple[int, ...], start: int, bill: _Bill, work: float) -> None:
        self.work = work
        self.settled = self.running = start
        self._counts = counts
        self._recent: float | None = None  # seconds per size with the settled number
        self._usual = 0.0  # the same over a longer time
        self._tried: dict[int, float] = {}
        self._patience = dict.fromkeys(counts, PATIENCE_LEAST)
        self._bill = bill
        self._changed = 0.0
        self._rival: tuple[int, float] | None = None  # has won its try; the settled number gets a last chance
        self._forget()

    def record(self, seconds: float, size: float, now: float) -> None:
        """A lap with the running number has taken so long."""
        self._seconds += seconds
        self._size += size
        self._laps += 1
        expected = (self._recent or 0.0) * self._size
        if self.running != self.settled:
            if self._is_lost(expected) or self._is_enough():
                self._judge(self._seconds - expected, now)
        elif self._rival is not None:
            if self._is_lost(self._rival[1] * self._size) or self._is_enough():
                self._decide(*self._rival, now)
        elif self._is_enough() or (self._recent and self._laps >= LEAST_LAPS and self._seconds > 2 * expected):
            self._settle_in(now)
            self._try_another(now)

    def _is_enough(self) -> bool:
        return self._laps >= LEAST_LAPS and self._seconds >= BLOCK_SECONDS

    def _is_lost(self, expected: float) -> bool:
        excess = self._seconds - expected
        return self._seconds > LOST * expected and excess > (GRACE if self._laps > 1 else 10 * GRACE)

    def _settle_in(self, now: float) -> None:
        """Laps with the settled number have been measured."""
        rate = self._seconds / self._size
        self._forget()
        if self._recent is None:
            self._recent = self._usual = rate
            return
        if rate > CHANGED * self._usual:
            # Whatever was known of the other numbers is void.
            self._changed = self._bill.due = now
            self._patience = dict.fromkeys(self._counts, PATIENCE_LEAST)
            self._usual = rate
        self._recent += 0.5 * (rate - self._recent)
        self._usual += 0.1 * (rate - self._usual)

    def _try_another(self, now: float) -> None:
        """Begin a try if one is due: first what was never tried or longest ago."""
        if now < self._bill.due:
            return
        waiting = [count for count in self._counts if count != self.settled and self._may_try(count, now)]
        if waiting:
            self.running = min(waiting, key=lambda count: (self._tried.get(count, -1.0), abs(count - self.settled)))

    def _may_try(self, count: int, now: float) -> bool:
        last = self._tried.get(count)
        if last is None:
            return True
        if count > self.settled:
            return now - last >= self._patience[count]
        return last < self._changed or now - last >= REST

    def _judge(self, excess: float, now: float) -> None:
        """A try has ended: the next one waits until it has been paid for."""
        count, rate = self.running, self._seconds / self._size
        assert self._recent is not None
        self._tried[count] = now
        self._bill.due = now + min(max(excess, 0.0) / SHARE, WAIT_MOST)
        if rate < BETTER * self._recent:
            self._rival = count, rate
        else:
            self._refuse(count)
        self.running = self.settled
        self._forget()

    def _decide(self, count: int, rate: float, now: float) -> None:
        """A slow moment is not a neighbour: whoever won against the settled number's last laps must win again."""
        settled = self._seconds / self._size
        if rate < BETTER * settled:
            self._tried[self.settled] = now
            self._patience = dict.fromkeys(self._counts, PATIENCE_LEAST)
            self.settled = self.running = count
            self._recent = self._usual = rate
        else:
            # One of the two blocks was a chance; more tries will tell.
            self._refuse(count)
            self._changed = now
            self._recent = settled
        self._rival = None
        self._forget()

    def _refuse(self, count: int) -> None:
        self._patience[count] = min(2 * self._patience[count], PATIENCE_MOST)

    def _forget(self) -> None:
        self._seconds = self._size = 0.0
        self._laps = 0
