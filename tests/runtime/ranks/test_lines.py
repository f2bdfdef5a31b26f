"""What goes over the pipes of ranks arrives as it was given, whatever it holds."""

from __future__ import annotations

import pickle
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cellar.core.messages import CopyResult, Logprobs, RowOpen, Spans, StepPlan, StepResult, TableUpdate
from cellar.core.sampling import SamplingParams
from cellar.runtime.ranks.lines import Answer, read, written
from cellar.runtime.ranks.rank import Died, Masks

INTS = st.integers(-(2**31), 2**31 - 1)
OPENS = (
    RowOpen(3, SamplingParams(temperature=0.5, logit_bias={4: 1.0}), 2, (7, 9), seed=5, name="a"),
    RowOpen(1, SamplingParams(repetition_penalty=2.0), prompt=np.arange(4, dtype=np.int32)),
)


def alike(one: Any, other: Any) -> bool:
    """Equal in type and content, field by field."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if is_dataclass(one):
        return all(alike(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def ints(count: int) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.int32, count, elements=INTS)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    spans, tokens, slots = (draw(st.integers(0, 5)) for _ in range(3))
    return StepPlan(
        step=draw(st.integers(0, 2**40)),
        spans=Spans(*(draw(ints(spans)) for _ in range(5))),
        tokens=draw(ints(tokens)),
        table=TableUpdate(*(draw(ints(slots)) for _ in range(3))),
        opens=draw(st.sampled_from([(), OPENS])),
        closes=draw(st.sampled_from([(), (1, 4)])),
        targets=draw(st.one_of(st.none(), ints(draw(st.integers(0, 4))))),
        masked_rows=draw(st.sampled_from([(), (2,)])),
    )


@given(plans())
def test_a_plan_arrives_as_it_was(plan: StepPlan) -> None:
    got = read(written(plan))
    assert alike(plan, got)
    for array in (got.spans.row, got.tokens, got.table.slot):
        assert array.flags.writeable  # as made here: compiled functions know both kinds apart


@given(st.integers(0, 4).flatmap(lambda n: st.tuples(*(ints(k) for k in (3 * n, n, n)))), st.floats(0, 10))
def test_an_answer_arrives_as_it_was(found: tuple[np.ndarray, ...], seconds: float) -> None:
    tokens, num_tokens, flags = found
    answer = Answer(3, StepResult(7, tokens.reshape(-1, 3), num_tokens, flags, seconds=seconds))
    assert alike(answer, read(written(answer)))


NONE = np.empty(0, np.int32)
ONE = np.ones(1, np.int32)
FLOATS = np.array([0.5], np.float32)
LOGPROBS = Logprobs(ONE, FLOATS, ONE, ONE.reshape(1, 1), FLOATS.reshape(1, 1))


@pytest.mark.parametrize(
    "message",
    [
        Answer(0, StepResult(1, ONE.reshape(1, 1), ONE, ONE, logprobs=LOGPROBS)),
        Answer(0, StepResult(1, ONE.reshape(1, 1), ONE, ONE, prompt_logprobs={2: LOGPROBS})),
        Answer(0, StepResult(1, NONE.reshape(0, 1), NONE, NONE, hidden={0: FLOATS.reshape(1, 1)}, seconds=2.0)),
        Answer(0, StepResult(1, NONE.reshape(0, 1), NONE, NONE, error="")),
        Answer(0, StepResult(1, ONE.reshape(1, 1), ONE, ONE, failed={1: "why"})),
        Answer(1, CopyResult(4, np.array([True, False]), 5, 0.5, "why")),
        Answer(1, StepResult(1, np.array([[2**40]]), ONE, ONE)),
        StepPlan(0, Spans(*[ONE] * 5), np.array([2**40]), TableUpdate(*[NONE] * 3)),
        Masks(3, {0: None, 1: ONE}),
        Died(2, "it has ended", follows=True),
        None,
    ],
    ids=lambda message: type(getattr(message, "result", message)).__name__,
)
def test_all_else_arrives_too(message: Any) -> None:
    assert alike(message, read(written(message)))


def test_a_plan_is_shorter_than_its_parts() -> None:
    plan = StepPlan(0, Spans(*(ONE.copy() for _ in range(5))), ONE, TableUpdate(*(ONE.copy() for _ in range(3))))
    assert len(written(plan)) < len(pickle.dumps(plan)) / 3
