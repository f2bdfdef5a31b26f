"""From a StepPlan to the index arrays of one step, in NumPy: what each token is, where its KV goes, who is sampled.

Token i of the step belongs to span s with cu[s] <= i < cu[s + 1]; its position is start[s] + i - cu[s].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.core.messages import Emit, IntArray, Source, StepPlan

LongArray = NDArray[np.int64]

_NONE = np.empty(0, np.int64)

# Plain integers: comparing an array with a member of an enum costs microseconds more.
_DEVICE, _LAST, _ALL = int(Source.DEVICE), int(Emit.LAST), int(Emit.ALL)
_HIDDEN, _SUM = int(Emit.HIDDEN), int(Emit.SUM)


@dataclass(slots=True)
class StepInputs:
    """Arrays of one step with T tokens and S spans.

    `feed` are the tokens [n] that come from the device, from rows `feed_rows`; in `tokens` they are 0.
    `sampled` are the tokens [n] whose logits are sampled, of rows `sampled_rows`, in span order.
    `scored` are the tokens [m] whose target's log-probability is asked for, of rows `scored_rows`, and
    `targets` those targets. `hidden` are the tokens whose final hidden state is asked for, of `hidden_rows`, and
    `pooled` those whose states are summed, of `pooled_rows`.
    """

    num_tokens: int
    row: IntArray
    start: IntArray
    stop: IntArray
    tokens: LongArray
    positions: LongArray
    slot_mapping: LongArray
    feed: LongArray
    feed_rows: LongArray
    sampled: LongArray
    sampled_rows: LongArray
    all_sampled: bool
    scored: LongArray
    scored_rows: LongArray
    targets: LongArray
    hidden: LongArray
    hidden_rows: LongArray
    pooled: LongArray
    pooled_rows: LongArray


def step_inputs(plan: StepPlan, table: IntArray, chunk_size: int) -> StepInputs:
    """Work out a plan's arrays. table [rows, columns] is the slot table after the plan's updates.

    Raises IntegrityError if the plan contradicts itself or names a chunk that has no slot.
    """
    spans = plan.spans
    if len(spans) and (spans.emit == _LAST).all() and (spans.stop - spans.start == 1).all():
        return _decode_inputs(plan, table, chunk_size)
    return _mixed_inputs(plan, table, chunk_size)


def _decode_inputs(plan: StepPlan, table: IntArray, chunk_size: int) -> StepInputs:
    """The common case: one token per span, all sampled."""
    spans = plan.spans
    count = len(spans)
    positions = spans.start.astype(np.int64)
    rows = spans.row.astype(np.int64)
    order = np.arange(count)
    if spans.source.all():
        tokens, feed, feed_rows, hosted = np.zeros(count, np.int64), order, rows, 0
    else:
        from_device = spans.source == _DEVICE
        tokens = np.zeros(count, np.int64)
        feed = np.flatnonzero(from_device)
        feed_rows = rows[feed]
        hosted = count - len(feed)
        if hosted == len(plan.tokens):
            tokens[~from_device] = plan.tokens
    if hosted != len(plan.tokens):
        raise IntegrityError(f"step {plan.step} brings {len(plan.tokens)} tokens for {hosted} positions.")
    return StepInputs(
        num_tokens=count,
        row=spans.row,
        start=spans.start,
        stop=spans.stop,
        tokens=tokens,
        positions=positions,
        slot_mapping=_slots(plan, table, rows, positions, chunk_size),
        feed=feed,
        feed_rows=feed_rows,
        sampled=order,
        sampled_rows=rows,
        all_sampled=True,
        scored=_NONE,
        scored_rows=_NONE,
        targets=_NONE,
        hidden=_NONE,
        hidden_rows=_NONE,
        pooled=_NONE,
        pooled_rows=_NONE,
    )


def _mixed_inputs(plan: StepPlan, table: IntArray, chunk_size: int) -> StepInputs:
    spans = plan.spans
    lengths = (spans.stop - spans.start).astype(np.int64)
    if (lengths < 1).any():
        raise IntegrityError(f"step {plan.step} has an empty span.")
    ends = lengths.cumsum()
    begins = ends - lengths
    total = int(ends[-1]) if len(ends) else 0
    rows = spans.row.astype(np.int64)
    token_rows = rows.repeat(lengths)
    positions = np.arange(total) + (spans.start - begins).repeat(lengths)

    from_device = spans.source == _DEVICE
    if (lengths[from_device] != 1).any():
        raise IntegrityError(f"step {plan.step} takes more than a row's last token from the device.")
    feed = begins[from_device]
    hosted = total - len(feed)
    if hosted != len(plan.tokens):
        raise IntegrityError(f"step {plan.step} brings {len(plan.tokens)} tokens for {hosted} positions.")
    if len(feed):
        tokens = np.zeros(total, np.int64)
        tokens[(~from_device).repeat(lengths)] = plan.tokens
    else:
        tokens = plan.tokens.astype(np.int64)

    emits = set(spans.emit.tolist())
    samples = spans.emit == _LAST
    scored = targets = scored_rows = _NONE
    if _ALL in emits:
        is_all = spans.emit == _ALL
        scored = np.flatnonzero(is_all.repeat(lengths))
        given = plan.targets
        if given is None or len(given) != len(scored):
            raise IntegrityError(f"step {plan.step} has {len(scored)} positions to score, but not as many targets.")
        targets = given.astype(np.int64)
        last = lengths[is_all].cumsum() - 1
        samples = samples.copy()
        samples[np.flatnonzero(is_all)[targets[last] < 0]] = True
        with_target = targets >= 0
        scored, targets = scored[with_target], targets[with_target]
        scored_rows = token_rows[scored]
    hidden = np.flatnonzero((spans.emit == _HIDDEN).repeat(lengths)) if _HIDDEN in emits else _NONE
    pooled = np.flatnonzero((spans.emit == _SUM).repeat(lengths)) if _SUM in emits else _NONE
    sampled = ends[samples] - 1
    return StepInputs(
        num_tokens=total,
        row=spans.row,
        start=spans.start,
        stop=spans.stop,
        tokens=tokens,
        positions=positions,
        slot_mapping=_slots(plan, table, token_rows, positions, chunk_size),
        feed=feed,
        feed_rows=rows[from_device],
        sampled=sampled,
        sampled_rows=rows[samples],
        all_sampled=len(sampled) == total,
        scored=scored,
        scored_rows=scored_rows,
        targets=targets,
        hidden=hidden,
        hidden_rows=token_rows[hidden] if len(hidden) else _NONE,
        pooled=pooled,
        pooled_rows=token_rows[pooled] if len(pooled) else _NONE,
    )


def _slots(plan: StepPlan, table: IntArray, rows: LongArray, positions: LongArray, chunk_size: int) -> LongArray:
    """Where each token's K and V go: slot * chunk_size + offset."""
    columns = positions // chunk_size
    try:
        slots = table[rows, columns]
    except IndexError as error:
        raise IntegrityError(f"step {plan.step} names a row or a position that does not exist ({error}).") from error
    if len(slots) and int(slots.min()) < 0:
        token = int(slots.argmin())
        raise IntegrityError(
            f"step {plan.step} computes position {positions[token]} of row {rows[token]}, but its chunk has no slot."
        )
    return slots * np.int64(chunk_size) + (positions - columns * chunk_size)
