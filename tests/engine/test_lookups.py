"""Two engines that share a tier: each finds what the other has written, and nothing that is not there is believed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from cellar.core.config import ScheduleConfig
from cellar.core.messages import ChunkLabel, CopyBatch, MemoryQuestion, Request, Tier, TierOrder
from cellar.core.sampling import SamplingParams
from cellar.engine.lookups import Lookups
from cellar.engine.steps import StepEngine, step_engine
from cellar.kv.foreign import Foreign
from cellar.runtime.protocol import Capacity
from cellar.runtime.steps.fake import FakeRuntime
from cellar.runtime.tiers.lookup import Lookup
from cellar.schedule.steps.scheduler import StepScheduler
from tests.limits import until

SIZE = 4
PARAMS = SamplingParams(temperature=0, seed=0, max_tokens=5)


class Server:
    """One engine, and its part of what all of them share: entries are named by identity, whoever wrote them."""

    def __init__(self, rng: random.Random, others: list[Server], slots: int = 20, remote: int = 30) -> None:
        self.rng, self.others, self.now = rng, others, 0.0
        self.is_open = True
        self.late: list[Callable[[], None]] = []  # answers that come in a later turn
        self.lost: set[int] = set()  # slots whose entry has gone from under us
        capacity, tiers = Capacity(slots, 4, SIZE, 64), {Tier.REMOTE: remote}
        self.runtime = FakeRuntime(capacity, vocab_size=29, tiers=tiers, copy_delay=2, fail_copy=self.fails)
        self.scheduler = StepScheduler(slots, 4, SIZE, 64, ScheduleConfig(), tiers=tiers)
        self.engine: StepEngine = step_engine(
            self.scheduler, self.runtime, clock=lambda: self.now, check_seconds=0.0, lookup=self
        )
        others.append(self)

    def fails(self, order: TierOrder, k: int) -> bool:
        if isinstance(order, CopyBatch) and order.source is Tier.REMOTE:
            return int(order.source_slots[k]) in self.lost
        if isinstance(order, CopyBatch) and order.target is Tier.REMOTE:
            self.lost.discard(int(order.target_slots[k]))
        return False

    def entries(self) -> dict[bytes, tuple[FakeRuntime, int, ChunkLabel]]:
        return {
            label.identity: (server.runtime, slot, label)
            for server in self.others
            for (tier, slot), label in server.runtime._memory._labels.items()
            if slot not in server.lost
        }

    def ask(
        self, labels: Sequence[ChunkLabel], parents: Sequence[bytes], then: Callable[[Sequence[ChunkLabel]], None]
    ) -> None:
        entries = self.entries()
        found = [label for label in labels if label.identity in entries]
        found += [label for *_, label in entries.values() if label.tokens and label.parent in parents]
        self.late.append(lambda: then(found))

    def adopt(self, slots: Sequence[int], labels: Sequence[ChunkLabel]) -> None:
        entries, memory = self.entries(), self.runtime._memory
        for slot, label in zip(slots, labels, strict=True):
            memory._labels[Tier.REMOTE, slot] = label
            if label.identity in entries and self.rng.random() < 0.9:
                runtime, there, _ = entries[label.identity]
                memory._tiers[Tier.REMOTE][:, slot] = runtime._memory._tiers[Tier.REMOTE][:, there]
                self.lost.discard(slot)
            else:
                self.lost.add(slot)  # it went away after it was found

    def turn(self, into: dict[str, list[int]]) -> int:
        """-> how many tokens of prompts were found."""
        self.now += 0.5
        if self.late and self.rng.random() < 0.7:
            self.late.pop(0)()
        cached = 0
        for output in self.engine.turn(0.0):
            cached += sum(output.num_cached_tokens.values())
            for name, token in zip(output.ids, output.tokens, strict=True):
                into.setdefault(name, []).append(token)
            assert not any(reason == "error" for reason, _ in output.finished.values()), output.finished
        self.scheduler.check_integrity()
        return cached


def request(name: str, prompt: list[int], talk: str | None) -> Request:
    return Request(name, np.array(prompt, np.int32), PARAMS, frozenset(), 5, conversation=talk)


def serve(servers: Sequence[Server], rounds: int, rng: random.Random) -> tuple[dict[str, list[int]], int]:
    """Conversations that move between servers, some dropped, one forgotten; -> answers, and tokens found."""
    common = [rng.randrange(29) for _ in range(9)]
    talks: dict[str, list[int]] = {f"t{k}": [*common[: 3 * k], k] for k in range(4)}
    answers: dict[str, list[int]] = {}
    cached = 0
    for number in range(rounds):
        sent: list[tuple[str, str, Server]] = []
        for talk, history in talks.items():
            if len(history) > 45:
                del history[rng.randrange(5, 20) :]
            history += [rng.randrange(29) for _ in range(rng.randrange(1, 7))]
            server, name = rng.choice(servers), f"{number}{talk}"
            server.engine.add(request(name, history, talk if rng.random() < 0.7 else None))
            sent.append((talk, name, server))
            if rng.random() < 0.1:
                extra = f"{name}x"
                server.engine.add(request(extra, [*history, 3], None))
                server.engine.abort(extra)
        if rng.random() < 0.2:
            server = rng.choice(servers)
            server.engine.memory(MemoryQuestion((rng.choice(list(talks)),), True), lambda answer: None)
        for server in servers:
            server.is_open = rng.random() < 0.9
        for _ in range(2000):
            cached += sum(server.turn(answers) for server in servers)
            if not any(server.engine.has_work() for server in servers):
                break
        else:
            raise AssertionError("requests wait for nothing")
        for _ in range(rng.randrange(12)):
            for server in servers:
                server.turn(answers)
        for talk, name, _ in sent:
            talks[talk] += answers[name]
    return answers, cached


def plain(rng: random.Random) -> Server:
    alone = Server(rng, [], slots=200, remote=30)
    alone.is_open = False
    return alone


@pytest.mark.parametrize("first", [0, pytest.param(40, marks=pytest.mark.long)])
def test_random_conversations_that_move(first: int) -> None:
    found = adopted = 0
    for seed in range(first, first + (3 if first == 0 else 12)):
        rng, shared = random.Random(seed), list[Server]()
        servers = [Server(random.Random(seed + k), shared, rng.choice((18, 24, 40)), 30) for k in range(2)]
        before = Foreign.adopt
        count = [0]

        def counted(foreign: Foreign, *rest: object, count: list[int] = count, before: object = before) -> object:
            slots, labels = before(foreign, *rest)  # type: ignore[operator]
            count[0] += len(labels)
            return slots, labels

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Foreign, "adopt", counted)
            answers, cached = serve(servers, 8, rng)
        found, adopted = found + cached, adopted + count[0]
        check_answers(answers, seed)
    assert adopted > 20, "conversations were found where they had not been"
    assert found > adopted


def check_answers(answers: dict[str, list[int]], seed: int) -> None:
    """The same conversations without any memory of the others."""
    rng = random.Random(seed)
    rng.choice((18, 24, 40)), rng.choice((18, 24, 40))
    alone = plain(random.Random(0))
    shut = [alone, alone]
    expected, _ = serve(shut, 8, rng)
    assert answers == expected


def test_who_is_dropped_while_it_is_asked_for_is_gone() -> None:
    server = Server(random.Random(0), [])
    server.engine.add(request("a", list(range(20)), None))
    assert server.engine.has_work()
    server.engine.abort("a")
    answers: dict[str, list[int]] = {}
    while server.late:
        server.turn(answers)
    assert not server.engine.has_work()
    server.engine.add(request("a", list(range(20)), None))  # its name is another's by now
    while server.engine.has_work():
        server.turn(answers)
    assert len(answers["a"]) == 5


def test_nobody_is_asked_while_the_tier_is_away_or_nothing_is_missing() -> None:
    server = Server(random.Random(0), [])
    answers: dict[str, list[int]] = {}
    server.is_open = False
    server.engine.add(request("a", list(range(9)), None))
    assert not server.late
    while server.engine.has_work():
        server.turn(answers)
    server.is_open = True
    server.engine.add(request("b", list(range(9)), None))
    assert not server.late, "all whole chunks but the last token's are here"
    while server.engine.has_work():
        server.turn(answers)
    assert isinstance(server.engine.companion, Lookups)


class Slow:
    """A tier that answers one question at a time, when it is let."""

    def __init__(self) -> None:
        self.is_open = True
        self.asked: list[tuple[int, int]] = []
        self.broken = False

    def find(self, wanted: Sequence[ChunkLabel], parents: Sequence[bytes]) -> Sequence[ChunkLabel]:
        self.asked.append((len(wanted), len(parents)))
        if self.broken:
            raise OSError("away")
        return [*wanted[::2], *(ChunkLabel(b"t" * 16, p, 3, b"", b"tail") for p in parents)]

    def adopt(self, slots: Sequence[int], labels: Sequence[ChunkLabel]) -> None:
        raise AssertionError("nobody has asked for it")


def test_lookup_answers_everybody_with_their_own() -> None:
    slow = Slow()
    lookup = Lookup(slow)
    labels = [ChunkLabel(bytes([k]) * 16, b"p" * 16, 32) for k in range(6)]
    answers: dict[str, Sequence[ChunkLabel]] = {}
    lookup.ask(labels[:4], [b"p" * 16], lambda found: answers.update(a=found))
    until(lambda: "a" in answers)
    assert [label.identity[0] for label in answers["a"]] == [0, 2, ord("t")]
    slow.broken = True
    lookup.ask(labels, [], lambda found: answers.update(b=found))
    until(lambda: "b" in answers)
    assert answers["b"] == []
    lookup.close()
    assert not lookup.is_open
