"""Masker: which mask each masked row of each step needs, and when it can be known.

Steps run ahead of their results, but the mask of a row's next token depends on its last. So a row's mask for a step is
computed once no earlier step that samples the row is on its way, which is while the step's own forward pass runs:

    submit t | submit t+1 | commit t -> the row's mask of t+1, beside the loop -> supply

Nothing is computed here: a `MaskRow` is what somebody may compute, in whatever thread.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cellar.core.memory import resident_bytes
from cellar.core.messages import Emit, Flag, StepPlan, StepResult
from cellar.core.sampling import SamplingParams, StructuredOutputsParams
from cellar.text.grammar import GrammarCompiler, Mask, Matcher

logger = logging.getLogger(__name__)

_CHOSEN = (Flag.OK, Flag.FELL_BACK)


@dataclass(slots=True, eq=False)
class MaskRow:
    """A masked row of one request, and where its output stands in its grammar.

    `grammar` tells which rows have the same one. `tokens` are those that the matcher has not seen. While `computing`,
    all but `parked` and `steps` belongs to who computes; `mask` is the next one, once it is known. `seconds` were spent
    on masks that were late, and would have been without others before them.
    """

    name: str
    grammar: tuple[object, ...]
    make: Callable[[], Matcher]
    nothing: Mask
    tokens: list[int] = field(default_factory=list)
    matcher: Matcher | None = None
    mask: Mask | None = None
    computing: bool = False
    parked: bool = False
    failed: bool = False
    seconds: float = 0.0
    steps: deque[int] = field(default_factory=deque)

    def compute(self) -> Mask:
        """The next mask. One that forbids everything ends the request with an error, and that alone."""
        try:
            if not self.failed:
                matcher = self.matcher = self.matcher or self.make()
                for token in self.tokens:
                    matcher.consume(token)
                self.tokens.clear()
                return matcher.mask()
        except Exception:
            logger.exception("a grammar cannot be followed; its request ends")
            self.failed, self.matcher = True, None
        return self.nothing


@dataclass(frozen=True, slots=True)
class Wanted:
    """A step's row whose mask can be computed now, if it is not there: `late` says that it cannot any more."""

    step: int
    row: int
    state: MaskRow
    late: bool = False


@dataclass(frozen=True, slots=True)
class _Kept:
    """A compiled grammar, and by how much the process grew while it was made."""

    matcher: Matcher
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step on its way: rows of its results in order, those that are masked with their state."""

    step: int
    sampled: tuple[int, ...]
    masked: dict[int, MaskRow]


class Masker:
    """Holds one matcher per masked row. One thread, except `ready` and `prepare`.

    Compiled grammars are kept for whoever asks for them again: the latest, and before it as many as `max_grammars` and
    `max_bytes` allow. `resident` says how large this process is; a grammar of 10 KB may take 140 MB.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        max_grammars: int = 256,
        max_bytes: int = 256 * 2**20,
        resident: Callable[[], int] = resident_bytes,
    ) -> None:
        self._compiler = compiler
        self._max_grammars = max_grammars
        self._max_bytes = max_bytes
        self._resident = resident
        self._lock = threading.Lock()
        self._grammars: OrderedDict[tuple[object, ...], _Kept] = OrderedDict()
        self._num_bytes = 0
        self._rows: dict[int, MaskRow] = {}
        self._parked: dict[str, MaskRow] = {}  # by request: late, and to be opened again
        self._pending: deque[_Pending] = deque()
        self._newly_parked: list[MaskRow] = []

    def ready(self, constraint: StructuredOutputsParams) -> bool:
        """True if the grammar has been compiled."""
        with self._lock:
            return constraint.key in self._grammars

    def prepare(self, constraint: StructuredOutputsParams) -> None:
        """Compile a grammar, however long that takes. Raises RequestError."""
        self._start(constraint)

    def submitted(self, plan: StepPlan) -> list[Wanted]:
        """A plan was handed over; -> its rows whose masks can be computed now."""
        for opened in plan.opens:
            if not opened.params.masked:
                self._rows.pop(opened.row, None)
                continue
            output = [] if opened.output is None else opened.output.tolist()
            state = self._parked.pop(opened.name, None) or self._opened(opened.name, opened.params, output)
            state.parked = False
            self._rows[opened.row] = state
        if not plan.masked_rows:
            return []
        masked = {row: self._rows[row] for row in plan.masked_rows}
        self._pending.append(_Pending(plan.step, sampled_rows(plan), masked))
        for state in masked.values():
            state.steps.append(plan.step)
        return [Wanted(plan.step, row, state) for row, state in masked.items() if len(state.steps) == 1]

    def committed(self, result: StepResult) -> list[Wanted]:
        """A result came; -> rows of later steps whose masks can be computed now, or never."""
        if not self._pending or self._pending[0].step != result.step:
            return []
        step = self._pending.popleft()
        for state in step.masked.values():
            state.steps.popleft()
        if result.error is None:
            for k, row in enumerate(step.sampled):
                if (found := step.masked.get(row)) is None or found.parked:
                    continue
                if result.flags[k] == Flag.LATE:
                    found.parked = True
                    self._newly_parked.append(found)
                    self._parked[found.name] = found
                elif result.num_tokens[k] and result.flags[k] in _CHOSEN:
                    found.tokens.append(int(result.tokens[k, 0]))
                    found.mask = None
        return [
            Wanted(state.steps[0], row, state, late=state.parked) for row, state in step.masked.items() if state.steps
        ]

    def newly_parked(self) -> list[MaskRow]:
        """Rows whose masks were late in results since the last call."""
        parked, self._newly_parked = self._newly_parked, []
        return parked

    def forget(self, name: str) -> None:
        """A request is dropped."""
        self._parked.pop(name, None)

    def _opened(self, name: str, params: SamplingParams, output: list[int]) -> MaskRow:
        """A row whose matcher will have seen some output."""

        def make() -> Matcher:
            constraint = params.structured_outputs
            matcher = None if constraint is None else self._start(constraint).copy()
            matcher = self._compiler.with_reasoning(matcher, params.thinking)
            return self._compiler.with_words(matcher, params) if params.picks else matcher

        key = () if params.structured_outputs is None else params.structured_outputs.key
        return MaskRow(name, key, make, self._compiler.nothing(), output)

    def _start(self, constraint: StructuredOutputsParams) -> Matcher:
        """The grammar's matcher at its start, compiled once; to be copied."""
        key = constraint.key
        with self._lock:
            found = self._grammars.get(key)
            if found is not None:
                self._grammars.move_to_end(key)
                return found.matcher
        before = self._resident()
        matcher = self._compiler.compile(constraint)
        made = _Kept(matcher, max(0, self._resident() - before))
        with self._lock:
            replaced = self._grammars.pop(key, None)
            self._num_bytes += made.nbytes - (0 if replaced is None else replaced.nbytes)
            self._grammars[key] = made
            while len(self._grammars) > 1 and (
                len(self._grammars) > self._max_grammars or self._num_bytes > self._max_bytes
            ):
                self._num_bytes -= self._grammars.popitem(last=False)[1].nbytes
        return matcher


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
