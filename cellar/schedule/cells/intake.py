"""Intake: which waiting requests start next, and on which worker. BatchMaker §2.4.3; docs/decisions/0012-cells.md."""

from __future__ import annotations

from collections.abc import Sequence

from cellar.core.cell_graphs import CellConfig
from cellar.schedule.cells.admission import Admission
from cellar.schedule.cells.running import Running
from cellar.schedule.cells.subgraphs import FREE, Subgraphs
from cellar.schedule.cells.types import CellType
from cellar.schedule.cells.waiting import Waiting

_ADMITTED = 128
"""Requests admitted at a time: enough to share what a call costs, and few enough not to hold up a plan."""


class Intake:
    """Gives waiting requests a home as workers run short of ready nodes. Index letters: model m.

    admitted    requests admitted at a time
    types       [m], all cells of a model
    waiting     [m]
    admissions  [m]
    entries     [m], cells at which requests begin
    """

    def __init__(
        self,
        config: CellConfig,
        types: Sequence[Sequence[CellType]],
        waiting: Sequence[Waiting],
        admissions: Sequence[Admission],
        running: Running,
        subgraphs: Subgraphs,
        num_workers: int,
    ) -> None:
        self.admitted = _ADMITTED
        self._config = config
        self._types = types
        self._waiting = waiting
        self._admissions = admissions
        self._running = running
        self._subgraphs = subgraphs
        self._num_workers = num_workers
        self.entries: list[set[int]] = [set() for _ in types]

    def admit(self) -> None:
        """Give waiting requests a home, as far as rows are free and calls reach.

        Of the workers that are short of ready nodes the least loaded is served first. Requests that wait are divided
        among all workers, so that the first that is short does not take what the next will ask for.
        """
        for m, queue in enumerate(self._waiting):
            if not queue:
                continue
            wants, most = self.is_short, min(self.admitted, -(-len(queue) // self._num_workers))
            if self._config.graph_batch:
                wants, most = self._takes_graph, self._config.graph_batch
            while queue:
                workers = [w for w in range(self._num_workers) if wants(m, w)]
                if len(workers) > 1:
                    workers.sort(key=self._load)
                if not any(self.start(m, most, w) for w in workers):
                    break

    def let_in(self, m: int, cell: int, worker: int) -> bool:
        """Admit requests that begin at a cell of which a worker's call could take more -> whether there were any."""
        if not self._waiting[m] or self._config.graph_batch or cell not in self.entries[m]:
            return False
        return bool(self.start(m, self.admitted, worker))

    def start(self, m: int, most: int, worker: int) -> int:
        """Admit up to `most` requests of a model to a worker -> how many."""
        numbers, requests = self._admissions[m].admit(self._waiting[m], most, worker)
        self._running.start(numbers, requests, m, worker)
        return len(numbers)

    def is_short(self, m: int, worker: int) -> bool:
        """Whether a worker has few ready nodes of a cell at which requests begin: under a task and a half."""
        types = self._types[m]
        return any(2 * types[c].num_ready(worker) < 3 * types[c].largest for c in self.entries[m])

    def _load(self, worker: int) -> tuple[int, int]:
        """What a worker has to do: ready nodes, then requests that run there."""
        ready = sum(kind.num_ready(worker) for types in self._types for kind in types)
        return ready, sum(running[worker] for running in self._running.counts)

    def _takes_graph(self, m: int, worker: int) -> bool:
        """Whether a worker takes the next merged graph of a model: it has none, or none with nodes left to submit."""
        return not self._running.counts[m][worker] or (self._config.graph_ahead and self._is_submitted(m, worker))

    def _is_submitted(self, m: int, worker: int) -> bool:
        """Whether no node of a model's requests on a worker is left to be submitted."""
        sub = self._subgraphs
        mine = (sub.owner != FREE) & (sub.home == worker) & (sub.left > 0) & (sub.dead == 0)
        return {kind.kind for kind in self._types[m]}.isdisjoint(sub.kind[mine].tolist())
