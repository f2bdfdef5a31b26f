"""Failures: requests that have failed by themselves while a plan was made or a result taken in.

What is done for one request alone may raise, by a defect or by a value that nobody thought of. Who catches that gives
back what the request holds, as far as that is known, and has it ended; the books are then checked before anything else
happens. If they balance, nobody else was touched; if not, `check` raises, and the engine ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from cellar.core.errors import CellarError, IntegrityError

logger = logging.getLogger(__name__)


class Failures:
    """`check` walks over the books and raises IntegrityError unless they balance."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._cause: Exception | None = None
        self._unsaid: dict[str, str] = {}

    def said(self, request_id: str, error: Exception) -> str:
        """Log what a request did -> the sentence for its client. Raises the error itself if it is an IntegrityError:
        that is no request's.
        """
        if isinstance(error, IntegrityError):
            raise error
        logger.error("request %s has failed", request_id, exc_info=error)
        self._cause = self._cause or error
        if isinstance(error, CellarError):
            return str(error)
        return f"the request has failed ({type(error).__name__}: {error})."

    def note(self, request_id: str, error: Exception) -> None:
        """As `said`; the sentence is kept for `take`."""
        self._unsaid[request_id] = self.said(request_id, error)

    def take(self) -> Mapping[str, str]:
        """What was noted since the last call."""
        unsaid, self._unsaid = self._unsaid, {}
        return unsaid

    def settle(self) -> None:
        """At the end of a plan or a commit: if a request has failed in it, the books must balance.

        Raises IntegrityError otherwise, from what the request did.
        """
        cause, self._cause = self._cause, None
        if cause is not None:
            try:
                self._check()
            except IntegrityError as error:
                raise IntegrityError(f"a request failed and left the books out of balance: {error}") from cause
