"""Tally: named counts that only grow, in memory, or in files that other processes read meanwhile.

A tally in files is one of the fronts' of a server. It is there again when its front is started again, so that sums
over all fronts never fall.
"""

from __future__ import annotations

import fcntl
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path

from cellar.core.errors import IntegrityError

CAPACITY = 4096
"""Most names of one tally."""

_VALUES, _NAMES = ".values", ".names"


class Tally:
    """Values as float64, each at the place of its name. One process writes; adding takes a lock nowhere.

    Two threads that do `values[place] += x` at once may lose one of them, so one thread adds to a name. With `path` the
    values stand in PATH.values and the names, a line each in the order of their places, in PATH.names. Raises
    IntegrityError for a path that another tally has open: two would give one place to two names.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._places: dict[str, int] = {}
        self._names = None
        if path is None:
            self.values = memoryview(bytearray(8 * CAPACITY)).cast("d")
            return
        names = path.with_name(path.name + _NAMES)
        self._names = open(names, "a", encoding="utf-8")  # noqa: SIM115 (open as long as the tally is)
        try:
            fcntl.flock(self._names, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._names.close()
            raise IntegrityError(f"the tally {path} is open already; it is one process's, and once.") from error
        for name in _lines(names):
            self._places[name] = len(self._places)
        with open(path.with_name(path.name + _VALUES), "a+b") as file:
            file.truncate(8 * CAPACITY)
            self.values = memoryview(mmap.mmap(file.fileno(), 8 * CAPACITY)).cast("d")

    def place(self, name: str) -> int:
        """Where a name's value stands in `values`; a new one is 0."""
        return self.places((name,))

    def places(self, names: Sequence[str]) -> int:
        """The first place of names that are always asked for together; the others follow it."""
        first = self._places.get(names[0])
        if first is None:
            first = len(self._places)
            if first + len(names) > CAPACITY:
                raise IntegrityError(f"a tally has room for {CAPACITY} names, but {names[0]} is one more.")
            for place, name in enumerate(names, first):
                self._places[name] = place
            if self._names is not None:
                self._names.write("".join(f"{name}\n" for name in names))
                self._names.flush()  # a name is read before its value can be other than 0
        return first

    def add(self, name: str, value: float = 1.0) -> None:
        """Let a value grow."""
        self.values[self.place(name)] += value

    def counts(self) -> dict[str, float]:
        """All of them."""
        return {name: self.values[place] for name, place in list(self._places.items())}


def summed(paths: Iterable[Path]) -> dict[str, float]:
    """The sums, by name, of tallies in files."""
    sums: dict[str, float] = {}
    for path in paths:
        names = _lines(path.with_name(path.name + _NAMES))
        if names:
            values = memoryview(path.with_name(path.name + _VALUES).read_bytes()).cast("d")
            for name, value in zip(names, values, strict=False):
                sums[name] = sums.get(name, 0.0) + value
    return sums


def _lines(file: Path) -> list[str]:
    """Whole lines of a file that may be growing."""
    if not file.exists():
        return []
    return file.read_text(encoding="utf-8").split("\n")[:-1]
