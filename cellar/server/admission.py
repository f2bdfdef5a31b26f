"""How many may wait: sequences and prompt tokens without a first token yet. Beyond that, a 503 at once, or a 429 where
others might still come in.
"""

from __future__ import annotations

import fcntl
import mmap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from cellar.server.config import LimitConfig
from cellar.server.errors import over_quota, unavailable


class Waiting(Protocol):
    """Counts of who waits: sequences, called requests in figures, and their prompt tokens."""

    def locked(self) -> AbstractContextManager[None]:
        """Nobody else changes the totals meanwhile."""

    def totals(self) -> tuple[int, int]:
        """Requests and tokens, at all fronts."""

    def of(self, owner: str) -> tuple[int, int]:
        """Those of one owner, at all fronts."""

    def add(self, requests: int, tokens: int, owner: str = "") -> None:
        """Change this front's part."""


class OwnWaiting:
    """The counts of a server with one front."""

    def __init__(self) -> None:
        self._requests = Counter[str]()
        self._tokens = Counter[str]()

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def totals(self) -> tuple[int, int]:
        return self._requests.total(), self._tokens.total()

    def of(self, owner: str) -> tuple[int, int]:
        return self._requests[owner], self._tokens[owner]

    def add(self, requests: int, tokens: int, owner: str = "") -> None:
        self._requests[owner] += requests
        self._tokens[owner] += tokens


class SharedWaiting:
    """The counts of all fronts in one file: two int64 for each front and owner. The lock is the file's, and ends with
    its process.

    `owners` are those of the keys, in the order that all processes know; whoever is none of them is counted as nobody.
    """

    def __init__(self, path: Path, index: int, count: int, owners: Sequence[str] = ()) -> None:
        self._places = {owner: place for place, owner in enumerate(dict.fromkeys(("", *owners)))}
        width = 2 * len(self._places)
        size = 8 * width * max(count, 1)
        self._file = open(path, "a+b")  # noqa: SIM115 (open as long as this is)
        self._file.truncate(size)
        self._counts = memoryview(mmap.mmap(self._file.fileno(), size)).cast("q")
        self._width = width
        self._mine = width * index

    @contextmanager
    def locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def totals(self) -> tuple[int, int]:
        return sum(self._counts[0::2]), sum(self._counts[1::2])

    def of(self, owner: str) -> tuple[int, int]:
        place = 2 * self._places.get(owner, 0)
        return sum(self._counts[place :: self._width]), sum(self._counts[place + 1 :: self._width])

    def add(self, requests: int, tokens: int, owner: str = "") -> None:
        place = self._mine + 2 * self._places.get(owner, 0)
        self._counts[place] += requests
        self._counts[place + 1] += tokens

    def clear(self) -> None:
        """Forget what waited at this front: it has ended."""
        for place in range(self._mine, self._mine + self._width):
            self._counts[place] = 0


class Ticket:
    """One admitted prompt with its n sequences, each until its first token or its end."""

    __slots__ = ("_admission", "_num_tokens", "_owner", "_waiting")

    def __init__(self, admission: Admission, num_tokens: int, num_sequences: int, owner: str = "") -> None:
        self._admission = admission
        self._owner = owner
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
        self._admission.leave(tokens, count, self._owner)


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

    def enter(self, prompt_lengths: Sequence[int], n: int = 1, owner: str = "") -> list[Ticket]:
        """Tickets for the prompts of one request with n sequences each, all or none. Raises ApiError (503, or 429 if it
        is too much for its owner's key).

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
            if owner:
                self._check_quota(owner, requests, tokens)
            self._waiting.add(requests, tokens, owner)
        return [Ticket(self, count, n, owner) for count in prompt_lengths]

    def leave(self, num_tokens: int, num_sequences: int = 1, owner: str = "") -> None:
        """A prompt's sequences wait no longer."""
        self._waiting.add(-num_sequences, -num_tokens, owner)

    def _check_quota(self, owner: str, requests: int, tokens: int) -> None:
        waiting, their_tokens = self._waiting.of(owner)
        for count, more, most, what in (
            (waiting, requests, self._limits.max_key_queued_requests, "sequences"),
            (their_tokens, tokens, self._limits.max_key_queued_tokens, "prompt tokens"),
        ):
            if waiting and most is not None and count + more > most:
                raise over_quota(
                    f"{count} {what} of this API key are already waiting, and {most} may; wait for some to begin, or "
                    "send smaller requests."
                )
