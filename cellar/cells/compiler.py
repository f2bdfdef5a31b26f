"""Compiles the blocks of a graph: subgraphs, the order in them, rows, tables. See docs/decisions/0012-cells.md.

A *unit* is a block that certainly lies in one subgraph: a chain, the leaves or the inner nodes of a tree, independent
nodes without parents, else one node. Calls read only earlier calls, so no path leaves a unit and returns.
Units of one cell that are connected form a subgraph if they have the same level, where

    level(u) = max over its parents p of level(p) + (1 if p is of another cell else 0).

A path that leaves a subgraph enters another cell, or another level, and so it can only return to a higher level:
subgraphs are convex.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from cellar.cells.graph import ZERO, Block, Feed
from cellar.cells.refs import OutputRange
from cellar.core.cell_graphs import NO_STOP, NUM_COLUMNS, VALUE_SLOTS, CellGraph, Column, Field, GraphPart
from cellar.core.errors import RequestError
from cellar.core.tasks import CellModelSpec, IntArray

Lookups = NDArray[np.int64]

ZERO_LOOKUP = -1
"""What a node reads is looked up as number * width + output; -1 is the zero row, -2 - e is value e of the request."""


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A graph, and where to find what was returned: `place[number]` in the results of part `part[cell]`."""

    graph: CellGraph
    place: IntArray
    part: dict[int, int]


@dataclass(slots=True, eq=False)
class _Unit:
    """Nodes [start, stop) of a block; `parents` are units."""

    block: int
    start: int
    stop: int
    parents: set[int]
    level: int = 0
    subgraph: int = -1


@dataclass(slots=True, eq=False)
class _Subgraph:
    """`order`: node numbers as they become ready; `ready` as `Column.READY`; `limit`: steps, if it grows."""

    cell: int
    units: list[int]
    order: NDArray[np.int64]
    ready: NDArray[np.int64] | int
    limit: int = 0


def lookups(blocks: Sequence[Block], width: int) -> list[list[Lookups]]:
    """For each block and input, what its nodes read."""
    found: list[list[Lookups]] = []
    value = 0
    for block in blocks:
        inputs: list[Lookups] = []
        for feed, given in zip(block.feeds, block.values, strict=True):
            inputs.append(_lookup(block, feed, width, value))
            value += 0 if given is None else len(given)
        found.append(inputs)
    return found


def _lookup(block: Block, feed: Feed, width: int, value: int) -> Lookups:
    n, kind = block.count, feed[0]
    if kind == "zero":
        return np.full(n, ZERO_LOOKUP)
    if kind == "value":
        return np.full(n, -2 - value)
    if kind == "values":
        return np.arange(-2 - value, -2 - value - n, -1)
    if kind == "output":
        return np.full(n, feed[1] * width + feed[2])
    if kind == "outputs":
        parts = [np.arange(start, start + count) * width + output for _, start, count, output in feed[1]]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)
    if kind == "carry":
        carried: Lookups = np.arange(block.start - 1, block.start - 1 + n) * width + feed[1]
        if n:
            carried[0] = _lookup(block, feed[2], width, value)[0]
        return carried
    _, position, from_leaf, from_inner = feed
    assert block.children is not None
    child: Lookups = block.children[:, position]
    num_leaves = block.detail[0]
    output = np.where(child < num_leaves, from_leaf, from_inner)
    found: Lookups = np.where(child < 0, ZERO_LOOKUP, (block.start - num_leaves + child) * width + output)
    return found


def compile_graph(
    spec: CellModelSpec, blocks: Sequence[Block], num_numbers: int, num_nodes: int, emits: Sequence[OutputRange]
) -> Compiled:
    """Raises RequestError for a cycle."""
    width = max(len(cell.outputs) for cell in spec.cells)
    reads = lookups(blocks, width)
    units = _units(blocks, reads, width)
    subgraphs = _subgraphs(blocks, units, reads, width)
    owner = np.empty(num_numbers, np.int64)
    for s, subgraph in enumerate(subgraphs):
        owner[subgraph.order] = s
    dep, waits, fans = _dependencies(blocks, units, reads, width, owner, len(subgraphs))
    codes, numbers, frames, num_values = _codes(spec, blocks, units, subgraphs, width, num_numbers, dep)
    lengths = [(1 + count) * bank.width for count, bank in zip(frames, spec.banks, strict=True)]
    rows = _rows(spec, blocks, reads, codes, numbers, width, num_numbers, list(accumulate(lengths, initial=0)))
    if dep:
        rows[list(dep), Column.DEP] = list(dep.values())
    emitted: dict[int, int] = {}
    for cell, start, count, output in emits:
        rows[start : start + count, Column.EMIT] |= 1 << output
        emitted[cell] = emitted.get(cell, 0) | 1 << output
    stops = [NO_STOP] * len(subgraphs)
    stop_outputs = [0] * len(subgraphs)
    for s, subgraph in enumerate(subgraphs):
        rows[subgraph.order, Column.READY] = subgraph.ready
        if subgraph.limit:
            _, stop_outputs[s], stops[s] = blocks[units[subgraph.units[0]].block].detail
            if stops[s] != NO_STOP:
                rows[subgraph.order, Column.EMIT] |= 1 << stop_outputs[s]
                emitted[subgraph.cell] = emitted.get(subgraph.cell, 0) | 1 << stop_outputs[s]
    fields = [[0] * len(Field)] * len(subgraphs)
    parts: list[GraphPart] = []
    for cell in sorted({subgraph.cell for subgraph in subgraphs}):
        members = [s for s, subgraph in enumerate(subgraphs) if subgraph.cell == cell]
        row = 0
        for s in members:
            one = subgraphs[s]
            fields[s] = [len(parts), row, len(one.order), one.limit or len(one.order), waits[s], 2 if one.limit else 0]
            row += len(one.order)
        parts.append(_part(spec, blocks, cell, [subgraphs[s] for s in members], rows, emitted.get(cell, 0)))
    graph = CellGraph(
        tuple(parts),
        np.array(fields, np.int32),
        np.array(stops),
        tuple(stop_outputs),
        tuple(frames),
        sum(lengths),
        tuple(num_values),
        fans,
        num_nodes,
    )
    return Compiled(graph, rows[:, Column.DEST], {part.cell: p for p, part in enumerate(parts)})


def _part(
    spec: CellModelSpec, blocks: Sequence[Block], cell: int, members: Sequence[_Subgraph], rows: IntArray, emitted: int
) -> GraphPart:
    """The table of one cell, subgraph after subgraph; column DEST of `rows` is filled."""
    one = spec.cells[cell]
    order = members[0].order if len(members) == 1 else np.concatenate([subgraph.order for subgraph in members])
    growing = any(subgraph.limit for subgraph in members)
    results = 0
    if emitted:
        mask = rows[order, Column.EMIT] != 0
        if not growing:
            dest = np.cumsum(mask) - 1
            results = int(dest[-1]) + 1
        else:  # all rows of a growing chain begin at one place, and go on from there
            dest, row = np.zeros(len(order), np.int64), 0
            for subgraph in members:
                own = slice(row, row + len(subgraph.order))
                emitting = mask[own]
                dest[own] = results if subgraph.limit else results - 1 + np.cumsum(emitting)
                results += subgraph.limit * int(emitting[0]) if subgraph.limit else int(emitting.sum())
                row = own.stop
        rows[order, Column.DEST] = dest
    table = rows[order, : NUM_COLUMNS + 2 * len(one.inputs) + len(one.kept)]
    plain = all(isinstance(subgraph.ready, int) or len(subgraph.order) == 1 for subgraph in members)
    valued = {i for block in blocks if block.cell == cell for i, given in enumerate(block.values) if given is not None}
    outputs = tuple(o for o in range(len(one.outputs)) if emitted >> o & 1)
    waited_for = bool(np.count_nonzero(table[:, Column.DEP] != -1))
    return GraphPart(cell, table, tuple(sorted(valued)), results, outputs, plain, growing, waited_for)


# -- subgraphs --------------------------------------------------------------------------------------


def _units(blocks: Sequence[Block], reads: Sequence[Sequence[Lookups]], width: int) -> list[_Unit]:
    units: list[_Unit] = []
    starts: list[int] = []

    def unit_at(number: int) -> int:
        return bisect_right(starts, number) - 1

    for b, block in enumerate(blocks):
        if not block.count:
            continue
        numbers = _parent_numbers(block)
        if numbers and block.kind in ("map", "leaves"):
            table = np.stack(reads[b], axis=1)
            for k in range(block.count):
                own = table[k]
                parents = {unit_at(int(v) // width) for v in own[own >= 0].tolist()}
                starts.append(block.start + k)
                units.append(_Unit(b, block.start + k, block.start + k + 1, parents))
        else:
            parents = {unit_at(number) for number in numbers}
            starts.append(block.start)
            units.append(_Unit(b, block.start, block.start + block.count, parents))
    return units


def _parent_numbers(block: Block) -> list[int]:
    """Nodes of earlier blocks that feed this one; of a tree's leaves one stands for all."""
    numbers: list[int] = []
    for feed in block.feeds:
        given = feed[2] if feed[0] == "carry" else feed
        if given[0] == "output":
            numbers.append(given[1])
        elif given[0] == "outputs":
            for _, start, count, _ in given[1]:
                numbers.extend(range(start, start + count))
        elif given[0] == "child" and block.children is not None:
            child = block.children[:, given[1]]
            leaves = child[(child >= 0) & (child < block.detail[0])]
            numbers.extend((block.start - block.detail[0] + leaves).tolist())
    return numbers


def _subgraphs(
    blocks: Sequence[Block], units: list[_Unit], reads: Sequence[Sequence[Lookups]], width: int
) -> list[_Subgraph]:
    root = list(range(len(units)))

    def find(u: int) -> int:
        while root[u] != u:
            root[u] = root[root[u]]
            u = root[u]
        return u

    free: dict[int, int] = {}
    for u, unit in enumerate(units):
        block = blocks[unit.block]
        grows = block.kind == "grow"
        for p in unit.parents:
            other = units[p]
            step = grows or blocks[other.block].cell != block.cell
            unit.level = max(unit.level, other.level + step)
        if grows:
            continue
        for p in unit.parents:
            other = units[p]
            if other.level == unit.level and blocks[other.block].cell == block.cell:
                root[find(u)] = find(p)
        if not unit.parents and block.kind in ("call", "map", "leaves"):
            first = free.setdefault(block.cell, u)
            root[find(u)] = find(first)
    groups: dict[int, list[int]] = {}
    for u in range(len(units)):
        groups.setdefault(find(u), []).append(u)
    subgraphs: list[_Subgraph] = []
    for members in groups.values():
        subgraphs.append(_order(blocks, units, members, reads, width))
        for u in members:
            units[u].subgraph = len(subgraphs) - 1
    return subgraphs


def _order(
    blocks: Sequence[Block], units: list[_Unit], members: list[int], reads: Sequence[Sequence[Lookups]], width: int
) -> _Subgraph:
    first = units[members[0]]
    block = blocks[first.block]
    if len(members) == 1 and block.kind != "inner":
        order = np.arange(first.start, first.stop)
        if block.kind == "grow":
            return _Subgraph(block.cell, members, order, 1, limit=block.detail[0])
        if block.kind == "chain":
            return _Subgraph(block.cell, members, order, 1)
        return _Subgraph(block.cell, members, order, np.arange(len(order), 0, -1))
    numbers = np.concatenate([np.arange(units[u].start, units[u].stop) for u in members])
    local = {number: k for k, number in enumerate(numbers.tolist())}
    pairs: list[tuple[int, int]] = []
    for u in members:
        unit = units[u]
        begin = unit.start - blocks[unit.block].start
        for read in _distinct(blocks[unit.block], reads[unit.block]):
            for k, v in enumerate(read[begin : begin + unit.stop - unit.start].tolist()):
                if v >= 0 and (p := local.get(v // width)) is not None:
                    pairs.append((p, local[unit.start + k]))
    places, ready = walk(len(numbers), pairs)
    return _Subgraph(block.cell, members, numbers[places], np.array(ready))


def _distinct(block: Block, reads: Sequence[Lookups]) -> list[Lookups]:
    """Of the inputs that read the same nodes (h and c of one child) one is enough."""
    kept: dict[object, Lookups] = {}
    for i, (feed, read) in enumerate(zip(block.feeds, reads, strict=True)):
        if feed[0] == "child":
            kept[feed[1]] = read
        elif feed != ZERO and feed[0] not in ("value", "values"):
            kept[("other", i)] = read
    return list(kept.values())


def walk(count: int, pairs: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """First-in first-out topological order, and how many nodes are ready when the first k have been submitted."""
    missing = [0] * count
    after: list[list[int]] = [[] for _ in range(count)]
    for parent, child in pairs:
        after[parent].append(child)
        missing[child] += 1
    order = [v for v in range(count) if not missing[v]]
    ready: list[int] = []
    for k, v in enumerate(order):  # grows while it is walked
        ready.append(len(order) - k)
        for child in after[v]:
            missing[child] -= 1
            if not missing[child]:
                order.append(child)
    if len(order) < count:
        raise RequestError("the graph has a cycle: a node waits for itself; let children stand below their parents.")
    return order, ready


# -- edges, rows and tables -------------------------------------------------------------------------


def _dependencies(
    blocks: Sequence[Block],
    units: list[_Unit],
    reads: Sequence[Sequence[Lookups]],
    width: int,
    owner: NDArray[np.int64],
    num_subgraphs: int,
) -> tuple[dict[int, int], list[int], tuple[tuple[int, ...], ...]]:
    """By node that another subgraph waits for, what column DEP says; nodes that each subgraph waits for; fans."""
    pairs: set[tuple[int, int]] = set()
    owners = owner.tolist()
    for b in sorted({unit.block for unit in units if unit.parents}):
        block = blocks[b]
        for read in _distinct(block, reads[b]):
            for k, v in enumerate(read.tolist(), block.start):
                if v >= 0 and owners[v // width] != owners[k]:
                    pairs.add((v // width, owners[k]))
    waits = [0] * num_subgraphs
    grouped: dict[int, list[int]] = {}
    for parent, s in sorted(pairs):
        waits[s] += 1
        grouped.setdefault(parent, []).append(s)
    dep: dict[int, int] = {}
    fans: list[tuple[int, ...]] = []
    for parent, targets in grouped.items():
        if len(targets) == 1:
            dep[parent] = targets[0]
        else:
            dep[parent] = -2 - len(fans)
            fans.append(tuple(targets))
    return dep, waits, tuple(fans)


def _codes(
    spec: CellModelSpec,
    blocks: Sequence[Block],
    units: list[_Unit],
    subgraphs: list[_Subgraph],
    width: int,
    num_numbers: int,
    waited_for: Mapping[int, int],
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[int], list[int]]:
    """By lookup, row codes within a bank and the numbers of values; per bank, frames and values."""
    alone = {units[s.units[0]].block for s in subgraphs if len(s.units) == 1}
    given = [
        (spec.cells[block.cell].inputs[i].bank or 0, len(values), b in alone and block.kind == "chain")
        for b, block in enumerate(blocks)
        for i, values in enumerate(block.values)
        if values is not None
    ]
    codes = np.zeros(num_numbers * width + sum(count for _, count, _ in given) + 1, np.int64)
    numbers = np.full(len(codes), -1)
    used = [0] * len(spec.banks)
    num_values = [0] * len(spec.banks)
    e = 0
    for bank, count, chained in given:
        slots = np.arange(count) % VALUE_SLOTS if chained else np.arange(count)
        place = len(codes) - 2 - e - np.arange(count)
        codes[place] = (1 + used[bank] + slots) * spec.banks[bank].width
        numbers[place] = num_values[bank] + np.arange(count)
        used[bank] += min(1 << (count - 1).bit_length(), VALUE_SLOTS) if chained else count
        num_values[bank] += count
        e += count
    for b, block in enumerate(blocks):
        if not block.count:
            continue
        turns = block.kind == "grow" or (
            block.kind == "chain"
            and b in alone
            and not any(block.start <= parent < block.start + block.count - 1 for parent in waited_for)
        )
        index = np.arange(block.count) & 1 if turns else np.arange(block.count)
        seen: dict[int, int] = {}
        for o in spec.cells[block.cell].kept:
            bank = spec.cells[block.cell].outputs[o].bank or 0
            offset = seen[bank] = seen.get(bank, -1) + 1
            first = block.start * width + o
            last = (block.start + block.count - 1) * width + o
            codes[first : last + 1 : width] = (1 + used[bank] + index) * spec.banks[bank].width + offset
        for bank in seen:
            used[bank] += min(block.count, 2) if turns else block.count
    return codes, numbers, used, num_values


def _rows(
    spec: CellModelSpec,
    blocks: Sequence[Block],
    reads: Sequence[Sequence[Lookups]],
    codes: NDArray[np.int64],
    numbers: NDArray[np.int64],
    width: int,
    num_numbers: int,
    begins: Sequence[int],
) -> IntArray:
    """The row of every node as in `GraphPart.table`, the widest cell's columns: int32 [num_numbers, columns].

    What it reads and writes, and the numbers of values; the first columns are blank.
    """
    kept = [cell.kept for cell in spec.cells]
    columns = NUM_COLUMNS + max(2 * len(cell.inputs) + len(kept[c]) for c, cell in enumerate(spec.cells))
    table = np.zeros((num_numbers, columns), np.int32)
    table[:, Column.DEP] = -1
    for block, inputs in zip(blocks, reads, strict=True):
        cell = spec.cells[block.cell]
        own = table[block.start : block.start + block.count]
        column = NUM_COLUMNS
        for i, read in enumerate(inputs):
            own[:, column + i] = codes[read] + begins[cell.inputs[i].bank or 0]
        column += len(inputs)
        for k, o in enumerate(kept[block.cell]):
            written = codes[block.start * width + o :: width][: block.count]
            own[:, column + k] = written + begins[cell.outputs[o].bank or 0]
        column += len(kept[block.cell])
        own[:, column : column + len(inputs)] = -1
        for i, given in enumerate(block.values):
            if given is not None:
                own[:, column + i] = numbers[inputs[i]]
    return table
