"""What is done just before a coroutine has to wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")


@coroutine
def before_waiting(coming: Awaitable[T], act: Callable[[], Awaitable[None]]) -> Generator[Any, Any, T]:
    """The result of `coming`; where that is not there at once, `act` is awaited first.

    What goes wrong with `act`, and a cancellation, meets `coming` where it waits.
    """
    steps = coming.__await__()
    move: Callable[[Any], Any] = steps.send
    given: Any = None
    acted = False
    while True:
        try:
            awaited = move(given)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            given = None  # an error that it was leads back to here
        try:
            if not acted:
                acted = True
                yield from act().__await__()
            given = yield awaited
            move = steps.send
        except BaseException as error:
            move, given = steps.throw, error
