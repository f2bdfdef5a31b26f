"""A runtime without a device: steps take the time that the planner's cost model says, on a clock that they move."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.core.messages import CopyBatch, CopyResult, Emit, IntArray, StepPlan, StepResult
from cellar.planner.steps import StepPrices
from cellar.runtime.protocol import Capacity

# Odd numbers: at one position different seeds give different tokens, and for one seed different positions do.
_SEED_STEP, _POSITION_STEP = np.int32(0x5851F42D), np.int32(0x14057B7F)
MAX_SEED = 0x7FFFFFFF
_MASK = np.int32(MAX_SEED)


def generated(seed: int, start: int, stop: int) -> IntArray:
    """What a simulated request with `seed` (0 to MAX_SEED) answers at positions [start, stop) of its sequence."""
    return _tokens(np.arange(start, stop, dtype=np.int32), np.array([seed], np.int32) * _SEED_STEP)


def _tokens(positions: IntArray, seeds: IntArray) -> IntArray:
    """Products wrap around at 32 bits, which loses nothing: the steps are odd."""
    return (positions * _POSITION_STEP + seeds) & _MASK


class StepRecord(NamedTuple):
    """One step as it ran: seconds on the simulated clock, tokens computed (all, and by decodes), rows sampled."""

    begin: float
    end: float
    num_tokens: int
    num_decodes: int
    num_sampled: int


class SimulatedRuntime:
    """Implements `Runtime[StepPlan]`; `now` is its clock, in seconds.

    A step begins when it was submitted or when the one before it ended, whichever is later, and lasts as long as
    `prices` say. `host_seconds` pass whenever a step is handed over: what a turn of the loop costs the host; while an
    earlier step runs, nobody waits for it. Requests need a seed in their parameters: see `generated`.
    """

    def __init__(self, capacity: Capacity, prices: StepPrices, host_seconds: float = 0.0) -> None:
        self.now = 0.0
        self.steps: list[StepRecord] = []
        self.workers = (_SimulatedWorker(self),)
        self.pending: deque[tuple[float, StepResult]] = deque()
        self._capacity = capacity
        self._prices = prices
        self._host_seconds = host_seconds
        self._free_at = 0.0
        self._seeds = np.zeros(capacity.num_rows, np.int32)  # of each row, times the seeds' step
        self._ones = np.ones(capacity.num_rows, np.int32)
        self._zeros = np.zeros(capacity.num_rows, np.int32)

    @property
    def capacity(self) -> Capacity:
        """As given."""
        return self._capacity

    def submit(self, plan: StepPlan) -> None:
        """Price a plan; its result is ready when the clock gets there."""
        if plan.masked_rows or plan.targets is not None:
            raise IntegrityError(f"step {plan.step} masks or scores, which has no price here.")
        self.now += self._host_seconds
        for opened in plan.opens:
            assert opened.params.seed is not None, "requests come with a seed"
            self._seeds[opened.row] = (np.array([opened.params.seed], np.int32) * _SEED_STEP)[0]
        spans = plan.spans
        rows, stop = spans.row, spans.stop
        if len(plan.tokens):
            sampled = spans.emit == Emit.LAST
            rows, stop = rows[sampled], stop[sampled]
            work = self._prices.work(spans.start, spans.stop, len(rows))
            num_decodes = work.tokens - len(plan.tokens)
        else:
            work = self._prices.decodes(stop)
            num_decodes = work.tokens
        count = len(rows)
        seconds = self._prices.seconds(work)
        begin = max(self.now, self._free_at)
        self._free_at = begin + seconds
        result = StepResult(
            step=plan.step,
            tokens=_tokens(stop, self._seeds[rows]).reshape(count, 1),
            num_tokens=self._ones[:count],
            flags=self._zeros[:count],
            seconds=seconds,
        )
        self.pending.append((self._free_at, result))
        self.steps.append(StepRecord(begin, self._free_at, work.tokens, num_decodes, count))

    def copy(self, batch: CopyBatch) -> None:
        """Raises IntegrityError: nothing but the device's tier is simulated."""
        raise IntegrityError(f"batch {batch.number} copies chunks, which has no price here.")

    def poll(self, timeout: float | None) -> list[StepResult | CopyResult]:
        """Let the clock run to the next result, or on by `timeout` seconds, whichever comes first."""
        pending = self.pending
        ready = pending[0][0] if pending else None
        until = None if timeout is None else self.now + timeout
        if ready is None or (until is not None and ready > until):
            self.now = self.now if until is None else until
            return []
        self.now = max(self.now, ready)
        found: list[StepResult | CopyResult] = []
        while pending and pending[0][0] <= self.now:
            found.append(pending.popleft()[1])
        return found

    def wake(self) -> None:
        """Nobody waits: the clock stands still between calls."""

    def supply(self, step: int, masks: Mapping[int, NDArray[np.int32]]) -> None:
        """Raises IntegrityError: simulated requests are not structured."""
        raise IntegrityError(f"step {step} has no masks.")

    def close(self) -> None:
        """Forget what is under way."""
        self.pending.clear()


class _SimulatedWorker:
    """The one queue."""

    def __init__(self, runtime: SimulatedRuntime) -> None:
        self.id = 0
        self._runtime = runtime

    @property
    def in_flight(self) -> int:
        return len(self._runtime.pending)

    def submit(self, plan: StepPlan) -> None:
        self._runtime.submit(plan)
