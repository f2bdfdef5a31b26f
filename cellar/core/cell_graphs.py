"""A request's graph of cells as data: what `cells/` compiles and `schedule/` runs.

A compiled graph speaks of rows in numbers of the request's own. The rows that a request can touch stand in one run,
bank after bank; of each bank first the `width` rows of the zero frame, then those of the frames of its values, then
those of the frames of its nodes. A row is written as its place in the run, its *code*; a plan looks the codes up. The
values of a request are numbered per bank; each goes up to its row with every plan that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import ConfigError
from cellar.core.tasks import IntArray, Values

NO_STOP = np.iinfo(np.int64).min
"""The stop symbol of a subgraph that has none."""

VALUE_SLOTS = 32
"""The values that a chain reads one by one take turns in so many slots: no more of its nodes are ever in flight.

Shorter chains own a power of two, so that chains of many lengths need equally many."""

GROWING_TASKS = 5
"""BatchMaker's MaxTasksToSubmit: of a chain that may meet its stop symbol the steps behind it are void."""


class Column(IntEnum):
    """The first columns of `GraphPart.table`; then come the sources, the rows, and the numbers of the values.

    READY  how many nodes of the subgraph are ready when it stands at this one
    EMIT   bit o: output o goes back to the host
    DEST   where in the request's results of this cell it goes (growing: the first step's place)
    DEP    the subgraph that waits for this node; -1 none; -2 - k: those of `CellGraph.fans[k]`
    """

    READY = 0
    EMIT = 1
    DEST = 2
    DEP = 3


NUM_COLUMNS = len(Column)


class Field(IntEnum):
    """Columns of `CellGraph.subgraphs`.

    PART   index into `parts`
    START  first row in the part's table
    ROWS   rows in the table
    NODES  nodes; of a growing one at most
    WAITS  nodes of other subgraphs that must have committed
    LOOP   how many of the last rows repeat: 0, or 2 for a growing chain
    """

    PART = 0
    START = 1
    ROWS = 2
    NODES = 3
    WAITS = 4
    LOOP = 5


@dataclass(frozen=True, slots=True, eq=False)
class GraphPart:
    """All nodes of one cell: table int32 [rows, Column + sources + kept outputs + sources], subgraph after subgraph.

    The second columns of the sources hold the number of the value that is read, -1 if it is none; `valued` are the
    inputs for which there is one.

    `num_results` places for emitted values; each of the outputs `emitted` has an array of that length. `plain`: never
    more than one node of a subgraph is ready; `growing`: a chain grows; `waited_for`: a subgraph waits for one of the
    nodes; `special`: one of these matters.
    """

    cell: int
    table: IntArray
    valued: tuple[int, ...]
    num_results: int
    emitted: tuple[int, ...]
    plain: bool
    growing: bool
    waited_for: bool
    special: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "special", not self.plain or self.growing or self.waited_for)


@dataclass(frozen=True, slots=True, eq=False)
class CellGraph:
    """The compiled graph of one or many requests: everything but the values.

    subgraphs  int32 [S, Field]
    stops      int64 [S]: the symbol that ends a growing chain, or NO_STOP
    stop_outputs  per subgraph, the output that is compared
    frames     per bank, frames of the request's own
    num_codes  length of the run
    num_values per bank, values that a request must bring
    fans       subgraphs that wait for one node, where there are several
    num_nodes  with every growing chain at its limit
    results    per part: its cell, how many results of it there are, and of which outputs
    needs      requests of equal `needs` need equally much of everything
    special    as in `GraphPart`, of any part
    valued     banks in which a request must bring values
    entries    cells of the subgraphs that wait for nothing
    """

    parts: tuple[GraphPart, ...]
    subgraphs: IntArray
    stops: NDArray[np.int64]
    stop_outputs: tuple[int, ...]
    frames: tuple[int, ...]
    num_codes: int
    num_values: tuple[int, ...]
    fans: tuple[tuple[int, ...], ...]
    num_nodes: int
    results: tuple[tuple[int, int, tuple[int, ...]], ...] = field(init=False)
    needs: tuple[Any, ...] = field(init=False)
    special: bool = field(init=False)
    valued: tuple[int, ...] = field(init=False)
    entries: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "valued", tuple(b for b, n in enumerate(self.num_values) if n))
        runs = [0 if n == 0 else 1 << (n - 1).bit_length() for n in self.num_values]
        results = tuple((part.cell, part.num_results, part.emitted) for part in self.parts)
        begun = self.subgraphs[self.subgraphs[:, Field.WAITS] == 0, Field.PART].tolist()
        object.__setattr__(self, "results", results)
        object.__setattr__(self, "needs", (*self.frames, *runs, len(self.subgraphs), results))
        object.__setattr__(self, "special", any(part.special for part in self.parts))
        object.__setattr__(self, "entries", frozenset([self.parts[p].cell for p in begun]))


@dataclass(slots=True, eq=False)
class CellRequest:
    """One request: its graph and its values, `values[bank]` [num_values, *shape] or None."""

    id: str
    model: int
    graph: CellGraph
    values: tuple[Values | None, ...]
    stream: bool = False


@dataclass(slots=True, eq=False)
class CellResults:
    """What a request computed: emitted[part][output] is [num_results, *shape], or None.

    `lengths[k]` is how far the k-th growing chain of the graph came, without its stop symbol, and `stopped[k]`
    whether it met the symbol.
    """

    emitted: tuple[tuple[Values | None, ...], ...]
    lengths: tuple[int, ...] = ()
    stopped: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class CellStep:
    """One step of growing chain number `ordinal` of a streamed request: a value of one of its outputs."""

    id: str
    ordinal: int
    part: int
    output: int
    value: Values


@dataclass(slots=True)
class CellOutput:
    """What one commit delivers: steps first, then the requests that ended, well or with a reason."""

    steps: list[CellStep] = field(default_factory=list)
    finished: list[tuple[str, CellResults]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def refusal(cls, reasons: Mapping[str, str]) -> CellOutput:
        """Requests that could not run, and why."""
        return cls(failed=[*reasons.items()])


@dataclass(frozen=True, slots=True)
class CellStats:
    """A snapshot of one scheduler; `free_rows[m][b]`, on all workers together. Totals count since it was made."""

    waiting: int
    running: int
    tasks: int
    nodes: int
    requests: int
    free_rows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class CellConfig:
    """How cells are scheduled.

    max_tasks    MaxTasksToSubmit of Algorithm 1: tasks of one call of a worker. None: as the runtime asks for
                 (`CellCapacity.max_tasks`), but no more than `GROWING_TASKS` of a cell whose chains grow
    run_ahead    calls on their way to a worker; 1 is the paper's, with 2 the device need not wait for the host.
                 None: as the runtime asks for (`CellCapacity.run_ahead`)
    graph_batch  0: cellular batching. n: graph batching, the baseline: n requests of a model run as one merged graph;
                 none joins or leaves before all are done
    graph_ahead  of graph batching: the next batch is prepared, and follows without a gap, once the last task of the one
                 before has been submitted; else when that one is done
    """

    max_tasks: int | None = None
    run_ahead: int | None = None
    graph_batch: int = 0
    graph_ahead: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_tasks", 1), ("run_ahead", 1), ("graph_batch", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}.")
        most = (self.max_tasks or 1) * (self.run_ahead or 1)
        if most > VALUE_SLOTS:
            raise ConfigError(f"max_tasks * run_ahead is {most}; it must be at most {VALUE_SLOTS}.")

    def tasks(self, suggested: int) -> int:
        """`max_tasks`, or what the runtime wants as far as `VALUE_SLOTS` allows."""
        return self.max_tasks or min(suggested, VALUE_SLOTS // (self.run_ahead or 1))

    def calls_ahead(self, suggested: int, tasks: int) -> int:
        """`run_ahead`, or what the runtime wants as far as `VALUE_SLOTS` allows, with so many tasks a call."""
        return self.run_ahead or max(1, min(suggested, VALUE_SLOTS // tasks))
