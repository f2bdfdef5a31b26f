"""The fake runtime's model: runs one step, by the formula of `next_token`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.core.messages import Emit, Flag, FloatArray, IntArray, Logprobs, RowOpen, Source, StepPlan, StepResult
from cellar.core.sampling import SamplingParams
from cellar.runtime.ranks.star import HostComm
from cellar.runtime.steps.fake.memory import FakeMemory

Masks = Mapping[int, NDArray[np.int32] | None]
_FREE: NDArray[np.int32] = np.empty(0, np.int32)
"""By row, the bits of the tokens that it may take."""


def next_token(sequence: Sequence[int] | NDArray[np.integer], vocab_size: int) -> int:
    """The formula above."""
    tokens = np.asarray(sequence, np.int64)
    return int(((tokens + 1) * np.arange(1, len(tokens) + 1)).sum() % vocab_size)


def _sum(values: NDArray[np.int64]) -> int:
    """Of a sequence's values, each times its number from 1."""
    return int((values * np.arange(1, len(values) + 1)).sum())


def hidden_states(sequence: Sequence[int] | NDArray[np.integer]) -> FloatArray:
    """The fake's final hidden states, float32 [n, 3]: each token + 1, the sum of these so far, and its position + 1."""
    tokens = np.asarray(sequence, np.int64) + 1
    return np.stack((tokens, tokens.cumsum(), np.arange(1, len(tokens) + 1)), 1).astype(np.float32)


def penalty(prompt: Sequence[int] | IntArray, output: Sequence[int] | IntArray) -> int:
    """What the fake adds to the sum if penalties are on: depends on every prompt and output token."""
    return int(np.sum(prompt, dtype=np.int64)) + 2 * int(np.sum(output, dtype=np.int64))


@dataclass
class _Row:
    """The device's side of a row."""

    params: SamplingParams
    stop_ids: tuple[int, ...]
    num_output: int
    penalty: int | None
    length: int = 0
    last: int = -1
    broken: bool = False


@dataclass(frozen=True)
class FakeBehavior:
    """What a step does beside the formula; see `FakeRuntime` for each."""

    vocab_size: int
    end_token: int | None
    end_period: int
    fail: Callable[[StepPlan], str | None]
    fail_open: Callable[[RowOpen], str | None]
    nan: Callable[[int, int], bool]


class FakeModel:
    """Runs steps over a memory, alone or as one of several ranks."""

    def __init__(self, behavior: FakeBehavior, memory: FakeMemory, comm: HostComm | None) -> None:
        self.num_steps = 0
        self.num_tokens = 0
        self._behavior = behavior
        self._memory = memory
        self._comm = comm
        self._rows: dict[int, _Row] = {}

    @property
    def samples(self) -> bool:
        """Whether this rank chooses the tokens."""
        return self._comm is None or self._comm.rank == 0

    def run(self, plan: StepPlan, masks: Masks) -> StepResult:
        """Order: opens, table, all K and V, attention and sampling, closes."""
        self.num_steps += 1
        failed = {opened.row: why for opened in plan.opens if (why := self._open(opened)) is not None}
        self._memory.update(plan.table)
        for row in set(plan.spans.row.tolist()):
            if row not in self._rows:
                raise IntegrityError(f"step {plan.step} computes row {row}, which is not open")
        reason = self._failure(plan)
        if reason is None:
            result = replace(self._compute(plan, masks), failed=failed)
        else:
            for row in plan.spans.row.tolist():
                self._rows[row].broken = True
            nothing = np.empty(0, np.int32)
            result = StepResult(plan.step, nothing.reshape(0, 1), nothing, nothing, error=reason)
        for row in plan.closes:
            if row not in self._rows:
                raise IntegrityError(f"step {plan.step} closes row {row}, which is not open")
            del self._rows[row]
            self._memory.clear(row)
        return result

    def _failure(self, plan: StepPlan) -> str | None:
        """Why a step fails: on one rank it fails on all."""
        reason = self._behavior.fail(plan)
        if self._comm is not None and self._comm.sum(np.array([reason is not None], np.int64))[0]:
            return reason or "another rank has failed"
        return reason

    def _open(self, opened: RowOpen) -> str | None:
        """Open a row -> why it could not be; then it is there, and broken."""
        penalized = None
        if opened.params.penalized:
            if opened.prompt is None or opened.output is None or len(opened.output) != opened.num_output:
                raise IntegrityError(f"row {opened.row} has penalties, but was opened without its tokens")
            penalized = penalty(opened.prompt, opened.output)
        why = self._behavior.fail_open(opened)
        broken = why is not None
        self._rows[opened.row] = _Row(opened.params, opened.stop_ids, opened.num_output, penalized, broken=broken)
        self._memory.clear(opened.row)
        return why

    def _compute(self, plan: StepPlan, masks: Masks) -> StepResult:
        spans = list(
            zip(
                plan.spans.row.tolist(),
                plan.spans.start.tolist(),
                plan.spans.stop.tolist(),
                plan.spans.source.tolist(),
                plan.spans.emit.tolist(),
                strict=True,
            )
        )
        taken = 0
        for row, start, stop, source, _ in spans:
            if source == Source.HOST:
                self._write(row, start, plan.tokens[taken : taken + stop - start])
                taken += stop - start
            else:
                self._write_last(row, start, stop)
            self.num_tokens += stop - start
        if taken != len(plan.tokens):
            raise IntegrityError(f"step {plan.step} brings {len(plan.tokens)} tokens for {taken} positions")
        return self._sample(plan, spans, masks)

    def _sample(self, plan: StepPlan, spans: list[tuple[int, int, int, int, int]], masks: Masks) -> StepResult:
        tokens: list[int] = []
        flags: list[int] = []
        with_logprobs: list[int] = []
        scores: dict[int, Logprobs] = {}
        sums: dict[int, FloatArray] = {}
        targets = np.empty(0, np.int32) if plan.targets is None else plan.targets
        used = 0
        for row, start, stop, _, emit in spans:
            state = self._rows[row]
            context = None if state.broken else self._memory.context(row, stop)
            last = emit == Emit.LAST
            if emit == Emit.ALL:
                span_targets = targets[used : used + stop - start]
                used += stop - start
                last = bool(span_targets[-1] == -1)
                scores[row] = _joined(scores.get(row), self._scores(start, span_targets))
            if emit == Emit.SUM:
                if self._comm is not None:
                    raise IntegrityError(f"the fake cannot pool row {row}, whose KV lies on several ranks")
                states = np.full((1, 3), np.nan, np.float32) if context is None else hidden_states(context)[start:]
                sums[row] = sums.get(row, np.float32(0)) + states.sum(0, keepdims=True)
            if not last:
                continue
            if masks.get(row, _FREE) is None:
                self._choose(state, context, None)  # other ranks do not know that it is void
                state.broken = True
                tokens.append(0)
                flags.append(Flag.LATE)
                continue
            mask = masks.get(row)
            bad = context is None or (mask is not None and not mask.any()) or self._behavior.nan(plan.step, row)
            token = self._choose(state, None if bad else context, mask)
            if token is None:
                state.broken = True
                tokens.append(0)
                flags.append(Flag.NAN)
                continue
            if state.params.logprobs is not None:
                with_logprobs.append(len(tokens))
            tokens.append(token)
            flags.append(Flag.OK)
            state.length = stop
        if used != len(targets):
            raise IntegrityError(f"step {plan.step} brings {len(targets)} targets for {used} positions")
        found = np.array(tokens, np.int32)
        index = np.array(with_logprobs, np.int32)
        return StepResult(
            plan.step,
            found.reshape(-1, 1),
            np.ones(len(found), np.int32),
            np.array(flags, np.int32),
            logprobs=self._logprobs(index, found[index]) if with_logprobs else None,
            prompt_logprobs=scores,
            hidden=sums,
        )

    def _choose(self, state: _Row, context: NDArray[np.int64] | None, mask: NDArray[np.int32] | None) -> int | None:
        """The next token after `context`, or None without one; with other ranks none of them decides alone."""
        comm, total = self._comm, 0
        if comm is None:
            if context is None:
                return None
            total = _sum(context + 1)
        else:
            part = 0 if context is None else _sum((context + comm.size - comm.rank) // comm.size)
            total, num_bad = comm.sum(np.array([part, context is None], np.int64)).tolist()
            if num_bad:
                return None
        if self.samples:
            token = self._sampled(state, total + (state.penalty or 0), mask)
            if comm is not None:
                comm.share(np.array([token], np.int64))
        else:
            assert comm is not None
            token = int(comm.share(None)[0])
        state.num_output += 1
        state.last = token
        if state.penalty is not None:
            state.penalty += 2 * token
        return token

    def _sampled(self, state: _Row, total: int, mask: NDArray[np.int32] | None) -> int:
        token = total % self._behavior.vocab_size
        if self._behavior.end_token is not None and total % self._behavior.end_period == 0:
            token = self._behavior.end_token
        banned = state.stop_ids if state.num_output < state.params.min_tokens else ()
        for _ in range(self._behavior.vocab_size):
            if token not in banned and (mask is None or mask[token // 32] >> (token % 32) & 1):
                break
            token = (token + 1) % self._behavior.vocab_size
        return token

    def _write_last(self, row: int, start: int, stop: int) -> None:
        state = self._rows[row]
        if not state.broken and (start != state.length or stop != start + 1):
            raise IntegrityError(f"row {row} has its last token at {state.length}, but [{start}, {stop}) is planned")
        self._write(row, start, np.array([state.last], np.int32))

    def _write(self, row: int, start: int, tokens: IntArray) -> None:
        if not self._rows[row].broken:
            self._memory.write(row, start, tokens)

    def _scores(self, start: int, targets: IntArray) -> Logprobs:
        """Of a span's targets: the index is the target's position."""
        real = targets[targets >= 0]
        return self._logprobs(np.arange(start + 1, start + 1 + len(real), dtype=np.int32), real)

    def _logprobs(self, index: IntArray, tokens: IntArray) -> Logprobs:
        """Token t has log-probability -(t + 1) / vocab_size and rank t; the one best is token 0."""
        count = len(tokens)
        return Logprobs(
            index,
            (-(tokens + 1) / self._behavior.vocab_size).astype(np.float32),
            tokens.astype(np.int32),
            np.zeros((count, 1), np.int32),
            np.full((count, 1), -1 / self._behavior.vocab_size, np.float32),
        )


def _joined(first: Logprobs | None, second: Logprobs) -> Logprobs:
    if first is None:
        return second
    return Logprobs(
        np.concatenate((first.index, second.index)),
        np.concatenate((first.logprob, second.logprob)),
        np.concatenate((first.rank, second.rank)),
        np.concatenate((first.top_ids, second.top_ids)),
        np.concatenate((first.top_logprobs, second.top_logprobs)),
    )
