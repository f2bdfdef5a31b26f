"""OpenAI's Agents SDK talks with the server: a tool is called and its output told, in a session of either kind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)

from tests.server.served import MODEL, Served, serve
from tests.server.spoken import says_in_turn

CALL = 'I look it up.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ASKED: list[str] = []


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    ASKED.append(city)
    return f"It rains in {city}."


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    set_tracing_disabled(True)
    with serve({"tool_call_parser": "hermes"}, max_model_len=4096, num_slots=1024) as served:
        yield served
        served.settle()


def agent_of(client: openai.AsyncOpenAI) -> Agent[Any]:
    model = OpenAIResponsesModel(MODEL, client)
    return Agent(name="Meteorologist", instructions="Say what the weather is.", tools=[weather], model=model)


async def talk(served: Served, session: Any, client: openai.AsyncOpenAI, stream: bool) -> list[str]:
    """Two turns; -> the answers."""
    answers = []
    for question in ("How is the weather in Rome?", "And tomorrow?"):
        if stream:
            running = Runner.run_streamed(agent_of(client), question, session=session)
            kinds = [event.type async for event in running.stream_events()]
            assert "raw_response_event" in kinds
            answers.append(str(running.final_output))
        else:
            answers.append(str((await Runner.run(agent_of(client), question, session=session)).final_output))
    return answers


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["server", "client"])
def test_an_agent_with_a_session(served: Served, kind: str, stream: bool) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            kept = OpenAIConversationsSession(openai_client=client)
            session: Any = kept if kind == "server" else SQLiteSession("one")
            ASKED.clear()
            with says_in_turn(served, CALL, "It rains.", "I do not know."):
                assert await talk(served, session, client, stream) == ["It rains.", "I do not know."]
            assert ASKED == ["Rome"]
            kinds = [item.get("type", "message") for item in await session.get_items()]
            call = ["message", "message", "function_call", "function_call_output", "message"]
            assert kinds == [*call, "message", "message"]
            if kind == "server":
                id = await kept._get_session_id()
                items = [item async for item in client.conversations.items.list(id, order="asc")]
                assert [item.type for item in items] == kinds

    asyncio.run(run())


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_whose_turns_the_server_remembers(served: Served, stream: bool) -> None:
    """Without a session: by `previous_response_id`, and in a conversation of the server."""

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            agent = agent_of(client)
            conversation = (await client.conversations.create()).id
            for named in ({"conversation_id": conversation}, {"auto_previous_response_id": True}):
                with says_in_turn(served, CALL, "It rains."):
                    if stream:
                        running = Runner.run_streamed(agent, "How is the weather?", **named)  # type: ignore[arg-type]
                        async for _ in running.stream_events():
                            pass
                        assert running.final_output == "It rains."
                    else:
                        done = await Runner.run(agent, "How is the weather?", **named)  # type: ignore[arg-type]
                        assert done.final_output == "It rains."
            kinds = [item.type async for item in client.conversations.items.list(conversation, order="asc")]
            assert kinds == ["message", "message", "function_call", "function_call_output", "message"]

    asyncio.run(run())
