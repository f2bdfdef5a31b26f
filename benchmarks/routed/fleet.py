"""Fleet: replicas, a router before them, and a judge who knows what the router should have known."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

import numpy as np

from benchmarks.routed import replica
from benchmarks.routed.replica import CHUNK, Ask, Begin, Came, Measured, Message, Reported, Setting, Tell
from cellar.bench.workloads import Load, Vocabulary
from cellar.core.messages import IntArray
from cellar.kv.identity import owner_identity
from cellar.routing.prices import RoutePrices
from cellar.routing.report import ReplicaReport
from cellar.routing.request import RoutedRequest
from cellar.routing.router import AffinityRouter, Choice, Router


@dataclass(slots=True)
class Turn:
    """A turn as it went; seconds since it was due. `cached` of its `prompt` tokens were found."""

    conversation: int
    number: int
    due: float
    prompt: int
    choice: Choice
    cached: int = 0
    first: float = 0.0
    seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)


class Fleet:
    """Has conversations held. `router` decides with `prices`; each `every`-th placement is judged, none if 0."""

    def __init__(self, name: str, count: int, setting: Setting) -> None:
        self.done: list[Turn] = []
        self.losses: list[float] = []
        self.reasons: Counter[str] = Counter()
        started = {f"{name}{k}": replica.start(f"{name}{k}", setting) for k in range(count)}
        self._processes = [process for process, _ in started.values()]
        self._pipes: dict[str, Connection] = {key: pipe for key, (_, pipe) in started.items()}
        self._names = {pipe: key for key, pipe in self._pipes.items()}
        self._setting = setting
        self._running: dict[str, Turn] = {}
        self._ended: list[Turn] = []
        self._told = self._count = 0

    def measure(self) -> Sequence[Measured]:
        """What prompts and steps take while all replicas measure."""
        for pipe in self._pipes.values():
            assert pipe.recv() == "ready"
        for pipe in self._pipes.values():
            pipe.send("measure")
        return [pipe.recv() for pipe in self._pipes.values()]

    def begin(self, make: Callable[[RoutePrices], Router], prices: RoutePrices, every: int) -> None:
        """All replicas report from now on."""
        self._router = make(prices)
        self._judge = AffinityRouter(prices, replica.shape(self._setting), replica.ROUTER)
        self._judged: dict[str, int] = {}
        self._every = every
        self._reported: set[str] = set()
        for pipe in self._pipes.values():
            pipe.send(Begin(prices))
        while len(self._reported) < len(self._pipes):
            self._hear(None)

    def hold(self, load: Load, vocabulary: Vocabulary, first: int) -> None:
        """Hold the conversations of a load to their ends; the first one has the number `first`."""
        said: dict[int, IntArray] = {}
        began = time.monotonic()
        due = [(began + float(moment), first + k, 0) for k, moment in enumerate(load.arrivals)]
        heapq.heapify(due)
        while due or self._running:
            while due and due[0][0] <= time.monotonic():
                moment, number, turn = heapq.heappop(due)
                asked = load.conversations[number - first].turns[turn]
                before = said.pop(number, np.empty(0, np.int32))
                said[number] = np.concatenate((before, vocabulary.tokens(asked)))
                self._place(number, turn, moment, said[number], asked.output_tokens)
            self._hear(due[0][0] - time.monotonic() if due else None)
            while self._ended:
                ended = self._ended.pop()
                turns = load.conversations[ended.conversation - first].turns
                following = ended.number + 1
                if following < len(turns):
                    answer = np.array(ended.tokens, np.int32)
                    said[ended.conversation] = np.concatenate((said[ended.conversation], answer))
                    pause = turns[following].think_time
                    heapq.heappush(due, (time.monotonic() + pause, ended.conversation, following))
                else:
                    del said[ended.conversation]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes.values():
            pipe.close()
        for process in self._processes:
            process.join(60)
            process.kill()

    def _place(self, number: int, turn: int, due: float, prompt: IntArray, max_tokens: int) -> None:
        id, now = f"{number}.{turn}", time.monotonic()
        session = owner_identity(b"", str(number))
        asked = RoutedRequest.of(b"", b"", prompt, CHUNK, session, max_tokens)
        choice = self._router.choose(asked, now)
        judged = self._every > 0 and self._count % self._every == 0
        self._count += 1
        if judged:
            self._told = 0
            for pipe in self._pipes.values():
                _send(pipe, Tell())  # before the request, which is not to be counted
        _send(self._pipes[choice.replica], Ask(id, choice.number, prompt, max_tokens))
        self.reasons[choice.why.value] += 1
        self._running[id] = Turn(number, turn, due, len(prompt), choice)
        if judged:
            while self._told < len(self._pipes):
                self._hear(None)
            costs = self._judge.costs(asked, time.monotonic())
            self.losses.append(costs[choice.replica] - min(costs.values()))
        if self._every and id in self._running:
            self._judged[id] = self._judge.choose(asked, time.monotonic(), among=[choice.replica]).number

    def _hear(self, timeout: float | None) -> None:
        """Whatever replicas say; waits for so long if they say nothing."""
        for pipe in wait(list(self._names), None if timeout is None else max(0.0, timeout)):
            assert isinstance(pipe, Connection)
            said: Came | Reported = pipe.recv()
            now = time.monotonic()
            if isinstance(said, Came):
                self._came(said, now)
            elif said.asked:
                assert self._judge.report(ReplicaReport.from_bytes(said.data), now)
                self._told += 1
            else:
                assert self._router.report(ReplicaReport.from_bytes(said.data), now)
                self._reported.add(self._names[pipe])

    def _came(self, said: Came, now: float) -> None:
        turn = self._running[said.id]
        if not turn.tokens and said.tokens:
            turn.first = now - turn.due
            turn.cached = said.cached or 0
            self._router.started(turn.choice.number, now)
            if said.id in self._judged:
                self._judge.started(self._judged[said.id], now)
        turn.tokens += said.tokens
        if said.ended:
            del self._running[said.id]
            turn.seconds = now - turn.due
            self._router.ended(turn.choice.number, len(turn.tokens), now)
            if said.id in self._judged:
                self._judge.ended(self._judged.pop(said.id), len(turn.tokens), now)
            self._ended.append(turn)
            self.done.append(turn)


def _send(pipe: Connection, message: Message) -> None:
    pipe.send(message)
