"""The structure of a response: where each value that an unfold function returned is found in a request's results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cellar.cells.compiler import Compiled
from cellar.cells.graph import GROWN_ROWS
from cellar.cells.refs import GrownOutput, Output, OutputRange, Outputs
from cellar.core.cell_graphs import CellResults
from cellar.core.errors import RequestError
from cellar.core.tasks import Port

Kind = Literal["one", "many", "growing"]
Leaf = Output | Outputs | GrownOutput
LEAVES = (Output, Outputs, GrownOutput)


@dataclass(frozen=True, slots=True)
class ResponsePort:
    """A value of the response: one, a list of them, or a list that grows while the request runs."""

    kind: Kind
    port: Port


@dataclass(frozen=True, slots=True, eq=False)
class _One:
    part: int
    output: int
    place: int

    def value(self, results: CellResults) -> Any:
        values = results.emitted[self.part][self.output]
        assert values is not None
        value = values[self.place]
        return value.item() if value.ndim == 0 else value


@dataclass(frozen=True, slots=True, eq=False)
class _Many:
    parts: tuple[tuple[int, int, NDArray[np.int32]], ...]

    def value(self, results: CellResults) -> Any:
        found = []
        for part, output, places in self.parts:
            values = results.emitted[part][output]
            assert values is not None
            found.append(values[places])
        if not found:
            return np.zeros(0, np.float32)
        return found[0] if len(found) == 1 else np.concatenate(found)


@dataclass(frozen=True, slots=True, eq=False)
class _Growing:
    part: int
    output: int
    place: int
    ordinal: int

    def value(self, results: CellResults) -> Any:
        values = results.emitted[self.part][self.output]
        assert values is not None
        return values[self.place : self.place + results.lengths[self.ordinal]]


Located = _One | _Many | _Growing


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Rebuilds what unfold returned. `grown[part, output]` are the names of growing values, for streaming."""

    structure: Any
    leaves: tuple[Located, ...]
    grown: dict[tuple[int, int, int], str]
    _assemble: Callable[[CellResults], Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_assemble", _assembler(self.structure, iter(self.leaves)))

    def assemble(self, results: CellResults) -> Any:
        """The response of one request: arrays and plain numbers in the structure that unfold returned."""
        return self._assemble(results)


def flatten(returned: Any, leaves: list[Leaf], names: list[str], name: str = "") -> Any:
    """-> the structure, hashable; appends the leaves and their names. Raises RequestError for anything else."""
    if isinstance(returned, LEAVES):
        leaves.append(returned)
        names.append(name)
        return None
    if isinstance(returned, dict):
        dot = f"{name}." if name else ""
        items = [(key, flatten(value, leaves, names, f"{dot}{key}")) for key, value in returned.items()]
        return ("dict", tuple(items))
    if isinstance(returned, (list, tuple)):
        dot = f"{name}." if name else ""
        kind = "list" if isinstance(returned, list) else "tuple"
        return (kind, tuple(flatten(value, leaves, names, f"{dot}{k}") for k, value in enumerate(returned)))
    raise RequestError(
        f"unfold returned a {type(returned).__name__}; return outputs (node['h']), or lists or dicts of them."
    )


def emits_of(leaves: list[Leaf]) -> tuple[OutputRange, ...]:
    """The node outputs that must come back to the host."""
    found: list[OutputRange] = []
    for leaf in leaves:
        if isinstance(leaf, Output):
            found.append(OutputRange(leaf.cell, leaf.node, 1, leaf.output))
        elif isinstance(leaf, Outputs):
            found.extend(leaf.ranges)
        else:
            found.append(OutputRange(leaf.cell, leaf.node, GROWN_ROWS, leaf.output))
    return tuple(found)


def layout_of(structure: Any, leaves: list[Leaf], names: list[str], compiled: Compiled) -> Layout:
    """Where the leaves are found once the graph is compiled."""
    located: list[Located] = []
    grown: dict[tuple[int, int, int], str] = {}
    part, place = compiled.part, compiled.place
    for leaf, name in zip(leaves, names, strict=True):
        if isinstance(leaf, Output):
            located.append(_One(part[leaf.cell], leaf.output, int(place[leaf.node])))
        elif isinstance(leaf, Outputs):
            located.append(
                _Many(tuple((part[c], output, place[start : start + n]) for c, start, n, output in leaf.ranges if n))
            )
        else:
            located.append(_Growing(part[leaf.cell], leaf.output, int(place[leaf.node]), leaf.ordinal))
            grown[part[leaf.cell], leaf.output, leaf.ordinal] = name
    return Layout(structure, tuple(located), grown)


def describe(structure: Any, ports: list[ResponsePort]) -> Any:
    """The structure with a `ResponsePort` in place of each value."""
    left = iter(ports)
    return _rebuild(structure, lambda: next(left))


def _assembler(structure: Any, leaves: Iterator[Located]) -> Callable[[CellResults], Any]:
    """A function that builds the structure, made once for all requests of a form."""
    if structure is None:
        return next(leaves).value
    kind, items = structure
    if kind == "dict":
        named = [(key, _assembler(item, leaves)) for key, item in items]
        return lambda results: {key: made(results) for key, made in named}
    parts = [_assembler(item, leaves) for item in items]
    if kind == "list":
        return lambda results: [made(results) for made in parts]
    return lambda results: tuple([made(results) for made in parts])


def _rebuild(structure: Any, value: Callable[[], Any]) -> Any:
    if structure is None:
        return value()
    kind, items = structure
    if kind == "dict":
        return {key: _rebuild(item, value) for key, item in items}
    rebuilt = [_rebuild(item, value) for item in items]
    return rebuilt if kind == "list" else tuple(rebuilt)
