"""Routers that know nothing of chunks: what the affinity router is compared with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from cellar.core.errors import CapacityError
from cellar.routing.report import ReplicaReport
from cellar.routing.request import RoutedRequest
from cellar.routing.router import Choice, Why

Pick = Callable[[Sequence[str], "Outstanding"], str]
"""One of several names."""


class Outstanding:
    """Replicas by name, and how many requests of this router each has."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}
        self.draining: set[str] = set()
        self.numbers: dict[int, str] = {}
        self.sent = 0

    def candidates(self, among: Collection[str] | None) -> list[str]:
        """Names that may be chosen, in order; those that drain only if there are no others."""
        allowed = sorted(name for name in self.count if among is None or name in among)
        steady = [name for name in allowed if name not in self.draining]
        return steady or allowed


class RuleRouter:
    """Implements `Router` by a rule that looks at names and outstanding requests only."""

    def __init__(self, pick: Pick, name: str = "router") -> None:
        self.name = name
        self._pick = pick
        self._known = Outstanding()

    def report(self, report: ReplicaReport, now: float) -> bool:
        """The digest is not looked at."""
        self._known.count.setdefault(report.replica, 0)
        (self._known.draining.add if report.draining else self._known.draining.discard)(report.replica)
        return True

    def remove(self, replica: str) -> None:
        known = self._known
        known.count.pop(replica, None)
        known.draining.discard(replica)
        known.numbers = {number: name for number, name in known.numbers.items() if name != replica}

    def choose(self, request: RoutedRequest, now: float, among: Collection[str] | None = None) -> Choice:
        known = self._known
        allowed = known.candidates(among)
        if not allowed:
            raise CapacityError("no replica may be chosen; start one, or wait until one has reported.")
        replica = self._pick(allowed, known)
        known.sent += 1
        known.count[replica] += 1
        known.numbers[known.sent] = replica
        return Choice(replica, known.sent, 0.0, Why.RULE)

    def started(self, number: int, now: float) -> None:
        """Nothing changes."""

    def ended(self, number: int, num_output: int, now: float) -> None:
        replica = self._known.numbers.pop(number, None)
        if replica is not None:
            self._known.count[replica] -= 1


def round_robin(name: str = "router") -> RuleRouter:
    """One after the other."""
    return RuleRouter(lambda allowed, known: allowed[known.sent % len(allowed)], name)


def least_loaded(name: str = "router") -> RuleRouter:
    """The fewest requests outstanding; of equal ones in turn."""

    def pick(allowed: Sequence[str], known: Outstanding) -> str:
        turned = [allowed[(known.sent + k) % len(allowed)] for k in range(len(allowed))]
        return min(turned, key=known.count.__getitem__)

    return RuleRouter(pick, name)


def two_choices(seed: int = 0, name: str = "router") -> RuleRouter:
    """The one with fewer requests of two drawn at random (Mitzenmacher 2001): what Ray Serve does by default."""
    random = np.random.default_rng(seed)

    def pick(allowed: Sequence[str], known: Outstanding) -> str:
        drawn: list[int] = random.choice(len(allowed), min(2, len(allowed)), replace=False).tolist()
        return min((allowed[k] for k in drawn), key=known.count.__getitem__)

    return RuleRouter(pick, name)
