"""Rows: the running requests as a struct of arrays, one element per row, so that a step costs no Python per row.

position      0        computed        length            planned          limit
              |-- KV is written --|-- token is known --|-- in flight --|          |
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cellar.core.messages import Emit, IntArray, Source
from cellar.schedule.steps.request import Phase, RequestState

Index = NDArray[np.intp]

NEVER = np.iinfo(np.int64).max
MAX_STOPS = 8


class Rows:
    """Arrays over rows r. Positions and counts are int64, tokens and slots int32.

    tokens [r, position]   prompt and output          table [r, column]  slot of each chunk
    length     known tokens                           num_chunks   columns of the table in use
    planned    positions up to here are planned       capacity     positions that the chunks hold
    computed   their KV is written: committed         next_named   computed position at which a chunk completes
    limit      most tokens                            in_flight    plans not committed that name the row
    last       position of the last, needs no KV
    decodes    may be planned as a decode             accepts      results are delivered
    masked     sampled under a mask
    from_device, emit_last: the same for every row, so that plans need not make them
    """

    def __init__(self, num_rows: int, max_model_len: int, chunk_size: int) -> None:
        self.num_rows = num_rows
        self.chunk_size = chunk_size
        # zeros, not empty or full: pages are touched only where a row gets that long
        self.tokens = np.zeros((num_rows, max_model_len), np.int32)
        self.table = np.zeros((num_rows, -(-max_model_len // chunk_size)), np.int32)
        self.length = np.zeros(num_rows, np.int64)
        self.planned = np.zeros(num_rows, np.int64)
        self.computed = np.zeros(num_rows, np.int64)
        self.limit = np.zeros(num_rows, np.int64)
        self.last = np.zeros(num_rows, np.int64)
        self.min_length = np.zeros(num_rows, np.int64)
        self.num_chunks = np.zeros(num_rows, np.int64)
        self.most_chunks = 0
        """Chunks of all rows that have an owner, if each gets as long as it may."""
        self._most = [0] * num_rows
        self.capacity = np.zeros(num_rows, np.int64)
        self.next_named = np.full(num_rows, NEVER)
        self.in_flight = np.zeros(num_rows, np.int64)
        self.decodes = np.zeros(num_rows, np.bool_)
        self.accepts = np.zeros(num_rows, np.bool_)
        self.masked = np.zeros(num_rows, np.bool_)
        self.priority = np.zeros(num_rows, np.int64)
        self.arrival = np.zeros(num_rows, np.int64)
        self.ids = np.full(num_rows, "", dtype=object)
        self.states: list[RequestState | None] = [None] * num_rows
        self.from_device = np.full(num_rows, Source.DEVICE, np.int32)
        self.emit_last = np.full(num_rows, Emit.LAST, np.int32)
        self._stops = np.full((MAX_STOPS, num_rows), -1, np.int32)
        self._num_stops = 0
        self._many_stops: set[int] = set()
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that no request owns."""
        return len(self._free)

    def open(self, state: RequestState, slots: IntArray, named: int = 0) -> int:
        """Give a free row to a request whose chunks lie in `slots`; nothing is planned or computed yet. The first
        `named` of them were found by their identities.

        Whatever it raises, the row is free.
        """
        row = self._free[-1]
        try:
            self._fill(row, state, slots, named)
        except Exception:
            self._blank(row)
            raise
        self._most[row] = max(len(slots), -(-(state.limit - 1) // self.chunk_size))
        self.most_chunks += self._most[row]
        self._free.pop()
        return row

    def _fill(self, row: int, state: RequestState, slots: IntArray, named: int) -> None:
        known, request = state.known, state.request
        count = len(known)
        self.tokens[row, :count] = known
        self.table[row, : len(slots)] = slots
        self.length[row] = count
        self.planned[row] = self.computed[row] = 0
        self.limit[row] = state.limit
        self.last[row] = state.limit - 1
        self.min_length[row] = state.num_prompt + request.params.min_tokens
        self.num_chunks[row] = len(slots)
        self.capacity[row] = len(slots) * self.chunk_size
        self.next_named[row] = (named + 1) * self.chunk_size
        self.decodes[row] = False
        self.accepts[row] = True
        self.masked[row] = request.params.masked
        self.priority[row], self.arrival[row] = state.key
        self.ids[row] = request.id
        self.states[row] = state
        stops = sorted(request.stop_ids)
        self._stops[:, row] = -1
        if len(stops) <= MAX_STOPS:
            self._stops[: len(stops), row] = stops
            self._num_stops = max(self._num_stops, len(stops))
        else:
            self._many_stops.add(row)

    def free(self, row: int) -> None:
        """Take a row back."""
        self._blank(row)
        self.most_chunks -= self._most[row]
        self._free.append(row)

    def _blank(self, row: int) -> None:
        self.decodes[row] = self.accepts[row] = self.masked[row] = False
        self.next_named[row] = NEVER
        self.num_chunks[row] = self.capacity[row] = 0
        self.ids[row] = ""
        self.states[row] = None
        self._many_stops.discard(row)

    def state(self, row: int) -> RequestState:
        """The owner of a row that has one."""
        state = self.states[row]
        assert state is not None
        return state

    def slots(self, row: int) -> IntArray:
        """Slots of a row's chunks, in order of position."""
        return self.table[row, : self.num_chunks[row]]

    def ready(self, depth: int) -> Index:
        """Rows whose next decode may be planned: fewer than `depth` plans in flight, limit not planned yet."""
        return ((self.in_flight < depth) & (self.planned < self.last) & self.decodes).nonzero()[0]

    def in_order(self, rows: Index) -> Index:
        """`rows`, first come first (within equal priority)."""
        order: Index = np.lexsort((self.arrival[rows], self.priority[rows]))
        return rows[order]

    def owned(self, phase: Phase) -> Index:
        """Rows whose owner is in `phase`; O(rows) in Python, for when memory is short."""
        return np.array([r for r, s in enumerate(self.states) if s is not None and s.phase is phase], np.intp)

    def any_decoding(self) -> bool:
        """True if some row has decodes that are not planned yet."""
        return bool((self.decodes & (self.planned < self.last)).any())

    def any_draining(self) -> bool:
        """True if some row has all its tokens planned: it ends, and gives back its memory, without more plans."""
        return bool((self.decodes & (self.planned >= self.last)).any())

    def grow(self, rows: Index, slots: IntArray) -> Index:
        """One chunk more for each of `rows` (distinct); -> the columns."""
        columns = self.num_chunks[rows]
        self.table[rows, columns] = slots
        self.num_chunks[rows] = columns + 1
        self.capacity[rows] += self.chunk_size
        return columns

    def append(self, rows: Index, tokens: IntArray) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """One output token for each of `rows` (distinct); -> the new lengths, and which rows end by a stop id."""
        at = self.length[rows]
        self.tokens[rows, at] = tokens
        at += 1
        self.length[rows] = at
        return at, self._stopped(rows, tokens, at)

    def _stopped(self, rows: Index, tokens: IntArray, lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of `rows` end by `tokens`, their newest: a stop id, and min_tokens reached before it."""
        hit: NDArray[np.bool_] = self._stops[0][rows] == tokens
        for stops in self._stops[1 : self._num_stops]:
            hit |= stops[rows] == tokens
        if self._many_stops:
            for k, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
                if row in self._many_stops:
                    hit[k] = token in self.state(row).request.stop_ids
        hit &= lengths > self.min_length[rows]
        return hit

    def completed(self, rows: Index) -> Index:
        """Those of `rows` in which a chunk is complete: KV computed, tokens known, identity not given yet."""
        due = self.next_named[rows]
        return rows[(self.computed[rows] >= due) & (self.length[rows] >= due)]
