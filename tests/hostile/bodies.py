"""Mutated bodies: whatever comes in, the answer is a success, the client's fault, or "too many" (503)."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx

from tests.hostile.mutations import dumped, spoilt, spoilt_bytes
from tests.limits import SECONDS

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "bob"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "x"},
]
CUSTOM = {"type": "custom", "custom": {"name": "g", "description": "d", "format": {"type": "text"}}}
REGEX = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[ab]{2}"}}
LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a" "b"'}}
CUSTOM_TALK = [
    *TALK[:2],
    {
        "role": "assistant",
        "content": "x",
        "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "g", "input": "a"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "x"},
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
SAMPLING: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
    "n": 2,
    "max_tokens": 3,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "min_tokens": 1,
    "stop": ["zz"],
    "stop_token_ids": [9],
    "logit_bias": {"5": 1.0},
    "ignore_eos": True,
    "user": "u",
    "prompt_cache_key": "k",
    "cache_salt": "s",
    "metadata": {"a": "b"},
    "return_token_ids": True,
}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "once upon a time", "logprobs": 2, "echo": True, **SAMPLING}),
    ("/v1/completions", {"prompt": [[5, 6, 7], [8]], "max_tokens": 2, "stream": True, "stream_options": {}}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2, "structured_outputs": {"regex": "[ab]{2}"}}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2, "prompt_logprobs": 1, "response_format": FORMAT}),
    ("/v1/chat/completions", {"messages": TALK, "tools": [TOOL], "tool_choice": "auto", **SAMPLING}),
    ("/v1/chat/completions", {"messages": TALK[:2], "response_format": FORMAT, "max_tokens": 3, "stream": True}),
    ("/v1/chat/completions", {"messages": TALK[:2], "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 2}),
    (
        "/v1/chat/completions",
        {
            "messages": CUSTOM_TALK,
            "tools": [{"type": "custom", "custom": {"name": "g", "format": LARK}}],
            "tool_choice": {"type": "custom", "custom": {"name": "g"}},
            "max_tokens": 3,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": TALK[:2],
            "tools": [TOOL, CUSTOM, {"type": "custom", "custom": {"name": "h", "format": REGEX}}],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "g"}}]},
            },
            "max_tokens": 3,
            "stream": True,
        },
    ),
    ("/v1/messages", {"model": "fake", "messages": TALK[1:2], "max_tokens": 3, "system": "s", "stop_sequences": ["z"]}),
    ("/v1/messages/count_tokens", {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}),
    (
        "/v1/responses",
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            "max_output_tokens": 3,
            "instructions": "be brief",
            "store": True,
            "metadata": {"a": "b"},
            "text": {"format": {"type": "text"}},
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
            "truncation": "auto",
            "top_p": 0.9,
        },
    ),
    ("/v1/responses", {"input": "hi", "store": False, "stream": True, "max_output_tokens": 2}),
    ("/v1/conversations", {"metadata": {"a": "b"}, "items": [{"role": "user", "content": "hi"}]}),
    ("/tokenize", {"messages": TALK[:2], "chat_template_kwargs": {"k": "v"}, "return_token_strs": True}),
    ("/tokenize", {"prompt": "once", "add_special_tokens": True}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/v1/embeddings", {"input": ["a", "b"], "dimensions": 2, "encoding_format": "base64", "pooling": "mean"}),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c"], "truncate_prompt_tokens": 3}),
    ("/v1/rerank", {"query": "a", "documents": ["b", "c"], "top_n": 1, "return_documents": True}),
)
FINE = frozenset({200, 400, 401, 404, 405, 413, 415, 422, 429, 431, 499, 503, 504})


def send_spoilt(url: str, seed: int, go_on: Callable[[int], bool], headers: dict[str, str]) -> Counter[int | str]:
    """Send mutated bodies while `go_on(count)`; -> answers by status, with "lost" for connections without one.

    A stream that ends with a defect counts as 500.
    """
    rng, found, count = random.Random(seed), Counter[int | str](), 0
    with httpx.Client(base_url=url, timeout=SECONDS) as http:
        while go_on(count):
            count += 1
            path, body = rng.choice(BODIES)
            data = dumped(spoilt(rng, body))
            if rng.random() < 0.2:
                data = spoilt_bytes(rng, data)
            kind = rng.choice(("application/json",) * 9 + ("text/plain",))
            try:
                answer = http.post(path, content=data, headers={"content-type": kind, **headers})
            except httpx.TransportError:
                found["lost"] += 1
                time.sleep(0.1)
                continue
            failed = answer.status_code == 200 and '"type":"server_error"' in answer.text
            found[500 if failed else answer.status_code] += 1
    return found
