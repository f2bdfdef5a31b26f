"""Turns of stored conversations go on from the ids that were stored, or are rendered anew and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.limits import until
from tests.server.served import MODEL, TEXT, Served, serve
from tests.server.spoken import says


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(
        {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}, max_model_len=2048, num_slots=512
    ) as served:
        yield served
        served.settle()


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return served.client()


def turns(served: Served) -> tuple[int, int]:
    """Turns that went on from their ids, and turns that did not."""
    with served.http() as http:
        text = http.get("/metrics").text
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("cellar:turns_"))
    names = [f'cellar:turns_{kind}_total{{model_name="{MODEL}"}}' for kind in ("continued", "rendered")]
    continued, rendered = (int(float(found.get(name, "0"))) for name in names)
    return continued, rendered


def ask(client: openai.OpenAI, **fields: Any) -> Response:
    made = client.responses.create(model=MODEL, **fields)
    assert isinstance(made, Response)
    return made


def begun(client: openai.OpenAI) -> list[Callable[[Response | None], dict[str, Any]]]:
    """Two ways to go on."""
    id = client.conversations.create().id
    return [
        lambda last: {} if last is None else {"previous_response_id": last.id},
        lambda last: {"conversation": id},
    ]


def test_only_what_is_new_is_tokenized(served: Served, client: openai.OpenAI) -> None:
    for way in begun(client):
        before, last = turns(served), None
        with says(served, "Hello there."):
            for k in range(4):
                said = "Tell me a little more of that, please." if k else "Hi"
                made = ask(client, input=said, stream=False, **way(last))
                if last is not None:
                    assert made.usage is not None
                    assert last.usage is not None
                    # all that was there is found again, but for the last chunk of 16
                    known = last.usage.total_tokens - 1
                    assert made.usage.input_tokens_details.cached_tokens > known - 2 * 16
                last = made
        after = turns(served)
        # a conversation's first turn follows nothing, and is one that has no ids
        first = way(None) != {}
        assert (after[0] - before[0], after[1] - before[1]) == (3, int(first))


def test_the_ids_are_those_that_were_made(served: Served, client: openai.OpenAI) -> None:
    """An answer whose text would be cut into other tokens goes on as it was made."""
    split = [*TEXT.encode("Hel", add_special_tokens=False), *TEXT.encode("lo.", add_special_tokens=False)]
    assert split != TEXT.encode("Hello.", add_special_tokens=False)
    ordinary = served.runtime._model._sampled

    def scripted(state: Any, total: int, mask: Any) -> int:
        return ordinary(state, [*split, 2][min(state.num_output, len(split))], mask)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served.runtime._model, "_sampled", scripted)
        first = ask(client, input="Hi")
        assert first.output_text == "Hello."
        second = ask(client, input="More", previous_response_id=first.id)
    whole = client.responses.input_tokens.count(
        model=MODEL, input=[*_said("user", "Hi"), *_said("assistant", "Hello."), *_said("user", "More")]
    )
    assert second.usage is not None
    assert second.usage.input_tokens == whole.input_tokens + len(split) - len(TEXT.encode(" Hello.", False))


def _said(role: str, text: str) -> list[Any]:
    return [{"role": role, "content": text}]


def test_what_is_rewritten_is_rendered_anew(served: Served, client: openai.OpenAI) -> None:
    with says(served, "<think>Hm.</think>Hello."):
        thought = ask(client, input="Hi")
    with says(served, "Hello."):
        first = ask(client, input="Hi")
        for previous, more in ((thought, {}), (first, {"instructions": "Be brief."})):
            before = turns(served)
            ask(client, input="More", previous_response_id=previous.id, **more)
            assert turns(served) == (before[0], before[1] + 1)


def test_other_ways_of_making_leave_ids_too(served: Served, client: openai.OpenAI) -> None:
    id = client.conversations.create().id
    with says(served, "Hello."):
        *_, last = client.responses.create(model=MODEL, input="Hi", conversation=id, stream=True)
        assert last.type == "response.completed"
        late = ask(client, input="More", conversation=id, background=True)
        until(lambda: client.responses.retrieve(late.id).status == "completed")
        before = turns(served)
        client.conversations.items.create(id, items=[{"role": "user", "content": "By the way"}])
        ask(client, input="More", conversation=id)
        assert turns(served) == (before[0] + 1, before[1])
        # a deleted item is no more said
        items = list(client.conversations.items.list(id, order="asc"))
        client.conversations.items.delete(str(items[0].id), conversation_id=id)
        ask(client, input="More", conversation=id)
        assert turns(served) == (before[0] + 1, before[1] + 1)
        ask(client, input="More", conversation=id)
        assert turns(served) == (before[0] + 2, before[1] + 1)
