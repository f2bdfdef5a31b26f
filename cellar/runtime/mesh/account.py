"""What collectives have sent: an account by kind, axes and name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Entry(NamedTuple):
    """Which collective, over which axes of the mesh, of what."""

    kind: str
    axes: str
    name: str


@dataclass(slots=True)
class Account:
    """Of one rank. `logical`: bytes that a chip must send, as `planner/sharding.py` counts them: what it holds
    afterwards and did not before (all-gather), held and does not keep (reduce-scatter, all-to-all), both (all-reduce).
    `moved`: bytes that the algorithm that ran read of other ranks' memory. `calls`: how often.
    """

    logical: dict[Entry, int] = field(default_factory=dict)
    moved: dict[Entry, int] = field(default_factory=dict)
    calls: dict[Entry, int] = field(default_factory=dict)

    def add(self, entry: Entry, logical: int, moved: int) -> None:
        """One collective more."""
        self.logical[entry] = self.logical.get(entry, 0) + logical
        self.moved[entry] = self.moved.get(entry, 0) + moved
        self.calls[entry] = self.calls.get(entry, 0) + 1

    def totals(self) -> Mapping[str, tuple[int, int]]:
        """Kind -> (logical, moved) bytes."""
        found: dict[str, tuple[int, int]] = {}
        for entry, logical in self.logical.items():
            before = found.get(entry.kind, (0, 0))
            found[entry.kind] = before[0] + logical, before[1] + self.moved[entry]
        return found
