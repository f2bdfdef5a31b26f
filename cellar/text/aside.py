"""Telling a matcher its token without keeping the interpreter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

SLOW_SECONDS = 0.001
"""A matcher that took longer to be told its last token does not keep the interpreter for its next one."""

_NO_GRAMMAR = "start: ("


class Aside:
    """Tells matchers over one of llguidance's vocabularies their tokens, in any thread, and how long that took.

    llguidance keeps the interpreter while one matcher is told a token: 20 ms and more in an ambiguous grammar, which
    steps stretch, since they go before the threads of masks. Where several matchers are told theirs at once it lets go
    of it. So one that takes long is told together with one that has no grammar, which takes 70 us more.
    """

    def __init__(self, vocabulary: Any, clock: Callable[[], float]) -> None:
        self._vocabulary = vocabulary
        self._clock = clock
        self._here = threading.local()

    def tell(self, matcher: Any, token: int, slow: bool) -> bool:
        """A token came; `slow` is what this said when the last one did. -> whether it took long."""
        begun = self._clock()
        if not slow:
            matcher.consume_token(token)
        else:
            executor, nobody = self._others()
            executor.consume_token_par([(matcher, token), (nobody, token)])
        return self._clock() - begun > SLOW_SECONDS

    def _others(self) -> tuple[Any, Any]:
        """This thread's: an executor, whose thread has the priority of this one, and a matcher without a grammar."""
        from llguidance import LLExecutor, LLMatcher

        if not hasattr(self._here, "others"):
            self._here.others = LLExecutor(1), LLMatcher(self._vocabulary, _NO_GRAMMAR, log_level=0)
        others: tuple[Any, Any] = self._here.others
        return others
