"""The progress bar of `LLM.generate`: prompts done, and tokens per second in and out."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from cellar.core.messages import SchedulerStats

SHOWN_SECONDS = 1.0
"""Between two looks at the rates."""


class Progress:
    """Shows nothing unless `shown`. `predicted`: tokens per second that a plan promised, shown beside. `stats` of the
    engine count tokens of those that have not ended, too: where weights are streamed, all may end in the last step.
    """

    def __init__(self, total: int, shown: bool, predicted: float | None, stats: Callable[[], SchedulerStats]) -> None:
        self._beside = "" if predicted is None else f" ({predicted:.3g} predicted)"
        self._stats = stats
        self._started = self._looked = time.perf_counter()
        self._before = stats()
        if shown:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc="Prompts", dynamic_ncols=True)
        else:
            self._bar = None

    def turned(self, finished: int) -> None:
        """The engine has made a turn, in which so many requests were completed."""
        if self._bar is None:
            return
        now = time.perf_counter()
        if finished or now - self._looked > SHOWN_SECONDS:
            self._looked = now
            seconds = max(now - self._started, 1e-9)
            now_there, before = self._stats(), self._before
            prompts = now_there.prompt_tokens - before.prompt_tokens
            answers = now_there.generation_tokens - before.generation_tokens
            rates = f"in {prompts / seconds:.0f} tok/s, out {answers / seconds:.3g} tok/s{self._beside}"
            self._bar.set_postfix_str(rates, refresh=not finished)
            self._bar.update(finished)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
