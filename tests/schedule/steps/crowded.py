"""Waits beside a crowd on a modelled clock: `python -m tests.schedule.steps.crowded [CASE ...]`.

The real scheduler plans; how long a step takes is a sum over what is in it, as it is about on two cores with the demo
model. So what somebody waits for is told apart from what else the machine does: `tests/hostile/crowding.py` has the
cases by the clock of a machine. A client asks for 8 tokens every 0.2 s, the others send their case again and again.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from cellar.core.config import ScheduleConfig
from cellar.core.messages import Emit, Request, Source, StepPlan, StepResult
from cellar.core.sampling import SamplingParams
from cellar.schedule.steps.scheduler import StepScheduler
from tests.hostile.crowding import PERIOD
from tests.server.load import quantile

SECONDS_OF_STEP, OF_DECODE, OF_PROMPT_TOKEN, OF_ROW = 0.003, 0.00023, 0.00017, 0.0006
"""A step lasts so long, and longer for each decode, each token of a prompt, and each row that it opens."""

BEGIN = 1.0
"""When the others come."""

PARAMS = SamplingParams(temperature=0.0, detokenize=False, seed=0)


@dataclass(frozen=True)
class Case:
    """Prompts of one request, their length, tokens asked for each, and how many clients send that."""

    prompts: int
    length: int
    max_tokens: int
    clients: int


CASES = {
    "biases-256": Case(256, 1, 64, 4),
    "sequences-many": Case(128, 1, 200, 8),
    "rows": Case(128, 1, 1900, 4),
    "stops": Case(1024, 1, 4, 1),
    "logprobs": Case(128, 20, 64, 1),
    "long-prompts": Case(100, 1900, 1, 1),
}


@dataclass
class Waits:
    """Seconds of whole answers, and of the longest wait for a token of each."""

    wholes: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


@dataclass
class _Asked:
    """The client's request."""

    id: str
    begun: float
    last: float
    gap: float = 0.0


class Crowd:
    """One server's scheduler with 256 rows, a client, and the clients of a case."""

    def __init__(self, case: Case) -> None:
        config = ScheduleConfig(max_num_batched_tokens=2048, max_mixed_seconds=0.1)
        self._scheduler = StepScheduler(256 * 130, 256, 16, 2048, config)
        self._ahead = config.run_ahead
        self._case = case
        self._comes = [(0.0, False), *((BEGIN, True) for _ in range(case.clients))]  # a heap: when, and whether theirs
        self._left: dict[str, int] = {}  # sequences of each of their requests
        self._asked: _Asked | None = None
        self._count = 0
        self.waits = Waits()

    def run(self, seconds: float) -> Waits:
        """So many of the modelled clock."""
        now, free = 0.0, 0.0  # free: when the device is
        flying: deque[tuple[float, float, StepPlan]] = deque()
        while now < seconds:
            while self._comes and self._comes[0][0] <= now:
                self._send(heapq.heappop(self._comes)[1], now)
            while len(flying) < self._ahead and (plan := self._scheduler.plan(0, now)) is not None:
                lasts = _seconds(plan)
                free = max(now, free) + lasts
                flying.append((free, lasts, plan))
            if not flying or (self._comes and self._comes[0][0] < flying[0][0]):
                now = max(now, self._comes[0][0])
                continue
            now, lasts, plan = flying.popleft()
            self._commit(plan, lasts, now)
        return self.waits

    def _send(self, is_theirs: bool, now: float) -> None:
        self._count += 1
        name, case = f"{self._count}", self._case
        if not is_theirs:
            self._asked = _Asked(name, now, now)
            self._scheduler.add(_request(name, 3, 8, name), now)
            return
        self._left[name] = case.prompts
        for k in range(case.prompts):
            self._scheduler.add(_request(f"{name}.{k}", case.length, case.max_tokens, name), now)

    def _commit(self, plan: StepPlan, lasts: float, now: float) -> None:
        count = int((plan.spans.emit == Emit.LAST).sum())
        tokens, ones = np.full((count, 1), 77, np.int32), np.ones(count, np.int32)
        result = StepResult(plan.step, tokens, ones, np.zeros(count, np.int32), seconds=lasts)
        output, asked = self._scheduler.commit(result, now), self._asked
        if asked is not None and asked.id in output.ids:
            asked.gap, asked.last = max(asked.gap, now - asked.last), now
        for id in output.finished:
            if asked is not None and id == asked.id:
                if now > BEGIN:
                    self.waits.wholes.append(now - asked.begun)
                    self.waits.gaps.append(asked.gap)
                self._asked = None
                heapq.heappush(self._comes, (max(now, asked.begun + PERIOD), False))
                continue
            name = id.partition(".")[0]
            self._left[name] -= 1
            if not self._left[name]:
                del self._left[name]
                heapq.heappush(self._comes, (now + 0.05, True))


def _request(id: str, length: int, max_tokens: int, owner: str) -> Request:
    prompt = np.arange(5, 5 + length, dtype=np.int32)
    return Request(id, prompt, PARAMS, frozenset(), max_tokens, owner=owner, seed=0)


def _seconds(plan: StepPlan) -> float:
    decodes = int((plan.spans.source == Source.DEVICE).sum())
    prompts = OF_PROMPT_TOKEN * len(plan.tokens) + OF_ROW * len(plan.opens)
    return SECONDS_OF_STEP + OF_DECODE * decodes + prompts


def main() -> None:
    for name in sys.argv[1:] or CASES:
        waits = Crowd(CASES[name]).run(20.0)
        p50, p99 = (quantile(waits.wholes, share) for share in (0.5, 0.99))
        print(
            f"{name}: {len(waits.wholes)} answers, p50 {p50:.2f}, p99 {p99:.2f}, longest wait {max(waits.gaps):.2f} s"
        )


if __name__ == "__main__":
    main()
