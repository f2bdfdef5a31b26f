"""Drives the real scheduler with the fake runtime by random operations, and holds everything against the arithmetic.

`drive` raises AssertionError (or an error of Cellar's own) as soon as anything is not as it must be.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cellar.core.config import ScheduleConfig
from cellar.core.errors import CapacityError
from cellar.core.messages import (
    CopyBatch,
    CopyResult,
    FinishReason,
    MemoryQuestion,
    Request,
    Source,
    StepOutput,
    StepPlan,
    StepResult,
    Tier,
)
from cellar.core.sampling import Pooling, SamplingParams
from cellar.kv.links import Link
from cellar.kv.policy import RetentionValue
from cellar.kv.recovery import Recovery
from cellar.kv.states import LOADING
from cellar.kv.store import KVStore, Reservation, Residency
from cellar.runtime.protocol import Capacity
from cellar.runtime.steps.fake import FakeRuntime
from cellar.runtime.steps.fake.model import hidden_states
from cellar.schedule.steps.batch import SCORED_COST
from cellar.schedule.steps.pace import Pace
from cellar.schedule.steps.request import Phase
from cellar.schedule.steps.scheduler import StepScheduler

VOCAB = 29

Op = tuple[str, int, int]
KINDS = ("add",) * 6 + ("turn",) * 6 + ("burst", "finish", "abort")


@dataclass(frozen=True)
class Setting:
    """One engine's size and habits."""

    num_slots: int = 24
    num_rows: int = 6
    chunk_size: int = 4
    max_model_len: int = 64
    budget: int = 16
    short: int | None = None
    run_ahead: int = 2
    one_plan_a_row: bool = False
    policy: str = "fcfs"
    reserve: float = 0.1
    caching: bool = True
    max_delay: int = 0
    error_every: int = 0
    host: int = 0
    disk: int = 0
    remote: int = 0
    values: bool = False
    """Chunks leave by their retention value, not by least recent use."""
    max_copy_delay: int = 0
    copy_fails_every: int = 0
    pressure: bool = False
    """Short prompts, long outputs, hardly an end before max_tokens: memory runs out in the middle of decodes."""
    recovery: str = "load"
    """What slower tiers have is loaded, computed ("compute"), or either: "faster" by what is measured, "any" by lot."""
    diagonal: bool = False
    """Requests begin evenly spread over the steps."""
    owners: int = 0
    """Requests are of so many owners, who take turns; 0: each is its own."""
    stages: int = 1
    """Of a pipeline, each with another plan."""


@dataclass
class Expected:
    """A request, what it must bring by hand calculation, and what it has brought."""

    request: Request
    arrival: int
    tokens: list[int]
    reason: FinishReason
    got: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    opened: bool = False
    over: bool = False


def by_hand(request: Request, max_model_len: int, vocab_size: int = VOCAB) -> tuple[list[int], FinishReason]:
    """All tokens of a request, without scheduler or cache."""
    sequence = request.prompt.tolist()
    prompt = len(sequence)
    params = request.params
    if params.pooling is not None:
        return [], FinishReason.STOP
    while True:
        total = sum((i + 1) * (token + 1) for i, token in enumerate(sequence))
        if params.penalized:
            total += sum(sequence[:prompt]) + 2 * sum(sequence[prompt:])
        token = total % vocab_size
        done = len(sequence) - prompt
        while done < params.min_tokens and token in request.stop_ids:
            token = (token + 1) % vocab_size
        sequence.append(token)
        if token in request.stop_ids:
            return sequence[prompt:], FinishReason.STOP
        if done + 1 == request.max_tokens or len(sequence) == max_model_len:
            return sequence[prompt:], FinishReason.LENGTH


def pooled_by_hand(request: Request) -> list[float]:
    """The vector of a request whose prompt is pooled."""
    states = hidden_states(request.prompt).astype(np.float64)
    vector = states[-1] if request.params.pooling == "last" else states.mean(0)
    return vector.astype(np.float32).tolist()


class AnyRecovery(Recovery):
    """Draws lots for each chunk, and for who waits until what its memory holds is copied out."""

    def __init__(self) -> None:
        super().__init__("faster")
        self._random = np.random.default_rng(0)

    def loads(
        self, tier: np.ndarray, cost: np.ndarray, links: Sequence[Link], now: float, floor: float = 0.0
    ) -> np.ndarray:
        return (tier == 0) | (self._random.random(len(tier)) < 0.5)

    def least_seconds(self, count: int) -> float:
        return 1e9 * self._random.integers(2)


def reserve_checked(store: KVStore) -> None:
    """From now on each reservation is held against what it must be."""
    reserve = store.reserve

    def checked(found: Residency | None, num_tokens: int, *rest: Any, **options: Any) -> Reservation | None:
        before = None if found is None else (found.chunk.copy(), found.tier.copy(), found.state.copy())
        made = reserve(found, num_tokens, *rest, **options)
        if made is None:
            return None
        computed = np.zeros(num_tokens, np.bool_)
        for start, stop in made.compute:
            assert not computed[start:stop].any(), "computed twice"
            computed[start:stop] = True
        assert computed.sum() + made.num_cached_tokens == num_tokens, "a token is lost, or computed though it is there"
        assert sum(made.hits) == made.num_cached_tokens
        assert 0 <= made.num_recomputed <= computed.sum()
        coming = np.flatnonzero(store._shelves.device.state[made.slots] == LOADING)
        assert {store._movement.fills(slot) for slot in made.slots[coming].tolist()} == made.awaits
        for column in coming.tolist():
            assert not computed[column * store.chunk_size], "loaded and computed"
        if found is not None and before is not None:
            size = store.chunk_size
            for column in np.flatnonzero((before[0] >= 0) & (before[1] == 0) & (before[2] == LOADING)).tolist():
                assert found.tokens[column] < size or not computed[column * size], "another loads it"
        return made

    setattr(store, "reserve", checked)  # noqa: B010


class World:
    """Scheduler, fake runtime, and the truth about every request."""

    def __init__(self, setting: Setting) -> None:
        self.setting = s = setting
        self.now = 0.0
        sizes = ((Tier.HOST, s.host), (Tier.DISK, s.disk), (Tier.REMOTE, s.remote))
        self.tiers = {tier: count for tier, count in sizes if count}
        self.config = ScheduleConfig(
            max_num_seqs=s.num_rows,
            max_num_batched_tokens=s.budget,
            max_mixed_seconds=None if s.short is None else 0.1,
            scheduling_policy=s.policy,  # type: ignore[arg-type]
            decode_reserve=s.reserve,
            run_ahead=s.run_ahead,
        )
        self.start()
        self.live: dict[str, Expected] = {}
        self.ended: list[Expected] = []
        self.by_seed: dict[int, Expected] = {}
        self.count = 0
        self.steps = 0
        self.loads = 0
        self.stores = 0
        self.restarts = 0
        self.loading: set[str] = set()  # admitted before they got a row
        self.holes = 0

    def start(self, before: FakeRuntime | None = None) -> None:
        """A process begins, perhaps after another was killed."""
        s = self.setting
        self.refused = False  # a chunk may have found a full disk, on which something was forgotten later
        self.scheduler = StepScheduler(
            s.num_slots,
            s.num_rows,
            s.chunk_size,
            s.max_model_len,
            self.config,
            s.caching,
            stages=s.stages,
            tiers=self.tiers,
            policy=RetentionValue({1: 1.0, s.max_model_len: 4.0}) if s.values else None,
            diagonal=s.diagonal,
            recovery=AnyRecovery() if s.recovery == "any" else Recovery(s.recovery, {1: 1.0, s.max_model_len: 4.0}),  # type: ignore[arg-type]
        )
        if s.one_plan_a_row:
            let_one_plan_name_a_row(self.scheduler, s.stages)
        if s.short is not None:
            self.scheduler._prompts.pace = Pace(0.1, s.short, least=1)
            for count in (1, 4, 8, 16, 32):  # rows take turns, as if steps cost what is in them
                self.scheduler._prompts.pace.decoded(count, 0.001 * (1 + count))
        reserve_checked(self.scheduler._store)
        self.runtime = FakeRuntime(
            Capacity(s.num_slots, s.num_rows, s.chunk_size, s.max_model_len),
            vocab_size=VOCAB,
            delay=lambda step: (step * 7919) % (s.max_delay + 1),
            fail=lambda plan: "made to fail" if self._fails(plan.step) else None,
            tiers=self.tiers,
            copy_delay=lambda batch: (batch.number * 7919) % (s.max_copy_delay + 1),
            fail_copy=lambda batch, k: bool(s.copy_fails_every) and (batch.number + 3 * k) % s.copy_fails_every == 0,
            nan=lambda step, row: bool(s.error_every) and (step * 31 + row) % (s.error_every * 4) == 1,
        )
        if before is not None:
            self.runtime.inherit(before)
            self.scheduler.restore(self.runtime.kept(), self.now)

    def _fails(self, step: int) -> bool:
        return bool(self.setting.error_every) and step % self.setting.error_every == self.setting.error_every - 1

    # -- operations -------------------------------------------------------------------------------

    def do(self, op: Op) -> None:
        kind, a, b = op
        if kind == "add":
            self.add(a, b)
        elif kind == "turn":
            self.turn()
        elif kind == "burst":
            for _ in range(a % 8):
                self.turn()
        elif kind == "restart":
            self.restart()
        elif kind == "forget":
            self.refused |= not self.has_room()
            self.scheduler.memory(MemoryQuestion(("ab"[a % 2],), forget=True))
        elif self.live:
            name = sorted(self.live)[a % len(self.live)]
            if kind == "abort":
                self.scheduler.abort(name)
                self.close(name)
            elif self.live[name].got:
                keep = 1 + b % len(self.live[name].got)
                self.scheduler.finish(name, keep, FinishReason.STOP)
                del self.live[name].got[keep:]
                self.close(name)
        self.check()

    def has_room(self) -> bool:
        """Whether the tier that outlives the process, if there is one, has a free slot."""
        shelves = self.scheduler._store._shelves
        return all(pool.num_free for pool in shelves.pools[shelves.persistent : shelves.persistent + 1])

    def restart(self) -> None:
        """The process is killed, whatever it is at; requests that run are lost, what persistent tiers have is not."""
        for name in list(self.live):
            self.close(name)
        self.by_seed.clear()
        self.restarts += 1
        self.start(self.runtime)

    def add(self, a: int, b: int) -> None:
        """A prompt that shares its beginning with others, or goes on where an ended request stopped."""
        rng = random.Random(a * 65537 + b)
        size = self.setting.chunk_size
        longest = self.setting.max_model_len - 1
        if self.ended and rng.random() < 0.3:
            old = rng.choice(self.ended)
            prompt = old.request.prompt.tolist() + old.got[: rng.randrange(longest)]
        else:
            family = random.Random(a % 3)
            prompt = [family.randrange(VOCAB) for _ in range(8 * size)][: rng.randrange(8 * size + 1)]
        prompt = (prompt + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 2 * size))])[:longest]
        if self.setting.pressure:
            prompt = prompt[-3 * size :]
        if rng.random() < 0.3:
            prompt = prompt[: len(prompt) // size * size] or prompt  # whole chunks: all of it may be cached
        max_tokens = longest if self.setting.pressure else rng.choice((1, 5, 3 * size, 6 * size, longest))
        penalized = rng.random() < 0.2
        params = SamplingParams(
            seed=self.count,
            temperature=0,
            max_tokens=max_tokens,
            min_tokens=rng.choice((0, 0, min(4, max_tokens))),
            presence_penalty=0.5 if penalized else 0.0,
            logprobs=rng.choice((None, None, 1)),
            prompt_logprobs=rng.choice((None, None, None, None, 0)),
        )
        request = Request(
            id=f"r{self.count:04}",
            prompt=np.array(prompt, np.int32),
            params=params,
            stop_ids=frozenset(
                rng.sample(range(VOCAB), rng.choice((0, 0, 0, 1) if self.setting.pressure else (0, 0, 1, 2, 10)))
            ),
            max_tokens=max_tokens,
            priority=rng.randrange(3),
            salt=rng.choice((b"", b"", b"other")),
            conversation=rng.choice((None, None, None, "a", "b")),
            owner="xyz"[rng.randrange(self.setting.owners)] if self.setting.owners else "",
            tenant="AB"[rng.randrange(2)] if self.setting.owners > 1 else "",
        )
        pooling: Pooling | None = rng.choice((None, None, None, None, None, "last", "mean"))
        if pooling is not None:
            max_tokens, params = 0, SamplingParams(seed=self.count, temperature=0, pooling=pooling)
            prompt = [*prompt, 1] if len(prompt) == longest else prompt  # it needs no room for a token
            whole = np.array(prompt, np.int32)
            request = replace(request, prompt=whole, params=params, max_tokens=0, stop_ids=frozenset())
        tokens, reason = by_hand(request, self.setting.max_model_len)
        expected = Expected(request, self.count, tokens, reason)
        self.count += 1
        limit = min(len(prompt) + max_tokens, self.setting.max_model_len)
        fits = -(-max(limit - 1, len(prompt)) // size) <= self.setting.num_slots
        try:
            self.scheduler.add(request, self.now)
        except CapacityError:
            assert not fits
            return
        assert fits
        self.live[request.id] = self.by_seed[expected.arrival] = expected

    def turn(self) -> bool:
        """One turn of the engine's loop. False if nothing moved."""
        moved = False
        self.now += 0.75
        worker = self.runtime.workers[0]
        while worker.in_flight < self.setting.run_ahead + self.setting.stages - 1:
            plan = self.plan()
            self.loading |= {state.request.id for state in self.scheduler._holders.loading}
            for batch in self.scheduler.copies(self.now):
                if isinstance(batch, CopyBatch):
                    self.loads += len(batch) if batch.target is Tier.DEVICE else 0
                    self.stores += len(batch) if batch.target is not Tier.DEVICE else 0
                self.runtime.copy(batch)
            if plan is None:
                break
            self.inspect(plan)
            worker.submit(plan)
            self.steps += 1
            moved = True
        flying = worker.in_flight or self.scheduler.next_event(self.now) is not None
        for result in self.runtime.poll(0):
            if isinstance(result, CopyResult):
                self.scheduler.commit_copy(result, self.now)
                continue
            result = dataclasses.replace(result, seconds=0.3 * (result.step * 7919 % 7))
            names = self.scheduler._rows.ids[self.scheduler._plans.in_flight[0].sampled].tolist()
            output = self.scheduler.commit(result, self.now)
            if result.error is None:
                wanted = [n for n, flag in zip(names, result.flags, strict=True) if n in self.live and not flag]
                assert output.ids == wanted, "a token is lost, or somebody got one who should not"
            self.take(result, output)
        self.check()
        return moved or bool(flying)

    def plan(self) -> StepPlan | None:
        """The scheduler's next plan. Whoever it suspends came after all who go on, unless owners take turns."""
        before = self.running()
        plan = self.scheduler.plan(0, self.now)
        assert not self.scheduler.failed()
        after = self.running()
        suspended = [self.key(self.live[name]) for name in before - after]
        going_on = [self.key(self.live[name]) for name in before & after]
        late = not suspended or not going_on or min(suspended) > max(going_on)
        assert late or self.setting.owners, "not the latest was suspended"
        assert not suspended or after <= before or not going_on or self.setting.owners, (
            "somebody was admitted in the step of a suspension"
        )
        return plan

    def running(self) -> set[str]:
        states = self.scheduler._rows.states
        return {s.request.id for s in states if s is not None and s.phase is Phase.RUNNING}

    def drain(self) -> None:
        """Run until nothing is left. Everything ends within a bounded number of turns."""
        work = sum(len(e.request.prompt) + e.request.max_tokens for e in self.live.values())
        delays = (self.setting.max_delay + 1) * (self.setting.max_copy_delay + 1)
        for _ in range(100 + 10 * work * delays):
            if not self.scheduler.has_work():
                break
            assert self.turn(), "nothing is in flight, and nothing is planned: a deadlock"
        assert not self.scheduler.has_work(), "work is left after far more turns than it needs"
        assert not self.live, f"{sorted(self.live)} never ended"
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.free_chunks + stats.cached_chunks == stats.total_chunks, "a chunk is still referenced"
        assert self.scheduler._rows.num_free == self.setting.num_rows, "a row is still owned"
        for _ in range(400 * (self.setting.max_copy_delay + 1)):  # copies end, too, and bring about no endless others
            if not self.turn():
                break
        assert self.scheduler.next_event(self.now) is None, "copies go on for ever"
        for kept in self.scheduler.stats().tiers:
            assert kept.referenced == 0, f"tier {kept.tier.name} is still used"
        self.check()
        self.check_kept()

    def check_kept(self) -> None:
        """At rest persistent tiers hold what the books say, and nothing that was forgotten."""
        store = self.scheduler._store
        assert store.num_erasing == 0
        shelves = store._shelves
        for tier, chunks in self.runtime.kept().items():
            pool, directory = shelves.pools[shelves.tiers.index(tier)], shelves.directory
            known = {slot: c for slot, c in enumerate(pool.chunk.tolist()) if c >= 0}
            said = {k.slot: (k.label.identity, k.label.parent, k.label.end, k.label.tokens) for k in chunks}
            assert said == {
                slot: (directory.identity(c), directory.parent(c), directory.end[c], directory.tail_tokens(c))
                for slot, c in known.items()
            }, f"tier {tier.name} has other chunks"
            rests = self.has_room() and not self.refused and not self.setting.copy_fails_every
            if tier is shelves.tiers[shelves.persistent] and rests:
                there = (directory.slot[: shelves.persistent] >= 0).any(0).nonzero()[0].tolist()
                assert set(there) <= set(known.values()), "what rests, and finds room, outlives the process"

    # -- the truth --------------------------------------------------------------------------------

    def close(self, name: str) -> None:
        expected = self.live.pop(name)
        expected.over = True
        self.ended.append(expected)

    def key(self, expected: Expected) -> tuple[int, int]:
        return (expected.request.priority if self.setting.policy == "priority" else 0, expected.arrival)

    def inspect(self, plan: StepPlan) -> None:
        """Budget, rows, order of admission, order and emission of spans."""
        spans = plan.spans
        assert 0 < spans.num_tokens <= self.setting.budget
        if self.setting.short is not None:
            self.inspect_long(plan, self.setting.short)
        assert len(set(spans.row.tolist())) <= self.setting.num_rows
        assert spans.row.size == 0 or (spans.row.min() >= 0 and spans.row.max() < self.setting.num_rows)
        assert len({(r, c) for r, c in zip(plan.table.row.tolist(), plan.table.column.tolist(), strict=True)}) == len(
            plan.table.row
        )
        last: dict[int, int] = {}
        for row, start, stop in zip(spans.row.tolist(), spans.start.tolist(), spans.stop.tolist(), strict=True):
            assert last.get(row, 0) <= start < stop, "spans of a row ascend"
            self.holes += row in last
            last[row] = stop
        running = self.running()
        for opened in plan.opens:
            assert opened.params.seed is not None
            expected = self.by_seed[opened.params.seed]
            assert opened.num_output <= len(expected.got)
            expected.opened = True
            loading = {state.request.id for state in self.scheduler._holders.loading}
            if expected.request.id in self.loading:
                continue  # it has been admitted before
            for other in () if self.setting.owners else self.live.values():
                if other.request.id not in running | loading and not self.may_pass(expected, other):
                    assert self.key(other) > self.key(expected), "somebody before it still waits"

    def inspect_long(self, plan: StepPlan, short: int) -> None:
        """Beside decodes of others long prompts have a budget of their own."""
        spans, states = plan.spans, self.scheduler._rows.states
        owners = [state.owner if state is not None else "" for state in (states[row] for row in spans.row.tolist())]
        decoding = {owner for owner, source in zip(owners, spans.source, strict=True) if source == Source.DEVICE}
        taken: Counter[str] = Counter()
        for owner, source, count in zip(owners, spans.source, spans.stop - spans.start, strict=True):
            taken[owner] += int(count) if source == Source.HOST and decoding - {owner} else 0
        beyond = sum(max(0, count - short) for count in taken.values())
        room = self.scheduler._prompts.pace.room(int((spans.source == Source.DEVICE).sum()))
        assert room is not None
        assert beyond <= room, "decodes wait for more of long prompts than they should"

    def may_pass(self, one: Expected, other: Expected) -> bool:
        """A short prompt passes a long one of the same priority."""
        short = 256 if self.setting.short is None else self.setting.short
        left = []
        for each in (one, other):
            scores = each.request.params.prompt_logprobs is not None and not each.got
            left.append((SCORED_COST if scores else 1) * (len(each.request.prompt) + len(each.got)))
        return self.key(one)[0] == self.key(other)[0] and left[0] <= short < left[1]

    def take(self, result: StepResult, output: StepOutput) -> None:
        for name, logprobs in output.prompt_logprobs.items():
            expected = self.live[name]
            assert expected.request.params.prompt_logprobs is not None
            expected.scored.extend(logprobs.index.tolist())
            assert logprobs.rank.tolist() == expected.request.prompt[logprobs.index].tolist()
        for name, vector in output.pooled.items():
            asked, cached = self.live[name].request, output.num_cached_tokens[name]
            assert vector.tolist() == pooled_by_hand(asked), name
            assert 0 <= cached < len(asked.prompt)
            assert asked.params.pooling == "last" or not cached
            assert output.finished[name] == (FinishReason.STOP, None)
        assert len(output.ids) == len(output.tokens) == len(set(output.ids))
        for name, token in zip(output.ids, output.tokens, strict=True):
            assert name in self.live, f"{name} got a token after its end"
            expected = self.live[name]
            assert len(expected.got) < len(expected.tokens), f"{name} got more than it asked for"
            assert token == expected.tokens[len(expected.got)], f"{name}: token {len(expected.got)} is wrong"
            if not expected.got:
                cached = output.num_cached_tokens[name]
                assert 0 <= cached < len(expected.request.prompt)
                if expected.request.params.prompt_logprobs is not None:
                    assert cached == 0
                    assert expected.scored == list(range(1, len(expected.request.prompt)))
            expected.got.append(token)
            assert (name in output.logprobs) == (expected.request.params.logprobs is not None)
            if name in output.logprobs:
                assert output.logprobs[name].rank.tolist() == [token]
        for name, (reason, token_id) in output.finished.items():
            expected = self.live[name]
            if reason is FinishReason.ERROR:
                assert self.setting.error_every
            else:
                assert expected.got == expected.tokens
                assert reason is expected.reason
                assert token_id == (expected.tokens[-1] if reason is FinishReason.STOP and expected.tokens else None)
                assert (name in output.pooled) == (expected.request.params.pooling is not None)
            self.close(name)
        for name in output.ids:
            if name in self.live:
                assert self.live[name].got != self.live[name].tokens, f"{name} has all its tokens and goes on"
        if result.error is not None:
            assert not output.ids

    def check(self) -> None:
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert stats.running + stats.waiting <= len(self.live)
        assert 0 <= stats.free_chunks + stats.cached_chunks <= stats.total_chunks
        assert stats.generation_tokens == sum(len(e.got) for e in self.by_seed.values())


def request(name: str, prompt: Sequence[int], max_tokens: int, stop: Sequence[int] = (), **more: Any) -> Request:
    """A greedy request; `more` are sampling parameters, and priority and salt."""
    own = {key: more.pop(key) for key in ("priority", "salt", "owner", "tenant") if key in more}
    params = SamplingParams(temperature=0, seed=0, max_tokens=max_tokens, **more)
    return Request(name, np.array(prompt, np.int32), params, frozenset(stop), max_tokens, **own)


def let_one_plan_name_a_row(scheduler: StepScheduler, stages: int = 1) -> None:
    """Plans in flight differ in their rows, as those of stages do, however many there are: more orders of commits."""
    scheduler._plans._row_depth = 1
    scheduler._prompts._row_depth = stages


def end_during_a_suspension() -> None:
    """Memory comes back while a suspension is pending: whoever waits must not overtake the suspended.

    One token a step, one plan in flight a row, four chunks of four. b needs its second chunk while v, the
    latest, is in flight and a1 and a2, which are not, get aborted.
    """
    config = ScheduleConfig(max_num_batched_tokens=1, max_num_seqs=5, decode_reserve=0.0, run_ahead=4)
    scheduler = StepScheduler(4, 5, 4, 16, config)
    let_one_plan_name_a_row(scheduler)
    runtime = FakeRuntime(Capacity(4, 5, 4, 16), vocab_size=VOCAB, strict=True)
    results: deque[Any] = deque()

    def plan() -> StepPlan | None:
        made = scheduler.plan(0, 0.0)
        if made is not None:
            runtime.submit(made)
            results.extend(runtime.poll(0))  # results are ready at once; when they are committed is up to us
        scheduler.check_integrity()
        return made

    def commit() -> list[str]:
        output = scheduler.commit(results.popleft(), 0.0)
        scheduler.check_integrity()
        return output.ids

    scheduler.add(request("b", [1, 2, 3, 4], 6), 0.0)
    for _ in range(3):
        assert plan() is not None
        commit()
    assert plan() is not None  # the last prompt token of b is in flight
    for name in ("a1", "a2", "v", "d"):
        scheduler.add(request(name, [5], 6), 0.0)
    assert plan() is not None
    assert plan() is not None
    assert plan() is not None
    assert plan() is None, "no memory for d"
    assert commit() == ["b"]
    assert commit() == ["a1"]
    assert commit() == ["a2"]
    assert plan() is None, "b waits for the memory of v"
    assert scheduler.stats().preemptions == 1
    scheduler.abort("a1")
    scheduler.abort("a2")
    assert plan() is not None, "b goes on"
    assert plan() is None, "d overtook v"
    assert commit() == ["v"], "the token of a suspending request counts"
    assert commit() == ["b"]
    names = []
    returns = []
    while scheduler.has_work():
        while (made := plan()) is not None:
            returns.extend(opened.num_output for opened in made.opens)
        names.extend(commit())
    assert returns[:2] == [1, 0], "v, which has a token, is admitted before d"
    assert (names.count("b"), names.count("v"), names.count("d")) == (4, 5, 6)


def drive(setting: Setting, ops: Sequence[Op]) -> World:
    """Do all operations, then run dry."""
    world = World(setting)
    for op in ops:
        world.do(op)
    world.drain()
    return world


def random_case(
    seed: int, num_ops: int = 40, pressure: bool | None = None, tiers: bool = False
) -> tuple[Setting, list[Op]]:
    """A setting and operations drawn from a seed: what the planted bugs are hunted with."""
    rng = random.Random(seed)
    pressure = rng.random() < 0.4 if pressure is None else pressure
    chunk = rng.choice((2, 4))
    longest = rng.choice((20, 40, 64))
    setting = Setting(
        num_slots=int(longest / chunk * rng.choice((1, 1.3, 2) if pressure else (0.8, 1, 1.2, 1.6, 3))),
        num_rows=rng.choice((4, 7) if pressure else (1, 2, 4, 7)),
        chunk_size=chunk,
        max_model_len=longest,
        budget=rng.choice((3, 8, 16) if pressure else (1, 3, 8, 16, 50)),
        short=random.Random(seed + 1).choice((None, None, 1, 5)),
        run_ahead=rng.choice((1, 2, 3, 4)),
        one_plan_a_row=rng.choice((False, False, True)),
        policy=rng.choice(("fcfs", "fcfs", "priority")),
        reserve=rng.choice((0.0, 0.1) if pressure else (0.1, 0.3)),
        caching=rng.random() < 0.8 or tiers,
        host=rng.choice((0, 3, 10, 40)) if tiers else 0,
        disk=rng.choice((0, 0, 8, 60)) if tiers else 0,
        remote=rng.choice((0, 0, 8, 60)) if tiers else 0,
        values=rng.random() < 0.5,
        max_copy_delay=rng.choice((0, 1, 5)),
        copy_fails_every=rng.choice((0, 0, 7)),
        max_delay=rng.choice((0, 0, 2)),
        error_every=rng.choice((0, 0, 0, 9)),
        pressure=pressure,
        owners=rng.choice((0, 0, 0, 2, 3)),
        recovery=random.Random(seed).choice(("load", "faster", "any", "compute")) if tiers else "load",
    )
    kinds = (*KINDS, "forget", "restart") if tiers else KINDS
    return setting, [(rng.choice(kinds), rng.randrange(256), rng.randrange(256)) for _ in range(num_ops)]
