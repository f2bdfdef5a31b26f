"""A loop of tools under Qwen 3's own template: steps go on from their ids, what the user says next is rendered anew."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.server.served import MODEL, Served, serve
from tests.server.spoken import says_in_turn

TEMPLATE = Path(__file__).parents[4] / "shared" / "data" / "chat_templates" / "llamacpp" / "Qwen-Qwen3-0.6B.jinja"

pytestmark = pytest.mark.skipif(not TEMPLATE.exists(), reason="the chat templates are not beside this checkout")

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CITIES = ("Rome", "Oslo", "Cork")
THOUGHTS = [f"I do not know yet how it is in {city}, so I look it up." for city in CITIES]


def call_of(thought: str, city: str) -> str:
    call = json.dumps({"name": "weather", "arguments": {"city": city}})
    return f"<think>\n{thought}\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


@pytest.fixture
def served() -> Iterator[Served]:
    options = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    with serve(options, max_model_len=8192, num_slots=4096, template=TEMPLATE.read_text()) as served:
        yield served
        served.settle()


def turns(served: Served) -> tuple[int, int]:
    """Turns that went on from their ids, and turns that did not."""
    with served.http() as http:
        text = http.get("/metrics").text
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("cellar:turns_"))
    continued, rendered = (
        int(float(found.get(f'cellar:turns_{kind}_total{{model_name="{MODEL}"}}', "0")))
        for kind in ("continued", "rendered")
    )
    return continued, rendered


def ask(client: openai.OpenAI, said: Any, last: Response | None, **fields: Any) -> Response:
    before = {} if last is None else {"previous_response_id": last.id}
    made = client.responses.create(model=MODEL, input=said, tools=[WEATHER], **before, **fields)  # type: ignore[list-item]
    assert isinstance(made, Response)
    return made


def counted(made: Response) -> tuple[int, int]:
    """Prompt tokens, and those of them that were found."""
    assert made.usage is not None
    return made.usage.input_tokens, made.usage.input_tokens_details.cached_tokens


def test_three_calls_and_a_question(served: Served) -> None:
    client = served.client()
    texts = [call_of(thought, city) for thought, city in zip(THOUGHTS, CITIES, strict=True)]
    said: Any = "How is the weather in Rome, Oslo and Cork?"
    made: list[Response] = []
    before = turns(served)
    with says_in_turn(served, *texts, "<think>\nNow I know.\n</think>\n\nIt rains everywhere."):
        for city in (*CITIES, None):
            made.append(ask(client, said, made[-1] if made else None))
            if city is not None:
                thought, call = made[-1].output[0], made[-1].output[-1]
                assert thought.type == "reasoning"
                assert call.type == "function_call"
                assert json.loads(call.arguments) == {"city": city}
                said = [{"type": "function_call_output", "call_id": call.call_id, "output": f"It rains in {city}."}]
    assert made[-1].output_text == "It rains everywhere."
    assert turns(served) == (before[0] + 3, before[1]), "between a call and its answer thoughts stay"
    for last, following in pairwise(made):
        assert last.usage is not None
        assert counted(following)[1] >= last.usage.total_tokens - 2, "all but the last token of an answer is found"

    # Now the thoughts go: what stands before the first of them is found, the rest computed, from the same ids cold.
    question = {"max_output_tokens": 12, "temperature": 0, "store": False}
    warm = ask(client, "And tomorrow?", made[-1], **question)
    assert turns(served) == (before[0] + 3, before[1] + 1)
    first = counted(made[0])[0]
    assert first - 16 <= counted(warm)[1] < first + 16
    with served.http() as http:
        assert http.delete("/engine/memory/device").status_code == 200
    cold = ask(client, "And tomorrow?", made[-1], **question)
    assert counted(cold) == (counted(warm)[0], 0)
    assert [item.model_dump(exclude={"id"}) for item in cold.output] == [
        item.model_dump(exclude={"id"}) for item in warm.output
    ]
    whole = client.chat.completions.create(
        model=MODEL,
        messages=messages(),  # type: ignore[arg-type]
        tools=[{"type": "function", "function": {k: v for k, v in WEATHER.items() if k not in ("type", "strict")}}],  # type: ignore[list-item]
        max_completion_tokens=1,
    )
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == counted(cold)[0], "as a chat of all that was said"


def messages() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather in Rome, Oslo and Cork?"}]
    for thought, city in zip(THOUGHTS, CITIES, strict=True):
        function = {"name": "weather", "arguments": json.dumps({"city": city})}
        call = {"id": f"call_{city}", "type": "function", "function": function}
        found.append({"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [call]})
        found.append({"role": "tool", "tool_call_id": f"call_{city}", "content": f"It rains in {city}."})
    found.append({"role": "assistant", "content": "It rains everywhere."})
    return [*found, {"role": "user", "content": "And tomorrow?"}]
