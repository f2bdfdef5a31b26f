"""What the processes of one server have in common: a directory of their own, gone with the server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from cellar.server.admission import SharedWaiting
from cellar.server.tally import Tally, summed


@dataclass(frozen=True, slots=True)
class Shared:
    """The place of one front among `count`; the process that keeps the fronts has the place `count`.

    The directory holds the sockets of `engines` engines, the tallies of all places, and who waits at each; `owners` are
    those of the server's keys.
    """

    directory: Path
    index: int
    count: int
    owners: tuple[str, ...] = ()
    engines: int = 1

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the engines' sockets."""
        return tuple(str(self.directory / f"engine-{k}") for k in range(self.engines))

    def tally(self) -> Tally:
        """This place's own tally."""
        return Tally(self._tally(self.index))

    def counts(self) -> dict[str, float]:
        """The sums of all tallies."""
        return summed(self._tally(k) for k in range(self.count + 1))

    def waiting(self) -> SharedWaiting:
        """Who waits, here and at all."""
        return SharedWaiting(self.directory / "waiting", self.index, self.count, self.owners)

    def at(self, index: int) -> Shared:
        """Another place."""
        return replace(self, index=index)

    def _tally(self, index: int) -> Path:
        return self.directory / f"tally-{index}"
