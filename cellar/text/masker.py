"""Masker: which mask each masked row of each step needs, and when it can be known.

Steps run ahead of their results, but the mask of a row's next token depends on its last. So a step's masks are
computed once no earlier step with masked rows is on its way, which is while its own forward pass runs:

    submit t | submit t+1 | commit t -> masks of t+1 -> supply | deliver t
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cellar.core.messages import Emit, Flag, StepPlan, StepResult
from cellar.core.sampling import SamplingParams, StructuredOutputsParams
from cellar.text.grammar import GrammarCompiler, Mask, Matcher

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of all masked rows of one step."""

    step: int
    masks: Mapping[int, Mask]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step on its way: `sampled` are the rows of its results, in order."""

    step: int
    masked: tuple[int, ...]
    sampled: tuple[int, ...]


class Masker:
    """Holds one matcher per masked row. One thread, except `ready` and `prepare`."""

    def __init__(self, compiler: GrammarCompiler, max_grammars: int = 256) -> None:
        self._compiler = compiler
        self._max_grammars = max_grammars
        self._lock = threading.Lock()
        self._grammars: OrderedDict[tuple[object, ...], Matcher] = OrderedDict()
        self._matchers: dict[int, Matcher | None] = {}  # None: it has failed
        self._pending: deque[_Pending] = deque()

    def ready(self, constraint: StructuredOutputsParams) -> bool:
        """True if the grammar has been compiled."""
        with self._lock:
            return constraint.key in self._grammars

    def prepare(self, constraint: StructuredOutputsParams) -> None:
        """Compile a grammar, however long that takes. Raises RequestError."""
        self._start(constraint)

    def submitted(self, plan: StepPlan) -> StepMasks | None:
        """A plan was handed over; -> its masks, if they can be known now."""
        for opened in plan.opens:
            if not opened.params.masked:
                self._matchers.pop(opened.row, None)
                continue
            output = () if opened.output is None else opened.output.tolist()
            self._matchers[opened.row] = self._opened(opened.params, output)
        if not plan.masked_rows:
            return None
        self._pending.append(_Pending(plan.step, plan.masked_rows, sampled_rows(plan)))
        return self._masks() if len(self._pending) == 1 else None

    def committed(self, result: StepResult) -> StepMasks | None:
        """A result came; -> the masks of the next step that waits for some."""
        if not self._pending or self._pending[0].step != result.step:
            return None
        step = self._pending.popleft()
        if result.error is None:
            masked = set(step.masked)
            for k, row in enumerate(step.sampled):
                if row in masked and result.num_tokens[k] and result.flags[k] in (Flag.OK, Flag.FELL_BACK):
                    self._consume(row, int(result.tokens[k, 0]))
        return self._masks() if self._pending else None

    def _masks(self) -> StepMasks:
        step = self._pending[0]
        return StepMasks(step.step, {row: self._mask(row) for row in step.masked})

    def _opened(self, params: SamplingParams, output: Sequence[int]) -> Matcher | None:
        """A matcher that has seen some output; None if it fails."""
        try:
            constraint = params.structured_outputs
            matcher = None if constraint is None else self._start(constraint).copy()
            matcher = self._compiler.with_reasoning(matcher, params.thinking)
            for token in output:
                matcher.consume(token)
        except Exception:
            logger.exception("a grammar cannot be followed; its request ends")
            return None
        return matcher

    def _consume(self, row: int, token: int) -> None:
        matcher = self._matchers[row]
        try:
            if matcher is not None:
                matcher.consume(token)
        except Exception:
            logger.exception("a grammar cannot be followed; its request ends")
            self._matchers[row] = None

    def _mask(self, row: int) -> Mask:
        """A mask that forbids everything ends its request with an error, and that alone."""
        matcher = self._matchers[row]
        try:
            if matcher is not None:
                return matcher.mask()
        except Exception:
            logger.exception("a grammar cannot be followed; its request ends")
            self._matchers[row] = None
        return self._compiler.nothing()

    def _start(self, constraint: StructuredOutputsParams) -> Matcher:
        """The grammar's matcher at its start, compiled once; to be copied."""
        key = constraint.key
        with self._lock:
            found = self._grammars.get(key)
            if found is not None:
                self._grammars.move_to_end(key)
                return found
        found = self._compiler.compile(constraint)
        with self._lock:
            self._grammars[key] = found
            if len(self._grammars) > self._max_grammars:
                self._grammars.popitem(last=False)
        return found


def sampled_rows(plan: StepPlan) -> tuple[int, ...]:
    """The rows of a plan's results, in order: spans that emit LAST, and ALL spans whose last target is sampled."""
    spans, sampled, used = plan.spans, [], 0
    if not np.any(spans.emit == Emit.ALL):
        return tuple(spans.row[spans.emit == Emit.LAST].tolist())
    lengths = (spans.stop - spans.start).tolist()
    for row, emit, length in zip(spans.row.tolist(), spans.emit.tolist(), lengths, strict=True):
        if emit == Emit.ALL and plan.targets is not None:
            used += length
            if plan.targets[used - 1] == -1:
                sampled.append(row)
        elif emit == Emit.LAST:
            sampled.append(row)
    return tuple(sampled)
