"""How a model marks its reasoning: by name, or by what its chat template shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cellar.core.sampling import Thinking
from cellar.text.tools.call import BLANK

OFF = "none"
"""The name that turns it off."""

_THINK = Thinking(opens=("<think>",), closes=("</think>",))

# vLLM's names. Models of the `deepseek_r1` kind think always, so what they write is reasoning until they end it.
STYLES: Mapping[str, Thinking] = {
    "qwen3": _THINK,
    "deepseek_r1": replace(_THINK, begun=True),
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "mistral": Thinking(opens=("[THINK]",), closes=("[/THINK]",)),
    "seed_oss": Thinking(opens=("<seed:think>",), closes=("</seed:think>",)),
    "granite": Thinking(
        opens=("Here is my thought process:", "Here's my thought process:"),
        closes=("Here is my response:", "Here's my response:"),
    ),
}

# What a template has to hold for its model to think in a style; the first that matches. Whether a template opens the
# reasoning itself is seen in what it makes of each conversation.
_SIGNS: tuple[tuple[str, str], ...] = (
    ("[THINK]", "mistral"),
    ("<seed:think>", "seed_oss"),
    ("my thought process:", "granite"),
    ("<think>", "qwen3"),
    ("</think>", "qwen3"),
)


def style_of(templates: Mapping[str, str]) -> str | None:
    """The name of the style for a model with these chat templates; None if they show no reasoning."""
    return next((style for sign, style in _SIGNS if any(sign in source for source in templates.values())), None)


def thinking_after(style: Thinking, prompt: str) -> Thinking | None:
    """How the answer to a prompt thinks: a prompt may end with the mark that opens reasoning, or have it behind it."""
    end = prompt[-256:].rstrip(BLANK)
    if end.endswith(style.closes):
        return None
    return replace(style, begun=True) if end.endswith(style.opens) else style
