"""Clients that people have, each on its main path and by its own package: chat, streams, tools, structures, vectors.

Clients that want other versions of what the rest of the tests need are in test_other_clients.py and test_lm_eval.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from cellar.runtime.steps.fake.model import hidden_states
from tests.server.served import MODEL, TEXT, Served, serve
from tests.server.spoken import says, says_in_turn

pytestmark = pytest.mark.long

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
QUESTION = "How is the weather in Rome?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Animal(BaseModel):
    """An animal."""

    name: str
    legs: int


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve({"tool_call_parser": "hermes"}, max_model_len=4096, num_slots=1024) as served:
        yield served
        served.settle()


def vector(text: str) -> np.ndarray:
    last = hidden_states(TEXT.encode(text))[-1]
    return last / np.linalg.norm(last)


def test_langchain(served: Served) -> None:
    from langchain_core.messages import ToolMessage
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings
    from pydantic import SecretStr

    key = SecretStr("none")
    model = ChatOpenAI(model=MODEL, base_url=f"{served.url}/v1", api_key=key, max_retries=0)
    with says(served, "It rains."):
        assert model.invoke(QUESTION).content == "It rains."
        assert "".join(str(chunk.content) for chunk in model.stream(QUESTION)) == "It rains."
    with says_in_turn(served, CALL, "It rains in Rome."):
        able = model.bind_tools([TOOL])
        asked = able.invoke(QUESTION)
        (call,) = asked.tool_calls  # type: ignore[attr-defined]
        assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
        told = ToolMessage("rain", tool_call_id=call["id"])
        assert able.invoke([("user", QUESTION), asked, told]).content == "It rains in Rome."
    with says(served, '{"name": "fox", "legs": 4}'):
        made = model.with_structured_output(Animal, method="json_schema").invoke("Which animal?")
        assert made == Animal(name="fox", legs=4)
    # Ids of another model's tokenizer, which it sends by default, mean nothing here: its own option for that.
    vectors = OpenAIEmbeddings(
        model=MODEL, base_url=f"{served.url}/v1", api_key=key, check_embedding_ctx_length=False, max_retries=0
    )
    np.testing.assert_allclose(vectors.embed_query("Once"), vector("Once"), rtol=1e-5)
    np.testing.assert_allclose(vectors.embed_documents(["Once", "there"])[1], vector("there"), rtol=1e-5)


def test_pydantic_ai(served: Served) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{served.url}/v1", api_key="none"))
    agent: Any = Agent(model)

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"rain in {city}"

    async def run() -> None:
        with says_in_turn(served, CALL, "It rains in Rome."):
            assert (await agent.run(QUESTION)).output == "It rains in Rome."
        with says_in_turn(served, CALL, "It rains in Rome."):
            async with agent.run_stream(QUESTION) as stream:
                assert [text async for text in stream.stream_text()][-1] == "It rains in Rome."
        typed = Agent(model, output_type=Animal)
        with says(served, '[{"name": "final_result", "arguments": {"name": "fox", "legs": 4}}]'):
            assert (await typed.run("Which animal?")).output == Animal(name="fox", legs=4)

    asyncio.run(run())
