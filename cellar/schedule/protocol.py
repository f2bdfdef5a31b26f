"""The one protocol of both schedulers: transformer iterations (`steps/`) and cell graphs (`cells/`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from cellar.core.messages import CopyResult, Event, FinishReason, TierOrder

RequestT_contra = TypeVar("RequestT_contra", contravariant=True)
PlanT_co = TypeVar("PlanT_co", covariant=True)
ResultT_contra = TypeVar("ResultT_contra", contravariant=True)
OutputT_co = TypeVar("OutputT_co", covariant=True)
StatsT_co = TypeVar("StatsT_co", covariant=True)


class Scheduler(Protocol[RequestT_contra, PlanT_co, ResultT_contra, OutputT_co, StatsT_co]):
    """Decides what runs next. No clock (`now` in seconds is an argument), no torch, one thread."""

    def add(self, request: RequestT_contra, now: float) -> None:
        """Queue a request. Raises RequestError or CapacityError if it could never run.

        Whatever it raises, nothing is kept, unless it is an IntegrityError.
        """

    def plan(self, worker: int, now: float) -> PlanT_co | None:
        """The next plan for a worker, or None if there is nothing to do before the next commit or add."""

    def commit(self, result: ResultT_contra, now: float) -> OutputT_co:
        """Take in a result; results of one worker arrive in the order of their plans."""

    def failed(self) -> Mapping[str, str]:
        """Requests that have failed by themselves in `plan` since the last call, and why: they have ended."""

    def copies(self, now: float) -> Sequence[TierOrder]:
        """Copies decided since the last call; they are handed over before the plan that was made last."""

    def persist(self, now: float) -> Sequence[TierOrder]:
        """Copies of what would be lost with this process, a batch at a time; none when all is safe, or moving."""

    def commit_copy(self, result: CopyResult, now: float) -> None:
        """Take in the result of a CopyBatch, before those of the steps that wait for it."""

    def next_event(self, now: float) -> Event | None:
        """What is awaited besides results of plans, or None. With no plan in flight and no event nothing ever moves."""

    def finish(self, request_id: str, num_tokens: int, reason: FinishReason) -> OutputT_co | None:
        """End a request after `num_tokens` output tokens (a stop string was found outside); later ones are void.

        Of a graph of cells, end the growing chains after so many steps. -> what that delivers, if anything.
        """

    def abort(self, request_id: str) -> OutputT_co | None:
        """Drop a request at any moment; unknown and ended ids are ignored. -> what that delivers to others, if so."""

    def has_work(self) -> bool:
        """True while any request waits, runs, or has a plan in flight."""

    def stats(self) -> StatsT_co:
        """A snapshot of queues and memory."""

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the bookkeeping is sound; called when work has ended, and by tests."""
