"""Several ranks as one worker, through the real engine: what one rank says, and what is found when one does wrong."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellar.core.config import ScheduleConfig
from cellar.core.errors import BuffersError, CapacityError, ConfigError, DeviceError, IntegrityError
from cellar.core.messages import CopyBatch, CopyResult, FinishReason, Request, StepPlan, StepResult, Tier
from cellar.core.sampling import SamplingParams, StructuredOutputsParams
from cellar.engine.steps import StepEngine, step_engine
from cellar.runtime.protocol import Capacity, Runtime
from cellar.runtime.ranks.group import RankGroup, _Watch
from cellar.runtime.ranks.rank import MOST_AT_ONCE, SWITCH_SECONDS, Opened, Packed, ProcessRank, ThreadRank
from cellar.runtime.ranks.star import Star, stars
from cellar.runtime.steps.fake import FakeRuntime, next_token
from cellar.schedule.steps.scheduler import StepScheduler
from cellar.text.grammar import GrammarCompiler
from cellar.text.masker import Masker
from cellar.text.tokenizer import Tokenizer
from tests.fake_front import TOKENIZER
from tests.limits import SECONDS, until

VOCAB = 97
SLOW = 6.0
"""Seconds of a step that is long."""
CAPACITY = Capacity(64, 8, 16, 256)


def open_rank(star: Star, capacity: Capacity = CAPACITY, **fake: Any) -> FakeRuntime:
    return FakeRuntime(capacity, **{"vocab_size": VOCAB, **fake}, comm=star)


def group_of(size: int, each: Callable[..., Runtime[StepPlan]] = open_rank, **fake: Any) -> RankGroup:
    return RankGroup([partial(each, star, **fake) for star in stars(size)])


def engine_over(runtime: Runtime[StepPlan], masker: Masker | None = None, step_tokens: int = 64) -> StepEngine:
    capacity = runtime.capacity
    config = ScheduleConfig(max_num_seqs=capacity.num_rows, max_num_batched_tokens=step_tokens)
    scheduler = StepScheduler(
        capacity.num_slots, capacity.num_rows, capacity.chunk_size, capacity.max_model_len, config
    )
    return step_engine(scheduler, runtime, masker=masker)


def request(id: str, prompt: Sequence[int], max_tokens: int = 6, **params: Any) -> Request:
    made = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0, **params)
    return Request(id, np.array(prompt, np.int32), made, frozenset(), max_tokens)


def expected(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


def run(engine: StepEngine) -> tuple[dict[str, list[int]], dict[str, tuple[FinishReason, int | str | None]]]:
    tokens: dict[str, list[int]] = {}
    finished: dict[str, tuple[FinishReason, int | str | None]] = {}
    end = time.monotonic() + SECONDS
    while engine.has_work():
        assert time.monotonic() < end
        for output in engine.turn(1.0):
            for id, token in zip(output.ids, output.tokens, strict=True):
                tokens.setdefault(id, []).append(token)
            finished |= output.finished
    return tokens, finished


@pytest.fixture
def opened() -> Iterator[list[RankGroup]]:
    """Groups to be closed."""
    groups: list[RankGroup] = []
    yield groups
    for group in groups:
        group.close()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_decode_step_on_several_ranks_is_that_of_one(size: int, opened: list[RankGroup]) -> None:
    group = group_of(size)
    opened.append(group)
    engine = engine_over(group)
    prompts = {f"r{k}": [k, 5, 2 * k] * (1 + k) for k in range(7)}
    engine.add(*(request(id, prompt, 12) for id, prompt in prompts.items()))
    tokens, _ = run(engine)
    assert tokens == {id: expected(prompt, 12) for id, prompt in prompts.items()}
    engine.scheduler.check_integrity()


def test_one_rank_alone_knows_only_its_share(opened: list[RankGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above shows that they work together: two ranks that add up the same share make other tokens."""
    parts = [int(((np.array([4, 7]) + 2 - rank) // 2 * np.array([1, 2])).sum()) for rank in (0, 1)]
    assert sum(parts) == 1 * 5 + 2 * 8
    total = Star.sum
    monkeypatch.setattr(Star, "sum", lambda self, part: total(self, part) if len(part) == 1 else 2 * part)
    group = group_of(2)
    opened.append(group)
    engine = engine_over(group)
    engine.add(request("r", [4, 7], 4))
    assert run(engine)[0]["r"] != expected([4, 7], 4)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_work_on_ranks_is_as_on_one(data: st.DataObject) -> None:
    """Little memory (suspensions), shared prefixes, aborts, penalties, failing steps and rows: ranks change nothing."""
    size = data.draw(st.integers(2, 3))
    slots = data.draw(st.integers(6, 20))
    rows = data.draw(st.integers(1, 5))
    bad_step, bad_row = data.draw(st.integers(0, 30)), data.draw(st.integers(0, 4))
    capacity = Capacity(slots, rows, 16, 96)
    bad: dict[str, Any] = {
        "fail": partial(_fails, bad_step) if data.draw(st.booleans()) else _never,
        "nan": partial(_nan, bad_row, data.draw(st.integers(0, 20))),
    }
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=8))
    penalized = data.draw(st.booleans())
    dropped = data.draw(st.sets(st.integers(0, 7), max_size=2))

    def answers(runtime: Runtime[StepPlan]) -> Any:
        engine = engine_over(runtime)
        for k, length in enumerate(lengths):
            params = {"presence_penalty": 1.0} if penalized and k % 2 else {}
            engine.add(request(f"r{k}", [1, *range(k % 3, k % 3 + length - 1)], 20, **params))
        for k in dropped:
            engine.abort(f"r{k}")
        found = run(engine)
        engine.scheduler.check_integrity()
        engine.close()
        return found

    tokens, finished = answers(group_of(size, capacity=capacity, **bad))
    alone, ends = answers(FakeRuntime(capacity, vocab_size=VOCAB))
    assert finished.keys() == ends.keys()
    for id, (reason, _) in finished.items():
        made = tokens.get(id, [])
        assert made == alone[id][: len(made)]
        assert len(made) == len(alone[id]) or reason is FinishReason.ERROR


def _never(plan: StepPlan) -> str | None:
    return None


def _fails(step: int, plan: StepPlan) -> str | None:
    return "made to fail" if plan.step == step else None


def _nan(row: int, step: int, at: int, of: int) -> bool:
    return at == step and of == row


def test_masks_go_to_the_rank_that_samples(opened: list[RankGroup]) -> None:
    text = Tokenizer.load(TOKENIZER)
    group = group_of(2, vocab_size=text.vocab_size)
    opened.append(group)
    engine = engine_over(group, Masker(GrammarCompiler(text, text.vocab_size, (2,))))
    wanted = StructuredOutputsParams(regex="[ab]{9}")
    engine.add(
        replace(request("masked", [3, 4], 20, structured_outputs=wanted), stop_ids=frozenset({2})),
        request("plain", [5], 6),
    )
    tokens, finished = run(engine)
    assert finished["masked"] == (FinishReason.STOP, 2)
    assert set(text.decode(tokens["masked"][:-1])) <= set("ab")
    assert len(tokens["plain"]) == 6


def test_capacity_is_the_least_of_all(opened: list[RankGroup]) -> None:
    capacities = [Capacity(64, 8, 16, 256), Capacity(40, 9, 16, 128)]
    group = RankGroup([partial(open_rank, star, c) for star, c in zip(stars(2), capacities, strict=True)])
    opened.append(group)
    assert group.capacity == Capacity(40, 8, 16, 128)
    with pytest.raises(ConfigError, match="16, 32"):
        RankGroup(
            [partial(open_rank, star, Capacity(8, 2, size, 64)) for star, size in zip(stars(2), (16, 32), strict=True)]
        )


def test_a_chunk_has_arrived_if_every_rank_has_its_shard(opened: list[RankGroup]) -> None:
    def each(star: Star) -> FakeRuntime:
        return open_rank(star, tiers={Tier.HOST: 8}, fail_copy=lambda batch, k: k == star.rank)

    group = group_of(2, each)
    opened.append(group)
    slots = np.arange(3, dtype=np.int32)
    group.copy(CopyBatch(0, Tier.DEVICE, slots, Tier.HOST, slots))
    (result,) = group.poll(SECONDS)
    assert result.ok.tolist() == [False, False, True]  # type: ignore[union-attr]


def test_a_step_that_fails_on_one_rank_ends_its_requests_and_no_others(opened: list[RankGroup]) -> None:
    def each(star: Star) -> FakeRuntime:
        return open_rank(star, fail=lambda plan: "no room" if star.rank == 1 and 13 in plan.tokens.tolist() else None)

    group = group_of(2, each)
    opened.append(group)
    engine = engine_over(group)
    engine.add(request("bad", [13], 5))
    _, finished = run(engine)
    assert "rank 1: no room" in str(finished["bad"][1])
    engine.add(request("good", [1, 2], 5))
    assert run(engine)[0] == {"good": expected([1, 2], 5)}


# -- ranks that do wrong ----------------------------------------------------------------------------


class Wrong(FakeRuntime):
    """Rank 1 does something else from its fourth result on."""

    how: str = ""
    silent: threading.Event

    def close(self) -> None:
        self.silent.set()
        super().close()

    def poll(self, timeout: float | None) -> list[Any]:
        found = super().poll(timeout)
        return [self._changed(result) if result.step >= 4 else result for result in found]

    def _changed(self, result: StepResult) -> StepResult:
        match self.how:
            case "tokens":
                return replace(result, tokens=result.tokens + 1)
            case "flags":
                return replace(result, flags=result.flags + 1)
            case "step":
                return replace(result, step=result.step + 1)
            case "death":
                raise ZeroDivisionError("a defect of the device")
            case "silence":
                self.silent.wait(SECONDS)
        return result


def wrong_rank(how: str, star: Star) -> FakeRuntime:
    runtime = (Wrong if star.rank == 1 else FakeRuntime)(CAPACITY, vocab_size=VOCAB, comm=star)
    if isinstance(runtime, Wrong):
        runtime.how, runtime.silent = how, threading.Event()
    return runtime


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ("tokens", IntegrityError, "rank 1 has other tokens of step 4"),
        ("flags", IntegrityError, "rank 1 has other flags of step 4"),
        ("step", IntegrityError, "rank 1 answered step 5, but its next was step 4"),
        ("death", DeviceError, r"rank 1 has ended \(ZeroDivisionError: a defect of the device\)"),
        ("silence", DeviceError, "rank 1 has not answered for 0.5 s"),
    ],
)
def test_a_rank_that_does_wrong_is_found(how: str, error: type[Exception], said: str) -> None:
    group = RankGroup([partial(wrong_rank, how, star) for star in stars(2)], patience=0.5 if how == "silence" else 60.0)
    engine = engine_over(group)
    engine.add(request("r", [1, 2], 50))
    with pytest.raises(error, match=said):
        run(engine)
    with pytest.raises(error, match=said):  # and nothing goes on as if nothing had been
        group.poll(0.0)
    begin = time.monotonic()
    engine.close()
    assert time.monotonic() - begin < 10


def test_a_rank_that_cannot_be_opened_ends_the_others() -> None:
    def each(star: Star) -> FakeRuntime:
        if star.rank == 1:
            raise ConfigError("no such shard")
        return open_rank(star)

    before = threading.active_count()
    with pytest.raises(ConfigError, match="no such shard"):
        group_of(2, each)
    until(lambda: threading.active_count() <= before)


def test_a_wake_ends_the_wait(opened: list[RankGroup]) -> None:
    group = group_of(2)
    opened.append(group)
    timer = threading.Timer(0.05, group.wake)
    timer.start()
    begin = time.monotonic()
    assert group.poll(SECONDS) == []
    assert time.monotonic() - begin < SECONDS / 2
    timer.join()


# -- processes --------------------------------------------------------------------------------------


@pytest.mark.long
def test_ranks_in_processes_and_what_is_left_when_one_is_killed() -> None:
    group = RankGroup([partial(open_rank, star) for star in stars(2)], ProcessRank)
    engine = engine_over(group)
    prompts = {"a": [1, 2, 3], "b": list(range(40))}
    engine.add(*(request(id, prompt, 10) for id, prompt in prompts.items()))
    assert run(engine)[0] == {id: expected(prompt, 10) for id, prompt in prompts.items()}
    pids = [rank.process.pid for rank in group._ranks]  # type: ignore[attr-defined]
    engine.add(request("long", [7], 200))
    engine.turn(1.0)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(DeviceError, match=r"rank 1 has ended \(its process has ended by signal 9\)"):
        run(engine)
    begin = time.monotonic()
    engine.close()
    assert time.monotonic() - begin < 10
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.long
def test_a_rank_whose_process_is_stopped_is_found_though_its_plan_is_large() -> None:
    """The other one waits for it, so nobody answers; but it goes on saying that it lives. The plan is more than the
    stopped one's socket takes.
    """
    roomy = Capacity(12_000, 2, 16, 180_000)
    group = RankGroup([partial(open_rank, star, roomy) for star in stars(2)], ProcessRank, silence=4.0)
    engine = engine_over(group, step_tokens=170_000)
    engine.add(request("before", [3], 5))
    assert run(engine)[0] == {"before": expected([3], 5)}
    pids = [rank.process.pid for rank in group._ranks]  # type: ignore[attr-defined]
    os.kill(pids[1], signal.SIGSTOP)
    engine.add(request("large", [7] * 160_000, 20))
    plans: list[int] = []
    submit = group.submit
    group.submit = lambda plan: (plans.append(len(Packed(plan).bytes())), submit(plan))[1]  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="rank 1 has given no sign of life for 4 s"):
        run(engine)
    assert max(plans) > 600_000
    begin = time.monotonic()
    engine.close()
    assert time.monotonic() - begin < 10
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.long
def test_a_rank_that_takes_no_orders_is_given_no_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellar.runtime.ranks.rank.MOST_UNSENT", 3)
    group = RankGroup([partial(open_rank, star) for star in stars(1)], ProcessRank)
    (rank,) = group._ranks
    assert isinstance(rank, ProcessRank)
    os.kill(rank.process.pid, signal.SIGSTOP)  # type: ignore[arg-type]
    slots = np.arange(60_000, dtype=np.int32)
    for number in range(5):
        group.copy(CopyBatch(number, Tier.DEVICE, slots, Tier.HOST, slots))
    with pytest.raises(DeviceError, match=r"rank 0 has ended \(it has left 3 orders untaken\)"):
        group.poll(SECONDS)
    assert rank.process.exitcode == -signal.SIGKILL


class Told:
    """A runtime that copies nothing, and answers in the order in which it was told to."""

    capacity = CAPACITY

    def __init__(self) -> None:
        self.workers = (self,)
        self.in_flight = 0
        self._told: SimpleQueue[CopyResult] = SimpleQueue()

    def copy(self, batch: CopyBatch) -> None:
        self._told.put(CopyResult(batch.number, np.ones(1, bool), 0, 0.0, None))

    def poll(self, timeout: float | None) -> list[CopyResult]:
        return [self._told.get()]

    def close(self) -> None:
        pass


@pytest.mark.long
def test_orders_keep_their_turn_whoever_writes_them() -> None:
    """Large ones wait for a thread, and small ones that come meanwhile do, too; alone these are written at once."""
    news: SimpleQueue[Any] = SimpleQueue()
    rank = ProcessRank(0, Told, news)  # type: ignore[arg-type]
    assert isinstance(news.get(timeout=SECONDS), Opened)
    small, large = np.zeros(1, np.int32), np.zeros(60_000, np.int32)
    batches = [CopyBatch(k, Tier.DEVICE, s, Tier.HOST, s) for k in range(100) for s in [large if k % 7 == 3 else small]]
    packs = [Packed(batch) for batch in batches]
    assert {len(packed.bytes()) > MOST_AT_ONCE for packed in packs} == {True, False}
    at_once = 0
    for batch, packed in zip(batches, packs, strict=True):
        rank.send(batch, packed)
        at_once += rank._orders.empty() and rank._unsent == 0
    assert [news.get(timeout=SECONDS).result.number for _ in batches] == list(range(100))
    assert at_once, "some were"
    rank.stop()
    rank.join(SECONDS)


def _says_how_it_runs() -> Runtime[StepPlan]:
    raise ConfigError(f"{sys.getswitchinterval():g} s, level {logging.getLogger().getEffectiveLevel()}")


@pytest.mark.long
def test_a_ranks_process_lets_copies_in_and_says_as_much_as_its_parent() -> None:
    """Who asks for copies waits for the interpreter a few times for each: at 5 ms a time loads came too late."""
    news: SimpleQueue[Any] = SimpleQueue()
    before = logging.getLogger().level
    logging.getLogger().setLevel(logging.INFO)
    try:
        rank = ProcessRank(0, _says_how_it_runs, news)
    finally:
        logging.getLogger().setLevel(before)
    assert str(news.get(timeout=SECONDS).error) == f"{SWITCH_SECONDS:g} s, level {logging.INFO}"
    rank.stop()
    rank.join(SECONDS)


@pytest.mark.long
def test_a_long_step_is_no_silence() -> None:
    group = RankGroup([partial(open_rank, star, fail=_takes_long) for star in stars(2)], ProcessRank, silence=SLOW / 2)
    engine = engine_over(group)
    try:
        engine.add(request("r", [1, 2], 1))
        assert run(engine)[0] == {"r": expected([1, 2], 1)}
    finally:
        engine.close()


def _takes_long(plan: StepPlan) -> None:
    time.sleep(SLOW)


def test_who_was_stopped_itself_takes_nobody_for_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Heard:
        heard = 0.0

    moments = iter([0.0, 1.0, 2.0, 100.0, 102.0, 103.5])
    monkeypatch.setattr("cellar.runtime.ranks.group.time.monotonic", lambda: next(moments))
    watch, ranks = _Watch(), [Heard()]
    for _ in range(5):
        watch.look(ranks, 3.0)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="rank 0 has given no sign of life for 3 s"):
        watch.look(ranks, 3.0)  # type: ignore[arg-type]


def too_large(missing: int) -> Runtime[StepPlan]:
    raise BuffersError("buffers take more than the plan has left.", missing)


@pytest.mark.long
@pytest.mark.parametrize("make", [ThreadRank, ProcessRank])
def test_the_most_that_a_rank_misses_is_what_all_are_planned_again_with(make: Any) -> None:
    """It is heard through a process's last words, too."""
    with pytest.raises(BuffersError, match="buffers take more") as caught:
        RankGroup([partial(too_large, 3), partial(too_large, 9)], make)
    assert caught.value.missing in (3, 9)
    if make is ThreadRank:
        assert caught.value.missing == 9


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ("refused", ConfigError, "rank 1 could not be opened: no such shard"),
        ("killed", DeviceError, "rank 1 could not be opened: its process has ended by signal 9"),
        ("out of memory", CapacityError, "rank 1 could not be opened: its memory ran out; take a smaller or quantized"),
    ],
)
def test_a_rank_that_ends_at_load_is_said_and_nobody_is_left(how: str, error: type[Exception], said: str) -> None:
    """The other one waits for it to come."""
    with pytest.raises(error, match=said):
        RankGroup([partial(_ends_at_load, how, star) for star in stars(2)], ProcessRank)
    assert not [child for child in multiprocessing.active_children() if child.name.startswith("cellar-rank")]


def _ends_at_load(how: str, star: Star) -> FakeRuntime:
    if star.rank == 0:
        star.sum(np.zeros(1, np.int64))  # until rank 1 is there
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "refused":
        raise ConfigError("no such shard")
    torch.empty(2**60)
    return open_rank(star)
