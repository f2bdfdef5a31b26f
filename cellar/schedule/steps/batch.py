"""StepBatch: one step while it is put together, then the plan for the runtime and the record for the commit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cellar.core.messages import Emit, IntArray, RowOpen, Source, Spans, StepPlan, TableUpdate
from cellar.schedule.steps.request import RequestState
from cellar.schedule.steps.rows import Index, Rows

CONTEXT_OF_A_TOKEN = 64
"""Known positions before a piece of a prompt that cost about as much as one token of it: they are read for each piece,
however short it is."""

SCORED_COST = 2
"""Tokens of a step's budget that a position takes whose log-probability is asked for: it passes the head, too."""

_NO_INTS = np.empty(0, np.int32)
_NO_PROMPTS = np.empty((0, 2), np.int32)
_NO_ROWS = np.empty(0, np.intp)
_NO_UPDATE = TableUpdate(_NO_INTS, _NO_INTS, _NO_INTS)
_HOST = int(Source.HOST)  # a member of an enum costs an array microseconds more

IntT = TypeVar("IntT", np.int32, np.intp)


@dataclass(frozen=True, slots=True)
class InFlight:
    """What a commit must know of its plan.

    `rows` are the rows named, each once; when it commits, their KV is computed up to `stops`. `sampled`
    are the rows of its results, in the order of the results: `num_decodes` decodes, then ends of prompts. `prompts`
    [n, 2] are the positions of prompts that it computes; `cost` is what it took of its budget.
    """

    step: int
    rows: Index
    stops: Index
    sampled: Index
    num_decodes: int
    prompts: IntArray
    cost: int


def _each(state: RequestState) -> int:
    """What each token of a prompt takes of the budget."""
    return SCORED_COST if state.scores_prompt else 1


class StepBatch:
    """Collects spans up to `budget` tokens: decodes in one go, then prompt chunks one by one.

    Where long prompts have a budget of their own, an owner's first prompt is short if it takes at most `short`.
    """

    def __init__(self, rows: Rows, budget: int, short: int) -> None:
        self.budget = budget
        self.num_decodes = 0
        self._short = short
        self._long_budget: int | None = None  # what is left for long prompts; None: all
        self._alone: str | None = None
        self._whole = budget
        self._taken: Counter[str] = Counter()  # of the budget by owners' prompts
        self._fresh: set[int] = set()  # rows opened in it
        self._rows = rows
        self._decodes: Index = _NO_ROWS
        self._opens: list[RowOpen] = []
        self._updates: list[tuple[Index, Index, IntArray]] = []
        self._spans: list[tuple[int, int, int, Emit]] = []
        self._prompts: list[int] = []
        self._stops: list[int] = []
        self._sampled: list[int] = []

    @staticmethod
    def cost(state: RequestState) -> int:
        """What is left of its prompt takes so much of the budget."""
        return _each(state) * state.num_left

    def room(self, state: RequestState) -> int:
        """What a request's prompt may take of the budget now."""
        return self.budget if self.is_short(state) else max(0, min(self.budget, self._long_budget or 0))

    def is_short(self, state: RequestState) -> bool:
        """True if long prompts' budget does not concern it: it is as short as that, and its owner's first in this step.
        Whoever sends many at once has what many short ones take in common with one long prompt. The rest of a long one
        is no short one.
        """
        if self._long_budget is None or state.owner == self._alone:
            return True
        if state.row >= 0 and state.row not in self._fresh:
            return False
        return self.cost(state) <= self._short and not self._taken[state.owner]

    def limit(self, budget: int) -> None:
        """It has so many tokens at most."""
        self._whole = self.budget = min(self.budget, budget)

    def limit_long(self, budget: int, alone: str | None) -> None:
        """All long prompts together get so much of it, but those of the owner who is `alone`, if one is."""
        self._long_budget, self._alone = budget, alone

    @property
    def has_prompts(self) -> bool:
        """True if some prompt's tokens are in it."""
        return bool(self._spans)

    @property
    def is_empty(self) -> bool:
        """True if nothing is computed in it."""
        return not self.num_decodes and not self._spans

    def decode(self, rows: Index) -> None:
        """One token of each of `rows`."""
        self._decodes = rows
        self.num_decodes = len(rows)
        self.budget -= len(rows)

    def place(self, rows: Index, columns: Index, slots: IntArray) -> None:
        """New entries of the rows' tables."""
        self._updates.append((rows, columns, slots))

    def open(self, state: RequestState) -> None:
        """The request has got its row."""
        request, row, penalized = state.request, state.row, state.request.params.penalized
        masked = request.params.masked
        self._opens.append(
            RowOpen(
                row=row,
                params=request.params,
                num_output=state.num_output,
                stop_ids=tuple(sorted(request.stop_ids)),
                prompt=request.prompt if penalized else None,
                output=state.known[state.num_prompt :] if penalized or masked else None,
                seed=request.seed,
                name=request.id,
            )
        )
        self._fresh.add(row)
        slots = self._rows.slots(row).copy()
        self.place(np.full(len(slots), row), np.arange(len(slots)), slots)

    def prompt(self, state: RequestState) -> None:
        """As much of a request's known tokens as there is room for, holes before what follows them."""
        todo, row, end = state.todo, state.row, len(state.known)
        stop = 0
        cost = _each(state)
        is_short, room = self.is_short(state), self.room(state)
        while todo and room > 0:
            start, stop = todo.popleft()
            most = -(-room // cost)
            if stop - start > most:
                todo.appendleft((start + most, stop))
                stop = start + most
            if self._long_budget is not None and not is_short:
                self._long_budget -= start // CONTEXT_OF_A_TOKEN
            room -= self._take(state, min(room, cost * (stop - start)), is_short)
            if state.pools:
                self._pool(state, start, stop)
                continue
            emit = Emit.ALL if state.scores_prompt else Emit.LAST if stop == end else Emit.NONE
            self._spans.append((row, start, stop, emit))
        if stop:
            self._prompts.append(row)
            self._stops.append(stop)
            if stop == end and not state.pools:
                self._sampled.append(row)

    def _take(self, state: RequestState, cost: int, is_short: bool) -> int:
        self.budget -= cost
        self._taken[state.owner] += cost
        if self._long_budget is not None and not is_short:
            self._long_budget -= cost
        return cost

    def _pool(self, state: RequestState, start: int, stop: int) -> None:
        """Positions of a prompt that is pooled: all of them count, or the last alone."""
        row, last = state.row, len(state.known) - 1
        if state.needs_all or start == last:
            self._spans.append((row, start, stop, Emit.SUM))
        elif stop > last:
            self._spans += [(row, start, last, Emit.NONE), (row, last, stop, Emit.SUM)]
        else:
            self._spans.append((row, start, stop, Emit.NONE))

    def withdraw(self, row: int) -> None:
        """Take out all that was said of a row after the decodes."""
        self._opens = [opened for opened in self._opens if opened.row != row]
        self._spans = [span for span in self._spans if span[0] != row]
        self._sampled = [other for other in self._sampled if other != row]
        kept = [k for k, other in enumerate(self._prompts) if other != row]
        self._prompts, self._stops = [self._prompts[k] for k in kept], [self._stops[k] for k in kept]
        stays = [(rows != row, rows, columns, slots) for rows, columns, slots in self._updates]
        self._updates = [(rows[at], columns[at], slots[at]) for at, rows, columns, slots in stays]

    def build(self, step: int, closes: tuple[int, ...]) -> tuple[StepPlan, InFlight] | None:
        """The plan, and the rows' arrays moved on by it. None if there is nothing to compute."""
        rows, decodes = self._rows, self._decodes
        count = len(decodes)
        if not count and not self._spans:
            return None
        start = rows.planned[decodes]
        record = InFlight(step, decodes, start + 1, decodes, count, _NO_PROMPTS, count)
        spans = Spans(
            row=decodes.astype(np.int32),
            start=start.astype(np.int32),
            stop=record.stops.astype(np.int32),
            source=rows.from_device[:count],
            emit=rows.emit_last[:count],
        )
        tokens, targets = _NO_INTS, None
        if self._spans:
            planned = np.array(self._spans, np.int32)
            record = InFlight(
                step,
                _after(decodes, np.array(self._prompts, np.intp)),
                _after(record.stops, np.array(self._stops, np.intp)),
                _after(decodes, np.array(self._sampled, np.intp)),
                count,
                planned[:, 1:3],
                self._whole - self.budget,
            )
            row, begin, stop, emit = planned.T.copy()
            spans = Spans(
                row=_after(spans.row, row),
                start=_after(spans.start, begin),
                stop=_after(spans.stop, stop),
                source=_after(spans.source, np.full(len(row), _HOST, np.int32)),
                emit=_after(spans.emit, emit),
            )
            tokens = np.concatenate([rows.tokens[r, a:b] for r, a, b, _ in self._spans])
            targets = self._targets()
        rows.planned[record.rows] = record.stops
        rows.in_flight[record.rows] += 1
        masked = tuple(record.sampled[rows.masked[record.sampled]].tolist()) if rows.masked.any() else ()
        plan = StepPlan(step, spans, tokens, self._update(), tuple(self._opens), closes, targets, masked_rows=masked)
        return plan, record

    def _targets(self) -> IntArray | None:
        """Tokens that follow the positions of the ALL spans; -1 after the last known one, which is sampled."""
        pieces = []
        for row, start, stop, emit in self._spans:
            if emit is Emit.ALL:
                known = int(self._rows.length[row])
                pieces.append(self._rows.tokens[row, start + 1 : min(stop + 1, known)])
                if stop == known:
                    pieces.append(np.array([-1], np.int32))
        return np.concatenate(pieces) if pieces else None

    def _update(self) -> TableUpdate:
        if not self._updates:
            return _NO_UPDATE
        row, column, slot = (np.concatenate(part, dtype=np.int32) for part in zip(*self._updates, strict=True))
        return TableUpdate(row, column, slot)


def _after(decodes: NDArray[IntT], prompts: NDArray[IntT]) -> NDArray[IntT]:
    """What a step has of decodes, then of prompts."""
    return np.concatenate((decodes, prompts)) if len(decodes) else prompts
