"""The progress bar of `LLM.generate`: prompts done, and tokens per second in and out."""

from __future__ import annotations

import time
from types import TracebackType

from cellar.core.messages import RequestOutput


class Progress:
    """Shows nothing unless `shown`. `predicted`: tokens per second that a plan promised, shown beside."""

    def __init__(self, total: int, shown: bool, predicted: float | None = None) -> None:
        self._beside = "" if predicted is None else f" ({predicted:.3g} predicted)"
        self._started = time.perf_counter()
        self._in = self._out = 0
        if shown:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc="Prompts", dynamic_ncols=True)
        else:
            self._bar = None

    def finished(self, output: RequestOutput) -> None:
        """One request is complete."""
        if self._bar is None:
            return
        self._in += len(output.prompt_token_ids)
        self._out += sum(len(completion.token_ids) for completion in output.outputs)
        seconds = max(time.perf_counter() - self._started, 1e-9)
        self._bar.set_postfix_str(
            f"in {self._in / seconds:.0f} tok/s, out {self._out / seconds:.3g} tok/s{self._beside}", refresh=False
        )
        self._bar.update(1)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
