"""The loop, over the real scheduler and a runtime whose tokens can be computed by hand."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from cellar.core.config import ScheduleConfig
from cellar.core.errors import IntegrityError, RequestError
from cellar.core.messages import (
    CopyBatch,
    CopyResult,
    Event,
    EventKind,
    FinishReason,
    Request,
    StepOutput,
    StepPlan,
    StepResult,
    Tier,
)
from cellar.core.sampling import SamplingParams, StructuredOutputsParams
from cellar.engine.engine import Engine
from cellar.engine.steps import StepEngine, step_engine
from cellar.engine.structured import StructuredOutput
from cellar.runtime.protocol import Capacity
from cellar.runtime.steps.fake import FakeRuntime, next_token
from cellar.schedule.steps.scheduler import StepScheduler
from cellar.text.masker import MaskRow, Wanted
from tests.fake_front import engine_of, open_fake
from tests.limits import SECONDS, join_all

VOCAB = 97


class Collected:
    """What a client sees: tokens and endings by request, in order."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finished: dict[str, tuple[FinishReason, int | str | None]] = {}

    def take(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            for id, token in zip(output.ids, output.tokens, strict=True):
                assert id not in self.finished
                self.tokens[id].append(token)
            self.finished |= output.finished


def make(
    *, num_slots: int = 64, num_rows: int = 8, run_ahead: int = 2, max_model_len: int = 256, **fake: object
) -> tuple[StepEngine, FakeRuntime]:
    runtime = FakeRuntime(Capacity(num_slots, num_rows, 16, max_model_len), vocab_size=VOCAB, **fake)  # type: ignore[arg-type]
    config = ScheduleConfig(max_num_seqs=num_rows, max_num_batched_tokens=64, run_ahead=run_ahead)
    ticks = iter(range(10**9))
    scheduler = StepScheduler(num_slots, num_rows, 16, max_model_len, config)
    return step_engine(scheduler, runtime, run_ahead=run_ahead, clock=lambda: float(next(ticks))), runtime


def request(id: str, prompt: list[int], max_tokens: int = 4, stop_ids: tuple[int, ...] = ()) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0)
    return Request(id, np.array(prompt, np.int32), params, frozenset(stop_ids), max_tokens)


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


def run(engine: StepEngine, collected: Collected) -> None:
    while engine.has_work():
        collected.take(engine.turn(1.0))


def test_tokens_by_hand() -> None:
    engine, _ = make()
    engine.add(request("a", [1, 2], 2))
    collected = Collected()
    run(engine, collected)
    # 1 * 2 + 2 * 3 = 8, then 8 + 3 * 9 = 35
    assert collected.tokens["a"] == [8, 35]
    assert collected.finished["a"][0] is FinishReason.LENGTH


@pytest.mark.parametrize("run_ahead", [1, 2, 5])
@pytest.mark.parametrize("num_slots", [16, 64])
def test_many_requests_whatever_the_depth_and_memory(run_ahead: int, num_slots: int) -> None:
    engine, _ = make(run_ahead=run_ahead, num_slots=num_slots, delay=lambda step: step % 3)
    rng = np.random.default_rng(0)
    prompts = {f"r{k}": rng.integers(0, VOCAB, rng.integers(1, 120)).tolist() for k in range(30)}
    for id, prompt in prompts.items():
        engine.add(request(id, prompt, 20))
    collected = Collected()
    run(engine, collected)
    for id, prompt in prompts.items():
        assert collected.tokens[id] == expected(prompt, 20)


def test_the_same_calls_make_the_same_steps() -> None:
    def steps() -> list[list[tuple[str, int]]]:
        engine, _ = make(num_slots=16)
        for k in range(12):
            engine.add(request(f"r{k}", [k, k + 1] * (k + 1), 10))
        seen = []
        while engine.has_work():
            seen += [list(zip(o.ids, o.tokens, strict=True)) for o in engine.turn(1.0)]
        return seen

    assert steps() == steps()


def test_run_ahead_is_the_number_of_plans_in_flight() -> None:
    engine, runtime = make(run_ahead=3, delay=10**6)
    engine.add(request("a", [1], 50))
    for _ in range(5):
        engine.turn(0.0)
    assert runtime.in_flight == 3


def test_finish_and_abort_arrive_at_the_next_turn() -> None:
    engine, _ = make()
    collected = Collected()
    for id in ("stopped", "aborted", "other"):
        engine.add(request(id, [5, 6, 7], 30))
    while len(collected.tokens["stopped"]) < 3:
        collected.take(engine.turn(1.0))
    engine.finish("stopped", 2, FinishReason.STOP)
    engine.abort("aborted")
    engine.abort("nobody")
    before = {id: len(tokens) for id, tokens in collected.tokens.items()}
    run(engine, collected)
    assert len(collected.tokens["stopped"]) == before["stopped"]
    assert len(collected.tokens["aborted"]) == before["aborted"]
    assert collected.tokens["other"] == expected([5, 6, 7], 30)
    assert engine.stats().running == engine.stats().waiting == 0


def test_what_could_never_run_is_refused_before_anything_starts() -> None:
    engine, runtime = make(num_slots=4, max_model_len=256)
    engine.add(request("fits", [1], 3))
    engine.add(request("long", [1] * 60, 100))
    engine.add(request("fits", [1], 3))
    refused = engine.refused()
    assert runtime.num_steps == 0
    assert set(refused) == {"long", "fits"}
    assert "chunks" in refused["long"]
    collected = Collected()
    outputs = engine.turn(0.0)
    assert {id: said for id, (_, said) in outputs[0].finished.items()} == refused
    assert not engine.refused()
    collected.take(outputs[1:])
    run(engine, collected)
    assert collected.tokens == {"fits": expected([1], 3)}


def test_a_refusal_comes_with_the_turn_too() -> None:
    engine, _ = make(num_slots=4)
    engine.add(request("long", [1] * 60, 100))
    (output,) = engine.turn(None)
    assert output.finished["long"][0] is FinishReason.ERROR
    assert not engine.has_work()


def test_a_failed_step_ends_only_its_requests() -> None:
    bad = 13

    def fail(plan: StepPlan) -> str | None:
        return "out of order" if bad in plan.tokens.tolist() else None

    engine, _ = make(fail=fail)
    collected = Collected()
    engine.add(request("bad", [bad], 5))
    collected.take(engine.turn(1.0))
    engine.add(request("good", [1, 2], 5))
    run(engine, collected)
    assert collected.finished["bad"] == (FinishReason.ERROR, "out of order")
    assert collected.tokens["good"] == expected([1, 2], 5)


def test_add_from_another_thread_ends_the_wait() -> None:
    engine, _ = make()
    collected = Collected()
    timer = threading.Timer(0.05, lambda: engine.post(lambda: engine.add(request("a", [1, 2], 3))))
    begin = time.monotonic()
    timer.start()
    engine.turn(SECONDS)
    assert time.monotonic() - begin < SECONDS / 2
    run(engine, collected)
    join_all([timer])
    assert collected.tokens["a"] == expected([1, 2], 3)


def test_many_threads_add_and_abort() -> None:
    engine, _ = make(num_slots=32)
    done = threading.Event()
    collected = Collected()

    def loop() -> None:
        while not done.is_set() or engine.has_work():
            collected.take(engine.turn(0.05))

    def client(name: str) -> None:
        for k in range(40):
            id = f"{name}{k}"
            engine.post(partial(engine.add, request(id, [k % VOCAB] * 5, 6)))
            if k % 4 == 3:
                engine.post(partial(engine.abort, id))

    looper = threading.Thread(target=loop)
    clients = [threading.Thread(target=client, args=(name,)) for name in "abcd"]
    for thread in [looper, *clients]:
        thread.start()
    join_all(clients)
    done.set()
    engine.wake()
    join_all([looper])
    for name in "abcd":
        for k in range(40):
            if k % 4 != 3:
                assert collected.tokens[f"{name}{k}"] == expected([k % VOCAB] * 5, 6)


class SlowGrammars:
    """A masker whose grammars are ready when the test says so, and that masks nothing."""

    def __init__(self, error: str | None = None) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Event()
        self.error = error
        self.done: set[str] = set()

    def ready(self, wanted: StructuredOutputsParams) -> bool:
        return wanted.text in self.done

    def prepare(self, wanted: StructuredOutputsParams) -> None:
        self.begun.release()
        assert self.go.wait(SECONDS)
        if self.error is not None:
            raise RequestError(self.error)
        self.done.add(wanted.text)

    def submitted(self, plan: StepPlan) -> list[Wanted]:
        return []

    def committed(self, result: StepResult) -> list[Wanted]:
        return []

    def newly_parked(self) -> list[MaskRow]:
        return []

    def forget(self, name: str) -> None: ...


def structured(id: str, prompt: list[int], grammar: str) -> Request:
    asked = request(id, prompt, 3)
    return replace(asked, params=asked.params.clone(structured_outputs=StructuredOutputsParams(regex=grammar)))


def held_by(engine: StepEngine, masker: SlowGrammars) -> StructuredOutput:
    engine.companion = StructuredOutput(masker, lambda step, masks: None, lambda threads: None)
    engine.companion.attach(engine, SECONDS)
    return engine.companion


def test_an_id_taken_again_while_a_grammar_compiles_runs_the_later_request() -> None:
    engine, _ = make()
    masker = SlowGrammars()
    held_by(engine, masker)
    engine.add(structured("a", [1, 2], "x"))
    assert masker.begun.acquire(timeout=SECONDS)
    engine.abort("a")
    engine.add(structured("a", [7, 8, 9], "y"))
    masker.go.set()
    opened: list[list[int]] = []
    plan = engine.scheduler.plan

    def noted(worker: int, now: float) -> StepPlan | None:
        made = plan(worker, now)
        opened.extend([made.tokens.tolist()] if made is not None and made.opens else [])
        return None if made is None else replace(made, masked_rows=())

    engine.scheduler.plan = noted  # type: ignore[method-assign]
    run(engine, Collected())
    assert opened == [[7, 8, 9]]


def test_what_is_refused_between_turns_belongs_to_the_request_it_was_said_of() -> None:
    opened, _ = open_fake()
    front = opened.front
    masker = SlowGrammars("no such grammar")
    companion = held_by(engine_of(opened), masker)
    prompt, plain = front.reader.read([1, 2]), SamplingParams(max_tokens=2)
    grammar = plain.clone(structured_outputs=StructuredOutputsParams(regex="x"))
    front.start([front.prepare("late", prompt, grammar)])
    masker.go.set()
    assert masker.begun.acquire(timeout=SECONDS)
    companion._compiler.shutdown()  # the refusal has been posted
    front.start([front.prepare("good", prompt, plain)])
    ended = {}
    while len(ended) < 2:
        for output in front.turn(5.0).finished:
            ended[output.request_id] = output.outputs[0]
    assert (ended["late"].finish_reason, ended["late"].stop_reason) == ("error", "no such grammar")
    assert ended["good"].finish_reason == "length"


def test_books_are_checked_when_work_ends_but_not_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make()
    now, checks = [0.0], []
    engine.clock = lambda: now[0]
    monkeypatch.setattr(engine.scheduler, "check_integrity", lambda: checks.append(now[0]))
    for second in (0.0, 1.0, 59.0, 60.0, 61.0, 500.0):
        now[0] = second
        engine.turn(0.0)
        engine.add(request(f"at {second}", [1], 2))
        run(engine, Collected())
    assert checks == [0.0, 60.0, 500.0]


def test_a_stall_is_a_defect_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make()
    engine.add(request("a", [1], 2))
    monkeypatch.setattr(engine.scheduler, "plan", lambda worker, now: None)
    with pytest.raises(IntegrityError, match="nothing is awaited"):
        engine.turn(None)


def test_close_stops_the_runtime() -> None:
    engine, runtime = make()
    engine.close()
    with pytest.raises(IntegrityError, match="closed"):
        runtime.submit(None)  # type: ignore[arg-type]


class _Quiet:
    """A scheduler whose work ends by a message, and a runtime on which nothing runs."""

    def __init__(self) -> None:
        self.working, self.checks, self.waited, self.workers = True, 0, list[float | None](), ()
        self.event: Event | None = None

    def plan(self, worker: int, now: float) -> None:
        return None

    def copies(self, now: float) -> tuple[()]:
        return ()

    def failed(self) -> dict[str, str]:
        return {}

    def next_event(self, now: float) -> Event | None:
        return self.event

    def has_work(self) -> bool:
        return self.working

    def check_integrity(self) -> None:
        self.checks += 1

    def wake(self) -> None: ...

    def poll(self, timeout: float | None) -> list[object]:
        self.waited.append(timeout)
        return []


def quiet_engine(now: float = 0.0) -> tuple[Engine[Any, Any, Any, Any, Any], _Quiet]:
    quiet = _Quiet()
    return Engine(quiet, quiet, StepOutput.refusal, run_ahead=1, clock=lambda: now), quiet  # type: ignore[arg-type]


def test_work_that_a_message_ends_is_told_before_the_loop_waits() -> None:
    """No result will come of it: who looks after each turn would see the old state as long as nothing else happens."""
    engine, quiet = quiet_engine()
    quiet.event = Event(EventKind.COPY)
    engine.post(lambda: None)
    engine.turn(None)
    engine.post(lambda: setattr(quiet, "working", False))
    engine.turn(None)
    engine.turn(None)
    assert quiet.waited == [None, 0.0, None]
    assert quiet.checks == 1


def test_a_request_that_waits_for_a_copy_or_a_moment_is_no_stall() -> None:
    engine, quiet = quiet_engine(now=10.0)
    copies = Event(EventKind.COPY), Event(EventKind.COPY, 11.0)
    for quiet.event in (*copies, Event(EventKind.TIMER, 12.5), Event(EventKind.TIMER, 7.0)):
        engine.turn(None)
    engine.turn(0.25)
    quiet.event = Event(EventKind.TIMER, 12.5)
    engine.turn(0.25)
    assert quiet.waited == [None, 1.0, 2.5, 0.0, 0.0, 0.25]
    quiet.event = None
    with pytest.raises(IntegrityError, match="nothing is awaited"):
        engine.turn(None)


def test_copies_go_before_their_plan_and_their_results_to_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runtime = make()
    batch = CopyBatch(0, Tier.HOST, np.zeros(1, np.int32), Tier.DEVICE, np.zeros(1, np.int32))
    result = CopyResult(0, np.ones(1, np.bool_), 64)
    decided, seen = [batch], list[object]()
    submit, poll = runtime.submit, runtime.poll
    monkeypatch.setattr(engine.scheduler, "copies", lambda now: [decided.pop()] if decided else [])
    monkeypatch.setattr(engine.scheduler, "commit_copy", lambda result, now: seen.append(result))
    monkeypatch.setattr(runtime, "copy", seen.append)
    monkeypatch.setattr(runtime, "submit", lambda plan: (seen.append("plan"), submit(plan)))
    monkeypatch.setattr(runtime, "poll", lambda timeout: [result, *poll(timeout)])
    engine.add(request("a", [1], 2))
    engine.turn(0)
    assert seen[:2] == [batch, "plan"], "what a plan waits for is handed over before it"
    assert seen[-1] is result
    # without a plan, too
    seen.clear()
    decided.append(batch)
    monkeypatch.setattr(engine.scheduler, "plan", lambda worker, now: None)
    engine.turn(0)
    assert seen[0] is batch
