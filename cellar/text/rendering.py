"""Chat templates over messages of strangers: rendered in a process that may be ended (`expendable.py`).

A template is a program, and what it makes of a message may be a thousand times the message: `tojson(indent=4)` over a
deep object, a width in a format, a string doubled in a loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from cellar.core.errors import RequestError
from cellar.text.chat import ChatTemplate, Message
from cellar.text.expendable import Budget, Lanes, OverBudget, Worker


class Rendering:
    """The templates of one model, as `ChatTemplate`, but what takes too long or too much memory is refused."""

    def __init__(self, templates: ChatTemplate, budget: Budget) -> None:
        arguments = {"sources": templates.sources, "special_tokens": templates.special_tokens}
        self._lanes = Lanes(f"{__name__}:renderer", arguments, budget)
        self._there = bool(templates)

    def __bool__(self) -> bool:
        """True if the model has a template."""
        return self._there

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        **variables: Any,
    ) -> str:
        """See `ChatTemplate.render`; messages, tools and variables are JSON values. Raises RequestError."""
        try:
            text: str = self._lanes.call(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                now=None if now is None else now.isoformat(),
                variables=variables,
            )
        except OverBudget as error:
            raise RequestError(
                f"the model's chat template cannot show these messages: {error}; send less.", "messages"
            ) from error
        return text

    def close(self) -> None:
        """End the processes."""
        self._lanes.close()


def renderer(sources: dict[str, str], special_tokens: dict[str, str]) -> Worker:
    """In the process: the model's templates."""
    templates = ChatTemplate(sources, special_tokens)

    def render(
        messages: Any, tools: Any, add_generation_prompt: bool, now: str | None, variables: dict[str, Any]
    ) -> str:
        at = None if now is None else datetime.fromisoformat(now)
        return templates.render(messages, tools, add_generation_prompt, at, **variables)

    return render
