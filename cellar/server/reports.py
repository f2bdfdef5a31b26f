"""Reports: what an engine tells the fronts that choose between engines, every second in which something happens."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from cellar.core.messages import EngineRates, Outlook
from cellar.routing.basis import Basis
from cellar.routing.digest import DigestShape
from cellar.routing.report import ReplicaReport, Reporter

REPORT_SECONDS = 1.0
"""Between two reports: what they cost the loop is then a few thousandths of it."""

Tell = Callable[[ReplicaReport, EngineRates], None]


@dataclass(slots=True)
class _Shape:
    """Those who want digests of one shape; `whole` while one of them has none to which a change could be told."""

    reporter: Reporter
    watchers: dict[Hashable, Tell] = field(default_factory=dict)
    whole: bool = True


class Reports:
    """Belongs to the engine's thread. `outlook` is what the engine says of itself, which takes milliseconds.

    Reports name no replica, and nothing that was seen: whoever sends them knows.
    """

    def __init__(self, outlook: Callable[[], Outlook], basis: Basis) -> None:
        self._outlook = outlook
        self._basis = basis
        self._shapes: dict[tuple[tuple[int, int], ...], _Shape] = {}
        self._last = -REPORT_SECONDS
        self._news = False

    def watch(self, key: Hashable, shape: DigestShape, tell: Tell) -> None:
        """Somebody wants reports, the first one at once."""
        name = tuple((int(tier), bits) for tier, bits in sorted(shape.bits.items()))
        of_shape = self._shapes.get(name)
        if of_shape is None:
            reporter = Reporter("", self._basis.prices(EngineRates()), shape)
            of_shape = self._shapes[name] = _Shape(reporter)
        of_shape.watchers[key] = tell
        of_shape.whole = True
        self._news, self._last = True, self._last - REPORT_SECONDS

    def leave(self, key: Hashable) -> None:
        """Somebody wants none any more; who never wanted any is ignored."""
        for name, of_shape in list(self._shapes.items()):
            of_shape.watchers.pop(key, None)
            if not of_shape.watchers:
                del self._shapes[name]

    def patience(self, now: float) -> float | None:
        """Seconds until the next report is due; None: nothing has happened since the last one."""
        return max(0.0, self._last + REPORT_SECONDS - now) if self._news and self._shapes else None

    def turned(self, something: bool, now: float) -> None:
        """The engine has made a turn in which there was `something` to do, or not. Tells those who want to know."""
        self._news = self._news or something
        if not self._shapes or not self._news or now < self._last + REPORT_SECONDS:
            return
        outlook = self._outlook()
        prices = self._basis.prices(outlook.rates)
        for of_shape in self._shapes.values():
            of_shape.reporter.reprice(prices)
            report = of_shape.reporter.report(outlook, {}, whole=of_shape.whole)
            of_shape.whole = False
            for tell in of_shape.watchers.values():
                tell(report, outlook.rates)
        self._last, self._news = now, False
