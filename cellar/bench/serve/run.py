"""One run of a load against a server: sends what is due when it is due, and measures itself meanwhile."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cellar.bench.serve.client import Answer, LoadClient
from cellar.bench.serve.prompts import Script, Talk
from cellar.bench.workloads import Load
from cellar.reports.load import FloatArray, RequestTiming, Section

PREPARED_TOKENS = 8_000_000
"""First prompts up to this many tokens are written out before the run; of more, each just before it is due."""

HEARTBEAT = 0.01
BUSY_SHARE = 0.8
LATE_SECONDS = 0.05
LATE_SHARE = 0.2
"""A client busier than this, later than this, or later than this share of the time to the first token, is told of."""


@dataclass(frozen=True, slots=True, eq=False)
class ClientLoad:
    """How busy the client itself was. Lags and delays in seconds; `busy` is its thread's share of one core."""

    busy: float
    lags: FloatArray
    delays: FloatArray

    def section(self) -> Section:
        """Lines of the report."""
        return Section(
            "Client",
            (
                ("Client CPU (% of one core)", "client_cpu_percent", self.busy * 100),
                ("P99 event loop lag (ms)", "p99_client_lag_ms", _p99(self.lags) * 1e3),
                ("Max event loop lag (ms)", "max_client_lag_ms", _max(self.lags) * 1e3),
                ("P99 send delay (ms)", "p99_send_delay_ms", _p99(self.delays) * 1e3),
            ),
        )

    def warnings(self, ttft: float, paced: bool) -> list[str]:
        """What to say if the figures tell of the client rather than of the server.

        `ttft` is the median, in seconds. Only if requests are `paced` it matters when they were sent.
        """
        found = []
        late = _p99(self.lags)
        if self.busy > BUSY_SHARE or _matters(late, ttft):
            found.append(
                f"the client or its machine was a bottleneck: {self.busy:.0%} of a core busy, awake up to "
                f"{late * 1e3:.0f} ms late (p99), which is part of the latencies above; lower the load, or run the "
                "client on another machine."
            )
        late = _p99(self.delays)
        if paced and _matters(late, ttft):
            found.append(
                f"requests were sent up to {late * 1e3:.0f} ms late (p99): the load was not quite as intended."
            )
        return found


def _matters(late: float, ttft: float) -> bool:
    return late > LATE_SECONDS or late > LATE_SHARE * ttft


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What came of one run; `answers` are in the order of `timings`. `unsent` turns came after a failure."""

    timings: list[RequestTiming]
    answers: list[Answer]
    duration: float
    unsent: int
    client: ClientLoad


async def run_load(
    client: LoadClient,
    load: Load,
    script: Script,
    max_concurrency: int | None = None,
    session: str | None = None,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> Run:
    """Send a load, at most `max_concurrency` conversations at a time, and wait for the last answer.

    `session` prefixes the header X-Session-ID, which names a conversation. A failure ends its conversation.
    """
    return await _Runner(client, load, script, max_concurrency, session, on_answer).run()


class _Runner:
    def __init__(
        self,
        client: LoadClient,
        load: Load,
        script: Script,
        max_concurrency: int | None,
        session: str | None,
        on_answer: Callable[[Answer], None],
    ) -> None:
        self._client = client
        self._load = load
        self._script = script
        self._slots = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._session = session
        self._on_answer = on_answer
        self._timings: list[RequestTiming] = []
        self._answers: list[Answer] = []
        self._delays: list[float] = []
        self._unsent = 0
        self._origin = 0.0

    async def run(self) -> Run:
        first_tokens = sum(c.turns[0].num_tokens for c in self._load.conversations)
        prepared: list[tuple[Talk, bytes]] | None = None
        if first_tokens <= PREPARED_TOKENS:
            prepared = [self._open(k) for k in range(len(self._load.conversations))]
        gc.freeze()  # a collection that walks through all prompts would be a pause in the middle of the run
        heart = asyncio.create_task(_beats())
        try:
            self._origin, busy = time.perf_counter(), time.thread_time()
            async with asyncio.TaskGroup() as group:
                for k, arrival in enumerate(self._load.arrivals.tolist()):
                    talk, body = self._open(k) if prepared is None else prepared[k]
                    due = await self._until(self._origin + arrival)
                    if self._slots is not None and self._slots.locked():
                        await self._slots.acquire()
                        due = time.perf_counter()
                    elif self._slots is not None:
                        await self._slots.acquire()
                    group.create_task(self._converse(k, talk, body, due))
            duration = max((t.finish for t in self._timings), default=0.0)
            elapsed = time.perf_counter() - self._origin
            busy = (time.thread_time() - busy) / max(elapsed, 1e-9)
        finally:
            heart.cancel()
            (lags,) = await asyncio.gather(heart)
            gc.unfreeze()
        client = ClientLoad(busy, np.array(lags), np.array(self._delays))
        return Run(self._timings, self._answers, max(duration, 1e-9), self._unsent, client)

    def _open(self, k: int) -> tuple[Talk, bytes]:
        talk = self._script.talk(k)
        return talk, talk.say()

    async def _until(self, due: float) -> float:
        """Sleep until a moment of the clock; gives it back."""
        pause = due - time.perf_counter()
        if pause > 0:
            await asyncio.sleep(pause)
        return due

    async def _converse(self, k: int, talk: Talk, body: bytes, due: float) -> None:
        turns = self._load.conversations[k].turns
        headers = None if self._session is None else {"x-session-id": f"{self._session}-{k}"}
        context = 0
        try:
            for at, turn in enumerate(turns):
                context += turn.num_tokens
                answer = await self._client.ask(body, headers)
                delay = max(answer.sent - due, 0.0)
                self._delays.append(delay)
                self._timings.append(answer.timing(self._origin, context, k, at, delay))
                self._answers.append(answer)
                self._on_answer(answer)
                if answer.error is not None:
                    self._unsent += len(turns) - at - 1
                    return
                context += answer.output_tokens
                if at + 1 < len(turns):
                    talk.heard(answer)
                    body = talk.say()
                    due = await self._until(answer.ended + turns[at + 1].think_time)
        finally:
            if self._slots is not None:
                self._slots.release()


async def _beats() -> list[float]:
    """How much later than asked for this task was woken, again and again until it is cancelled."""
    lags: list[float] = []
    while True:
        before = time.perf_counter()
        try:
            await asyncio.sleep(HEARTBEAT)
        except asyncio.CancelledError:
            lag = time.perf_counter() - before - HEARTBEAT
            return [*lags, lag] if lag > 0 else lags  # overdue: the loop was held up to the very end
        lags.append(max(time.perf_counter() - before - HEARTBEAT, 0.0))


def _p99(values: FloatArray) -> float:
    return float(np.percentile(values, 99)) if len(values) else 0.0


def _max(values: FloatArray) -> float:
    return float(values.max()) if len(values) else 0.0
