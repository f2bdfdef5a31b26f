"""The object of a response, as it is before anything is written."""

from __future__ import annotations

from typing import Any

from cellar.core.sampling import SamplingParams
from cellar.server.responses.requests import ResponseRequest
from cellar.server.responses.tools import echoed


def response_body(
    request: ResponseRequest, id: str, model: str, created_at: int, params: SamplingParams
) -> dict[str, Any]:
    """What the client asked for, with the defaults that hold."""
    form, reasoning = request.format, request.reasoning
    return {
        "id": id,
        "object": "response",
        "created_at": created_at,
        "status": "queued" if request.background else "in_progress",
        "background": bool(request.background),
        "completed_at": None,
        "conversation": None if request.conversation_id is None else {"id": request.conversation_id},
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.stored,
        "temperature": params.temperature,
        "text": {
            "format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True),
            "verbosity": "medium",
        },
        "tool_choice": request.tool_choice or "auto",
        "tools": echoed(request.tools or ()),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
    }
