"""Fields of requests that change no token: accepted at the values listed here, and refused at any other.

A field that stands neither here nor in the request's model is refused by its name, so that nobody believes in an
option that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cellar.server.errors import ApiError, refused

Accepts = Callable[[Any], bool]


def _one_of(*values: Any) -> Accepts:
    return lambda value: any(value == allowed and type(value) is type(allowed) for allowed in values)


def _text(value: Any) -> bool:
    return isinstance(value, str)


_NONE = _one_of(None)

COMMON: Mapping[str, tuple[Accepts, str]] = {
    # who asks, and for what: for the operator's books
    "user": (_text, "a string"),
    "safety_identifier": (_text, "a string"),
    "metadata": (lambda value: isinstance(value, dict), "an object"),
    "service_tier": (_one_of("auto", "default"), "auto or default"),
    "prompt_cache_retention": (_text, "a string"),
    # what vLLM knows and this engine does not do
    "use_beam_search": (_one_of(False), "false"),
    "length_penalty": (_one_of(1, 1.0), "1"),
    "spaces_between_special_tokens": (_one_of(True), "true"),
    "best_of": (_one_of(1), "1: ask for n, and choose"),
    "return_tokens_as_token_ids": (_one_of(False), "false"),
}

COMPLETION: Mapping[str, tuple[Accepts, str]] = {
    **COMMON,
    "suffix": (_one_of(""), "null: the model cannot fill in the middle"),
}

CHAT: Mapping[str, tuple[Accepts, str]] = {
    **COMMON,
    "store": (_one_of(False), "false: nothing is stored"),
    "modalities": (_one_of(["text"]), '["text"]'),
    "verbosity": (_one_of("medium"), "medium"),
    "prediction": (_NONE, "null"),
    "audio": (_NONE, "null"),
    "web_search_options": (_NONE, "null"),
    "echo": (_one_of(False), "false"),
    "include_reasoning": (_one_of(True), "true"),
    "functions": (_one_of([]), "null: use tools"),
    "function_call": (_one_of("none"), "none: use tool_choice"),
    "documents": (_NONE, "null"),
}

POOLING: Mapping[str, tuple[Accepts, str]] = {
    **{name: COMMON[name] for name in ("user", "safety_identifier", "metadata", "service_tier")},
}

RESPONSE: Mapping[str, tuple[Accepts, str]] = {
    # who asks, and for what: for the operator's books
    "client_metadata": COMMON["metadata"],
    "service_tier": COMMON["service_tier"],
    "prompt_cache_retention": COMMON["prompt_cache_retention"],
    "prompt": (_NONE, "null: this server keeps no prompts"),
    "context_management": (_one_of([]), "null: use truncation"),
    "moderation": (_NONE, "null"),
    "prompt_cache_options": (_NONE, "null"),
    "background_options": (_NONE, "null"),
    "access_programs": (_NONE, "null"),
    "image": (_NONE, "null"),
    "personality": (_NONE, "null"),
}


def check_extra(extra: Mapping[str, Any], neutral: Mapping[str, tuple[Accepts, str]]) -> None:
    """Refuse fields beyond the model's own, unless they are neutral. Raises ApiError with the field's name."""
    for name, value in extra.items():
        if value is None:  # clients send it for what they leave out
            continue
        if name not in neutral:
            raise unknown(name)
        accepts, allowed = neutral[name]
        if not accepts(value):
            raise refused(f"{name} has no effect here and must be {allowed}; leave it out.", name)


def unknown(name: str) -> ApiError:
    """A field that nobody reads."""
    return refused(f"{name[:64]} is not a parameter of this server; leave it out.", name[:64], "unknown_parameter")
