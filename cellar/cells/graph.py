"""Graph: what an unfold function writes to. It records blocks of nodes; `compiler.py` makes a `CellGraph` of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cellar.cells.cell import Cell
from cellar.cells.refs import Grown, Node, Nodes, Output, OutputRange, Outputs, Range
from cellar.core.cell_graphs import NO_STOP
from cellar.core.errors import RequestError
from cellar.core.tasks import CellSpec, Port, Values

GROWN_ROWS = 3
"""A growing chain is written as its first step and two that repeat; so it owns three node numbers."""

# How an input of a block is fed; hashable, so that equal blocks have equal keys.
Feed = tuple[Any, ...]
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}

ZERO: Feed = ("zero",)
VALUE: Feed = ("value",)
VALUES: Feed = ("values",)


@dataclass(slots=True, eq=False)
class Block:
    """Nodes [start, start + count) that one call made.

    feeds   per input how it is fed; values[i] is [1 or count, *shape] if from outside
    kind    "call" (one node), "map", "leaves", "chain", "inner" (of a tree) or "grow"
    detail  inner: children and wires; grow: (limit, stop output, stop symbol)
    """

    kind: str
    cell: int
    start: int
    count: int
    feeds: tuple[Feed, ...]
    values: tuple[Values | None, ...]
    detail: tuple[Any, ...] = ()
    key: tuple[Any, ...] = ()
    children: np.ndarray[Any, Any] | None = None


class Graph:
    """Builds the graph of one request. Inputs that are not mentioned read zeros.

    Where an input is meant, give an `Output`, a value (number, list, array), or None for zeros.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        specs: Sequence[CellSpec] | None,
        names: tuple[dict[str, int], ...],
        index: Mapping[str, int],
        max_nodes: int,
    ) -> None:
        self.blocks: list[Block] = []
        self.num_nodes = 0
        self.num_numbers = 0
        self._cells = cells
        self._specs = specs
        self._names = names
        self._index = index
        self._max_nodes = max_nodes
        self._num_grown = 0

    # -- calls of unfold functions ----------------------------------------------------------------

    def call(self, cell: Cell | str, **inputs: Any) -> Node:
        """One node."""
        c = self._cell(cell)
        start = self._grow_by(1)
        feeds, values = self._wire(c, 1, {}, {}, {}, inputs)
        self._add(Block("call", c, start, 1, feeds, values))
        return Node(self._names, c, start)

    def map(
        self,
        cell: Cell | str,
        count: int,
        *,
        each: Mapping[str, Any] | None = None,
        fixed: Mapping[str, Any] | None = None,
    ) -> Nodes:
        """`count` nodes that do not depend on each other.

        each:  input -> one value per node, or `Outputs` one per node
        fixed: input -> the same for all nodes
        """
        c = self._cell(cell)
        start = self._grow_by(self._count(count))
        feeds, values = self._wire(c, count, each or {}, {}, {}, fixed or {})
        self._add(Block("map", c, start, count, feeds, values))
        return Nodes(self._names, (Range(c, start, count),))

    def chain(
        self,
        cell: Cell | str,
        count: int,
        *,
        carry: Mapping[str, str],
        each: Mapping[str, Any] | None = None,
        first: Mapping[str, Any] | None = None,
        fixed: Mapping[str, Any] | None = None,
    ) -> Nodes:
        """`count` nodes in a row.

        carry: input -> output of the node before that it reads
        first: input of `carry` -> what the first node reads there (default zeros)
        each, fixed: as in `map`
        """
        c = self._cell(cell)
        start = self._grow_by(self._count(count))
        feeds, values = self._wire(c, count, each or {}, carry, first or {}, fixed or {})
        self._add(Block("chain", c, start, count, feeds, values))
        return Nodes(self._names, (Range(c, start, count),))

    def tree(
        self,
        leaf: Cell | str,
        inner: Cell | str,
        *,
        children: Any,
        wires: Sequence[Mapping[str, str]],
        leaves: Mapping[str, Any],
        num_leaves: int | None = None,
        each: Mapping[str, Any] | None = None,
    ) -> Nodes:
        """A tree or forest. Leaves are nodes 0..n-1 of the result, inner node k is n + k, in any order.

        children: int [m, arity], numbers of nodes; -1: no child, zeros are read
        wires:    per child position, input of `inner` -> output of the child
        leaves:   input of `leaf` -> one value (or output) per leaf; `each` likewise for the inner nodes
        num_leaves: default: the length of a value of `leaves`
        """
        lc, ic = self._cell(leaf), self._cell(inner)
        if num_leaves is None:
            num_leaves = len(next(iter(leaves.values()))) if leaves else 0
        table = np.asarray(children, np.int64)
        if table.ndim != 2 or table.shape[1] != len(wires):
            raise RequestError(
                f"children has shape {table.shape}; give [inner nodes, {len(wires)}], as many columns as wires."
            )
        m = len(table)
        start = self._grow_by(self._count(num_leaves) + m)
        feeds, values = self._wire(lc, num_leaves, leaves, {}, {}, {})
        self._add(Block("leaves", lc, start, num_leaves, feeds, values))
        nodes = Nodes(self._names, (Range(lc, start, num_leaves), Range(ic, start + num_leaves, m)))
        if m == 0:
            return Nodes(self._names, nodes.ranges[:1])
        if table.min() < -1 or table.max() >= num_leaves + m:
            raise RequestError(f"children name a node outside of [-1, {num_leaves + m}); number leaves first.")
        self._wire_tree(lc, ic, start, num_leaves, table, wires, each or {})
        return nodes

    def grow(
        self,
        cell: Cell | str,
        limit: int,
        *,
        carry: Mapping[str, str],
        first: Mapping[str, Any] | None = None,
        fixed: Mapping[str, Any] | None = None,
        stop: tuple[str, int] | None = None,
    ) -> Grown:
        """Repeat a cell until output `stop[0]` is the symbol `stop[1]`, or `limit` steps are done.

        `carry`, `first` and `fixed` as in `chain`. The stop symbol is no part of the result.
        """
        c = self._cell(cell)
        if self._count(limit) < 1:
            raise RequestError("a growing chain has a limit of 0 steps; allow at least 1.")
        if not carry:
            raise RequestError("a growing chain carries nothing; name an input that reads the step before.")
        self._check_size(limit)
        self.num_nodes += limit
        start = self.num_numbers
        self.num_numbers += GROWN_ROWS
        feeds, values = self._wire(c, 1, {}, carry, first or {}, fixed or {})
        output, symbol = (0, NO_STOP) if stop is None else (self._output(c, stop[0]), int(stop[1]))
        if stop is not None and self._specs is not None:
            port = self._specs[c].outputs[output]
            if port.shape != () or not port.dtype.startswith("int"):
                raise RequestError(
                    f"stop output {stop[0]!r} is {port.dtype} {port.shape}; it must be one integer a step."
                )
        block = Block("grow", c, start, GROWN_ROWS, feeds, values, (limit, output, symbol))
        self._add(block)
        self._num_grown += 1
        return Grown(self._names, c, start, self._num_grown - 1)

    # -- recording --------------------------------------------------------------------------------

    def _add(self, block: Block) -> None:
        block.key = (block.kind, block.cell, block.count, block.feeds, block.detail)
        self.blocks.append(block)

    def _cell(self, cell: Cell | str) -> int:
        name = cell if isinstance(cell, str) else cell.name
        index = self._index.get(name)
        if index is None or (not isinstance(cell, str) and self._cells[index] is not cell):
            raise RequestError(f"cell {name!r} is not one of this model's; register it, or use {tuple(self._index)}.")
        return index

    def _count(self, count: int) -> int:
        if not isinstance(count, (int, np.integer)) or count < 0:
            raise RequestError(f"a count of {count!r} nodes; give an integer of at least 0.")
        return int(count)

    def _check_size(self, more: int) -> None:
        if self.num_nodes + more > self._max_nodes:
            raise RequestError(
                f"the graph has more than {self._max_nodes} nodes; send a smaller request, or raise max_nodes."
            )

    def _grow_by(self, count: int) -> int:
        self._check_size(count)
        start = self.num_numbers
        self.num_nodes += count
        self.num_numbers += count
        return start

    def _output(self, cell: int, name: str) -> int:
        names = self._names[cell]
        if name not in names:
            raise RequestError(f"cell {self._cells[cell].name!r} has no output {name!r}; it has {tuple(names)}.")
        return names[name]

    def _wire(
        self,
        cell: int,
        count: int,
        each: Mapping[str, Any],
        carry: Mapping[str, str],
        first: Mapping[str, Any],
        fixed: Mapping[str, Any],
    ) -> tuple[tuple[Feed, ...], tuple[Values | None, ...]]:
        """Feeds and values of all inputs of a block."""
        feeds: list[Feed] = []
        values: list[Values | None] = []
        named = 0
        for i, name in enumerate(self._cells[cell].inputs):
            value: Values | None = None
            if name in carry:
                named += 1
                output = self._output(cell, carry[name])
                self._check_edge(cell, i, cell, output)
                start, value = self._feed(cell, i, first.get(name))
                feed: Feed = ("carry", output, start)
            elif name in each:
                named += 1
                feed, value = self._feed_each(cell, i, count, each[name])
            elif name in fixed:
                named += 1
                feed, value = self._feed(cell, i, fixed[name])
            else:
                feed = ZERO
            feeds.append(feed)
            values.append(value)
        if named != len(each) + len(carry) + len(fixed) or (first and not first.keys() <= carry.keys()):
            self._refuse_names(cell, each, carry, first, fixed)
        return tuple(feeds), tuple(values)

    def _feed(self, cell: int, i: int, given: Any) -> tuple[Feed, Values | None]:
        """One source for an input: an output, zeros, or a value."""
        if given is None:
            return ZERO, None
        if type(given) is Output:
            self._check_edge(cell, i, given.cell, given.output)
            return ("output", given.node, given.output), None
        return VALUE, self._values(cell, i, given, None)

    def _feed_each(self, cell: int, i: int, count: int, given: Any) -> tuple[Feed, Values | None]:
        """A source per node for an input."""
        if type(given) is Outputs:
            if len(given) != count:
                raise RequestError(f"{len(given)} outputs for {count} nodes of cell {self._cells[cell].name!r}.")
            for part in given.ranges:
                self._check_edge(cell, i, part.cell, part.output)
            return ("outputs", given.ranges), None
        if isinstance(given, (list, tuple)) and given and type(given[0]) is Output:
            if len(given) != count:
                raise RequestError(f"{len(given)} outputs for {count} nodes of cell {self._cells[cell].name!r}.")
            ranges = []
            for output in given:
                if type(output) is not Output:
                    raise RequestError("a list mixes outputs and values; give one kind.")
                self._check_edge(cell, i, output.cell, output.output)
                ranges.append(OutputRange(output.cell, output.node, 1, output.output))
            return ("outputs", tuple(ranges)), None
        return VALUES, self._values(cell, i, given, count)

    def _values(self, cell: int, i: int, given: Any, count: int | None) -> Values:
        """A value as an array [1 or count, *shape] of the input's dtype, checked."""
        port = None if self._specs is None else self._specs[cell].inputs[i]
        dtype = None if port is None else host_dtype(port.dtype)
        if isinstance(given, torch.Tensor):
            given = (given.float() if given.dtype is torch.bfloat16 else given).numpy(force=True)
        try:
            array = np.asarray(given)
            if array.dtype.kind not in "biuf":
                raise TypeError(f"it holds {array.dtype}")
            if dtype is None:
                dtype = np.dtype(np.float32) if array.dtype.kind == "f" else array.dtype
            if array.dtype != dtype:
                array = self._cast(cell, i, array, dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError(f"{self._input(cell, i)} cannot take this value: {error}.") from None
        if count is None:
            array = array[None]
        elif array.ndim == 0 or len(array) != count:
            raise RequestError(f"{self._input(cell, i)} has {array.shape[:1]} values for {count} nodes; give one each.")
        if port is not None:
            if array.shape[1:] != port.shape:
                raise RequestError(
                    f"{self._input(cell, i)} has values of shape {array.shape[1:]}; they must be {port.shape}."
                )
            if port.high is not None and len(array) and not _below(array, port.high):
                raise RequestError(f"{self._input(cell, i)} has a value outside of [0, {port.high}).")
        return array

    def _cast(self, cell: int, i: int, array: Values, dtype: np.dtype[Any]) -> Values:
        if dtype.kind in "iub" and array.dtype.kind == "f" and array.size:
            raise TypeError(f"it holds {array.dtype}, not {dtype}")
        return array.astype(dtype)

    def _input(self, cell: int, i: int) -> str:
        return f"input {self._cells[cell].inputs[i]!r} of cell {self._cells[cell].name!r}"

    def _check_edge(self, cell: int, i: int, source: int, output: int) -> None:
        """An output may feed an input of the same shape and dtype."""
        if self._specs is None:
            return
        port, made = self._specs[cell].inputs[i], self._specs[source].outputs[output]
        if made.bank != port.bank:
            raise RequestError(
                f"{self._input(cell, i)} is {_kind(port)}, but output {made.name!r} of cell "
                f"{self._cells[source].name!r} is {_kind(made)}; they must be equal."
            )

    def _wire_tree(
        self,
        leaf: int,
        inner: int,
        start: int,
        num_leaves: int,
        children: np.ndarray[Any, Any],
        wires: Sequence[Mapping[str, str]],
        each: Mapping[str, Any],
    ) -> None:
        """Add the inner nodes of a tree."""
        has_leaf = bool(num_leaves) and bool(((children >= 0) & (children < num_leaves)).any())
        has_inner = bool((children >= num_leaves).any())
        inputs = self._cells[inner].inputs
        wired: dict[str, Feed] = {}
        for position, wire in enumerate(wires):
            for name, output in wire.items():
                if name in wired or name in each or name not in inputs:
                    raise RequestError(
                        f"input {name!r} of cell {self._cells[inner].name!r} is wired twice, or does not exist."
                    )
                from_leaf = self._output(leaf, output) if has_leaf else 0
                from_inner = self._output(inner, output) if has_inner else 0
                i = inputs.index(name)
                if has_leaf:
                    self._check_edge(inner, i, leaf, from_leaf)
                if has_inner:
                    self._check_edge(inner, i, inner, from_inner)
                wired[name] = ("child", position, from_leaf, from_inner)
        feeds, values = self._wire(inner, len(children), each, {}, {}, {})
        feeds = tuple(wired.get(name, feed) for name, feed in zip(inputs, feeds, strict=True))
        detail = (num_leaves, children.shape[1], children.tobytes())
        block = Block("inner", inner, start + num_leaves, len(children), feeds, values, detail, children=children)
        self._add(block)

    def _refuse_names(self, cell: int, *given: Mapping[str, Any]) -> None:
        inputs = self._cells[cell].inputs
        names = [name for mapping in given for name in mapping]
        unknown = [name for name in names if name not in inputs]
        if unknown:
            raise RequestError(f"cell {self._cells[cell].name!r} has no input {unknown[0]!r}; its inputs are {inputs}.")
        raise RequestError(
            f"an input of cell {self._cells[cell].name!r} is given twice, or `first` names one that is not carried."
        )


def host_dtype(name: str) -> np.dtype[Any]:
    """The NumPy type in which values of a dtype cross."""
    return np.dtype("float32" if name == "bfloat16" else name)


def _below(array: Values, high: int) -> bool:
    """Whether all integers are in [0, high): read as unsigned, negative ones are the largest."""
    return int(np.maximum.reduce(array.view(_UNSIGNED[array.itemsize]), axis=None)) < high


def _kind(port: Port) -> str:
    return f"{port.dtype} {list(port.shape)}"
