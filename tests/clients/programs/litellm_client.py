"""litellm, by the provider of servers like this one. Arguments: the address of the server."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm
from pydantic import BaseModel

SERVER: dict[str, Any] = {"api_base": f"{sys.argv[1]}/v1", "api_key": "none"}
NAME = "hosted_vllm/fake"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather in Rome?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}}


class Animal(BaseModel):
    """An animal."""

    name: str
    legs: int


def chat(**options: Any) -> Any:
    return litellm.completion(model=NAME, **SERVER, num_retries=0, **options)


assert chat(messages=MESSAGES).choices[0].message.content == "It rains."
parts = [chunk.choices[0].delta.content or "" for chunk in chat(messages=MESSAGES, stream=True)]
assert "".join(parts) == "It rains."
assert len([part for part in parts if part]) > 1  # as they came, not at the end

asked = chat(messages=MESSAGES, tools=[TOOL]).choices[0].message
(call,) = asked.tool_calls
assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
told = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
assert chat(messages=[*MESSAGES, asked, told], tools=[TOOL]).choices[0].message.content == "It rains in Rome."

made = chat(messages=MESSAGES, response_format=Animal).choices[0].message.content
assert Animal.model_validate_json(made) == Animal(name="fox", legs=4)

vectors = litellm.embedding(model=NAME, input=["Once", "there"], **SERVER).data
assert [len(one["embedding"]) > 1 for one in vectors] == [True, True]
ranked = litellm.rerank(model=NAME, query="Once", documents=["there", "Once"], **SERVER).results
assert ranked[0]["index"] == 1
assert ranked[0]["relevance_score"] > ranked[1]["relevance_score"]
