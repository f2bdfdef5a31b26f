"""Ctrl-C that waits for the end of a turn, so that no bookkeeping is left half done."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class DeferredInterrupt:
    """Inside the block the first Ctrl-C is only noted; `check`, and the end of the block, raise KeyboardInterrupt.

    A second one does not wait. Does nothing outside the main thread, or where Ctrl-C has another handler.
    """

    def __init__(self) -> None:
        self._came = False
        self._installed = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C came."""
        if self._came:
            self._came = False
            raise KeyboardInterrupt

    def __enter__(self) -> DeferredInterrupt:
        here = threading.current_thread() is threading.main_thread()
        if here and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._installed = False
        if error is None:
            self.check()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
