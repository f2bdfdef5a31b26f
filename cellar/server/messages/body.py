"""Bodies of requests in Anthropic's form: fields that have an effect, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cellar.server.errors import refused
from cellar.server.fields import Accepts, check_extra
from cellar.server.requests import MAX_NAME, Objects, Texts

Count = Annotated[int, Field(ge=1, lt=2**31)]


def _null(value: Any) -> bool:
    return value is None


def _ephemeral(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "ephemeral"


CACHE_CONTROL: tuple[Accepts, str] = (_ephemeral, '{"type": "ephemeral"}: every prefix is cached anyway')
"""Accepted wherever Anthropic has it: what it asks for happens for every prompt without asking."""

_CONTAINERS = "null: there are no containers"

NEUTRAL: Mapping[str, tuple[Accepts, str]] = {
    "metadata": (lambda value: isinstance(value, dict), "an object"),
    "service_tier": (lambda value: value in ("auto", "standard_only"), "auto or standard_only"),
    "speed": (lambda value: value == "standard", "standard"),
    "inference_geo": (_null, "null: it runs where this server stands"),
    "container": (_null, _CONTAINERS),
    "diagnostics": (_null, "null"),
    "mcp_servers": (lambda value: value == [], "an empty list: the client calls its tools itself"),
    "context_management": (_null, "null: nothing is cleared from a prompt"),
    "user_profile_id": (_null, "null"),
    "cache_control": CACHE_CONTROL,
}
"""Fields that change no token; see `cellar/server/fields.py`."""


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class Thinking(_Body):
    """Field `thinking`."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Count | None = None
    display: Literal["summarized"] | None = None


class OutputConfig(_Body):
    """Field `output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class ToolChoice(_Body):
    """Field `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class PromptBody(_Body):
    """Body of /v1/messages/count_tokens: what becomes the prompt."""

    model: str | None = None
    messages: Annotated[Objects, Field(min_length=1)]
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def check(self) -> None:
        """Refuse fields that nobody reads. Raises ApiError."""
        check_extra(self.model_extra or {}, NEUTRAL)
        for name in ("tool_choice", "thinking", "output_config"):
            part = getattr(self, name)
            only((part.model_extra or {}) if part is not None else {}, {}, name)


class MessagesBody(PromptBody):
    """Body of /v1/messages."""

    max_tokens: Count
    stop_sequences: Texts | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None


def only(given: Mapping[str, Any], names: Mapping[str, Accepts], where: str) -> None:
    """Refuse keys that nobody reads, and values with another meaning than here. Raises ApiError."""
    for name, value in given.items():
        if value is None:
            continue
        if name not in names:
            raise refused(f"{where}.{name[:64]} is not implemented here; leave it out.", where)
        if not names[name](value):
            raise refused(f"{where}.{name} has a value that is not implemented here; leave it out.", where)


def of(*kinds: type) -> Accepts:
    """Values of these types."""
    return lambda value: isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def equal(*allowed: Any) -> Callable[[Any], bool]:
    """One of these values."""
    return lambda value: any(value == one and type(value) is type(one) for one in allowed)
