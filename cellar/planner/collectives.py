"""Prices of collectives that were measured: lines of seconds over bytes, and how far off they are.

A collective of one kind over so many ranks takes `start` seconds, and `each` for a byte that a rank must send
(`sharding.volume`). Small ones may go another way than large ones (boxes in each other's memory, all parts at once), so
there are two such lines where one misses. They are fitted to some of the sizes and judged on the others.

They are measured by `cellar profile --ranks`, or were for the machines of the library (`ranks.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cellar.core.collectives import OURS, PEERS, SEND, SUM
from cellar.core.hardware import Origin, Table
from cellar.planner.sharding import Kind

KINDS = frozenset({*(kind.value for kind in Kind if kind not in (Kind.SLICE, Kind.SUM)), SEND})

LEAST = 3
"""Sizes that a line needs, so that it is more than the way between two of them."""

SPLIT = 0.7
"""Two lines must miss by less than this share of what one misses by."""


@dataclass(frozen=True, slots=True)
class Line:
    """Up to `most` bytes sent: `start` seconds, and `each` a byte."""

    most: float
    start: float
    each: float

    @property
    def rate(self) -> float:
        """Bytes/s."""
        return 1 / self.each if self.each else math.inf


@dataclass(frozen=True, slots=True)
class Fit:
    """Lines of a kind of collective over so many ranks, by ascending size; the last has no end.

    `missed`: the worst relative error on sizes that were not fitted; None: there were none.
    """

    way: str
    kind: str
    ranks: int
    lines: tuple[Line, ...]
    missed: float | None = None
    source: Origin = "measured"

    def line(self, nbytes: float) -> Line:
        """The one for so many bytes."""
        return next(line for line in self.lines if nbytes <= line.most)

    def seconds(self, nbytes: float) -> float:
        """Of a collective in which each rank sends so many bytes."""
        line = self.line(nbytes)
        return line.start + line.each * nbytes


@dataclass(frozen=True, slots=True)
class Collectives:
    """Fits of one way. Hashable, so that what is made of them can be kept."""

    fits: tuple[Fit, ...]

    @property
    def ranks(self) -> int:
        """The most that were measured."""
        return max(fit.ranks for fit in self.fits)

    @property
    def boxes(self) -> bool:
        """Whether sums of tensor parallelism go through boxes in peers' memory; if not, they are all-reduces."""
        return any(fit.kind == SUM for fit in self.fits)

    def of(self, kind: str, ranks: int) -> Fit:
        """Over so many ranks, else the next more, else the most that were measured."""
        if kind == SUM and not self.boxes:
            kind = Kind.ALL_REDUCE.value
        known = sorted((fit for fit in self.fits if fit.kind == kind), key=lambda fit: fit.ranks)
        return next((fit for fit in known if fit.ranks >= ranks), known[-1])


def read(table: Table) -> tuple[Fit, ...]:
    """Fits of every way, kind and number of ranks of a profile's table, in its order."""
    points: dict[tuple[str, str, int], list[tuple[float, float, bool]]] = {}
    for way, kind, ranks, _, sent, seconds, fitted in table.rows:
        point = float(sent), float(seconds), bool(fitted)
        points.setdefault((str(way), str(kind), int(ranks)), []).append(point)
    return tuple(fit(*key, found) for key, found in points.items())


def ours(table: Table) -> Collectives | None:
    """What the planner prices by; None if a kind was not measured.

    Where there are boxes, our all-reduce is a sum through them, which layouts of plans do not have: the library's is
    the nearest that is measured to theirs.
    """
    fits = read(table)
    found = tuple(one for one in fits if one.way == OURS)
    if not {one.kind for one in found} >= KINDS:
        return None
    reduce, ways = Kind.ALL_REDUCE.value, {one.way for one in fits}
    theirs = tuple(one for one in fits if one.way not in (OURS, PEERS) and one.kind == reduce)
    if PEERS not in ways or not theirs:
        return Collectives(found)
    return Collectives((*(replace(one, kind=SUM) if one.kind == reduce else one for one in found), *theirs))


def fit(way: str, kind: str, ranks: int, points: Sequence[tuple[float, float, bool]]) -> Fit:
    """Lines through (bytes sent, seconds, whether to be fitted)."""
    points = sorted(points)
    seen = np.array([(sent, seconds) for sent, seconds, fitted in points if fitted])
    one, misses = _line(seen)
    lines: tuple[Line, ...] = (one,)
    least = misses * SPLIT
    for k in range(LEAST, len(seen) - LEAST + 1):
        (small, a), (large, b) = _line(seen[:k]), _line(seen[k:])
        if a + b < least:
            lines, least = (replace(small, most=float(seen[k - 1, 0])), large), a + b
    found = Fit(way, kind, ranks, lines)
    errors = [abs(found.seconds(sent) / seconds - 1) for sent, seconds, fitted in points if not fitted]
    return replace(found, missed=max(errors, default=None))


def _line(seen: np.ndarray) -> tuple[Line, float]:
    """The line with the least squared relative errors, neither start nor slope below 0, and their sum."""
    from scipy.optimize import nnls  # a tenth of the seconds in which a server's process starts, which fits no lines

    sent, seconds = seen[:, 0], seen[:, 1]
    unit = float(sent.max())
    (start, each), norm = nnls(np.stack((1 / seconds, sent / unit / seconds), 1), np.ones(len(seen)))
    return Line(math.inf, float(start), float(each) / unit), float(norm) ** 2
