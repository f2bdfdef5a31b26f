"""The errors that Cellar raises on purpose.

Every message is one sentence that says what was wrong, what is allowed and what to change. Code at the
edge (command line, server) shows the message as it is; anything that is not a `CellarError` is a defect.
"""

from __future__ import annotations

import threading

_LONG = 900
"""Characters of a message that a person reads."""


class CellarError(Exception):
    """Base of all errors that a user can cause and can mend."""


class ConfigError(CellarError, ValueError):
    """An option or a combination of options is not allowed."""


class RequestError(CellarError, ValueError):
    """One request asks for something that this engine cannot do; no other request is disturbed.

    `parameter` names the offending field, and `code` is OpenAI's word for what is wrong, where it has one, so that a
    server can report them.
    """

    def __init__(self, message: str, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.code = code


class CheckpointError(CellarError):
    """A checkpoint is missing, incomplete, damaged or of an unknown architecture.

    What its files say may be of any length: of a long message the middle is left out.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= _LONG else f"{message[: _LONG // 2]} ... {message[-_LONG // 3 :]}")


class CapacityError(CellarError):
    """Memory, rows or chunks do not suffice for even one request."""


class BuffersError(CapacityError):
    """A step's buffers take more of a device than a plan has left for them: `missing` bytes more."""

    def __init__(self, message: str, missing: int) -> None:
        super().__init__(message)
        self.missing = missing

    def __reduce__(self) -> tuple[type[BuffersError], tuple[str, int]]:
        return type(self), (str(self), self.missing)


class DeviceError(CellarError):
    """A device is not there, or an operation on it failed."""


class IntegrityError(CellarError):
    """An invariant of the engine's own bookkeeping does not hold: a defect, never a user's mistake."""


def is_interrupt(error: BaseException) -> bool:
    """True for Ctrl-C, which Python raises in the main thread alone. All else that user code raises is its own fault,
    `SystemExit` included: it must end one request, not the thread that serves all."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
