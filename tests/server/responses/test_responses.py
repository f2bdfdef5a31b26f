"""/v1/responses by the official client: every verb, sync, async and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.server.served import MODEL, TEXT, Served, plain, serve
from tests.server.spoken import says

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather somewhere.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TEMPLATE = (
    "{% for t in tools or [] %}[tool] {{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %} ({{ m.reasoning_content }}){% endif %}"
    "{% if m.content %}{{ '' if m.role == 'assistant' else ' ' }}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %} {{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


OPTIONS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(OPTIONS, max_model_len=2048, num_slots=512, template=TEMPLATE) as served:
        yield served
        served.settle()


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return served.client()


def prompt_of(served: Served, *lines: str) -> list[int]:
    """Ids of a conversation as the template shows it."""
    return TEXT.encode("".join(f"{line}\n" for line in lines) + "[assistant]", add_special_tokens=False)


def ask(client: openai.OpenAI, input: Any = "Hi", **fields: Any) -> Response:
    made = client.responses.create(model=MODEL, input=input, **{"max_output_tokens": 8, **fields})
    assert isinstance(made, Response)
    return made


def test_a_response(served: Served, client: openai.OpenAI) -> None:
    ids = prompt_of(served, "[system] Be brief.", "[user] Hi")
    made = ask(client, instructions="Be brief.", metadata={"a": "b"}, temperature=0, user="me")
    assert made.id.startswith("resp_")
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.output_text == TEXT.decode(plain(ids, 8))
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens, made.usage.total_tokens) == (len(ids), 8, len(ids) + 8)
    assert (made.instructions, made.metadata, made.temperature, made.user) == ("Be brief.", {"a": "b"}, 0, "me")
    assert (made.object, made.model, made.error, made.tools, made.tool_choice) == ("response", MODEL, None, [], "auto")
    with says(served, "Hello."):
        whole = ask(client)
    assert (whole.status, whole.output_text, whole.incomplete_details) == ("completed", "Hello.", None)
    assert whole.completed_at is not None
    assert whole.completed_at >= whole.created_at


def test_it_is_kept_and_deleted(client: openai.OpenAI) -> None:
    made = ask(client, [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}])
    assert client.responses.retrieve(made.id) == made
    items = client.responses.input_items.list(made.id, order="asc").data
    assert [item.content[0].text for item in items] == ["one", "two"]  # type: ignore[union-attr]
    assert [item.id for item in client.responses.input_items.list(made.id, limit=1).data] == [items[1].id]
    assert [item.id for item in client.responses.input_items.list(made.id, limit=1)] == [items[1].id, items[0].id]
    client.responses.delete(made.id)
    for gone in (
        lambda: client.responses.retrieve(made.id),
        lambda: client.responses.delete(made.id),
        lambda: client.responses.input_items.list(made.id),
        lambda: client.responses.cancel(made.id),
    ):
        with pytest.raises(openai.NotFoundError) as found:
            gone()
        assert made.id in found.value.message


def test_what_is_not_stored_is_not_there(client: openai.OpenAI) -> None:
    made = ask(client, store=False)
    assert made.store is False  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_stream_ends_with_what_is_kept() -> None:
    with serve(OPTIONS, max_model_len=2048, num_slots=512, template=TEMPLATE, latency=0.02) as served:
        client = served.client()
        with client.responses.stream(model=MODEL, input="Hi", max_output_tokens=8) as stream:
            events: list[Any] = list(stream)
        kinds, last = [event.type for event in events], events[-1].response
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.incomplete"
        assert kinds.count("response.output_text.delta") > 1
        assert client.responses.retrieve(last.id).output == last.output


def test_frames_have_names_and_numbers(served: Served) -> None:
    with served.http() as http:
        raw = http.post("/v1/responses", json={"input": "Hi", "stream": True, "max_output_tokens": 2}).text
    frames = raw.strip().split("\n\n")
    assert all(frame.startswith("event: response.") for frame in frames)
    assert [json.loads(frame.split("\ndata: ")[1])["sequence_number"] for frame in frames] == list(range(len(frames)))


def test_the_async_client(served: Served) -> None:
    async def talk() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            made = await client.responses.create(model=MODEL, input="Hi", max_output_tokens=4)
            again = await client.responses.create(
                model=MODEL, input="More", previous_response_id=made.id, max_output_tokens=4, stream=True
            )
            kinds = [event.type async for event in again]
            assert kinds[-1] == "response.incomplete"
            assert await client.responses.retrieve(made.id) == made
            assert [item.type async for item in client.responses.input_items.list(made.id)] == ["message"]
            count = await client.responses.input_tokens.count(model=MODEL, input="Hi")
            assert made.usage is not None
            assert count.input_tokens == made.usage.input_tokens
            late = await client.responses.create(model=MODEL, input="x", background=True)
            assert (await client.responses.cancel(late.id)).status == "cancelled"
            await client.responses.delete(made.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(made.id)
            talked = await client.conversations.create(items=[{"role": "user", "content": "Hi"}])
            assert [item.type async for item in client.conversations.items.list(talked.id)] == ["message"]

    asyncio.run(talk())


def test_a_chain_and_its_forks(served: Served, client: openai.OpenAI) -> None:
    with says(served, "Hello."):
        first = ask(client, "Hi", instructions="Be brief.")
        second = ask(client, "Who?", previous_response_id=first.id)
        fork = ask(client, "Where?", previous_response_id=first.id, instructions="Be long.")
        third = ask(client, "And?", previous_response_id=second.id)
    # what was instructed before is not carried over
    begin = ("[user] Hi", "[assistant]Hello.")
    lengths = {
        second.id: prompt_of(served, *begin, "[user] Who?"),
        fork.id: prompt_of(served, "[system] Be long.", *begin, "[user] Where?"),
        third.id: prompt_of(served, *begin, "[user] Who?", "[assistant]Hello.", "[user] And?"),
    }
    for made in (second, fork, third):
        assert made.usage is not None
        assert made.usage.input_tokens == len(lengths[made.id])
    assert third.usage is not None
    assert third.usage.input_tokens_details.cached_tokens > 0
    count = client.responses.input_tokens.count(model=MODEL, input="And?", previous_response_id=second.id)
    assert count.input_tokens == third.usage.input_tokens
    client.responses.delete(first.id)
    assert ask(client, "x", previous_response_id=third.id).status == "incomplete"
    for gone in (first.id, "resp_none"):
        with pytest.raises(openai.BadRequestError) as found:
            ask(client, "x", previous_response_id=gone)
        assert (found.value.code, found.value.param) == ("previous_response_not_found", "previous_response_id")


def test_an_item_may_stand_for_another(served: Served, client: openai.OpenAI) -> None:
    with says(served, "Hello."):
        first = ask(client)
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    twice = ask(client, [reference, {"role": "user", "content": "x"}], previous_response_id=first.id)
    assert twice.usage is not None
    said = prompt_of(served, "[user] Hi", "[assistant]Hello.", "[assistant]Hello.", "[user] x")
    assert twice.usage.input_tokens == len(said)
    again = ask(client, [reference, {"role": "user", "content": "x"}])
    assert again.usage is not None
    assert again.usage.input_tokens == len(prompt_of(served, "[assistant]Hello.", "[user] x"))
    client.responses.delete(first.id)
    client.responses.delete(twice.id)
    client.responses.delete(again.id)
    for gone in ("msg_none", first.output[0].id):
        with pytest.raises(openai.BadRequestError, match=gone):
            ask(client, [{"type": "item_reference", "id": gone}])


def test_a_call_and_its_output(served: Served, client: openai.OpenAI) -> None:
    with says(served, f"Let me see.\n{CALL}"):
        made = ask(client, tools=[WEATHER], max_output_tokens=200)
    said, call = made.output
    assert made.output_text == "Let me see.\n"
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Rome"}, "completed")
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    with says(served, "It rains."):
        chained = ask(client, [output], previous_response_id=made.id, tools=[WEATHER])
        told = [{"role": "user", "content": "Hi"}, said.to_dict(), call.to_dict(), output]
        by_hand = ask(client, told, tools=[WEATHER], store=False)
    assert chained.usage is not None
    assert by_hand.usage is not None
    assert chained.usage.input_tokens == by_hand.usage.input_tokens
    assert chained.output_text == by_hand.output_text == "It rains."
    with pytest.raises(openai.BadRequestError, match="call_id lost"):
        ask(client, [{**output, "call_id": "lost"}], previous_response_id=made.id)


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
    ],
)
def test_a_forced_call_is_streamed(client: openai.OpenAI, choice: Any) -> None:
    other = {**WEATHER, "name": "other", "parameters": None}
    fields: dict[str, Any] = {"tools": [other, WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    if choice == "required":
        fields["tools"] = [WEATHER]
    with client.responses.stream(model=MODEL, input="Hi", max_output_tokens=400, temperature=0, **fields) as stream:
        events: list[Any] = list(stream)
    last = events[-1].response
    (call,) = last.output
    assert call.type == "function_call"
    assert call.name == "weather"
    told = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(told) == call.arguments
    if last.status == "completed":
        assert isinstance(json.loads(call.arguments)["city"], str)
    assert last.tool_choice == choice or last.tool_choice.to_dict() == choice  # type: ignore[union-attr]


def test_structured_output(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    made = ask(client, text=form, max_output_tokens=200)
    assert json.loads(made.output_text)["x"] in (1, 2)
    assert made.text is not None
    assert made.text.format is not None
    assert made.text.format.to_dict() == form["format"]
    free = ask(client, text={"format": {"type": "json_object"}}, max_output_tokens=30)
    assert free.output_text.lstrip().startswith("{")


def test_reasoning_is_an_item_of_its_own(served: Served, client: openai.OpenAI) -> None:
    with says(served, "<think>\nHm, Rome.\n</think>\n\nRome."):
        made = ask(client, "Where?", max_output_tokens=200)
        with client.responses.stream(model=MODEL, input="Where?", max_output_tokens=200) as stream:
            events = list(stream)
    thought, _ = made.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text == "Hm, Rome."
    assert thought.encrypted_content is None
    assert made.output_text == "Rome."
    assert made.usage is not None
    assert 0 < made.usage.output_tokens_details.reasoning_tokens < made.usage.output_tokens
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "Hm, Rome."
    next = ask(client, "When?", previous_response_id=made.id)
    assert next.usage is not None
    seen = prompt_of(served, "[user] Where?", "[assistant] (Hm, Rome.)Rome.", "[user] When?")
    assert next.usage.input_tokens == len(seen)


def test_encrypted_reasoning_comes_back(served: Served, client: openai.OpenAI) -> None:
    with says(served, "<think>Hm, Rome.</think>Rome."):
        made = ask(client, "Where?", store=False, include=["reasoning.encrypted_content"], max_output_tokens=200)
    thought, said = made.output
    assert thought.type == "reasoning"
    sealed = thought.encrypted_content
    assert sealed
    assert "Rome" not in sealed
    kept = {"type": "reasoning", "id": thought.id, "summary": [], "encrypted_content": sealed}
    told: Any = [{"role": "user", "content": "Where?"}, kept, said.to_dict(), {"role": "user", "content": "When?"}]
    next = ask(client, told, store=False)
    assert next.usage is not None
    seen = prompt_of(served, "[user] Where?", "[assistant] (Hm, Rome.)Rome.", "[user] When?")
    assert next.usage.input_tokens == len(seen)
    for broken in ("abc", sealed[:-8] + "AAAAAAA=", "é", ""):
        told[1]["encrypted_content"] = broken
        if not broken:
            ask(client, told, store=False)
            continue
        with pytest.raises(openai.BadRequestError) as found:
            ask(client, told, store=False)
        assert found.value.code == "invalid_encrypted_content"


def test_log_probabilities(client: openai.OpenAI) -> None:
    made = ask(client, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=3)
    part = made.output[0].content[0]  # type: ignore[union-attr]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert len(part.logprobs) == 3
    assert [len(one.top_logprobs) for one in part.logprobs] == [2, 2, 2]
    assert all(one.logprob <= 0 for one in part.logprobs)
    assert "".join(one.token for one in part.logprobs) == made.output_text


def test_truncation_drops_whole_turns_from_the_beginning(served: Served, client: openai.OpenAI) -> None:
    long = "word " * 400
    turns: Any = [{"role": role, "content": f"{k} {long}"} for k in range(8) for role in ("user", "assistant")]
    turns.append({"role": "user", "content": "the end"})
    with pytest.raises(openai.BadRequestError) as found:
        ask(client, turns)
    assert (found.value.code, found.value.param) == ("context_length_exceeded", "input")
    made = ask(client, turns, truncation="auto", instructions="Be brief.", store=False)
    assert made.truncation == "auto"
    assert made.usage is not None
    left = next(
        ids for k in range(8) if len(ids := prompt_of(served, "[system] Be brief.", *lines(turns[2 * k :]))) + 8 <= 2048
    )
    assert made.usage.input_tokens == len(left)
    with pytest.raises(openai.BadRequestError):  # the last turn alone is too long
        ask(client, "word " * 4000, truncation="auto")


def lines(turns: list[dict[str, str]]) -> list[str]:
    return [f"[{turn['role']}]{'' if turn['role'] == 'assistant' else ' '}{turn['content']}" for turn in turns]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"frequency": 1}, "frequency"),
        ({"model": "other"}, "model"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{**WEATHER, "async": True}]}, "tools"),
        ({"tools": [{**WEATHER, "parameters": 3}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}]}},
            "tool_choice",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 3}}}}, "text.format"),
        ({"text": {"format": {"type": "grammar"}}}, "text"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"text": {"size": "low"}}, "text.size"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning"),
        ({"include": ["everything"]}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**30}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"metadata": {str(k): "" for k in range(17)}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"metadata": {"a": 3}}, "metadata"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"background": True, "store": False}, "store"),
        ({"conversation": "conv_x", "store": False}, "store"),
        ({"conversation": "conv_x", "previous_response_id": "resp_x"}, "previous_response_id"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"priority": 3}, "priority"),
        ({"stop": "x" * 9000}, "stop"),
    ],
)
def test_what_is_refused_names_its_parameter(served: Served, fields: dict[str, Any], param: str) -> None:
    with served.http() as http:
        answer = http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 2, **fields})
        assert answer.status_code in (400, 404), answer.text
        error = answer.json()["error"]
        assert error["param"] == param, error
        assert error.keys() == {"message", "type", "param", "code"}


def test_neutral_fields_are_accepted(client: openai.OpenAI) -> None:
    made = ask(
        client,
        service_tier="auto",
        truncation="disabled",
        max_tool_calls=3,
        parallel_tool_calls=True,
        safety_identifier="me",
        prompt_cache_key="mine",
        prompt_cache_retention="24h",
        reasoning={"summary": "auto"},
        text={"verbosity": "medium"},
        include=["web_search_call.action.sources"],
        extra_body={"client_metadata": {"a": "b"}, "top_k": 3, "seed": 1, "stop": ["zzz"], "moderation": None},
    )
    assert (made.max_tool_calls, made.safety_identifier, made.prompt_cache_key) == (3, "me", "mine")
    assert made.service_tier == "default"


def test_what_this_server_does_not_do_says_so(served: Served) -> None:
    with served.http() as http:
        compact = http.post("/v1/responses/compact", json={"model": MODEL, "input": "x"})
        assert compact.status_code == 400
        assert "does not compact" in compact.json()["error"]["message"]
        for query, param in (
            ("starting_after=3", "starting_after"),
            ("include_obfuscation=true", "include_obfuscation"),
            ("include=x", "include"),
            ("stream=perhaps", "stream"),
        ):
            answer = http.get(f"/v1/responses/resp_x?{query}")
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param


def test_who_hangs_up_leaves_nothing(served: Served) -> None:
    with (
        served.http() as http,
        http.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True, "max_output_tokens": 1500}) as answer,
    ):
        line = next(line for line in answer.iter_lines() if line.startswith("data: "))
        id = json.loads(line.removeprefix("data: "))["response"]["id"]
    served.settle()
    with served.http() as http:
        assert http.get(f"/v1/responses/{id}").status_code == 404
