"""A runtime without a device: steps and copies take the time that models of them say, on a clock that they move."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.core.messages import CopyResult, Emit, EraseBatch, IntArray, StepPlan, StepResult, Tier, TierOrder
from cellar.planner.steps import StepPrices
from cellar.runtime.protocol import Capacity
from cellar.simulate.link import Link

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
    earlier step runs, nobody waits for it. Requests need a seed in their parameters: see `generated`. `links` lead to
    the slower tiers. A copy within the device takes no time.
    """

    def __init__(
        self,
        capacity: Capacity,
        prices: StepPrices,
        host_seconds: float = 0.0,
        links: Mapping[Tier, Link] | None = None,
    ) -> None:
        self.now = 0.0
        self.steps: list[StepRecord] = []
        self.workers = (_SimulatedWorker(self),)
        self.pending: deque[tuple[float, StepResult]] = deque()
        self.computed: dict[int, list[tuple[int, int]]] = {}
        """Positions of prompts that were computed, as ranges by seed; whoever reads them takes them out."""
        self._links = dict(links or {})
        self._copied: deque[CopyResult] = deque()  # within the device
        self._filling: dict[int, tuple[Link, int]] = {}  # slot -> the load that brings it layer by layer
        self._loads: dict[int, IntArray] = {}  # load under way -> its slots
        self._talk = [0] * capacity.num_rows  # seed of each row
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
            self._talk[opened.row] = opened.params.seed
            self._seeds[opened.row] = (np.array([opened.params.seed], np.int32) * _SEED_STEP)[0]
        spans = plan.spans
        rows, stop = spans.row, spans.stop
        if len(plan.tokens):
            sampled = spans.emit == Emit.LAST
            rows, stop = rows[sampled], stop[sampled]
            work = self._prices.work(spans.start, spans.stop, len(rows))
            num_decodes = work.tokens - len(plan.tokens)
            for row, first, last in zip(
                *(part[num_decodes:].tolist() for part in (spans.row, spans.start, spans.stop)), strict=True
            ):
                self.computed.setdefault(self._talk[row], []).append((first, last))
        else:
            work = self._prices.decodes(stop)
            num_decodes = work.tokens
        count = len(rows)
        seconds = self._prices.seconds(work)
        begin = max(self.now, self._free_at)
        self._free_at = self._end(plan, begin, seconds)
        result = StepResult(
            step=plan.step,
            tokens=_tokens(stop, self._seeds[rows]).reshape(count, 1),
            num_tokens=self._ones[:count],
            flags=self._zeros[:count],
            seconds=seconds,
        )
        self.pending.append((self._free_at, result))
        self.steps.append(StepRecord(begin, self._free_at, work.tokens, num_decodes, count))

    def _end(self, plan: StepPlan, begin: float, seconds: float) -> float:
        """When a step ends that could begin at `begin`: layer j waits for layer j of chunks that are on their way.

        Layers take equally long, and arrive evenly: what binds is the first layer, or the last.
        """
        end, layers = begin + seconds, self._prices.d.layers
        if self._filling and len(plan.table.slot):
            loads = {self._filling[slot] for slot in plan.table.slot.tolist() if slot in self._filling}
            for link, number in loads:
                arrival = link.last_layer(number, self.now)
                if arrival is not None:
                    end = max(end, arrival[0] + seconds, arrival[1] + seconds / layers)
        return end

    def copy(self, batch: TierOrder) -> None:
        """Copy chunks over the link of the slower of both tiers.

        Raises IntegrityError for a tier without one, or a copy that a step waits for: who waits is the scheduler.
        """
        if isinstance(batch, EraseBatch):  # a note to a tier: no bytes move
            self._copied.append(CopyResult(batch.number, np.ones(len(batch), np.bool_)))
            return
        tier = max(batch.source, batch.target)
        if batch.before_step >= 0 or batch.after_step >= 0 or (tier is not Tier.DEVICE and tier not in self._links):
            raise IntegrityError(f"batch {batch.number} has no link here, or is tied to a step.")
        if tier is Tier.DEVICE:
            self._copied.append(CopyResult(batch.number, np.ones(len(batch), np.bool_)))
            return
        link = self._links[tier]
        link.submit(batch, self.now)
        if batch.target is Tier.DEVICE:
            self._loads[batch.number] = batch.target_slots
            self._filling.update(dict.fromkeys(batch.target_slots.tolist(), (link, batch.number)))

    def poll(self, timeout: float | None) -> list[StepResult | CopyResult]:
        """Let the clock run to the next result, or on by `timeout` seconds, whichever comes first."""
        pending = self.pending
        ready = pending[0][0] if pending else np.inf
        for link in self._links.values():
            ready = min(ready, link.next_time())
        if self._copied:
            ready = self.now
        until = ready if timeout is None else self.now + timeout
        if ready > until or ready == np.inf:
            self.now = self.now if timeout is None else until
            return []
        self.now = max(self.now, ready)
        results: list[StepResult | CopyResult] = []
        if self._links:
            results += self._copies()
        while pending and pending[0][0] <= self.now:
            results.append(pending.popleft()[1])
        return results

    def _copies(self) -> list[CopyResult]:
        """Results of copies so far, in order."""
        found = [(self.now, result) for result in self._copied]
        self._copied.clear()
        for link in self._links.values():
            found += link.collect(self.now)
            for number in link.ended:
                for slot in self._loads.pop(number).tolist():
                    if self._filling.get(slot) == (link, number):
                        del self._filling[slot]
            link.ended.clear()
        return [result for _, result in sorted(found, key=lambda entry: entry[0])]

    def wake(self) -> None:
        """Nobody waits: the clock stands still between calls."""

    def supply(self, step: int, masks: Mapping[int, NDArray[np.int32] | None]) -> None:
        """Raises IntegrityError: simulated requests are not structured."""
        raise IntegrityError(f"step {step} has no masks.")

    def masking(self, threads: int) -> None:
        """Nobody computes masks for simulated requests."""

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
