"""FakeRuntime: tokens by hand, and everything that a real runtime could not do is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from cellar.core.errors import IntegrityError
from cellar.core.messages import (
    ChunkLabel,
    CopyBatch,
    CopyResult,
    Emit,
    Flag,
    RowOpen,
    Source,
    Spans,
    StepPlan,
    StepResult,
    TableUpdate,
    Tier,
)
from cellar.core.sampling import SamplingParams
from cellar.runtime.protocol import Capacity, Runtime
from cellar.runtime.steps.fake import FakeRuntime, next_token, penalty
from tests.limits import SECONDS, join_all

GREEDY = SamplingParams(temperature=0, seed=0)
CAPACITY = Capacity(num_slots=8, num_rows=4, chunk_size=4, max_model_len=16)

Piece = tuple[int, int, int, Source, Emit]


def ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)


def plan_of(
    step: int,
    pieces: Sequence[Piece],
    tokens: Sequence[int] = (),
    table: Sequence[tuple[int, int, int]] = (),
    **more: Any,
) -> StepPlan:
    spans = Spans(*(ints(part) for part in zip(*pieces, strict=True)))
    update = TableUpdate(*(ints(part) for part in zip(*table, strict=True))) if table else TableUpdate(*[ints([])] * 3)
    return StepPlan(step, spans, ints(tokens), update, **more)


def prompt(step: int, tokens: Sequence[int], row: int = 0, slots: Sequence[int] = (3, 5), **more: Any) -> StepPlan:
    """Opens a row, places its chunks, computes a whole prompt."""
    piece = (row, 0, len(tokens), Source.HOST, Emit.LAST)
    opened = more.pop("opens", (RowOpen(row, GREEDY),))
    return plan_of(step, [piece], tokens, [(row, c, s) for c, s in enumerate(slots)], opens=opened, **more)


def decode(step: int, at: int, row: int = 0, **more: Any) -> StepPlan:
    return plan_of(step, [(row, at, at + 1, Source.DEVICE, Emit.LAST)], **more)


def run(runtime: FakeRuntime, *plans: StepPlan) -> list[list[int]]:
    """Submit and poll one by one; -> sampled tokens of each step."""
    answers = []
    for plan in plans:
        runtime.workers[0].submit(plan)
        (result,) = runtime.poll(0)
        assert isinstance(result, StepResult)
        answers.append(result.tokens[:, 0].tolist())
    return answers


def test_tokens_are_those_computed_by_hand() -> None:
    runtime = FakeRuntime(CAPACITY, vocab_size=100)
    # 1*11 + 2*21 + 3*31 = 146; + 4*47 = 334; + 5*35 = 509
    assert run(runtime, prompt(0, [10, 20, 30]), decode(1, 3), decode(2, 4)) == [[46], [34], [9]]
    assert next_token([10, 20, 30], 100) == 46
    assert (runtime.num_steps, runtime.num_tokens) == (3, 5)


def test_pieces_and_shared_chunks_change_nothing() -> None:
    runtime = FakeRuntime(CAPACITY)
    tokens = [3, 1, 4, 1, 5, 9, 2]
    whole = run(runtime, prompt(0, tokens))
    first = plan_of(
        1, [(1, 0, 3, Source.HOST, Emit.NONE)], tokens[:3], [(1, 0, 0), (1, 1, 1)], opens=(RowOpen(1, GREEDY),)
    )
    second = plan_of(2, [(1, 3, 7, Source.HOST, Emit.LAST)], tokens[3:])
    assert run(runtime, first, second) == [[], *whole]
    # row 2 shares the first chunk of row 0
    shared = plan_of(
        3, [(2, 4, 7, Source.HOST, Emit.LAST)], tokens[4:], [(2, 0, 3), (2, 1, 2)], opens=(RowOpen(2, GREEDY),)
    )
    assert run(runtime, shared) == whole


def test_hole_and_tail_in_one_step() -> None:
    runtime = FakeRuntime(CAPACITY)
    tokens = list(range(10))
    whole = run(runtime, prompt(0, tokens, slots=(0, 1, 2)))
    pieces: list[Piece] = [(1, 0, 4, Source.HOST, Emit.NONE), (1, 8, 10, Source.HOST, Emit.LAST)]
    holes = plan_of(
        1, pieces, [*tokens[:4], *tokens[8:]], [(1, 0, 3), (1, 1, 1), (1, 2, 4)], opens=(RowOpen(1, GREEDY),)
    )
    assert run(runtime, holes) == whole


@pytest.mark.parametrize(
    ("plans", "words"),
    [
        ([plan_of(0, [(0, 0, 1, Source.HOST, Emit.LAST)], [1])], "not open"),
        ([prompt(0, [1] * 9)], "no slot for position 8"),
        ([prompt(0, [1, 2]), decode(1, 3)], "last token at 2"),
        ([prompt(0, [1, 2]), prompt(1, [5, 5], 1, (3,)), decode(2, 2)], "overwritten"),
        ([prompt(0, [1, 2, 3]), prompt(0, [1])], "submitted after step 0"),
        ([prompt(0, [1, 2], closes=(2,))], "closes row 2"),
        ([prompt(0, [1, 2], closes=(0,)), decode(1, 2)], "not open"),
        (
            [
                plan_of(
                    0, [(0, 4, 6, Source.HOST, Emit.LAST)], [1, 2], [(0, 0, 1), (0, 1, 2)], opens=(RowOpen(0, GREEDY),)
                )
            ],
            "never written",
        ),
        ([prompt(0, [1, 2], opens=(RowOpen(0, GREEDY.clone(presence_penalty=1.0)),))], "penalties"),
    ],
)
def test_what_cannot_be_is_refused(plans: list[StepPlan], words: str) -> None:
    runtime = FakeRuntime(CAPACITY)
    for plan in plans[:-1]:
        runtime.submit(plan)
        if "submitted after" not in words:
            runtime.poll(0)
    with pytest.raises(IntegrityError, match=words):
        runtime.submit(plans[-1])


def test_rows_and_slots_in_flight_are_not_given_away() -> None:
    runtime = FakeRuntime(CAPACITY)
    runtime.submit(prompt(0, [1, 2]))
    with pytest.raises(IntegrityError, match="opens row 0, which a plan in flight names"):
        runtime.submit(prompt(1, [1, 2], slots=(6,)))
    runtime = FakeRuntime(CAPACITY)
    runtime.submit(prompt(0, [1, 2]))
    with pytest.raises(IntegrityError, match=r"writes slots \[3\]"):
        runtime.submit(prompt(1, [1, 2], row=1, slots=(3,)))
    runtime = FakeRuntime(CAPACITY)
    runtime.submit(prompt(0, [1, 2]))
    runtime.poll(0)
    runtime.submit(prompt(1, [1, 2], row=1, slots=(3,)))


def test_min_tokens_and_penalties() -> None:
    base = next_token([10, 20, 30], 97)
    params = GREEDY.clone(min_tokens=1, presence_penalty=1.0)
    opened = RowOpen(0, params, stop_ids=((base + 60) % 97,), prompt=ints([10, 20, 30]), output=ints([]))
    assert penalty([10, 20, 30], []) == 60
    assert run(FakeRuntime(CAPACITY), prompt(0, [10, 20, 30], opens=(opened,))) == [[(base + 61) % 97]]


def test_end_token_comes_by_its_rule() -> None:
    runtime = FakeRuntime(CAPACITY, vocab_size=100, end_token=2, end_period=146)
    assert run(runtime, prompt(0, [10, 20, 30])) == [[2]]


def test_logprobs_of_prompt_and_output() -> None:
    runtime = FakeRuntime(CAPACITY, vocab_size=10)
    opened = RowOpen(0, GREEDY.clone(logprobs=1, prompt_logprobs=1))
    piece = (0, 0, 3, Source.HOST, Emit.ALL)
    runtime.submit(plan_of(0, [piece], [1, 2, 3], [(0, 0, 0)], opens=(opened,), targets=ints([2, 3, -1])))
    (result,) = runtime.poll(0)
    assert isinstance(result, StepResult)
    assert result.prompt_logprobs[0].index.tolist() == [1, 2]
    assert result.prompt_logprobs[0].rank.tolist() == [2, 3]
    assert result.logprobs is not None
    assert result.logprobs.rank.tolist() == result.tokens[:, 0].tolist()


def test_failed_step_and_row_that_is_not_finite() -> None:
    runtime = FakeRuntime(CAPACITY, fail=lambda plan: "lost" if plan.step == 0 else None, nan=lambda s, r: s == 2)
    runtime.submit(prompt(0, [1, 2]))
    runtime.submit(decode(1, 2))
    first, second = runtime.poll(0)
    assert isinstance(first, StepResult)
    assert isinstance(second, StepResult)
    assert first.error == "lost"
    assert second.flags.tolist() == [Flag.NAN]
    runtime.submit(prompt(2, [1, 2]))
    (third,) = runtime.poll(0)
    assert isinstance(third, StepResult)
    assert third.flags.tolist() == [Flag.NAN]


def test_results_held_back_by_polls_stay_in_order() -> None:
    runtime = FakeRuntime(CAPACITY, delay=lambda step: 2 if step == 0 else 0)
    runtime.submit(prompt(0, [1, 2]))
    runtime.submit(decode(1, 2))
    assert runtime.workers[0].in_flight == 2
    assert runtime.poll(5) == []
    assert runtime.poll(5) == []
    assert [r.step for r in runtime.poll(5) if isinstance(r, StepResult)] == [0, 1]
    assert runtime.workers[0].in_flight == 0


def test_latency_adds_up_and_poll_waits() -> None:
    runtime = FakeRuntime(CAPACITY, latency=lambda plan: 0.03)
    begin = time.monotonic()
    runtime.submit(prompt(0, [1, 2]))
    runtime.submit(decode(1, 2))
    found = runtime.poll(None)
    assert time.monotonic() - begin >= 0.03
    while len(found) < 2:
        found += runtime.poll(None)
    assert time.monotonic() - begin >= 0.06


def test_a_long_step_holds_up_its_own_result_and_later_ones() -> None:
    runtime = FakeRuntime(CAPACITY, latency=lambda plan: 3600.0 if plan.step == 1 else 0.0)
    begin = time.monotonic()
    for plan in (prompt(0, [1, 2]), decode(1, 2), decode(2, 3)):
        runtime.submit(plan)
    assert len(runtime.poll(None)) == 1
    assert runtime.poll(0) == runtime.poll(0.01) == []
    assert time.monotonic() - begin < SECONDS, "submit does not block"


@contextmanager
def soon(call: Callable[[], None]) -> Iterator[None]:
    """Another thread does something in a moment; what waits for it must not wait for long afterwards."""
    begin = time.monotonic()
    timer = threading.Timer(0.05, call)
    timer.start()
    yield
    assert time.monotonic() - begin < SECONDS / 2
    join_all([timer])


def test_wake_and_timeout_end_a_poll() -> None:
    runtime = FakeRuntime(CAPACITY)
    assert runtime.poll(0.01) == []
    with soon(runtime.wake):
        assert runtime.poll(SECONDS) == []
    runtime.wake()
    with soon(lambda: None):
        assert runtime.poll(SECONDS) == [], "a wake before the poll is not lost"


def test_submit_and_close_end_a_poll_of_another_thread() -> None:
    runtime = FakeRuntime(CAPACITY)
    with soon(lambda: runtime.submit(prompt(0, [1, 2]))):
        assert len(runtime.poll(SECONDS)) == 1
    with soon(runtime.close):
        assert runtime.poll(SECONDS) == []
    with pytest.raises(IntegrityError, match="closed"):
        runtime.submit(prompt(1, [1, 2]))


def test_masked_rows_wait_for_their_masks() -> None:
    runtime = FakeRuntime(CAPACITY, vocab_size=100)
    runtime.submit(prompt(0, [10, 20, 30], masked_rows=(0,)))
    runtime.submit(decode(1, 3))
    assert runtime.poll(0) == []
    mask = np.zeros(4, np.int32)
    mask[50 // 32] |= 1 << (50 % 32)
    with pytest.raises(IntegrityError, match="does not mask"):
        runtime.supply(0, {1: mask})
    runtime.supply(0, {0: mask})
    first, second = runtime.poll(0)
    assert isinstance(first, StepResult)
    assert isinstance(second, StepResult)
    assert first.tokens.tolist() == [[50]], "46 is not allowed; the next one that is"
    assert second.tokens.tolist() == [[next_token([10, 20, 30, 50], 100)]]


def test_it_is_a_runtime() -> None:
    runtime: Runtime[StepPlan] = FakeRuntime(CAPACITY)
    assert [worker.id for worker in runtime.workers] == [0]
    assert runtime.capacity == CAPACITY


# -- copies --------------------------------------------------------------------------------------------


def batch(number: int, source: Tier, sources: Sequence[int], target: Tier, targets: Sequence[int], **more: Any) -> Any:
    return CopyBatch(number, source, ints(sources), target, ints(targets), **more)


def tiered(**more: Any) -> FakeRuntime:
    """A runtime whose row 0 has written slots 3 and 5, and has gone."""
    runtime = FakeRuntime(CAPACITY, tiers={Tier.HOST: 4, Tier.DISK: 2}, **more)
    run(runtime, prompt(0, [3, 1, 4, 1, 5, 9], closes=(0,)))
    return runtime


def polled(runtime: FakeRuntime) -> list[CopyResult]:
    results = runtime.poll(0)
    assert all(isinstance(result, CopyResult) for result in results)
    return results  # type: ignore[return-value]


def going_on(step: int, slots: Sequence[int]) -> StepPlan:
    """Row 1 goes on after the first chunk, which lies in slots[0]."""
    return plan_of(
        step,
        [(1, 4, 6, Source.HOST, Emit.LAST)],
        [5, 9],
        [(1, c, s) for c, s in enumerate(slots)],
        opens=(RowOpen(1, GREEDY),),
    )


def test_bytes_follow_the_slots_through_the_tiers() -> None:
    runtime = tiered()
    wanted = run(FakeRuntime(CAPACITY), prompt(0, [3, 1, 4, 1, 5, 9]))
    for k, (source, s, target, t) in enumerate(
        [(Tier.DEVICE, 3, Tier.HOST, 2), (Tier.HOST, 2, Tier.DISK, 1), (Tier.DISK, 1, Tier.DEVICE, 6)]
    ):
        label = ChunkLabel(b"i", b"p", 6)
        runtime.copy(batch(k, source, [s], target, [t], labels=(label,)))
        (result,) = polled(runtime)
        assert (result.number, result.ok.tolist(), result.error) == (k, [True], None)
    assert runtime.num_copied == 3
    assert run(runtime, going_on(1, (6, 7))) == wanted


def test_failed_copy_leaves_nothing_to_read() -> None:
    runtime = tiered(fail_copy=lambda batch, k: k == 0)
    runtime.copy(batch(0, Tier.DEVICE, [3, 5], Tier.DEVICE, [0, 1]))
    (result,) = polled(runtime)
    assert result.ok.tolist() == [False, True]
    assert result.error is not None
    with pytest.raises(IntegrityError, match="does not hold it"):
        run(runtime, going_on(1, (0, 7)))


def test_copy_takes_its_polls_and_a_step_waits_for_it() -> None:
    runtime = tiered(copy_delay=2)
    runtime.copy(batch(0, Tier.DEVICE, [3], Tier.HOST, [0]))
    assert [len(polled(runtime)) for _ in range(3)] == [0, 0, 1]
    runtime.copy(batch(1, Tier.HOST, [0], Tier.DEVICE, [6], before_step=1))
    runtime.workers[0].submit(going_on(1, (6, 7)))
    assert not runtime.poll(0)
    assert not runtime.poll(0)
    results = runtime.poll(0)
    assert [type(result) for result in results] == [CopyResult, StepResult], "the copy's result comes first"


def test_copy_waits_for_the_step_before_it() -> None:
    masked = plan_of(
        1,
        [(1, 0, 2, Source.HOST, Emit.LAST)],
        [7, 8],
        [(1, 0, 1)],
        opens=(RowOpen(1, GREEDY),),
        masked_rows=(1,),
    )
    runtime = tiered()
    runtime.workers[0].submit(masked)
    runtime.copy(batch(0, Tier.DEVICE, [1], Tier.HOST, [0], after_step=1))
    assert not runtime.poll(0)
    runtime.supply(1, {1: np.full(8, -1, np.int32)})
    assert {type(result) for _ in range(2) for result in runtime.poll(0)} == {CopyResult, StepResult}


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (batch(0, Tier.DEVICE, [3], Tier.HOST, [0]), batch(1, Tier.DEVICE, [5], Tier.HOST, [0]), "same slots"),
        (batch(0, Tier.DEVICE, [3], Tier.HOST, [0]), batch(1, Tier.HOST, [0], Tier.DEVICE, [1]), "same slots"),
        (batch(0, Tier.DEVICE, [3], Tier.HOST, [0]), batch(1, Tier.HOST, [1], Tier.DEVICE, [3]), "same slots"),
        (batch(0, Tier.DEVICE, [3], Tier.HOST, [0]), batch(0, Tier.DEVICE, [5], Tier.HOST, [1]), "same slots"),
        (batch(0, Tier.DEVICE, [3], Tier.HOST, [0]), batch(1, Tier.DEVICE, [5], Tier.REMOTE, [1]), "not there"),
        (batch(0, Tier.DEVICE, [3], Tier.HOST, [0]), batch(1, Tier.DEVICE, [5], Tier.DISK, [2]), "does not have"),
        (batch(0, Tier.DEVICE, [3], Tier.HOST, [0]), batch(1, Tier.DEVICE, [5, 1], Tier.DISK, [1, 1]), "of its own"),
        (batch(0, Tier.HOST, [0], Tier.DEVICE, [6]), going_on(1, (6, 7)), "fills"),
        (batch(0, Tier.HOST, [0], Tier.DEVICE, [6], before_step=2), going_on(1, (6, 7)), "fills"),
        (batch(0, Tier.DEVICE, [3], Tier.HOST, [0]), prompt(1, [1, 2], row=2, slots=(3,)), "copies"),
        (going_on(1, (3, 7)), batch(0, Tier.HOST, [0], Tier.DEVICE, [7]), "step 1 uses"),
        (going_on(1, (3, 7)), batch(0, Tier.DEVICE, [7], Tier.HOST, [0]), "step 1 writes"),
    ],
)
def test_what_no_device_could_do_is_refused(first: Any, second: Any, words: str) -> None:
    runtime = tiered(copy_delay=9, delay=lambda step: 9 * (step > 0))

    def hand_over(order: Any) -> None:
        (runtime.submit if isinstance(order, StepPlan) else runtime.copy)(order)

    hand_over(first)
    with pytest.raises(IntegrityError, match=words):
        hand_over(second)
