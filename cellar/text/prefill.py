"""An answer that is begun already: the rendered conversation up to the end of its last message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cellar.core.errors import RequestError


def begun_answer(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """The beginning of a rendered conversation that ends with the words of its last message, for the model to go on.

    Templates may trim a message: blanks at its end stay only where the template keeps them, as transformers has it.
    Raises RequestError if the last message has no text, or the template does not show it.
    """
    content = messages[-1].get("content")
    if isinstance(content, (list, tuple)):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = texts[-1] if texts else None
    if not isinstance(content, str) or not content.strip():
        raise RequestError(
            "continue_final_message needs a last message with text; give the beginning of the answer as its content.",
            "messages",
        )
    begin = text.rfind(content.strip())
    if begin < 0:
        raise RequestError(
            "continue_final_message cannot be: the model's chat template does not show the last message as it is; "
            "leave it out.",
            "continue_final_message",
        )
    whole = content.lstrip()
    return text[: begin + len(whole if text.startswith(whole, begin) else content.strip())]
