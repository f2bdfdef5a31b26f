"""Index arrays of a step against a loop over its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellar.core.errors import IntegrityError
from cellar.core.messages import Emit, Source, Spans, StepPlan, TableUpdate
from cellar.runtime.steps.inputs import step_inputs

ROWS, COLUMNS, CHUNK = 6, 5, 16
NONE = np.empty(0, np.int32)


def plan_of(spans: list[tuple[int, int, int, int, int]], tokens: list[int], targets: list[int]) -> StepPlan:
    arrays = np.array(spans, np.int32).reshape(-1, 5).T.copy()
    return StepPlan(
        step=3,
        spans=Spans(*arrays),
        tokens=np.array(tokens, np.int32),
        table=TableUpdate(NONE, NONE, NONE),
        targets=np.array(targets, np.int32) if targets else None,
    )


@st.composite
def steps(draw: Any) -> tuple[list[tuple[int, int, int, int, int]], list[int], list[int]]:
    """Some rows, each with a decode or with up to three ascending spans of prompt; sometimes decodes alone."""
    only_decodes = draw(st.booleans())
    spans, tokens, targets = [], [], []
    for row in draw(st.lists(st.integers(0, ROWS - 1), unique=True, max_size=ROWS)):
        if only_decodes or draw(st.booleans()):
            position = draw(st.integers(0, COLUMNS * CHUNK - 1))
            source = draw(st.sampled_from(Source))
            spans.append((row, position, position + 1, source, Emit.LAST))
            tokens += [draw(st.integers(1, 99))] if source == Source.HOST else []
            continue
        borders = draw(st.lists(st.integers(0, COLUMNS * CHUNK), unique=True, min_size=2, max_size=6).map(sorted))
        for start, stop in zip(borders[::2], borders[1::2], strict=False):
            emit = draw(st.sampled_from(Emit))
            spans.append((row, start, stop, Source.HOST, emit))
            tokens += range(start + 1, stop + 1)
            if emit == Emit.ALL:
                last = draw(st.sampled_from([-1, 7]))
                targets += [*draw(st.lists(st.just(5), min_size=stop - start - 1, max_size=stop - start - 1)), last]
    return spans, tokens, targets


@given(steps())
@settings(max_examples=300, deadline=None)
def test_against_a_loop(step: tuple[list[tuple[int, int, int, int, int]], list[int], list[int]]) -> None:
    spans, tokens, targets = step
    table = np.random.default_rng(0).permutation(ROWS * COLUMNS).reshape(ROWS, COLUMNS).astype(np.int32)
    got = step_inputs(plan_of(spans, tokens, targets), table, CHUNK)

    ids, positions, slots, feed, sampled, scored, hidden, pooled = [], [], [], [], [], [], [], []
    given_tokens, given_targets = list(tokens), list(targets)
    for row, start, stop, source, emit in spans:
        sampled_last = emit == Emit.LAST
        for position in range(start, stop):
            if source == Source.DEVICE:
                feed.append((len(ids), row))
                ids.append(0)
            else:
                ids.append(given_tokens.pop(0))
            positions.append(position)
            slots.append(int(table[row, position // CHUNK]) * CHUNK + position % CHUNK)
            if emit == Emit.ALL:
                target = given_targets.pop(0)
                if target >= 0:
                    scored.append((len(ids) - 1, row, target))
                elif position == stop - 1:
                    sampled_last = True
            if emit == Emit.HIDDEN:
                hidden.append((len(ids) - 1, row))
            if emit == Emit.SUM:
                pooled.append((len(ids) - 1, row))
        if sampled_last:
            sampled.append((len(ids) - 1, row))
    assert got.num_tokens == len(ids)
    assert got.tokens.tolist() == ids
    assert got.positions.tolist() == positions
    assert got.slot_mapping.tolist() == slots
    assert list(zip(got.feed.tolist(), got.feed_rows.tolist(), strict=True)) == feed
    assert list(zip(got.sampled.tolist(), got.sampled_rows.tolist(), strict=True)) == sampled
    found = zip(got.scored.tolist(), got.scored_rows.tolist(), got.targets.tolist(), strict=True)
    assert list(found) == scored
    assert list(zip(got.hidden.tolist(), got.hidden_rows.tolist(), strict=True)) == hidden
    assert list(zip(got.pooled.tolist(), got.pooled_rows.tolist(), strict=True)) == pooled
    assert got.all_sampled == (len(sampled) == len(ids))
    for name in ("tokens", "positions", "slot_mapping", "feed", "feed_rows", "sampled", "scored", "targets", "hidden"):
        assert getattr(got, name).dtype == np.int64


@pytest.mark.parametrize(
    ("spans", "tokens", "words"),
    [
        ([(0, 0, 2, Source.HOST, Emit.LAST)], [1], "brings 1 tokens for 2 positions"),
        ([(0, 0, 1, Source.HOST, Emit.LAST)], [1, 2], "brings 2 tokens for 1 positions"),
        ([(0, 0, 1, Source.DEVICE, Emit.LAST)], [1], "brings 1 tokens for 0 positions"),
        ([(0, 4, 6, Source.DEVICE, Emit.LAST)], [], "more than a row's last token"),
        ([(0, 4, 4, Source.HOST, Emit.NONE)], [], "empty span"),
        (
            [(0, 2 * CHUNK, 2 * CHUNK + 1, Source.HOST, Emit.LAST)],
            [1],
            "position 32 of row 0, but its chunk has no slot",
        ),
        ([(9, 0, 1, Source.DEVICE, Emit.LAST)], [], "does not exist"),
    ],
)
def test_contradictions_are_named(spans: list[tuple[int, int, int, int, int]], tokens: list[int], words: str) -> None:
    table = np.zeros((2, 3), np.int32)
    table[:, 2] = -1
    with pytest.raises(IntegrityError, match=words):
        step_inputs(plan_of(spans, tokens, []), table, CHUNK)
