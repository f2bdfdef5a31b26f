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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.core.messages import CopyResult, KeptChunk, RowOpen, StepPlan, StepResult, Tier, TierOrder
from cellar.runtime.protocol import Capacity
from cellar.runtime.ranks.star import HostComm
from cellar.runtime.steps.fake.memory import FakeMemory
from cellar.runtime.steps.fake.model import FakeBehavior, FakeModel
from cellar.runtime.steps.fake.under_way import Copying, Pending, UnderWay


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
    fail_open     says why a row cannot be opened, or None
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
    fail_open: Callable[[RowOpen], str | None] = lambda opened: None
    nan: Callable[[int, int], bool] = lambda step, row: False
    tiers: Mapping[Tier, int] = field(default_factory=dict)
    copy_delay: int | Callable[[TierOrder], int] = 0
    fail_copy: Callable[[TierOrder, int], bool] = lambda batch, k: False
    strict: bool = True
    comm: HostComm | None = None
    _closed: bool = False
    _woken: bool = False

    def __post_init__(self) -> None:
        self.workers = (FakeWorker(self),)
        tiers = {Tier.DEVICE: self.capacity.num_slots, **self.tiers}
        self._under_way = UnderWay(self.capacity, tiers, self.strict)
        self._memory = FakeMemory(self.capacity, tiers, self.fail_copy)
        behavior = FakeBehavior(self.vocab_size, self.end_token, self.end_period, self.fail, self.fail_open, self.nan)
        self._model = FakeModel(behavior, self._memory, self.comm)
        self._signal = threading.Condition()
        self._broken: BaseException | None = None
        if self.comm is not None:
            threading.Thread(target=self._run_all, name=f"cellar-fake-{self.comm.rank}", daemon=True).start()

    @property
    def num_steps(self) -> int:
        """Steps run so far."""
        return self._model.num_steps

    @property
    def num_tokens(self) -> int:
        """Positions computed so far."""
        return self._model.num_tokens

    @property
    def num_copied(self) -> int:
        """Chunks copied so far."""
        return self._memory.num_copied

    # -- after the end ----------------------------------------------------------------------------

    def kept(self) -> dict[Tier, list[KeptChunk]]:
        """Chunks that persistent tiers have, as the next process finds them."""
        return self._memory.kept()

    def inherit(self, before: FakeRuntime) -> None:
        """This process comes after another, which was killed: what outlived it is here."""
        self._memory.inherit(before._memory)

    # -- the protocol -----------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Plans submitted whose result no `poll` has returned yet."""
        return len(self._under_way.pending)

    def submit(self, plan: StepPlan) -> None:
        """Check a plan against those in flight and run it, unless it or one before it waits for masks."""
        with self._signal:
            if self._closed:
                raise IntegrityError("a plan was submitted to a closed runtime")
            if self._under_way.pending and plan.step <= self._under_way.pending[-1].plan.step:
                raise IntegrityError(
                    f"step {plan.step} was submitted after step {self._under_way.pending[-1].plan.step}"
                )
            uses, writes = self._under_way.take(plan)
            latency = self.latency(plan) if callable(self.latency) else self.latency
            begin = max(time.monotonic(), self._under_way.pending[-1].ready if self._under_way.pending else 0.0)
            delay = self.delay(plan.step) if callable(self.delay) else self.delay
            self._under_way.pending.append(Pending(plan, uses, delay, begin + latency, writes=writes))
            self._advance()
            self._signal.notify_all()

    def copy(self, batch: TierOrder) -> None:
        """Check a batch against all that is under way; it is copied when its delay is over, at the last moment."""
        with self._signal:
            if self._closed:
                raise IntegrityError("a batch was handed to a closed runtime")
            self._under_way.check_copy(batch)
            delay = self.copy_delay(batch) if callable(self.copy_delay) else self.copy_delay
            self._memory.expect(batch)
            self._under_way.copying.append(Copying(batch, delay))
            self._signal.notify_all()

    def poll(self, timeout: float | None) -> list[StepResult | CopyResult]:
        """Results that are ready, in order; waits for a first one, unless it is held back by `delay`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._signal:
            while not self._woken and not self._closed and self._broken is None:
                now = time.monotonic()
                head = self._under_way.pending[0] if self._under_way.pending else None
                runs = head is not None and head.result is not None
                if self._under_way.copying or (head is not None and runs and (head.polls > 0 or head.ready <= now)):
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

    def supply(self, step: int, masks: Mapping[int, NDArray[np.int32] | None]) -> None:
        """Token bit masks for the masked rows of a submitted step."""
        with self._signal:
            entry = next((p for p in self._under_way.pending if p.plan.step == step), None)
            if self._closed:
                return
            if entry is None or not set(masks) <= set(entry.plan.masked_rows):
                raise IntegrityError(f"masks of step {step} are for rows that it does not mask")
            if entry.masks.keys() & masks.keys():
                raise IntegrityError(f"masks of step {step} came twice")
            entry.masks |= masks
            self._advance()
            self._signal.notify_all()

    def masking(self, threads: int) -> None:
        """Nothing is computed here."""

    def close(self) -> None:
        """Drop everything; a waiting `poll` returns."""
        if self.comm is not None:
            self.comm.close()  # a step may wait for the other ranks
        with self._signal:
            self._closed = True
            self._under_way.clear()
            self._signal.notify_all()

    # -- order ------------------------------------------------------------------------------------

    def _ready(self, now: float) -> list[StepResult | CopyResult]:
        results: list[StepResult | CopyResult] = []
        for copying in tuple(self._under_way.copying):
            if copying.polls > 0 or self._under_way.waits_for_a_step(copying.batch):
                copying.polls -= 1
                continue
            self._under_way.copying.remove(copying)
            results.append(self._memory.copy(copying.batch))
        self._advance()
        while (
            self._under_way.pending
            and self._under_way.pending[0].result is not None
            and self._under_way.pending[0].ready <= now
        ):
            head = self._under_way.pending[0]
            if head.polls > 0:
                head.polls -= 1
                break
            results.append(self._under_way.pending.popleft().result)  # type: ignore[arg-type]
        return results

    def _advance(self) -> None:
        """Run what has been submitted, up to the first step whose masks or chunks are missing.

        With other ranks a thread does, without the lock: a step may wait for them while earlier ones are answered.
        """
        if self.comm is not None:
            self._signal.notify_all()
            return
        while (entry := self._under_way.runnable(self._model.samples)) is not None:
            entry.result = self._model.run(entry.plan, entry.masks)

    def _run_all(self) -> None:
        """The thread of a rank."""
        with self._signal:
            while not self._closed:
                entry = self._under_way.runnable(self._model.samples)
                if entry is None:
                    self._signal.wait()
                    continue
                self._signal.release()
                try:
                    result = self._model.run(entry.plan, entry.masks)
                except BaseException as error:  # `poll` raises it
                    self._broken, result = error, None
                finally:
                    self._signal.acquire()
                self._signal.notify_all()
                if result is None:
                    return
                entry.result = result
