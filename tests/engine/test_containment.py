"""What one request causes in the loop ends that request: all others' tokens are those of a run without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cellar.core.errors import IntegrityError
from cellar.core.messages import FinishReason, Logprobs, Request
from cellar.core.sampling import SamplingParams
from cellar.engine.steps import StepEngine
from cellar.kv.names import Names
from cellar.kv.store import KVStore
from cellar.runtime.steps.fake import FakeRuntime
from cellar.schedule.steps import delivery
from cellar.schedule.steps.batch import StepBatch
from cellar.schedule.steps.holders import Holders
from cellar.schedule.steps.request import RequestState
from cellar.schedule.steps.rows import Rows
from tests.engine.test_engine import Collected, expected, make, request, run

VICTIM = "victim"
PROMPT = [(7 * k) % 97 for k in range(150)]
"""Of the victim: three steps long, and begun as others are."""

Plant = Callable[[pytest.MonkeyPatch, StepEngine, FakeRuntime], None]


class Planted(Exception):
    """A failure that was put there."""


def failing(patch: pytest.MonkeyPatch, owner: Any, name: str, is_it: Callable[..., bool], when: int = 0) -> None:
    """The call number `when` of those that `is_it` raises after it has done its work."""
    original, seen = getattr(owner, name), [0]

    def planted(*arguments: Any, **named: Any) -> Any:
        done = original(*arguments, **named)
        if is_it(*arguments):
            seen[0] += 1
            if seen[0] == when + 1:
                raise Planted(f"planted in {name}")
        return done

    patch.setattr(owner, name, planted)


def in_find(patch: pytest.MonkeyPatch, engine: StepEngine, runtime: FakeRuntime) -> None:
    failing(patch, KVStore, "find", lambda store, chain, known: known.tolist() == PROMPT)


def in_fill(patch: pytest.MonkeyPatch, engine: StepEngine, runtime: FakeRuntime) -> None:
    failing(patch, Rows, "_fill", lambda rows, row, state, slots, named: state.request.id == VICTIM)


def in_open(patch: pytest.MonkeyPatch, engine: StepEngine, runtime: FakeRuntime) -> None:
    failing(patch, StepBatch, "open", lambda batch, state: state.request.id == VICTIM)


def in_first_chunk(patch: pytest.MonkeyPatch, engine: StepEngine, runtime: FakeRuntime) -> None:
    failing(patch, StepBatch, "prompt", lambda batch, state: state.request.id == VICTIM)


def in_later_chunk(patch: pytest.MonkeyPatch, engine: StepEngine, runtime: FakeRuntime) -> None:
    failing(patch, StepBatch, "prompt", lambda batch, state: state.request.id == VICTIM, when=1)


def in_name(patch: pytest.MonkeyPatch, engine: StepEngine, runtime: FakeRuntime) -> None:
    failing(patch, Holders, "name", lambda holders, row: holders.rows.state(row).request.id == VICTIM)


def in_half_of_a_name(patch: pytest.MonkeyPatch, engine: StepEngine, runtime: FakeRuntime) -> None:
    """Some of its chunks have their identity by then."""

    def is_it(names: Names, slots: Any, *_: Any) -> bool:
        states = filter(None, engine.scheduler._rows.states)  # type: ignore[attr-defined]
        mine = [state for state in states if state.request.id == VICTIM]
        return bool(mine) and slots[0] in engine.scheduler._rows.slots(mine[0].row)  # type: ignore[attr-defined]

    failing(patch, Names, "_new", is_it, when=1)


def in_prompt_logprobs(patch: pytest.MonkeyPatch, engine: StepEngine, runtime: FakeRuntime) -> None:
    failing(patch, delivery, "_part", lambda logprobs, entries: logprobs.index[0] > 0)


def in_logprobs(patch: pytest.MonkeyPatch, engine: StepEngine, runtime: FakeRuntime) -> None:
    """Of the third token."""

    def is_it(logprobs: Logprobs, entries: Any) -> bool:
        return len(logprobs.top_ids) == len(entries) == 1

    failing(patch, delivery, "_part", is_it, when=3)


def on_the_device(patch: pytest.MonkeyPatch, engine: StepEngine, runtime: FakeRuntime) -> None:
    behavior = replace(runtime._model._behavior, fail_open=lambda opened: "planted" if opened.name == VICTIM else None)
    patch.setattr(runtime._model, "_behavior", behavior)


PLANTS: tuple[Plant, ...] = (
    *(in_find, in_fill, in_open, in_first_chunk, in_later_chunk, in_name, in_half_of_a_name),
    *(in_prompt_logprobs, in_logprobs, on_the_device),
)


def victim(scored: bool = False, **changes: Any) -> Request:
    params = SamplingParams(max_tokens=20, seed=0, temperature=0, logprobs=0, prompt_logprobs=0 if scored else None)
    return replace(request(VICTIM, PROMPT, 20), params=params, **changes)


def company() -> dict[str, list[int]]:
    """Others' prompts: some begin as the victim's does, some are as long."""
    rng = np.random.default_rng(1)
    prompts = {f"o{k}": rng.integers(0, 97, rng.integers(1, 100)).tolist() for k in range(9)}
    return prompts | {f"s{k}": [*PROMPT[: 30 * k], k] for k in range(1, 5)}


def balanced(engine: StepEngine) -> None:
    """Nothing is left: no row, no slot, no work."""
    engine.scheduler.check_integrity()
    stats = engine.stats()
    assert stats.free_chunks + stats.cached_chunks == stats.total_chunks
    assert stats.running == stats.waiting == 0
    rows = engine.scheduler._rows  # type: ignore[attr-defined]
    assert rows.num_free == rows.num_rows
    assert not engine.scheduler.has_work()


@pytest.mark.parametrize("run_ahead", [1, 3])
@pytest.mark.parametrize("num_slots", [16, 64])
@pytest.mark.parametrize("plant", PLANTS)
def test_what_fails_for_one_request_ends_that_one(
    plant: Plant, num_slots: int, run_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runtime = make(num_slots=num_slots, num_rows=4, run_ahead=run_ahead, delay=lambda step: step % 2)
    collected, prompts = Collected(), company()
    names = list(prompts)
    with monkeypatch.context() as patch:
        plant(patch, engine, runtime)
        for name in names[:3]:
            engine.add(request(name, prompts[name], 20))
        engine.add(victim(scored=plant is in_prompt_logprobs))
        for name in names[3:]:
            engine.add(request(name, prompts[name], 20))
        run(engine, collected)
    reason, said = collected.finished[VICTIM]
    assert reason is FinishReason.ERROR, "nothing was planted"
    assert "planted" in str(said)
    delivered = collected.tokens[VICTIM]
    assert delivered == expected(PROMPT, 20)[: len(delivered)]
    assert len(delivered) < 20
    for name, prompt in prompts.items():
        assert collected.tokens[name] == expected(prompt, 20), name
        assert collected.finished[name][0] is FinishReason.LENGTH
    balanced(engine)
    # And once more, unharmed: what it left behind misleads nobody.
    again = Collected()
    engine.add(victim())
    run(engine, again)
    assert again.tokens[VICTIM] == expected(PROMPT, 20)
    balanced(engine)


def test_a_stop_id_that_no_array_holds_ends_its_request() -> None:
    """Nobody planted this one: `PromptReader` refuses such ids, and here is what would happen if it did not."""
    engine, _ = make()
    engine.add(request("good", [1, 2], 5))
    engine.add(victim(stop_ids=frozenset({2**40})))
    collected = Collected()
    run(engine, collected)
    assert collected.finished[VICTIM][0] is FinishReason.ERROR
    assert collected.tokens == {"good": expected([1, 2], 5)}
    balanced(engine)


def test_one_that_fails_alone_is_told_at_once() -> None:
    """No result will come that could bring the news, and nothing waits for nothing."""
    engine, runtime = make()
    engine.add(victim(stop_ids=frozenset({2**40})))
    (output,) = engine.turn(None)
    assert output.finished[VICTIM][0] is FinishReason.ERROR
    assert runtime.num_steps == 0
    balanced(engine)


def test_where_the_books_do_not_balance_the_engine_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make()
    failing(monkeypatch, KVStore, "reserve", lambda store, found, count, *_: count == len(PROMPT))
    engine.add(victim())
    with pytest.raises(IntegrityError, match="out of balance") as raised:
        engine.turn(None)
    assert isinstance(raised.value.__cause__, Planted)


def test_a_broken_invariant_is_no_requests_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(batch: StepBatch, state: RequestState) -> None:
        raise IntegrityError("the books are wrong")

    engine, _ = make()
    monkeypatch.setattr(StepBatch, "open", broken)
    engine.add(victim())
    with pytest.raises(IntegrityError, match="the books are wrong"):
        engine.turn(None)
