"""How many may wait: requests and prompt tokens without a first token yet. Beyond that, a 503 at once."""

from __future__ import annotations

from collections.abc import Sequence

from cellar.server.config import LimitConfig
from cellar.server.errors import unavailable


class Ticket:
    """One admitted request, until its first token or its end."""

    __slots__ = ("_admission", "_num_tokens", "_waits")

    def __init__(self, admission: Admission, num_tokens: int) -> None:
        self._admission = admission
        self._num_tokens = num_tokens
        self._waits = True

    def served(self) -> None:
        """It waits no longer; a second call does nothing."""
        if self._waits:
            self._waits = False
            self._admission.leave(self._num_tokens)


class Admission:
    """Counts who waits. One thread."""

    def __init__(self, limits: LimitConfig) -> None:
        self._limits = limits
        self.num_requests = 0
        self.num_tokens = 0

    def enter(self, prompt_lengths: Sequence[int]) -> list[Ticket]:
        """Tickets for the prompts of one request, all or none. Raises ApiError (503).

        A request alone is never refused for its tokens: it could not be served later either.
        """
        requests, tokens = self.num_requests + len(prompt_lengths), self.num_tokens + sum(prompt_lengths)
        if self.num_requests and (
            requests > self._limits.max_queued_requests or tokens > self._limits.max_queued_tokens
        ):
            raise unavailable(
                f"{self.num_requests} requests with {self.num_tokens} prompt tokens wait already; try again later.",
                retry_after=2,
            )
        self.num_requests, self.num_tokens = requests, tokens
        return [Ticket(self, count) for count in prompt_lengths]

    def leave(self, num_tokens: int) -> None:
        """One of them waits no longer."""
        self.num_requests -= 1
        self.num_tokens -= num_tokens
