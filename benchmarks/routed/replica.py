"""A replica: an engine of the demo model in a process of its own, which reports what it holds as a router wants it."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import numpy as np

from cellar import demo
from cellar.core.config import EngineConfig
from cellar.core.messages import IntArray, MemoryQuestion, Request, StepOutput, Tier
from cellar.core.sampling import SamplingParams
from cellar.engine.steps import StepEngine, step_engine
from cellar.routing.digest import DigestShape
from cellar.routing.prices import RoutePrices, StepPrice
from cellar.routing.report import Reporter
from cellar.runtime.steps.local import open_local
from cellar.schedule.steps.scheduler import StepScheduler

CHUNK = 16
TOKEN_NBYTES = 7000
"""Of the demo model's K and V in float32: no more than that."""

ROUTER = "router"
ALL_SEEN = 1 << 60

LENGTHS = (64, 256, 512, 1024, 2000)
"""Of the prompts that prices are made from."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is the same for all replicas: tokens of KV, and seconds between two reports."""

    kv_tokens: int
    interval: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds that prompts of `LENGTHS` took, and steps of one row and of eight."""

    prompts: tuple[float, ...]
    steps: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: `number` is the router's."""

    id: str
    number: int
    prompt: IntArray
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Tell:
    """A report is wanted at once, for the judge; it has seen all that was sent before."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Measurements have ended: forget what they left, and report with these prices, to the router regularly."""

    prices: RoutePrices


Message = Ask | Tell | Begin


@dataclass(frozen=True, slots=True)
class Reported:
    """A report on its way, `asked` for by the judge or not."""

    data: bytes
    asked: bool


@dataclass(frozen=True, slots=True)
class Came:
    """Tokens of a request; with its first ones how many of its prompt's tokens were found in the cache."""

    id: str
    tokens: tuple[int, ...]
    cached: int | None
    ended: bool


def shape(setting: Setting) -> DigestShape:
    """Of the digests."""
    return DigestShape.of({Tier.DEVICE: setting.kv_tokens // CHUNK})


def prices(measured: Sequence[Measured]) -> RoutePrices:
    """From what several replicas measured at the same time: their means."""
    seconds = np.mean([each.prompts for each in measured], axis=0)
    one, eight = np.mean([each.steps for each in measured], axis=0).tolist()
    n = np.array(LENGTHS, np.float64)
    # seconds(n) = fixed + token * n + attended * n**2 / 2, and the last two are no less than nothing.
    wanted = np.stack((np.ones(len(n)), n, n**2 / 2), axis=1) / seconds[:, None]
    _, token, attended = np.linalg.lstsq(wanted, np.ones(len(n)), rcond=None)[0].tolist()
    token, attended = max(token, 0.0), max(attended, 0.0)
    compute = {2**k: CHUNK * (token + attended * 2**k) for k in range(12)}
    row = max(0.0, (eight - one) / 7)
    return RoutePrices(CHUNK, compute, {}, StepPrice(fixed=max(0.0, one - row), per_row=row))


class Replica:
    """`name` at one end of a pipe; `run` ends with the pipe."""

    def __init__(self, name: str, setting: Setting, pipe: Connection) -> None:
        self._name, self._setting, self._pipe = name, setting, pipe
        config = EngineConfig.of(
            kv_cache_memory_bytes=setting.kv_tokens * TOKEN_NBYTES,
            block_size=CHUNK,
            num_threads=1,
            dtype="float32",
            max_num_seqs=64,
        ).serving()
        opened = open_local(config, demo.path())
        capacity = opened.runtime.capacity
        assert capacity.num_slots >= setting.kv_tokens // CHUNK
        self.engine: StepEngine = step_engine(
            StepScheduler(
                setting.kv_tokens // CHUNK,
                capacity.num_rows,
                capacity.chunk_size,
                capacity.max_model_len,
                opened.config.schedule,
            ),
            opened.runtime,
        )
        self._seen = 0
        self._begun: RoutePrices | None = None
        self._reporters: list[Reporter] = []
        self._next = 0.0
        self._closed = False

    def measure(self) -> Measured:
        """Alone with the machine, but for whoever does the same."""
        draw = np.random.default_rng(0)
        prompts = tuple(
            min(self._seconds([draw.integers(1, 4000, n, dtype=np.int32)], 1) for _ in range(3)) for n in LENGTHS
        )
        steps = []
        for rows in (1, 8):
            asked = [draw.integers(1, 4000, 100, dtype=np.int32) for _ in range(rows)]
            steps.append((self._seconds(asked, 40) - self._seconds(asked, 8)) / 32)
        return Measured(prompts, (steps[0], steps[1]))

    def _seconds(self, prompts: Sequence[IntArray], tokens: int) -> float:
        began = time.monotonic()
        self.engine.add(*(self._request(str(k), prompt, tokens) for k, prompt in enumerate(prompts)))
        while self.engine.has_work():
            self.engine.turn(1.0)
        return time.monotonic() - began

    def _request(self, id: str, prompt: IntArray, tokens: int) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return Request(id, prompt, params, frozenset(), tokens)

    def run(self) -> None:
        """Serve."""
        threading.Thread(target=self._listen, daemon=True).start()
        while not self._closed:
            wait = 1.0 if self._begun is None else self._next - time.monotonic()
            for output in self.engine.turn(max(0.0, wait)):
                self._send(output)
            if self._begun is not None and time.monotonic() >= self._next:
                self._next = max(self._next + self._setting.interval, time.monotonic())
                self._report(0)
        self.engine.close()

    def _listen(self) -> None:
        try:
            while True:
                self.engine.post(partial(self._heard, self._pipe.recv()))
        except EOFError:
            self._closed = True
            self.engine.wake()

    def _heard(self, message: Message) -> None:
        """In the engine's thread, in the order of sending."""
        if isinstance(message, Ask):
            self._seen = max(self._seen, message.number)
            self.engine.add(self._request(message.id, message.prompt, message.max_tokens))
        elif isinstance(message, Tell):
            self._report(1)
        else:
            self.engine.memory(MemoryQuestion((), flush=Tier.DEVICE), lambda answer: None)
            self._begun = message.prices
            self._reporters = [Reporter(self._name, message.prices, shape(self._setting)) for _ in range(2)]
            self._report(0)
            self._next = time.monotonic() + self._setting.interval

    def _report(self, to: int) -> None:
        scheduler = self.engine.scheduler
        assert isinstance(scheduler, StepScheduler)
        seen = {ROUTER: ALL_SEEN if to else self._seen}
        report = self._reporters[to].report(scheduler.outlook(), seen)
        self._pipe.send(Reported(report.to_bytes(), bool(to)))

    def _send(self, output: StepOutput) -> None:
        tokens: dict[str, list[int]] = {}
        for id, token in zip(output.ids, output.tokens, strict=True):
            tokens.setdefault(id, []).append(token)
        for id in {**tokens, **dict.fromkeys(output.finished)}:
            reason = output.finished.get(id)
            if reason is not None and reason[0].value == "error":
                raise RuntimeError(f"request {id}: {reason[1]}")
            came = tuple(tokens.get(id, ()))
            self._pipe.send(Came(id, came, output.num_cached_tokens.get(id), reason is not None))


def serve(name: str, setting: Setting, pipe: Connection) -> None:
    """What the process does: measure, say so, and serve."""
    replica = Replica(name, setting, pipe)
    pipe.send("ready")
    assert pipe.recv() == "measure"  # all together
    pipe.send(replica.measure())
    with suppress(ConnectionError):  # as soon as nobody listens
        replica.run()


def start(name: str, setting: Setting) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    """A process, and the pipe to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(name, setting, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours
