"""How many may wait: sequences and prompt tokens without a first token yet. Beyond that, a 503 at once."""

from __future__ import annotations

import fcntl
import mmap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from cellar.server.config import LimitConfig
from cellar.server.errors import unavailable


class Waiting(Protocol):
    """Counts of who waits: sequences, called requests in figures, and their prompt tokens."""

    def locked(self) -> AbstractContextManager[None]:
        """Nobody else changes the totals meanwhile."""

    def totals(self) -> tuple[int, int]:
        """Requests and tokens, at all fronts."""

    def add(self, requests: int, tokens: int) -> None:
        """Change this front's part."""


class OwnWaiting:
    """The counts of a server with one front."""

    def __init__(self) -> None:
        self._requests = 0
        self._tokens = 0

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def totals(self) -> tuple[int, int]:
        return self._requests, self._tokens

    def add(self, requests: int, tokens: int) -> None:
        self._requests += requests
        self._tokens += tokens


class SharedWaiting:
    """The counts of all fronts in one file: two int64 for each. The lock is the file's, and ends with its process."""

    def __init__(self, path: Path, index: int, count: int) -> None:
        size = 16 * max(count, 1)
        self._file = open(path, "a+b")  # noqa: SIM115 (open as long as this is)
        self._file.truncate(size)
        self._counts = memoryview(mmap.mmap(self._file.fileno(), size)).cast("q")
        self._mine = 2 * index

    @contextmanager
    def locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def totals(self) -> tuple[int, int]:
        return sum(self._counts[0::2]), sum(self._counts[1::2])

    def add(self, requests: int, tokens: int) -> None:
        self._counts[self._mine] += requests
        self._counts[self._mine + 1] += tokens

    def clear(self) -> None:
        """Forget what waited at this front: it has ended."""
        self._counts[self._mine] = self._counts[self._mine + 1] = 0


class Ticket:
    """One admitted prompt with its n sequences, each until its first token or its end."""

    __slots__ = ("_admission", "_num_tokens", "_waiting")

    def __init__(self, admission: Admission, num_tokens: int, num_sequences: int) -> None:
        self._admission = admission
        self._num_tokens = num_tokens
        self._waiting = set(range(num_sequences))

    def began(self, index: int) -> None:
        """A sequence waits no longer; a second call does nothing. The prompt's tokens wait for the first of them."""
        if index in self._waiting:
            self._waiting.remove(index)
            self._leave(1)

    def served(self) -> None:
        """None waits any longer; a second call does nothing."""
        if self._waiting:
            count = len(self._waiting)
            self._waiting.clear()
            self._leave(count)

    def _leave(self, count: int) -> None:
        tokens, self._num_tokens = self._num_tokens, 0
        self._admission.leave(tokens, count)


class Admission:
    """Lets in, or refuses, by the counts of who waits. One thread."""

    def __init__(self, limits: LimitConfig, waiting: Waiting | None = None) -> None:
        self._limits = limits
        self._waiting: Waiting = waiting or OwnWaiting()

    @property
    def num_requests(self) -> int:
        """Requests that wait."""
        return self._waiting.totals()[0]

    @property
    def num_tokens(self) -> int:
        """Their prompt tokens."""
        return self._waiting.totals()[1]

    def enter(self, prompt_lengths: Sequence[int], n: int = 1) -> list[Ticket]:
        """Tickets for the prompts of one request with n sequences each, all or none. Raises ApiError (503).

        A request alone is never refused: it could not be served later either.
        """
        requests, tokens = n * len(prompt_lengths), sum(prompt_lengths)
        with self._waiting.locked():
            others, their_tokens = self._waiting.totals()
            if others and (
                others + requests > self._limits.max_queued_requests
                or their_tokens + tokens > self._limits.max_queued_tokens
            ):
                raise unavailable(
                    f"{others} sequences with {their_tokens} prompt tokens are already waiting; try again later.",
                    retry_after=2,
                )
            self._waiting.add(requests, tokens)
        return [Ticket(self, count, n) for count in prompt_lengths]

    def leave(self, num_tokens: int, num_sequences: int = 1) -> None:
        """A prompt's sequences wait no longer."""
        self._waiting.add(-num_sequences, -num_tokens)
