"""The one protocol of both schedulers: transformer iterations (`steps.py`) and cell graphs (`cells.py`)."""

from __future__ import annotations

from typing import Protocol, TypeVar

from cellar.core.messages import FinishReason, Request, SchedulerStats, StepOutput

PlanT_co = TypeVar("PlanT_co", covariant=True)
ResultT_contra = TypeVar("ResultT_contra", contravariant=True)


class Scheduler(Protocol[PlanT_co, ResultT_contra]):
    """Decides what runs next. No clock (`now` in seconds is an argument), no torch, one thread."""

    def add(self, request: Request, now: float) -> None:
        """Queue a request. Raises RequestError or CapacityError if it could never run; nothing is kept then."""

    def plan(self, worker: int, now: float) -> PlanT_co | None:
        """The next plan for a worker, or None if there is nothing to do before the next commit or add."""

    def commit(self, result: ResultT_contra, now: float) -> StepOutput:
        """Take in a result; results of one worker arrive in the order of their plans."""

    def finish(self, request_id: str, num_tokens: int, reason: FinishReason) -> None:
        """End a request after `num_tokens` output tokens (a stop string was found outside); later ones are void."""

    def abort(self, request_id: str) -> None:
        """Drop a request at any moment; unknown and ended ids are ignored."""

    def has_work(self) -> bool:
        """True while any request waits, runs, or has a plan in flight."""

    def stats(self) -> SchedulerStats:
        """A snapshot of queues and cache."""

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the bookkeeping is sound; called when work has ended, and by tests."""
