"""The affinity router against a model of it that walks over sets and lists, by random operations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cellar.core.errors import CapacityError
from cellar.core.messages import Tier
from cellar.routing.flights import REPORTS
from cellar.routing.prices import MARGIN, LoadPrice, RoutePrices, StepPrice
from cellar.routing.router import FIRST_OUTPUT, MEMORY, AffinityRouter, Choice
from tests.routing.fleet import CHUNK, SHAPE, Replica, request

PRICES = RoutePrices(
    CHUNK,
    {CHUNK: 0.010, 40 * CHUNK: 0.030},
    {Tier.HOST: LoadPrice(0.002, 0.004), Tier.DISK: LoadPrice(0.001, 0.025)},
    StepPrice(1e-4, 1e-5, 1e-7),
)


@dataclass
class Sent:
    number: int
    replica: str
    chunks: list[int]
    tokens: int
    work: float
    until: int | None = None
    ended: bool = False
    seen: bool = False


@dataclass
class Known:
    """What the model knows of one replica: as the last report had it, and since."""

    held: dict[Tier, set[int]]
    clear: float
    requests: float
    context: float
    free: float
    cached: float
    draining: bool
    reports: int = 1
    sent: list[Sent] = field(default_factory=list)

    def holds(self, chunk: int) -> Tier | None:
        if any(chunk in s.chunks and (s.until is None or self.reports < s.until) for s in self.sent):
            return Tier.DEVICE
        return next((tier for tier in sorted(self.held) if chunk in self.held[tier]), None)


def seconds_of(chunk: int) -> float:
    return 0.010 + 0.020 * chunk / 39


class RouterMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.router = AffinityRouter(PRICES, SHAPE)
        self.now = 0.0
        self.replicas: dict[str, Replica] = {}
        self.known: dict[str, Known] = {}
        self.sent: list[Sent] = []
        self.output = FIRST_OUTPUT

    def cost(self, known: Known, chunks: list[int], tokens: int) -> tuple[float, float]:
        """-> of a prompt, in all and until its prompt's turn has been used."""
        spare, load, resident = 0.0, 0.0, 0
        by_tier: dict[Tier, list[float]] = {}
        for place, chunk in enumerate(chunks):
            tier = known.holds(chunk)
            if tier is not None:
                by_tier.setdefault(tier, []).append(seconds_of(place))
        for tier, parts in by_tier.items():
            if tier is Tier.DEVICE:
                spare += sum(parts)
                resident += len(parts) * CHUNK
                continue
            price = PRICES.load[tier]
            pays = [part for part in parts if part * (1 + MARGIN) > price.per_chunk]
            loads = price.fixed + len(pays) * price.per_chunk
            if pays and sum(pays) * (1 + MARGIN) > loads:
                load += loads
                spare += sum(pays)
        total = sum(seconds_of(place) for place in range(len(chunks)))
        tail = tokens - len(chunks) * CHUNK
        middle = (len(chunks) * CHUNK + tokens + CHUNK) / 2
        compute = total - spare + tail / CHUNK * seconds_of((middle - CHUNK) / CHUNK)  # type: ignore[arg-type]
        step = 1e-4 + 1e-5 * (known.requests + 1) + 1e-7 * (known.context + tokens + self.output / 2)
        decode = self.output * step
        short = max(0.0, tokens + self.output - resident - max(known.free, 0) - max(known.cached, 0))
        room = short / max(known.context, 1.0) * decode
        wait = max(0.0, known.clear - self.now)
        others = known.requests * (compute + self.output * (1e-5 + 1e-7 * (tokens + self.output / 2)))
        return wait + room + load + compute + decode + others, load + compute

    @rule(
        name=st.sampled_from("abcd"),
        device=st.sets(st.integers(0, 29)),
        host=st.sets(st.integers(0, 29)),
        disk=st.sets(st.integers(0, 29)),
        waiting=st.integers(0, 20),
        requests=st.integers(0, 20),
        free=st.sampled_from([100, 1000, 100_000]),
        sees=st.booleans(),
        draining=st.booleans(),
    )
    def report(
        self,
        name: str,
        device: set[int],
        host: set[int],
        disk: set[int],
        waiting: int,
        requests: int,
        free: int,
        sees: bool,
        draining: bool,
    ) -> None:
        fresh = name not in self.known
        replica = self.replicas.setdefault(name, Replica(name, prices=PRICES))
        replica.held = {Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk}
        replica.waiting, replica.requests, replica.context = waiting, requests, 200 * requests
        replica.free, replica.cached = free, 50
        before = [] if fresh else self.known[name].sent
        last = max((s.number for s in before), default=0) if sees else 0
        report = replica.report({"router": last}, whole=fresh, draining=draining)
        assert self.router.report(report, self.now)
        known = Known(
            replica.held, self.now + report.waiting_seconds, requests, 200 * requests, free, 50, draining, sent=before
        )
        known.reports = 1 if fresh else self.known[name].reports + 1
        for s in before:
            s.seen = s.seen or s.number <= last
            if not s.seen and not s.ended:
                known.clear += 0.0 if s.until is not None else s.work
                known.requests += 1
                known.context += s.tokens
                known.free -= s.tokens
        self.known[name] = known

    @rule(start=st.integers(0, 20), count=st.integers(0, 9), more=st.integers(1, 32))
    def choose(self, start: int, count: int, more: int) -> None:
        chunks = list(range(start, start + count))
        asked = request(chunks, more=more)
        if not self.known:
            with pytest.raises(CapacityError):
                self.router.choose(asked, self.now)
            return
        choice = self.router.choose(asked, self.now)
        steady = [name for name, known in self.known.items() if not known.draining]
        allowed = steady or list(self.known)
        found = {name: self.cost(self.known[name], chunks, asked.prompt_tokens) for name in allowed}
        assert choice.replica in allowed
        least = min(cost for cost, _ in found.values())
        assert math.isclose(found[choice.replica][0], least, rel_tol=1e-3, abs_tol=1e-6)
        self.note(choice, chunks, asked.prompt_tokens, found[choice.replica][1])

    def note(self, choice: Choice, chunks: list[int], tokens: int, work: float) -> None:
        known = self.known[choice.replica]
        sent = Sent(choice.number, choice.replica, chunks, tokens, work)
        known.clear = max(known.clear, self.now) + work
        known.requests += 1
        known.context += tokens
        known.free -= tokens
        known.sent.append(sent)
        self.sent.append(sent)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def started(self, data: st.DataObject) -> None:
        sent = data.draw(st.sampled_from(self.sent))
        self.router.started(sent.number, self.now)
        if sent.until is None and not sent.ended:
            sent.until = self.known[sent.replica].reports + REPORTS

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), num_output=st.integers(0, 300))
    def ended(self, data: st.DataObject, num_output: int) -> None:
        sent = data.draw(st.sampled_from(self.sent))
        self.sent.remove(sent)
        self.router.ended(sent.number, num_output, self.now)
        known = self.known[sent.replica]
        if sent.until is None:
            known.clear = max(self.now, known.clear - sent.work)
            sent.until = known.reports + REPORTS
        known.requests = max(0, known.requests - 1)
        known.context = max(0, known.context - sent.tokens)
        known.cached += sent.tokens
        sent.ended = True
        if num_output:
            self.output = MEMORY * self.output + (1 - MEMORY) * num_output

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        self.router.remove(name)
        del self.known[name], self.replicas[name]
        self.sent = [s for s in self.sent if s.replica != name]

    @rule(seconds=st.sampled_from([0.001, 0.05, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def nothing_is_remembered_for_ever(self) -> None:
        if not self.known:
            assert len(self.router._flights) == 0


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
