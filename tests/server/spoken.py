"""A device that says what a test wants it to say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.fake_front import TEMPLATE
from tests.server.served import TEXT, Served

HYBRID = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
"""A template that lets reasoning be turned off; else the model opens it, or does not."""

ALWAYS = TEMPLATE + "<think>\n"
"""A template that opens the reasoning."""

END = 2
"""The fake's end symbol."""


@contextmanager
def says(served: Served, text: str) -> Iterator[None]:
    """Every answer begun meanwhile is `text`, and its end, as far as masks allow: else the nearest allowed token."""
    script = [*TEXT.encode(text, add_special_tokens=False), END]
    ordinary = served.runtime._model._sampled

    def scripted(state: Any, total: int, mask: Any) -> int:
        token = script[min(state.num_output, len(script) - 1)]
        return ordinary(state, token, mask)

    served.runtime._model._sampled = scripted  # type: ignore[method-assign]
    try:
        yield
    finally:
        served.runtime._model._sampled = ordinary  # type: ignore[method-assign]


@contextmanager
def paced(served: Served, seconds: float = 0.01) -> Iterator[None]:
    """Steps last long enough for each to be told: what has not been when the next one ends is told with it."""
    served.runtime.latency = seconds
    try:
        yield
    finally:
        served.runtime.latency = 0.0


@contextmanager
def says_in_turn(served: Served, *texts: str) -> Iterator[None]:
    """Each answer begun meanwhile is the next of the texts, and its end."""
    scripts = iter([*TEXT.encode(text, add_special_tokens=False), END] for text in texts)
    spoken: dict[int, list[int]] = {}
    ordinary = served.runtime._model._sampled

    def scripted(state: Any, total: int, mask: Any) -> int:
        if state.num_output == 0:
            spoken[id(state)] = next(scripts)
        script = spoken[id(state)]
        return ordinary(state, script[min(state.num_output, len(script) - 1)], mask)

    served.runtime._model._sampled = scripted  # type: ignore[method-assign]
    try:
        yield
    finally:
        served.runtime._model._sampled = ordinary  # type: ignore[method-assign]
