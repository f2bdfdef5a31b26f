"""Events of a response, one by one, held against the types of the official client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cellar.core.messages import CompletionOutput, RequestOutput, TokenLogprob
from cellar.core.sampling import SamplingParams
from cellar.engine.outputs import Delta
from cellar.server.responses.answer import Answer
from cellar.server.responses.body import response_body
from cellar.server.responses.requests import ResponseRequest
from cellar.server.tools import ToolUse
from tests.server.served import TEXT

STREAM: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PLAIN = ToolUse()
HERMES = ToolUse([], "hermes")


def answer(use: ToolUse = PLAIN, num_top: int | None = None, seal: Any = None, **fields: Any) -> Answer:
    request = ResponseRequest(input="Hi", **fields)
    return Answer(response_body(request, "resp_1", "fake", 1, SamplingParams()), use, TEXT, num_top, seal, {})


def whole(made: Answer, deltas: Sequence[Delta], reason: str = "stop", reasoning_tokens: int = 0) -> list[Any]:
    """All events; every one is as the official client has it, and their numbers ascend."""
    events = made.begin()
    for delta in deltas:
        events += made.push(delta)
    ids = [id for delta in deltas for id in delta.token_ids]
    output = CompletionOutput(token_ids=ids, index=0, finish_reason=reason, num_reasoning_tokens=reasoning_tokens)
    events += made.finish(RequestOutput("x", None, [1, 2, 3], [output], True, None, 2))
    events.append(made.last())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return [strict(event) for event in events]


def strict(event: dict[str, Any]) -> Any:
    found = STREAM.validate_python(event)
    assert found.type == event["type"]
    assert type(found).__name__.lower().startswith("response")
    return found


def deltas(*texts: str, reason: str | None = "stop") -> list[Delta]:
    """Each text as two tokens."""
    made = [Delta("x", 0, text, [5, 6]) for text in texts]
    made[-1].finish_reason = reason
    return made


def test_text() -> None:
    events = whole(made := answer(), deltas("Hel", "", "lo"))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [e.response.status for e in (events[0], events[-1])] == ["in_progress", "completed"]
    assert events[0].response.output == []
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Hello"
    last: Response = events[-1].response
    assert last.output_text == "Hello"
    assert last.output[0] == events[-2].item
    assert last.usage is not None
    assert last.usage.model_dump(exclude_none=True) == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 1},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 9,
    }
    assert made.body["completed_at"] is not None


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    last = whole(answer(), deltas(""))[-1].response
    assert [item.type for item in last.output] == ["message"]
    assert last.output_text == ""


def test_a_cut_answer_is_incomplete() -> None:
    events = whole(answer(), deltas("Hel", "lo", reason="length"), "length")
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    assert events[-1].response.output[0].status == "incomplete"


def test_reasoning_text_and_calls() -> None:
    thought = [Delta("x", 0, "", [1], reasoning="Let me "), Delta("x", 0, "", [2], reasoning="think.")]
    text = ["Sure.", '\n<tool_call>\n{"name": "f", "argu', 'ments": {"x": ', "1}}\n</tool_call>"]
    more = ['\n<tool_call>{"name": "g", "arguments": {}}</tool_call>', "Done."]
    events = whole(made := answer(HERMES, seal=str.upper), [*thought, *deltas(*text, *more)], reasoning_tokens=2)
    last = events[-1].response
    assert [item.type for item in last.output] == ["reasoning", "message", "function_call", "function_call", "message"]
    thoughts, said, first, second, end = last.output
    assert thoughts.content[0].text == "Let me think."
    assert thoughts.encrypted_content == "LET ME THINK."
    assert said.content[0].text.strip() == "Sure."
    assert (first.name, first.arguments) == ("f", '{"x": 1}')
    assert (second.name, second.arguments) == ("g", "{}")
    assert end.content[0].text.strip() == "Done."
    assert all(item.status == "completed" for item in last.output)
    assert last.usage.output_tokens_details.reasoning_tokens == 2
    # each item is told from its beginning to its end, in order
    for index, item in enumerate(last.output):
        mine = [e for e in events if getattr(e, "output_index", None) == index]
        assert mine[0].type == "response.output_item.added"
        assert mine[-1].type == "response.output_item.done"
        assert mine[-1].item == item
        assert {getattr(e, "item_id", item.id) for e in mine} == {item.id}
    told = [e.delta for e in events if e.type == "response.function_call_arguments.delta" and e.output_index == 2]
    assert "".join(told) == '{"x": 1}'
    assert len(told) > 1
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "Let me think."
    assert [item["id"] for item in made.body["output"]] == [item.id for item in last.output]


def test_reasoning_alone_that_was_cut() -> None:
    events = whole(answer(), [Delta("x", 0, "", [1], finish_reason="length", reasoning="hm")], "length", 1)
    assert [(item.type, item.status) for item in events[-1].response.output] == [("reasoning", "incomplete")]


def test_scores_stand_beside_their_text() -> None:
    def scored(text: str, reason: str | None = None, reasoning: str = "") -> Delta:
        table = {5: TokenLogprob(-0.5, 1, "a"), 6: TokenLogprob(-1.5, 2, "b")}
        return Delta("x", 0, text, [5], [table], reason, reasoning=reasoning)

    events = whole(answer(num_top=2), [scored("", reasoning="hm"), scored(""), scored("one"), scored("two", "stop")])
    part = events[-1].response.output[1].content[0]
    assert [score.token for score in part.logprobs] == ["a"] * 3
    assert [top.logprob for top in part.logprobs[0].top_logprobs] == [-0.5, -1.5]
    told = [e for e in events if e.type == "response.output_text.delta"]
    assert [len(e.logprobs) for e in told] == [2, 1]


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_what_is_stopped_keeps_what_there_is(status: str) -> None:
    made = answer()
    made.begin()
    made.push(Delta("x", 0, "Hel", [5]))
    made.stop(status, {"code": "server_error", "message": "x"} if status == "failed" else None)
    (item,) = made.body["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hel")
    assert made.body["status"] == status
    if status == "failed":
        assert strict(made.last()).response.error.message == "x"


def test_a_queued_one() -> None:
    made = answer(background=True)
    events = [*made.begin(queued=True), *made.started()]
    assert [strict(event).type for event in events] == ["response.created", "response.queued", "response.in_progress"]
    assert [event["response"]["status"] for event in events] == ["queued", "queued", "in_progress"]
