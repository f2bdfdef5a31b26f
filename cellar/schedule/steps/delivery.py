"""From a step's result to what users get: tokens of the rows that still count, and who ends by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cellar.core.errors import IntegrityError
from cellar.core.messages import FinishReason, Flag, Logprobs, StepOutput, StepResult
from cellar.schedule.steps.batch import InFlight
from cellar.schedule.steps.rows import Index, Rows

NOT_FINITE = "the logits of this request are not finite: its parameters forbid every token, or the model overflows."
NO_VECTOR = "the hidden states of this prompt are not finite: the model overflows."
NO_TOKEN = "the device brought no token for this request; please report this defect."


@dataclass(frozen=True, slots=True)
class Ending:
    """The request of `row` ends; `detail` is the stop id that did it, or says what went wrong."""

    row: int
    reason: FinishReason
    detail: int | str | None = None


Said = Callable[[str, Exception], str]


def late_rows(rows: Rows, record: InFlight, result: StepResult) -> list[int]:
    """Those that results still count for, and whose mask did not come in time."""
    if not np.count_nonzero(result.flags):
        return []
    late = record.sampled[(result.flags == Flag.LATE) & rows.accepts[record.sampled]]
    found: list[int] = late[~np.isin(late, list(result.failed))].tolist()
    return found


def deliver(rows: Rows, record: InFlight, result: StepResult, output: StepOutput, said: Said) -> list[Ending]:
    """Fill `output`, append the tokens to their rows, and say which requests end.

    Results of rows whose request has ended meanwhile are void. A row that failed on the device, without finite logits,
    or without a token, ends with an error; one whose mask was late gets no token. Nothing of a request is delivered
    after its end. Of a request whose part of the result cannot be read `said` makes a sentence from its id and the
    exception.
    """
    rows_, tokens, flags = record.sampled, result.tokens, result.flags
    if len(tokens) != len(rows_):
        raise IntegrityError(f"step {record.step} has {len(tokens)} results, but sampled {len(rows_)} rows")
    endings = [Ending(row, FinishReason.ERROR, why) for row, why in result.failed.items() if rows.accepts[row]]
    accepted = rows.accepts[rows_]
    if result.failed:
        accepted = accepted & ~np.isin(rows_, list(result.failed))
    if np.count_nonzero(flags) or np.count_nonzero(result.num_tokens) < len(rows_):
        accepted = accepted & (flags != Flag.LATE)
        bad = (flags == Flag.NAN) | (flags == Flag.VOID) | (result.num_tokens == 0)
        bad &= accepted
        for row, flag in zip(rows_[bad].tolist(), flags[bad].tolist(), strict=True):
            endings.append(Ending(row, FinishReason.ERROR, NOT_FINITE if flag == Flag.NAN else NO_TOKEN))
        accepted = accepted & ~bad
    spoilt: list[Ending] = []
    if result.prompt_logprobs:
        spoilt = _deliver_prompt_logprobs(rows, result, output, {ending.row for ending in endings}, said)
        endings += spoilt
        if spoilt:
            accepted = accepted & ~np.isin(rows_, [ending.row for ending in spoilt])
    if result.hidden:
        endings += _deliver_pooled(rows, result, output, {ending.row for ending in endings}, said)
    if not len(rows_):
        return endings
    sampled = rows_
    column = tokens[:, 0]
    if np.count_nonzero(accepted) < len(rows_):
        rows_, column = rows_[accepted], column[accepted]
    lengths, stopped = rows.append(rows_, column)
    output.ids = rows.ids[rows_].tolist()
    output.tokens = column.tolist()
    for k, row in enumerate(sampled[record.num_decodes :].tolist(), record.num_decodes):
        state = rows.state(row)
        if accepted[k] and rows.length[row] == state.num_prompt + 1:
            output.num_cached_tokens[state.request.id] = state.num_cached
            output.queue_seconds[state.request.id] = state.queue_seconds
    if result.logprobs is not None:
        unread = _deliver_logprobs(rows, sampled, accepted, result.logprobs, output, said)
        endings += unread
        spoilt += unread
    ended = stopped | (lengths >= rows.limit[rows_])
    if spoilt:
        ended &= ~np.isin(rows_, [ending.row for ending in spoilt])
    if np.count_nonzero(ended):
        for k in np.flatnonzero(ended).tolist():
            row = int(rows_[k])
            if stopped[k]:
                endings.append(Ending(row, FinishReason.STOP, int(column[k])))
            else:
                endings.append(Ending(row, FinishReason.LENGTH))
    return endings


def _deliver_pooled(rows: Rows, result: StepResult, output: StepOutput, failed: set[int], said: Said) -> list[Ending]:
    """Add up the states of prompts that are pooled; one that is computed to its end is delivered, and ends."""
    endings: list[Ending] = []
    for row, states in result.hidden.items():
        if not rows.accepts[row] or row in failed:
            continue
        state = rows.state(row)
        try:
            more = states.sum(axis=0, dtype=np.float64)
            state.total = more if state.total is None else state.total + more
        except Exception as error:
            endings.append(Ending(row, FinishReason.ERROR, said(state.request.id, error)))
            continue
        if rows.computed[row] < state.num_prompt:
            continue
        id, vector = state.request.id, state.total / (state.num_prompt if state.needs_all else 1)
        state.total = None
        if not np.isfinite(vector).all():
            endings.append(Ending(row, FinishReason.ERROR, NO_VECTOR))
            continue
        output.pooled[id] = vector.astype(np.float32)
        output.num_cached_tokens[id] = state.num_cached
        output.queue_seconds[id] = state.queue_seconds
        endings.append(Ending(row, FinishReason.STOP))
    return endings


def _deliver_logprobs(
    rows: Rows, sampled: Index, accepted: np.ndarray, logprobs: Logprobs, output: StepOutput, said: Said
) -> list[Ending]:
    spoilt = []
    for m, k in enumerate(logprobs.index.tolist()):
        if accepted[k]:
            row = int(sampled[k])
            request = rows.state(row).request
            if request.params.logprobs is not None:
                try:
                    output.logprobs[request.id] = _part(logprobs, np.array([m]))
                except Exception as error:
                    spoilt.append(Ending(row, FinishReason.ERROR, said(request.id, error)))
    return spoilt


def _deliver_prompt_logprobs(
    rows: Rows, result: StepResult, output: StepOutput, failed: set[int], said: Said
) -> list[Ending]:
    """A prompt that is computed again after a suspension delivers only what it had not delivered yet."""
    spoilt = []
    for row, logprobs in result.prompt_logprobs.items():
        if rows.accepts[row] and row not in failed and len(logprobs.index):
            state = rows.state(row)
            try:
                fresh = np.flatnonzero(logprobs.index >= state.num_scored)
                if len(fresh):
                    state.num_scored = int(logprobs.index[fresh[-1]]) + 1
                    output.prompt_logprobs[state.request.id] = _part(logprobs, fresh)
            except Exception as error:
                spoilt.append(Ending(row, FinishReason.ERROR, said(state.request.id, error)))
    return spoilt


def _part(logprobs: Logprobs, entries: Index) -> Logprobs:
    return Logprobs(
        logprobs.index[entries],
        logprobs.logprob[entries],
        logprobs.rank[entries],
        logprobs.top_ids[entries],
        logprobs.top_logprobs[entries],
    )
