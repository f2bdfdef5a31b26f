"""The load: users who talk with a server from several processes, and what they have heard, joined.

Conversations begin as a Poisson process, and users think for exponential times. Those whom a steady state has in
thought are there at second 0: their histories are computed before the clock starts, so a short run is steady. Each
user has a connection. Moments are seconds of `time.perf_counter`, which is one clock for all processes of a machine.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

import aiohttp
import numpy as np
import uvloop

from benchmarks.replicas.servers import counters
from cellar.bench.serve.client import LoadClient
from cellar.core.errors import ConfigError, RequestError

HISTORY_SECONDS = 120.0
DRAIN_SECONDS = 60.0
KEEPALIVE_SECONDS = 60.0
FIRST_ID = 100
"""Of the ids that prompts are made of: those below mean something in many vocabularies."""

Turns: TypeAlias = Sequence[tuple[int, int]]
"""Of a conversation: the tokens that each turn adds, and those of its answer."""


@dataclass(frozen=True, slots=True)
class Load:
    """`rate` requests/s by `clients` processes; `seconds` are counted after `warm`. `think` is the mean, in seconds."""

    lengths: Sequence[Turns]
    rate: float
    think: float
    warm: int
    seconds: int
    vocab_size: int
    seed: str
    clients: int

    def share(self, client: int) -> Load:
        """What one of the processes sends."""
        return replace(self, rate=self.rate / self.clients, seed=f"{self.seed}/{client}", clients=1)

    def within(self, max_context: int) -> Load:
        """Without turns whose prompt and answer exceed a context. Raises ConfigError if none is left."""
        cut = [tuple(t for k, t in enumerate(turns) if _total(turns[: k + 1]) <= max_context) for turns in self.lengths]
        if not any(cut):
            raise ConfigError(f"no conversation begins within {max_context} tokens; give others by --lengths.")
        return replace(self, lengths=[turns for turns in cut if turns])


class Begin(NamedTuple):
    """A conversation appears at `moment`, in seconds from the start; before `turn` lies a history that is known."""

    moment: float
    turns: Turns
    turn: int = 0


class Row(NamedTuple):
    """A request that was answered: `found` tokens of its prompt were cached, `could` had been computed before."""

    sent: float
    first: float
    ended: float
    tokens: int
    could: int
    found: int


@dataclass(slots=True)
class Heard:
    """By one process; `tokens` came in each second of the clock, `busy` is its share of a core."""

    rows: list[Row] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    tokens: dict[int, float] = field(default_factory=dict)
    busy: float = 0.0


def begins(load: Load) -> list[Begin]:
    """First those in thought at second 0, then those who come."""
    rng = random.Random(load.seed)
    turns_mean = fmean(map(len, load.lengths))
    starts = load.rate / turns_mean
    thinking = starts * (turns_mean - 1) * load.think  # Little's law
    later = [(turns, k) for turns in load.lengths for k in range(1, len(turns))]
    found = [Begin(0.0, *rng.choice(later)) for _ in range(int(thinking) + (rng.random() < thinking % 1))]
    moment = rng.expovariate(starts)
    while moment < load.warm + load.seconds:
        found.append(Begin(moment, rng.choice(load.lengths)))
        moment += rng.expovariate(starts)
    return found


def measure(root: str, model: str, load: Load) -> dict[str, Any]:
    """Load a server; -> figures, and by how much its counters grew."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for client in range(load.clients):
        ours, theirs = context.Pipe()
        process = context.Process(target=_client, args=(root, model, load.share(client), theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        if not pipe.poll(HISTORY_SECONDS):
            raise RequestError(f"histories were not computed within {HISTORY_SECONDS:.0f} s; lower --rate or --think.")
        pipe.recv()
    start = math.floor(time.perf_counter() + 0.2) + 1  # seconds of the load are seconds of the clock
    for pipe in pipes:
        pipe.send(start)
    counted, end = start + load.warm, start + load.warm + load.seconds
    time.sleep(max(0.0, counted - time.perf_counter()))
    before = counters(root)
    time.sleep(max(0.0, end - time.perf_counter()))
    after = counters(root)
    heard = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return figures(heard, counted, end) | {"counters": {name: by for name, by in grown.items() if by}}


def figures(heard: Sequence[Heard], start: int, end: int) -> dict[str, Any]:
    """Of all processes together: requests that ended, and tokens that came, in [start, end). Raises RequestError."""
    rows = [row for each in heard for row in each.rows]
    errors = [error for each in heard for error in each.errors]
    done = [row for row in rows if start <= row.ended < end]
    if not done:
        raise RequestError(f"no request ended while they were counted; errors: {errors[:3]}.")
    tokens = sum(each.tokens.get(second, 0.0) for each in heard for second in range(start, end))
    flying = [end - row.sent for row in rows if row.sent < end <= row.ended]
    could = sum(row.could for row in done)
    return {
        "requests": len(done),
        "requests_per_second": len(done) / (end - start),
        "tokens_per_second": tokens / (end - start),
        **_percentiles("ms_per_token", [1e3 * (row.ended - row.sent) / row.tokens for row in done]),
        **_percentiles("first_token_ms", [1e3 * (row.first - row.sent) for row in done]),
        "could_tokens": could,
        "found_share": sum(min(row.could, row.found) for row in done) / could if could else None,
        "in_flight_at_end": len(flying),
        "oldest_in_flight_seconds": max(flying, default=0.0),
        "errors": len(errors),
        "first_errors": sorted(set(errors))[:3],
        "client_busy_max": max(each.busy for each in heard),
    }


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_p{p}": float(np.percentile(values, p)) for p in (50, 90, 99)}


def _total(turns: Turns) -> int:
    return sum(asked + answered for asked, answered in turns)


# -- a client's process -----------------------------------------------------------------------------


def _client(root: str, model: str, load: Load, pipe: Connection) -> None:
    """Says when histories are computed, hears when to start, and sends what it has heard."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pipe.send(runner.run(_converse(root, model, load, pipe)))


async def _converse(root: str, model: str, load: Load, pipe: Connection) -> Heard:
    heard = Heard()
    talks = [_Talk(root, model, load, begin, number, heard) for number, begin in enumerate(begins(load))]
    await asyncio.gather(*(talk.remember() for talk in talks))
    pipe.send("ready")
    start: int = await asyncio.to_thread(pipe.recv)
    tasks = [asyncio.create_task(talk.hold(start)) for talk in talks]
    busy = time.process_time()
    await asyncio.sleep(start + load.warm + load.seconds - time.perf_counter())
    heard.busy = (time.process_time() - busy) / (load.warm + load.seconds)
    done, lost = await asyncio.wait(tasks, timeout=DRAIN_SECONDS)
    await asyncio.gather(*done)  # what a task raised is raised here
    heard.errors += [f"no end {DRAIN_SECONDS:.0f} s after the load's"] * len(lost)
    for task in lost:
        task.cancel()
    await asyncio.gather(*lost, return_exceptions=True)
    return heard


class _Talk:
    """A user, and all that was said so far: of `ids` the first `known` were computed."""

    def __init__(self, root: str, model: str, load: Load, begin: Begin, number: int, heard: Heard) -> None:
        self._model, self._load, self._begin, self._heard = model, load, begin, heard
        self._rng = random.Random(f"{load.seed}/{number}")
        connector = aiohttp.TCPConnector(limit=1, keepalive_timeout=KEEPALIVE_SECONDS)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        self._client = LoadClient(self._session, root, root + "/v1/completions", {})
        self._ids: list[int] = []
        self._known = 0

    async def remember(self) -> None:
        """Have the history computed, if there is one."""
        if self._begin.turn:
            await self._ask(_total(self._begin.turns[: self._begin.turn]) - 1, 1)

    async def hold(self, start: float) -> None:
        """From its moment on, until the last turn, an error, or the end of the load."""
        end = start + self._load.warm + self._load.seconds
        try:
            if self._begin.turn and not self._known:
                return  # its history failed
            await asyncio.sleep(start + self._begin.moment - time.perf_counter())
            for asked, answered in self._begin.turns[self._begin.turn :]:
                pause = self._rng.expovariate(1.0) * self._load.think if self._ids else 0.0
                if time.perf_counter() + pause >= end:
                    return
                await asyncio.sleep(pause)
                if not await self._ask(asked, answered):
                    return
        finally:
            await self._session.close()

    async def _ask(self, asked: int, answered: int) -> bool:
        """Say `asked` tokens more and hear `answered`; False if it failed."""
        self._ids += self._rng.choices(range(FIRST_ID, self._load.vocab_size), k=asked)
        body = {
            "model": self._model,
            "prompt": self._ids,
            "max_tokens": answered,
            "ignore_eos": True,
            "temperature": 0.0,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = await self._client.ask(json.dumps(body).encode())
        came = len(answer.token_ids)
        if answer.error is not None or came != answered:
            self._heard.errors.append(answer.error or f"{came} tokens of {answered}")
            return False
        times, cached = answer.times, answer.cached_tokens or 0
        self._heard.rows.append(Row(answer.sent, times[0], times[-1], came, self._known, cached))
        for moment in times:  # an event has a token, or several if the client was late
            second = int(moment)
            self._heard.tokens[second] = self._heard.tokens.get(second, 0.0) + came / len(times)
        self._ids += answer.token_ids
        self._known = len(self._ids) - 1  # the last token has not been through the model
        return True
