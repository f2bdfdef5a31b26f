"""Commit: what finished tasks change. Values are kept, what waited is released, and requests end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cellar.core.cell_graphs import CellOutput, CellStep
from cellar.core.errors import IntegrityError
from cellar.core.tasks import NodeFlag, TaskResult, Values
from cellar.schedule.cells.flight import Dependants, Flight
from cellar.schedule.cells.queue import IndexArray
from cellar.schedule.cells.requests import Roster
from cellar.schedule.cells.running import Running
from cellar.schedule.cells.subgraphs import FREE, Subgraphs
from cellar.schedule.cells.types import CellType


class Commit:
    """Takes in the tasks of flights, one or several at once. Index letters: task t, output o."""

    def __init__(self, subgraphs: Subgraphs, kinds: Sequence[CellType], roster: Roster, running: Running) -> None:
        self._subgraphs = subgraphs
        self._kinds = kinds
        self._roster = roster
        self._running = running

    def is_eventful(self, flight: Flight, result: TaskResult) -> bool:
        """Whether tasks are committed one by one: a node failed, a chain met its stop symbol, steps are streamed."""
        kind = flight.kind
        if kind.num_streaming or np.count_nonzero(result.flags):
            return True
        if not kind.num_growing or result.error is not None:
            return False
        sub = self._subgraphs
        for o, (emit, values) in enumerate(zip(flight.emits, result.values, strict=True)):
            if emit is not None and values is not None and values.ndim == 1:
                owners = emit.owners[emit.bounds[result.first] : emit.bounds[result.stop]]
                if len(owners) != len(values):
                    return True
                hit = (sub.stop[owners] == values) & (sub.stop_output[owners] == o)
                if np.count_nonzero(hit):
                    return True
        return False

    def tasks(self, flight: Flight, first: int, stop: int, result: TaskResult, output: CellOutput) -> None:
        """Tasks [first, stop) of a flight; one, or several between which nothing happens."""
        sub = self._subgraphs
        slots = flight.owners[flight.cu_batch[first] : flight.cu_batch[stop]]
        np.subtract.at(sub.uncommitted, slots, 1)
        at_once = stop - first > 1
        if at_once and stop - first == flight.num_tasks and not sub.num_dead:
            done = flight.ending[sub.uncommitted.take(flight.ending) == 0]
        else:
            done = slots[sub.uncommitted.take(slots) == 0]
            if at_once or not flight.plain:  # a subgraph may have had several nodes
                done = np.array([*dict.fromkeys(done.tolist())], np.int64)
        some_ended = True
        if result.error is not None:
            alive = slots[sub.dead[slots] == 0]
            for number in np.unique(sub.owner[alive]).tolist():
                self._running.fail(number, result.error, output)
        else:
            failed = self._fail_nodes(flight, first, stop, result, output)
            self._keep_values(flight, first, stop, result, output, some_ended=failed or sub.num_dead > 0)
            some_ended = failed or sub.num_dead > 0
        if flight.dependants is not None:
            self._release(flight.dependants, flight.worker, first, stop, some_ended=some_ended)
        if len(done):
            self._complete(done, output)

    def _fail_nodes(self, flight: Flight, first: int, stop: int, result: TaskResult, output: CellOutput) -> bool:
        """Requests whose node is not finite, or failed, end; their neighbours do not notice. -> if there are any."""
        base = flight.cu_batch[result.first]
        begin, end = flight.cu_batch[first], flight.cu_batch[stop]
        flags = result.flags[begin - base : end - base]
        if not np.count_nonzero(flags):
            return False
        for k in np.flatnonzero(flags).tolist():
            slot = int(flight.owners[begin + k])
            number = int(self._subgraphs.owner[slot])
            if number == FREE or self._subgraphs.dead[slot]:
                continue
            name = flight.kind.spec.name
            if flags[k] == NodeFlag.NAN:
                reason = (
                    f"cell {name!r} computed a value that is not finite; check the request's values and the weights."
                )
            else:
                reason = result.errors.get(begin + k, f"cell {name!r} failed on this request.")
            self._running.fail(number, reason, output)
        return True

    def _keep_values(
        self, flight: Flight, first: int, stop: int, result: TaskResult, output: CellOutput, *, some_ended: bool
    ) -> None:
        """Put emitted values where their requests find them, and end chains that met their stop symbol."""
        sub, kind = self._subgraphs, flight.kind
        stopped: list[int] = []
        found: list[tuple[int, IndexArray, IndexArray, Values]] = []
        for o, emit in enumerate(flight.emits):
            if emit is None or emit.bounds[first] == emit.bounds[stop]:
                continue
            begin, end = emit.bounds[first], emit.bounds[stop]
            values, offset = result.values[o], begin - emit.bounds[result.first]
            if values is None or len(values) < offset + end - begin:
                raise IntegrityError(f"plan {result.plan} came back with too few values of output {o}.")
            values, places, owners = (
                values[offset : offset + end - begin],
                emit.places[begin:end],
                emit.owners[begin:end],
            )
            if some_ended:
                alive = (sub.owner[owners] != FREE) & (sub.dead[owners] == 0)
                values, places, owners = values[alive], places[alive], owners[alive]
            if kind.num_growing and values.ndim == 1:
                hit = (sub.stop[owners] == values) & (sub.stop_output[owners] == o)
                stopped += owners[hit].tolist()
            found.append((o, places, owners, values))
        for o, places, owners, values in found:
            if stopped:
                others = ~np.isin(owners, stopped)
                values, places, owners = values[others], places[others], owners[others]
            kind.outbox.put(o, places, values)
            if kind.num_streaming:
                self._stream(kind, o, owners, values, output)
        for slot in stopped:
            number = int(sub.owner[slot])
            made = int(sub.nodes[slot] - sub.uncommitted[slot])
            self._running.end_chain(number, slot, made - 1, stopped=True)
            if not self._roster.unfinished[number]:
                self._running.finish([number], output)

    def _stream(self, kind: CellType, o: int, owners: IndexArray, values: Values, output: CellOutput) -> None:
        """Steps of growing chains whose requests want them as they come."""
        for k in np.flatnonzero(self._subgraphs.loop[owners]).tolist():
            slot = int(owners[k])
            number = int(self._subgraphs.owner[slot])
            request = self._running.requests[number]
            if request.stream:
                ordinal = self._roster.growing[number].slots.index(slot)
                part = next(p for p, part in enumerate(request.graph.parts) if part.cell == kind.cell)
                output.steps.append(CellStep(request.id, ordinal, part, o, values[k]))

    def _release(self, dependants: Dependants, worker: int, first: int, stop: int, *, some_ended: bool) -> None:
        """Nodes have committed that subgraphs wait for; those that wait for nothing more join their queues."""
        sub = self._subgraphs
        begin, end = dependants.bounds[first], dependants.bounds[stop]
        if begin == end:
            return
        targets = dependants.targets[begin:end]
        if some_ended:
            owners = dependants.owners[begin:end]
            targets = targets[(sub.owner[owners] != FREE) & (sub.dead[owners] == 0)]
        np.subtract.at(sub.waits, targets, 1)
        met = targets[sub.waits.take(targets) == 0]
        if not len(met):
            return
        met = np.array([*dict.fromkeys(met.tolist())])  # in the order in which what they waited for has run
        kinds = sub.kind.take(met)
        for k in sorted(set(kinds.tolist())):
            self._kinds[k].release(met[kinds == k], worker)

    def _complete(self, done: IndexArray, output: CellOutput) -> None:
        """Subgraphs whose last node has committed; a request ends with its last subgraph."""
        sub, unfinished = self._subgraphs, self._roster.unfinished
        if sub.num_dead:
            dead = sub.dead[done] == 1
            self._running.release_dead(done[dead])
            done = done[~dead]
        owners = sub.owner.take(done)
        if np.count_nonzero(owners == FREE):  # they ended early in this very task
            done, owners = done[owners != FREE], owners[owners != FREE]
        if not len(done):
            return
        sub.give(done)
        np.subtract.at(unfinished, owners, 1)
        ended = owners[unfinished.take(owners) == 0].tolist()
        if ended:
            self._running.finish(ended if len(ended) == 1 else [*dict.fromkeys(ended)], output)
