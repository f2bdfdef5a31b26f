"""EngineClient: what a front knows of an engine, be it in its own process (`Engine`) or in another (`RemoteEngine`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from cellar.core.errors import CellarError
from cellar.core.messages import FinishReason, MemoryAnswer, MemoryQuestion, Request, SchedulerStats, StepOutput

RequestT_contra = TypeVar("RequestT_contra", contravariant=True)
OutputT_co = TypeVar("OutputT_co", covariant=True)
StatsT_co = TypeVar("StatsT_co", covariant=True)

Message = Callable[[], None]
"""What another thread wants done; it must not raise because of what one request is like."""


class EngineClient(Protocol[RequestT_contra, OutputT_co, StatsT_co]):
    """Requests in, outputs out. One thread owns it, the one that calls `turn`; `post` and `stats` are for all."""

    def post(self, message: Message) -> None:
        """Have something done by the owner's thread at its next turn; ends a waiting one."""

    def read(self) -> None:
        """Do what was posted; `turn` begins with it. What is posted meanwhile waits for the next time."""

    def add(self, *requests: RequestT_contra) -> None:
        """Queue requests; one that could never run comes back as finished with an error, from `turn`."""

    def finish(self, request_id: str, num_tokens: int, reason: FinishReason = FinishReason.STOP) -> None:
        """End a request after `num_tokens` output tokens; later ones are void, and it is not heard of again."""

    def abort(self, request_id: str) -> None:
        """Drop a request at any moment; it is not heard of again. Unknown ids are ignored."""

    def refused(self) -> Mapping[str, str]:
        """Requests that could never run and of which no turn has told yet, and why; as far as is known by now."""

    def turn(self, timeout: float | None = None) -> Sequence[OutputT_co]:
        """News; waits up to `timeout` seconds (None: for ever) for some, or for a message."""

    def has_work(self) -> bool:
        """True while a request waits or runs, or a message is unread."""

    def stats(self) -> StatsT_co:
        """A snapshot of queues and memory; may be a step old."""

    def close(self) -> None:
        """Drop what runs and free what is held."""


class StepClient(EngineClient[Request, StepOutput, SchedulerStats], Protocol):
    """A client of transformer steps."""

    def memory(self, question: MemoryQuestion, then: Callable[[MemoryAnswer | CellarError], None]) -> None:
        """Have `then` called by the owner's thread with where tokens of conversations lie, at once or from `turn`.

        What is to be forgotten is forgotten by then; where nobody can say so, `then` is told why. It is never called
        once the engine has ended.
        """
