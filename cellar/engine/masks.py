"""MaskDesk: computes the masks of structured output in threads beside the engine's loop; no step waits long for one.

llguidance lets go of the interpreter while it computes a mask, so a mask that takes seconds costs others a core, not
their turn; where a step wants that core, the threads here step back. The step that needs the mask hears that it is
late; it is computed all the same, for when its request comes back.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from cellar.core.cores import num_cores
from cellar.core.priority import yield_to_steps
from cellar.engine.patience import STEP_SECONDS
from cellar.text.masker import MaskRow, Wanted

logger = logging.getLogger(__name__)

Supply = Callable[[int, Mapping[int, NDArray[np.int32] | None]], None]
Told = Callable[[MaskRow, str | None], None]
Masking = Callable[[int], None]

QUICK_AGAIN = 16
"""After so many masks in a fifth of that time a grammar that was slow is no longer."""

MAX_THREADS = 4
"""For masks that are not known to be slow; there is one for those that are. More than there are cores beside that of
the steps are started only when all of them are held up by a mask that is late."""

MAX_SLOW = 1024
"""Grammars that are remembered as slow."""


@dataclass(slots=True, eq=False)
class _Job:
    """A mask to be computed for a step that waits `patience` seconds for it, or for nobody any more (`handed`); its
    grammar is known to be `slow`.
    """

    wanted: Wanted
    patience: float
    slow: bool = False
    handed: bool = False
    begun: float = 0.0

    def own(self, now: float) -> float:
        """Seconds that count against its sequence: none while the step would have waited for as long as it has been
        computed. What stood in the line before it is not its own.
        """
        seconds = now - self.begun
        return seconds if seconds > self.patience else 0.0


class MaskDesk:
    """`supply` gets each mask, or None for a late one; `told` hears of late masks that are there after all, or why a
    request must end: its masks that were late by themselves have taken `budget` seconds. `masking` hears how many
    threads compute masks, whenever that changes. All are called in any thread.
    """

    def __init__(
        self,
        supply: Supply,
        told: Told,
        masking: Masking,
        budget: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._supply = supply
        self._told = told
        self._masking = masking
        self._budget = budget
        self._clock = clock
        self._changed = threading.Lock()
        self._for_quick, self._for_slow, self._for_keeper = (threading.Condition(self._changed) for _ in range(3))
        self._quick: deque[_Job] = deque()
        self._slow: list[tuple[float, int, _Job]] = []  # who has used least first
        self._numbers = count()
        self._open: list[tuple[float, int, _Job]] = []  # a heap of those not handed yet, by deadline
        self._running: set[_Job] = set()
        self._num_computing = 0
        self._slowness: dict[tuple[object, ...], int] = {}
        self._num_threads = 0  # for quick ones
        self._closed = False

    def ask(self, wanted: Sequence[Wanted], patience: float = STEP_SECONDS) -> None:
        """Hand in these masks, each as soon as it is there, or late after `patience` seconds. The engine's thread;
        never waits long.
        """
        known: dict[int, dict[int, NDArray[np.int32] | None]] = {}
        with self._changed:
            deadline = self._clock() + patience
            for one in wanted:
                state = one.state
                if one.late or state.computing:
                    known.setdefault(one.step, {})[one.row] = None
                elif state.mask is not None:
                    known.setdefault(one.step, {})[one.row] = state.mask
                else:
                    state.computing = True
                    job = _Job(one, patience, state.grammar in self._slowness)
                    if job.slow:
                        job.handed = True
                        known.setdefault(one.step, {})[one.row] = None
                        heapq.heappush(self._slow, (state.seconds, next(self._numbers), job))
                        self._for_slow.notify()
                    else:
                        if not self._open or deadline < self._open[0][0]:
                            self._for_keeper.notify()
                        self._quick.append(job)
                        heapq.heappush(self._open, (deadline, next(self._numbers), job))
                        self._for_quick.notify()
            if self._quick and not self._num_threads:
                self._start(self._keep)
                self._start(self._work_slowly)
                self._add_thread()
        for step, masks in known.items():
            self._supply(step, masks)

    def close(self) -> None:
        """Compute no more; threads end with what they are at."""
        with self._changed:
            self._closed = True
            self._quick.clear()
            self._slow.clear()
            self._open.clear()
            for condition in (self._for_quick, self._for_slow, self._for_keeper):
                condition.notify_all()

    # -- threads ----------------------------------------------------------------------------------

    def _add_thread(self) -> None:
        self._num_threads += 1
        self._start(self._work)

    def _start(self, target: Callable[[], None]) -> None:
        threading.Thread(target=target, name="cellar-masks", daemon=True).start()

    def _work(self) -> None:
        """Compute what is not known to be slow, first come first served."""
        yield_to_steps()
        while (job := self._next(self._for_quick, self._quick, self._quick.popleft)) is not None:
            self._computed(job, job.wanted.state.compute())
            with self._changed:
                if self._num_threads > self._most_threads(self._clock()):
                    self._num_threads -= 1
                    return

    def _work_slowly(self) -> None:
        """Compute what is known to be slow: who has used least goes first."""
        yield_to_steps()
        while (job := self._next(self._for_slow, self._slow, lambda: heapq.heappop(self._slow)[2])) is not None:
            self._computed(job, job.wanted.state.compute())

    def _next(self, there: threading.Condition, jobs: Sized, take: Callable[[], _Job]) -> _Job | None:
        """Wait for a job; None once the desk is closed."""
        with self._changed:
            there.wait_for(lambda: self._closed or len(jobs))
            if self._closed:
                return None
            job = take()
            job.begun = self._clock()
            if job.handed:
                self._for_keeper.notify()
            self._running.add(job)
            self._compute(+1)
            return job

    def _compute(self, change: int) -> None:
        """So many more threads compute; with the lock."""
        self._num_computing += change
        self._masking(self._num_computing)

    def _computed(self, job: _Job, mask: NDArray[np.int32]) -> None:
        state = job.wanted.state
        with self._changed:
            self._running.discard(job)
            self._compute(-1)
            now = self._clock()
            self._learn(state.grammar, now - job.begun)
            late, job.handed = job.handed, True
            if late:
                state.seconds += job.own(now)
            state.mask, state.computing = mask, False
        try:
            if not late:
                self._supply(job.wanted.step, {job.wanted.row: mask})
            else:
                self._told(state, self._refusal() if state.seconds > self._budget else None)
        except Exception:
            if not self._closed:
                logger.exception("a mask could not be handed in")

    def _keep(self) -> None:
        """Say of masks that they are late, and end requests whose masks take too long, while they are computed."""
        while True:
            late, over = list[_Job](), list[_Job]()
            with self._changed:
                if self._closed:
                    return
                now = self._clock()
                while self._open and (self._open[0][2].handed or self._open[0][0] <= now):
                    job = heapq.heappop(self._open)[2]
                    if not job.handed:
                        job.handed = True
                        late.append(job)
                for job in self._running:
                    if job.handed and job.wanted.state.seconds + job.own(now) > self._budget:
                        over.append(job)
                if late and self._quick and self._num_threads < self._most_threads(now):
                    self._add_thread()
                if not late and not over:
                    ends = [self._open[0][0] - now] if self._open else []
                    ends += [self._budget / 10] if any(job.handed for job in self._running) else []
                    self._for_keeper.wait(min(ends, default=None))
                    continue
                for job in over:
                    self._running.discard(job)
                for job in late:
                    if _is_long(job, now):
                        self._remember(job.wanted.state.grammar)
            try:
                for job in late:
                    self._supply(job.wanted.step, {job.wanted.row: None})
                for job in over:
                    self._told(job.wanted.state, self._refusal())
            except Exception:
                if not self._closed:
                    logger.exception("a late mask could not be told")

    def _most_threads(self, now: float) -> int:
        """As many as there are cores beside that of the steps, and those that one mask keeps for long."""
        held = sum(not job.slow and _is_long(job, now) for job in self._running)
        return min(MAX_THREADS, max(1, num_cores() - 1) + held)

    def _learn(self, grammar: tuple[object, ...], seconds: float) -> None:
        """Which grammars are slow; those that are quick again get another chance."""
        left = self._slowness.get(grammar, 0)
        if seconds > STEP_SECONDS:
            self._remember(grammar)
        elif left and seconds < STEP_SECONDS / 5:
            self._slowness[grammar] = left - 1
            if left == 1:
                del self._slowness[grammar]

    def _remember(self, grammar: tuple[object, ...]) -> None:
        """A grammar is slow."""
        self._slowness[grammar] = QUICK_AGAIN
        if len(self._slowness) > MAX_SLOW:
            del self._slowness[next(iter(self._slowness))]

    def _refusal(self) -> str:
        return (
            f"its grammar is too slow to follow: masks have taken more than {self._budget:g} s; make it less ambiguous."
        )


def _is_long(job: _Job, now: float) -> bool:
    """Whether a mask has been computed for so long that its grammar is slow."""
    return job.begun > 0 and now - job.begun > STEP_SECONDS / 2
