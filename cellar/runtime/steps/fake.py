"""FakeRuntime: a runtime without a model, whose tokens a person can compute by hand.

The token after t[0], ..., t[n-1] is

    (1 * (t[0] + 1) + 2 * (t[1] + 1) + ... + n * (t[n-1] + 1)) mod vocab_size

read from a simulated KV cache: per slot and offset the position, the token and a digest of everything before
it, written as plans say and read back through the row tables. Slower tiers hold the same, copies take it from slot to
slot. So a wrong slot, a missing hole or a chunk that somebody overwrote changes the tokens, or rather is found:
whatever a real runtime could not do, or would do wrongly without notice, raises IntegrityError.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.core.messages import (
    CopyBatch,
    CopyResult,
    Emit,
    Flag,
    IntArray,
    Logprobs,
    RowOpen,
    Source,
    StepPlan,
    StepResult,
    Tier,
)
from cellar.core.sampling import SamplingParams
from cellar.runtime.protocol import Capacity
from cellar.runtime.ranks.star import HostComm

_PRIME = 1_000_003
_FACTOR = 31
_UNWRITTEN = -1


def next_token(sequence: Sequence[int] | NDArray[np.integer], vocab_size: int) -> int:
    """The formula above."""
    tokens = np.asarray(sequence, np.int64)
    return int(((tokens + 1) * np.arange(1, len(tokens) + 1)).sum() % vocab_size)


def _sum(values: NDArray[np.int64]) -> int:
    """Of a sequence's values, each times its number from 1."""
    return int((values * np.arange(1, len(values) + 1)).sum())


def penalty(prompt: Sequence[int] | IntArray, output: Sequence[int] | IntArray) -> int:
    """What the fake adds to the sum if penalties are on: depends on every prompt and output token."""
    return int(np.sum(prompt, dtype=np.int64)) + 2 * int(np.sum(output, dtype=np.int64))


@dataclass
class _Row:
    """The device's side of a row. `digest` is that of the positions before `written`, as this row wrote them."""

    params: SamplingParams
    stop_ids: tuple[int, ...]
    num_output: int
    penalty: int | None
    length: int = 0
    last: int = -1
    broken: bool = False
    written: int = 0
    digest: int = 0


@dataclass
class _Pending:
    """A submitted plan that no poll has answered."""

    plan: StepPlan
    uses: Mapping[int, frozenset[int]]
    polls: int
    ready: float
    result: StepResult | None = None
    masks: dict[int, NDArray[np.int32]] | None = None
    writes: frozenset[int] = frozenset()


@dataclass
class _Copying:
    """A batch that no poll has answered."""

    batch: CopyBatch
    polls: int


@dataclass
class FakeWorker:
    """The one queue of a FakeRuntime."""

    runtime: FakeRuntime
    id: int = 0

    @property
    def in_flight(self) -> int:
        """Plans submitted whose result no `poll` has returned yet."""
        return self.runtime.in_flight

    def submit(self, plan: StepPlan) -> None:
        """Hand over a plan; it is computed at once, its result comes when latency and delay are over."""
        self.runtime.submit(plan)


@dataclass
class FakeRuntime:
    """Implements `Runtime[StepPlan]`.

    latency       seconds (or a function of the plan) that a step lasts
    delay         how many polls (or a function of the step) come back without the step's result
    end_token     is sampled in place of the ordinary token whenever the sum is a multiple of `end_period`
    fail          says why a step fails as a whole, or None
    nan           says whether a step's result for a row is not finite
    tiers         how many chunks slower tiers hold
    copy_delay    how many polls (or a function of the batch) come back without a batch's result
    fail_copy     says whether chunk k of a batch does not arrive
    strict        also refuse a row or slot that is given away while a plan in flight uses it
    comm          the other ranks, if this is one of several: of the (t + 1) of every token t, rank r of R adds up
                  (t + R - r) // R, so that only all of them together know the sum; rank 0 samples
    """

    capacity: Capacity
    vocab_size: int = 97
    latency: float | Callable[[StepPlan], float] = 0.0
    delay: int | Callable[[int], int] = 0
    end_token: int | None = None
    end_period: int = 16
    fail: Callable[[StepPlan], str | None] = lambda plan: None
    nan: Callable[[int, int], bool] = lambda step, row: False
    tiers: Mapping[Tier, int] = field(default_factory=dict)
    copy_delay: int | Callable[[CopyBatch], int] = 0
    fail_copy: Callable[[CopyBatch, int], bool] = lambda batch, k: False
    strict: bool = True
    comm: HostComm | None = None
    num_copied: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    _pending: deque[_Pending] = field(default_factory=deque)
    _copying: list[_Copying] = field(default_factory=list)
    _rows: dict[int, _Row] = field(default_factory=dict)
    _closed: bool = False
    _woken: bool = False

    def __post_init__(self) -> None:
        c = self.capacity
        self.workers = (FakeWorker(self),)
        # Per tier [position | token | digest, slot, offset].
        self._memory = {
            tier: np.full((3, count, c.chunk_size), _UNWRITTEN, np.int64)
            for tier, count in {Tier.DEVICE: c.num_slots, **self.tiers}.items()
        }
        self._position, self._token, self._digest = self._memory[Tier.DEVICE]
        self._table = np.full((c.num_rows, -(-c.max_model_len // c.chunk_size)), -1, np.int64)
        self._submitted_table = self._table.copy()
        self._signal = threading.Condition()
        self._broken: BaseException | None = None
        if self.comm is not None:
            threading.Thread(target=self._run_all, name=f"cellar-fake-{self.comm.rank}", daemon=True).start()

    # -- the protocol -----------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Plans submitted whose result no `poll` has returned yet."""
        return len(self._pending)

    def submit(self, plan: StepPlan) -> None:
        """Check a plan against those in flight and run it, unless it or one before it waits for masks."""
        with self._signal:
            if self._closed:
                raise IntegrityError("a plan was submitted to a closed runtime")
            if self._pending and plan.step <= self._pending[-1].plan.step:
                raise IntegrityError(f"step {plan.step} was submitted after step {self._pending[-1].plan.step}")
            uses, writes = self._uses(plan)
            latency = self.latency(plan) if callable(self.latency) else self.latency
            begin = max(time.monotonic(), self._pending[-1].ready if self._pending else 0.0)
            delay = self.delay(plan.step) if callable(self.delay) else self.delay
            self._pending.append(_Pending(plan, uses, delay, begin + latency, writes=writes))
            self._advance()
            self._signal.notify_all()

    def copy(self, batch: CopyBatch) -> None:
        """Check a batch against all that is under way; it is copied when its delay is over, at the last moment."""
        with self._signal:
            if self._closed:
                raise IntegrityError("a batch was handed to a closed runtime")
            self._check_copy(batch)
            delay = self.copy_delay(batch) if callable(self.copy_delay) else self.copy_delay
            self._memory[batch.target][:, batch.target_slots] = _UNWRITTEN
            self._copying.append(_Copying(batch, delay))
            self._signal.notify_all()

    def poll(self, timeout: float | None) -> list[StepResult | CopyResult]:
        """Results that are ready, in order; waits for a first one, unless it is held back by `delay`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._signal:
            while not self._woken and not self._closed and self._broken is None:
                now = time.monotonic()
                head = self._pending[0] if self._pending else None
                runs = head is not None and head.result is not None
                if self._copying or (head is not None and runs and (head.polls > 0 or head.ready <= now)):
                    break
                ends = [t for t in (deadline, head.ready if head is not None and runs else None) if t is not None]
                if deadline is not None and deadline <= now:
                    break
                self._signal.wait(min(ends) - now if ends else None)
            self._woken = False
            if self._broken is not None and not self._closed:
                raise self._broken
            return self._ready(time.monotonic())

    def wake(self) -> None:
        """End a waiting `poll`, or the next one at once."""
        with self._signal:
            self._woken = True
            self._signal.notify_all()

    def supply(self, step: int, masks: Mapping[int, NDArray[np.int32]]) -> None:
        """Token bit masks for the masked rows of a submitted step."""
        with self._signal:
            entry = next((p for p in self._pending if p.plan.step == step), None)
            if entry is None or set(masks) != set(entry.plan.masked_rows):
                raise IntegrityError(f"masks of step {step} are for rows that it does not mask")
            entry.masks = dict(masks)
            self._advance()
            self._signal.notify_all()

    def close(self) -> None:
        """Drop everything; a waiting `poll` returns."""
        if self.comm is not None:
            self.comm.close()  # a step may wait for the other ranks
        with self._signal:
            self._closed = True
            self._pending.clear()
            self._copying.clear()
            self._rows.clear()
            self._signal.notify_all()

    # -- order ------------------------------------------------------------------------------------

    def _ready(self, now: float) -> list[StepResult | CopyResult]:
        results: list[StepResult | CopyResult] = []
        for copying in tuple(self._copying):
            if copying.polls > 0 or self._waits_for_a_step(copying.batch):
                copying.polls -= 1
                continue
            self._copying.remove(copying)
            results.append(self._copy(copying.batch))
        self._advance()
        while self._pending and self._pending[0].result is not None and self._pending[0].ready <= now:
            head = self._pending[0]
            if head.polls > 0:
                head.polls -= 1
                break
            results.append(self._pending.popleft().result)  # type: ignore[arg-type]
        return results

    def _advance(self) -> None:
        """Run what has been submitted, up to the first step whose masks or chunks are missing.

        With other ranks a thread does, without the lock: a step may wait for them while earlier ones are answered.
        """
        if self.comm is not None:
            self._signal.notify_all()
            return
        while (entry := self._runnable()) is not None:
            entry.result = self._run(entry.plan, entry.masks or {})

    def _runnable(self) -> _Pending | None:
        """The first step that has not run, if it can."""
        entry = next((entry for entry in self._pending if entry.result is None), None)
        if entry is None or (entry.plan.masked_rows and entry.masks is None and self._samples):
            return None
        if any(0 <= c.batch.before_step <= entry.plan.step for c in self._copying):
            return None
        return entry

    def _run_all(self) -> None:
        """The thread of a rank."""
        with self._signal:
            while not self._closed:
                entry = self._runnable()
                if entry is None:
                    self._signal.wait()
                    continue
                self._signal.release()
                try:
                    result = self._run(entry.plan, entry.masks or {})
                except BaseException as error:  # `poll` raises it
                    self._broken, result = error, None
                finally:
                    self._signal.acquire()
                self._signal.notify_all()
                if result is None:
                    return
                entry.result = result

    def _uses(self, plan: StepPlan) -> tuple[dict[int, frozenset[int]], frozenset[int]]:
        """Slots that each row of a plan reads or writes, after checking that nobody else in flight minds."""
        spans, table = plan.spans, self._submitted_table
        for opened in plan.opens:
            table[opened.row] = -1
            if self.strict and any(opened.row in p.uses for p in self._pending):
                raise IntegrityError(f"step {plan.step} opens row {opened.row}, which a plan in flight names")
        table[plan.table.row, plan.table.column] = plan.table.slot
        size = self.capacity.chunk_size
        uses: dict[int, frozenset[int]] = {}
        writes: dict[int, set[int]] = {}
        for row, start, stop in zip(spans.row.tolist(), spans.start.tolist(), spans.stop.tolist(), strict=True):
            uses[row] = frozenset(table[row, : -(-stop // size)].tolist())
            writes.setdefault(row, set()).update(table[row, start // size : -(-stop // size)].tolist())
        for closed in plan.closes:
            table[closed] = -1
        if self.strict:
            self._check_step(plan, uses, writes)
            for row, written in writes.items():
                for step, others in [(p.plan.step, p.uses) for p in self._pending] + [(plan.step, uses)]:
                    for other, used in others.items():
                        if other != row and written & used:
                            raise IntegrityError(
                                f"step {plan.step} writes slots {sorted(written & used)} for row {row}, "
                                f"which row {other} uses in step {step}"
                            )
        return uses, frozenset().union(*writes.values())

    # -- copies -----------------------------------------------------------------------------------

    def _check_copy(self, batch: CopyBatch) -> None:
        """Nothing under way may write what the batch reads, or use what it writes."""
        name, ends = f"batch {batch.number}", {}
        for what, tier, slots in (
            ("reads", batch.source, batch.source_slots),
            ("writes", batch.target, batch.target_slots),
        ):
            if tier not in self._memory:
                raise IntegrityError(f"{name} {what} tier {tier.name}, which is not there")
            if len(slots) and not 0 <= slots.min() <= slots.max() < self._memory[tier].shape[1]:
                raise IntegrityError(f"{name} {what} slots that tier {tier.name} does not have")
            ends[what] = {(tier, slot) for slot in slots.tolist()}
        if len(batch.source_slots) != len(batch.target_slots) or len(ends["writes"]) != len(batch.target_slots):
            raise IntegrityError(f"{name} does not give every source a target of its own")
        for other in (copying.batch for copying in self._copying):
            read = {(other.source, slot) for slot in other.source_slots.tolist()}
            written = {(other.target, slot) for slot in other.target_slots.tolist()}
            if ends["writes"] & (read | written) or ends["reads"] & written or other.number == batch.number:
                raise IntegrityError(f"{name} and batch {other.number} are under way and touch the same slots")
        if self.strict:
            targets = {slot for tier, slot in ends["writes"] if tier is Tier.DEVICE}
            sources = {slot for tier, slot in ends["reads"] if tier is Tier.DEVICE and batch.target is not tier}
            for pending in self._pending:
                if pending.writes & sources and batch.after_step < pending.plan.step:
                    raise IntegrityError(f"{name} reads slots that step {pending.plan.step} writes")
                if any(used & targets for used in pending.uses.values()):
                    raise IntegrityError(f"{name} writes slots that step {pending.plan.step} uses")

    def _check_step(self, plan: StepPlan, uses: Mapping[int, frozenset[int]], writes: Mapping[int, set[int]]) -> None:
        """A step may use what a batch writes only if the batch comes before it, and write nothing that one reads."""
        for batch in (copying.batch for copying in self._copying):
            early = not 0 <= batch.before_step <= plan.step
            for row, used in uses.items():
                if batch.target is Tier.DEVICE and early and used & set(batch.target_slots.tolist()):
                    raise IntegrityError(f"row {row} of step {plan.step} uses slots that batch {batch.number} fills")
                # Within the device a tail is copied that its owner may be writing on in.
                outwards = batch.source is Tier.DEVICE and batch.target is not Tier.DEVICE
                if outwards and writes.get(row, set()) & set(batch.source_slots.tolist()):
                    raise IntegrityError(f"row {row} of step {plan.step} writes what batch {batch.number} copies")

    def _waits_for_a_step(self, batch: CopyBatch) -> bool:
        return any(p.result is None and p.plan.step <= batch.after_step for p in self._pending)

    def _copy(self, batch: CopyBatch) -> CopyResult:
        ok = np.array([not self.fail_copy(batch, k) for k in range(len(batch))], np.bool_)
        source, target = self._memory[batch.source], self._memory[batch.target]
        target[:, batch.target_slots[ok]] = source[:, batch.source_slots[ok]]
        self.num_copied += int(ok.sum())
        return CopyResult(batch.number, ok, int(ok.sum()), error=None if ok.all() else "made to fail")

    # -- one step ---------------------------------------------------------------------------------

    def _run(self, plan: StepPlan, masks: Mapping[int, NDArray[np.int32]]) -> StepResult:
        """Order: opens, table, all K and V, attention and sampling, closes."""
        self.num_steps += 1
        for opened in plan.opens:
            self._open(opened)
        self._table[plan.table.row, plan.table.column] = plan.table.slot
        for row in set(plan.spans.row.tolist()):
            if row not in self._rows:
                raise IntegrityError(f"step {plan.step} computes row {row}, which is not open")
        reason = self._failure(plan)
        if reason is None:
            result = self._compute(plan, masks)
        else:
            for row in plan.spans.row.tolist():
                self._rows[row].broken = True
            nothing = np.empty(0, np.int32)
            result = StepResult(plan.step, nothing.reshape(0, 1), nothing, nothing, error=reason)
        for row in plan.closes:
            if row not in self._rows:
                raise IntegrityError(f"step {plan.step} closes row {row}, which is not open")
            del self._rows[row]
            self._table[row] = -1
        return result

    def _failure(self, plan: StepPlan) -> str | None:
        """Why a step fails: on one rank it fails on all."""
        reason = self.fail(plan)
        if self.comm is not None and self.comm.sum(np.array([reason is not None], np.int64))[0]:
            return reason or "another rank has failed"
        return reason

    @property
    def _samples(self) -> bool:
        return self.comm is None or self.comm.rank == 0

    def _open(self, opened: RowOpen) -> None:
        penalized = None
        if opened.params.penalized:
            if opened.prompt is None or opened.output is None or len(opened.output) != opened.num_output:
                raise IntegrityError(f"row {opened.row} has penalties, but was opened without its tokens")
            penalized = penalty(opened.prompt, opened.output)
        self._rows[opened.row] = _Row(opened.params, opened.stop_ids, opened.num_output, penalized)
        self._table[opened.row] = -1

    def _compute(self, plan: StepPlan, masks: Mapping[int, NDArray[np.int32]]) -> StepResult:
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

    def _sample(
        self, plan: StepPlan, spans: list[tuple[int, int, int, int, int]], masks: Mapping[int, NDArray[np.int32]]
    ) -> StepResult:
        tokens: list[int] = []
        flags: list[int] = []
        with_logprobs: list[int] = []
        scores: dict[int, Logprobs] = {}
        targets = np.empty(0, np.int32) if plan.targets is None else plan.targets
        used = 0
        for row, start, stop, _, emit in spans:
            state = self._rows[row]
            context = None if state.broken else self._context(row, stop)
            last = emit == Emit.LAST
            if emit == Emit.ALL:
                span_targets = targets[used : used + stop - start]
                used += stop - start
                last = bool(span_targets[-1] == -1)
                scores[row] = _joined(scores.get(row), self._scores(start, span_targets))
            if not last:
                continue
            mask = masks.get(row)
            bad = context is None or (mask is not None and not mask.any()) or self.nan(plan.step, row)
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
        )

    def _choose(self, state: _Row, context: NDArray[np.int64] | None, mask: NDArray[np.int32] | None) -> int | None:
        """The next token after `context`, or None without one; with other ranks none of them decides alone."""
        comm, total = self.comm, 0
        if comm is None:
            if context is None:
                return None
            total = _sum(context + 1)
        else:
            part = 0 if context is None else _sum((context + comm.size - comm.rank) // comm.size)
            total, num_bad = comm.sum(np.array([part, context is None], np.int64)).tolist()
            if num_bad:
                return None
        if self._samples:
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
        token = total % self.vocab_size
        if self.end_token is not None and total % self.end_period == 0:
            token = self.end_token
        banned = state.stop_ids if state.num_output < state.params.min_tokens else ()
        for _ in range(self.vocab_size):
            if token not in banned and (mask is None or mask[token // 32] >> (token % 32) & 1):
                break
            token = (token + 1) % self.vocab_size
        return token

    # -- simulated memory -------------------------------------------------------------------------

    def _write_last(self, row: int, start: int, stop: int) -> None:
        state = self._rows[row]
        if not state.broken and (start != state.length or stop != start + 1):
            raise IntegrityError(f"row {row} has its last token at {state.length}, but [{start}, {stop}) is planned")
        self._write(row, start, np.array([state.last], np.int32))

    def _write(self, row: int, start: int, tokens: IntArray) -> None:
        state = self._rows[row]
        if state.broken:
            return
        before = self._read(row, start)[1] if start else 0
        if start == state.written and before != state.digest:
            raise IntegrityError(f"the KV of row {row} before position {start} was overwritten by another sequence")
        slots, offsets = self._places(row, start, start + len(tokens))
        for k, token in enumerate(tokens.tolist()):
            before = (before * _FACTOR + token + 1) % _PRIME
            self._position[slots[k], offsets[k]] = start + k
            self._token[slots[k], offsets[k]] = token
            self._digest[slots[k], offsets[k]] = before
        state.written, state.digest = start + len(tokens), before

    def _read(self, row: int, stop: int) -> tuple[NDArray[np.int64], int]:
        """Tokens of positions [0, stop), and the digest at the last. Raises IntegrityError if any is not there."""
        slots, offsets = self._places(row, 0, stop)
        positions, tokens, digests = (part[slots, offsets] for part in (self._position, self._token, self._digest))
        wrong = positions != np.arange(stop)
        before = np.concatenate(([0], digests[:-1]))
        wrong |= (before * _FACTOR + tokens + 1) % _PRIME != digests
        if wrong.any():
            at = int(np.argmax(wrong))
            raise IntegrityError(
                f"row {row} attends to position {at}, but slot {slots[at]} does not hold it: "
                f"it was never written, or overwritten by another sequence"
            )
        return tokens, int(digests[-1])

    def _context(self, row: int, stop: int) -> NDArray[np.int64]:
        return self._read(row, stop)[0]

    def _places(self, row: int, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        size = self.capacity.chunk_size
        positions = np.arange(start, stop)
        slots = self._table[row, positions // size]
        if len(slots) and slots.min() < 0:
            raise IntegrityError(f"row {row} has no slot for position {int(positions[np.argmin(slots)])}")
        return slots, positions % size

    # -- log-probabilities ------------------------------------------------------------------------

    def _scores(self, start: int, targets: IntArray) -> Logprobs:
        """Of a span's targets: the index is the target's position."""
        real = targets[targets >= 0]
        return self._logprobs(np.arange(start + 1, start + 1 + len(real), dtype=np.int32), real)

    def _logprobs(self, index: IntArray, tokens: IntArray) -> Logprobs:
        """Token t has log-probability -(t + 1) / vocab_size and rank t; the one best is token 0."""
        count = len(tokens)
        return Logprobs(
            index,
            (-(tokens + 1) / self.vocab_size).astype(np.float32),
            tokens.astype(np.int32),
            np.zeros((count, 1), np.int32),
            np.full((count, 1), -1 / self.vocab_size, np.float32),
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
