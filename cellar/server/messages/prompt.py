"""One request of /v1/messages as the chat that it is."""

from __future__ import annotations

from typing import Any

from cellar.server.errors import refused
from cellar.server.messages.body import MessagesBody, PromptBody, of, only
from cellar.server.messages.turns import chat_messages, chat_tools
from cellar.server.reasoning import EFFORT, Reasoning
from cellar.server.requests import ChatRequest

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(body: PromptBody, reasoning: Reasoning) -> ChatRequest:
    """The same in a chat's fields. Raises ApiError for what this server does not do."""
    body.check()
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": chat_messages(body.system, body.messages),
        "tools": chat_tools(body.tools) if body.tools else None,
        **_choice(body),
        **_thinking(body, reasoning),
        **_output(body, reasoning),
    }
    if isinstance(body, MessagesBody):
        for name in ("max_tokens", "temperature", "top_p", "top_k", "stream", "cache_salt"):
            fields[name] = getattr(body, name)
        fields["stop"] = body.stop_sequences
    return ChatRequest(**fields)


def _choice(body: PromptBody) -> dict[str, Any]:
    choice = body.tool_choice
    if choice is None:
        strict = any(tool.get("strict") for tool in body.tools or ())
        chosen: Any = None
    else:
        strict = choice.type in ("auto", "none") and any(tool.get("strict") for tool in body.tools or ())
        if (choice.type == "tool") != (choice.name is not None):
            raise refused("tool_choice has a name if, and only if, its type is tool; correct it.", "tool_choice")
        named = {"type": "function", "function": {"name": choice.name}}
        chosen = named if choice.type == "tool" else _CHOICES[choice.type]
        if chosen != "none" and not body.tools:
            raise refused("tool_choice asks for tools, but there are none; give some.", "tool_choice")
    if strict:
        raise refused(
            "strict tools are enforced with tool_choice any or tool only; leave strict out, or choose one of them.",
            "tools",
        )
    single = choice is not None and choice.disable_parallel_tool_use
    return {"tool_choice": chosen, "parallel_tool_calls": False if single else None}


def _thinking(body: PromptBody, reasoning: Reasoning) -> dict[str, Any]:
    """Absent it is off, as with Anthropic, if the model's template can turn it off."""
    wanted, switch = body.thinking, reasoning.switch
    if wanted is None or wanted.type == "disabled":
        if wanted is not None and switch is None and reasoning.known:
            raise refused("thinking cannot be disabled: this model always thinks; leave thinking out.", "thinking")
        return {} if switch is None else {"chat_template_kwargs": {switch: False}}
    if not reasoning.known:
        raise refused("thinking cannot be enabled: this model does not think; leave thinking out.", "thinking")
    budget = wanted.budget_tokens
    if (wanted.type == "enabled") != (budget is not None):
        raise refused("thinking has budget_tokens if, and only if, its type is enabled; correct it.", "thinking")
    if budget is not None and isinstance(body, MessagesBody) and budget >= body.max_tokens:
        raise refused(
            f"thinking.budget_tokens is {budget}, but must be less than max_tokens, which is {body.max_tokens}.",
            "thinking",
        )
    variables = {} if switch is None else {"chat_template_kwargs": {switch: True}}
    return {**variables, "thinking_token_budget": budget}


def _output(body: PromptBody, reasoning: Reasoning) -> dict[str, Any]:
    wanted, found = body.output_config, dict[str, Any]()
    if wanted is None:
        return found
    if wanted.effort is not None:
        if not reasoning.reads(EFFORT):
            raise refused(
                "output_config.effort has no effect: the model's chat template does not read it; leave it out.",
                "output_config",
            )
        found["reasoning_effort"] = "xhigh" if wanted.effort == "max" else wanted.effort
    if wanted.format is not None:
        only(wanted.format, {"type": of(str), "schema": of(dict)}, "output_config.format")
        if wanted.format.get("type") != "json_schema" or "schema" not in wanted.format:
            raise refused('output_config.format must be {"type": "json_schema", "schema": {...}}.', "output_config")
        schema = {"name": "output", "schema": wanted.format["schema"]}
        found["response_format"] = {"type": "json_schema", "json_schema": schema}
    return found
