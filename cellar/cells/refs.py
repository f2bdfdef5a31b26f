"""What the graph builder's calls return: nodes and their outputs, to be wired into other nodes or returned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from cellar.core.errors import RequestError


class Range(NamedTuple):
    """Nodes [start, start + length) of one cell."""

    cell: int
    start: int
    length: int


class OutputRange(NamedTuple):
    """Output number `output` of the nodes [start, start + length) of one cell."""

    cell: int
    start: int
    length: int
    output: int


RangeT = TypeVar("RangeT", Range, OutputRange)


class Output(NamedTuple):
    """One output of one node."""

    cell: int
    node: int
    output: int


@dataclass(frozen=True, slots=True)
class Outputs:
    """The same output of several nodes, in their order."""

    ranges: tuple[OutputRange, ...]

    def __len__(self) -> int:
        return sum(part.length for part in self.ranges)

    def __getitem__(self, k: int) -> Output:
        part, offset = _locate(self.ranges, k, len(self))
        return Output(part.cell, part.start + offset, part.output)

    def __iter__(self) -> Iterator[Output]:
        for part in self.ranges:
            for offset in range(part.length):
                yield Output(part.cell, part.start + offset, part.output)


@dataclass(slots=True, eq=False)
class Node:
    """One use of a cell; `node["h"]` is its output."""

    names: tuple[dict[str, int], ...]
    cell: int
    node: int

    def __getitem__(self, name: str) -> Output:
        return Output(self.cell, self.node, _output(self.names[self.cell], name))


@dataclass(slots=True, eq=False)
class Nodes:
    """Several nodes: `nodes[k]` is one (from the end if k < 0), `nodes["h"]` is the output `h` of all."""

    names: tuple[dict[str, int], ...]
    ranges: tuple[Range, ...]

    def __len__(self) -> int:
        return sum(part.length for part in self.ranges)

    def __getitem__(self, key: int | str) -> Node | Outputs:
        if isinstance(key, str):
            return self.output(key)
        return self.node(key)

    def node(self, k: int) -> Node:
        """Node k; -1 is the last."""
        part, offset = _locate(self.ranges, k, len(self))
        return Node(self.names, part.cell, part.start + offset)

    def output(self, name: str) -> Outputs:
        """The output of that name of every node."""
        return Outputs(
            tuple(
                OutputRange(cell, start, count, _output(self.names[cell], name)) for cell, start, count in self.ranges
            )
        )


@dataclass(slots=True, eq=False)
class Grown:
    """A growing chain; `grown["token"]` is the list that its steps return. Nothing else may read it."""

    names: tuple[dict[str, int], ...]
    cell: int
    node: int
    ordinal: int

    def __getitem__(self, name: str) -> GrownOutput:
        return GrownOutput(self.cell, self.node, _output(self.names[self.cell], name), self.ordinal)


@dataclass(frozen=True, slots=True)
class GrownOutput:
    """One output of all steps of growing chain number `ordinal`."""

    cell: int
    node: int
    output: int
    ordinal: int


def _output(names: dict[str, int], name: str) -> int:
    if name not in names:
        raise RequestError(f"a cell with outputs {tuple(names)} has no output {name!r}.")
    return names[name]


def _locate(ranges: tuple[RangeT, ...], k: int, length: int) -> tuple[RangeT, int]:
    if not -length <= k < length:
        raise RequestError(f"node {k} of {length} does not exist.")
    offset = k % length
    for part in ranges:
        if offset < part.length:
            return part, offset
        offset -= part.length
    raise AssertionError(k)
