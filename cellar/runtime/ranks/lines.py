"""Lines: orders and answers as bytes, for the pipes between a group and the processes of its ranks.

In every step a plan goes one way and an answer the other. The ten arrays of a plan take two to three times as long to
be pickled one by one as in one piece.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cellar.core.messages import CopyResult, IntArray, RowOpen, Spans, StepPlan, StepResult, TableUpdate


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank's runtime answered."""

    rank: int
    result: StepResult | CopyResult


class _Plan(NamedTuple):
    """A `StepPlan`: `words` are its arrays, int32, one after another, of so many each."""

    step: int
    lengths: list[int]
    words: bytearray
    opens: tuple[RowOpen, ...]
    closes: tuple[int, ...]
    masked_rows: tuple[int, ...]


class _Tokens(NamedTuple):
    """The `Answer` of a step that has brought tokens alone: `words` are `tokens` [rows, width] and the other two."""

    rank: int
    step: int
    rows: int
    width: int
    words: bytearray
    seconds: float


def written(message: Any) -> bytes:
    """One message, for `read`."""
    short: _Plan | _Tokens | None = None
    if isinstance(message, StepPlan):
        short = _of_plan(message)
    elif isinstance(message, Answer) and isinstance(message.result, StepResult):
        short = _of_result(message.rank, message.result)
    return pickle.dumps(message if short is None else short, pickle.HIGHEST_PROTOCOL)


def read(data: bytes) -> Any:
    """The message that was written."""
    message = pickle.loads(data)
    if isinstance(message, _Plan):
        return _plan(message)
    return _answer(message) if isinstance(message, _Tokens) else message


def _joined(arrays: Sequence[NDArray[Any]]) -> bytearray | None:
    """Their elements, one array after another; None if they are not all int32."""
    if any(array.dtype != np.int32 for array in arrays):
        return None
    return bytearray(np.concatenate(arrays))


def _of_plan(plan: StepPlan) -> _Plan | None:
    spans, table = plan.spans, plan.table
    arrays = [spans.row, spans.start, spans.stop, spans.source, spans.emit]
    arrays += [table.row, table.column, table.slot, plan.tokens]
    if plan.targets is not None:
        arrays.append(plan.targets)
    words = _joined(arrays)
    if words is None:
        return None
    return _Plan(plan.step, [len(array) for array in arrays], words, plan.opens, plan.closes, plan.masked_rows)


def _plan(message: _Plan) -> StepPlan:
    words, arrays, begin = np.frombuffer(message.words, np.int32), list[IntArray](), 0
    for length in message.lengths:
        arrays.append(words[begin : begin + length])
        begin += length
    spans, table, tokens, targets = arrays[:5], arrays[5:8], arrays[8], arrays[9:]
    return StepPlan(
        step=message.step,
        spans=Spans(*spans),
        tokens=tokens,
        table=TableUpdate(*table),
        opens=message.opens,
        closes=message.closes,
        targets=targets[0] if targets else None,
        masked_rows=message.masked_rows,
    )


def _of_result(rank: int, result: StepResult) -> _Tokens | None:
    """None if there is more than tokens."""
    if result.logprobs or result.prompt_logprobs or result.hidden or result.failed or result.error is not None:
        return None
    rows, width = result.tokens.shape
    words = _joined((result.tokens.reshape(-1), result.num_tokens, result.flags))
    return None if words is None else _Tokens(rank, result.step, rows, width, words, result.seconds)


def _answer(message: _Tokens) -> Answer:
    words, rows, size = np.frombuffer(message.words, np.int32), message.rows, message.rows * message.width
    tokens = words[:size].reshape(rows, message.width)
    num_tokens, flags = words[size : size + rows], words[size + rows :]
    return Answer(message.rank, StepResult(message.step, tokens, num_tokens, flags, seconds=message.seconds))
