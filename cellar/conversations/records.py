"""What a store keeps, as frozen records. Times are seconds since 1970, UTC."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
RecordT = TypeVar("RecordT")


class Status(StrEnum):
    """Where a response is, in OpenAI's words."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def running(self) -> bool:
        """True until it has ended."""
        return self in RUNNING


RUNNING = (Status.QUEUED, Status.IN_PROGRESS)
ANSWERED = (Status.COMPLETED, Status.INCOMPLETE)
"""Those whose items become part of a conversation."""


@dataclass(frozen=True, slots=True)
class Item:
    """A message, a call, a result of one, reasoning: `body` is what the API shows, its `id` and `type` included."""

    id: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """`metadata` is the client's (the page keeps a title there). `updated_at` is its last turn or change.

    `head` is the response whose context stands for the items at positions below `head_until`, where there is one.
    """

    id: str
    owner: str
    created_at: float
    updated_at: float
    metadata: dict[str, Any] = field(default_factory=dict)
    head: str | None = None
    head_until: int = 0


@dataclass(frozen=True, slots=True)
class Response:
    """`body` is what the API shows, without `output`; `input` and `output` are the items of this turn alone.

    `previous` is the response that it follows, in a chain or (the head at its beginning) in its conversation.
    """

    id: str
    owner: str
    status: Status
    created_at: float
    body: dict[str, Any]
    conversation: str | None = None
    previous: str | None = None
    background: bool = False
    input: tuple[Item, ...] = ()
    output: tuple[Item, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids of a turn, prompt and answer, in what they add to a context.

    ids: int32 [n], those added to the context of the response `base`, or all if `base` is None; none beyond a stop
    string. The last `num_answer` are the answer's. All before them stand for a rendered prompt of `text_length`
    characters, of which `text_digest` is the SHA-256 (`cellar.text.continuation.PromptText`).
    """

    ids: IntArray
    base: str | None = None
    num_answer: int = 0
    text_length: int = 0
    text_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class History:
    """All that a next turn goes on from: the items so far, of which the first `num_covered` are what `context` says.

    `tokens` holds the whole context (its `base` is the response that it belongs to), or is None if none is kept.
    `thread` is the conversation, or the response that the chain began with. `is_cut`: older items were left out.
    """

    items: tuple[Item, ...]
    num_covered: int = 0
    tokens: Tokens | None = None
    thread: str = ""
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Page(Generic[RecordT]):
    """A part of a list. `more` tells whether anything follows."""

    records: tuple[RecordT, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a background response's stream: `number` counts from 0, `data` is what was sent."""

    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Thread:
    """What lives and dies together: a conversation, or a chain of responses, named by its first one."""

    owner: str
    id: str


@dataclass(frozen=True, slots=True)
class Deleted:
    """What was deleted, and how many bytes of the disk it took, about."""

    threads: tuple[Thread, ...]
    size: int
