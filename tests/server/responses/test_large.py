"""What a few bytes of a request stand for: items referred to again and again, and what was stored piece by piece."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from httpx import Client

from cellar.server.responses.requests import MAX_INPUT_ITEMS
from cellar.server.responses.tools import chosen
from tests.server.served import MODEL, TEXT, Served, serve

MOST = 8192
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(limits={"max_body_bytes": MOST}, max_model_len=8192, num_slots=2048, template=TEMPLATE) as served:
        yield served
        served.settle()


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return served.client()


@pytest.fixture
def http(served: Served) -> Iterator[Client]:
    with served.http() as http:
        yield http


def ask(http: Client, **body: Any) -> Any:
    return http.post("/v1/responses", json={"model": MODEL, "max_output_tokens": 1, **body}).json()


def message(id: str, length: int) -> dict[str, Any]:
    return {"type": "message", "id": id, "role": "user", "content": "a" * length}


@pytest.mark.parametrize("stored", [False, True])
def test_references_count_as_often_as_they_stand_there(http: Client, client: openai.OpenAI, stored: bool) -> None:
    given = [message("one", 2000)]
    if stored:
        (item,) = client.conversations.items.create(client.conversations.create().id, items=given).data  # type: ignore[arg-type]
        given, name = [], str(item.id)
    else:
        name = "one"
    refers = {"type": "item_reference", "id": name}
    assert ask(http, input=[*given, refers, refers])["status"] == "incomplete"
    error = ask(http, input=[*given, *[refers] * 5])["error"]
    assert "characters together, but a request may refer to 8192" in error["message"]


def test_references_to_many_items_are_counted_before_they_are_read(http: Client, client: openai.OpenAI) -> None:
    id = client.conversations.create().id
    refers = []
    for _ in range(5):
        (item,) = client.conversations.items.create(id, items=[message("x", 2000)]).data  # type: ignore[list-item]
        refers.append({"type": "item_reference", "id": item.id})
    assert "may refer to 8192" in ask(http, input=refers)["error"]["message"]


def test_a_conversation_larger_than_a_body(http: Client, client: openai.OpenAI) -> None:
    id = client.conversations.create().id
    for letter in "abcde":
        client.conversations.items.create(id, items=[{"role": "user", "content": letter * 2000}])
    error = ask(http, conversation=id, input="now")["error"]
    assert (error["param"], "set truncation to auto" in error["message"]) == ("conversation", True)
    text = "c" * 2000 + "d" * 2000 + "e" * 2000 + "now"
    made = ask(http, conversation=id, input="now", truncation="auto")
    assert made["usage"]["input_tokens"] == len(TEXT.encode(text, add_special_tokens=False))


def test_a_list_of_large_items_comes_in_pages(http: Client, client: openai.OpenAI) -> None:
    id = client.conversations.create().id
    for letter in "abcdefg":
        client.conversations.items.create(id, items=[{"role": "user", "content": letter * 3000}])
    page = http.get(f"/v1/conversations/{id}/items", params={"order": "asc", "limit": 100}).json()
    assert (len(page["data"]), page["has_more"]) == (2, True)
    for order, letters in (("asc", "abcdefg"), ("desc", "gfedcba")):
        listed = client.conversations.items.list(id, order=order, limit=100)  # type: ignore[arg-type]
        assert [item.content[0].text[0] for item in listed] == list(letters)  # type: ignore[union-attr]
    client.conversations.items.create(id, items=[{"role": "user", "content": "h" * 7000}])
    client.conversations.items.create(id, items=[{"role": "user", "content": "i" * 7000}])
    assert len(list(client.conversations.items.list(id, limit=100))) == 9  # one at least, however large


@pytest.mark.parametrize("in_conversation", [False, True])
def test_a_chain_larger_than_a_body(http: Client, client: openai.OpenAI, in_conversation: bool) -> None:
    """A chain of responses, one of which may have been made in a conversation."""
    last: dict[str, Any] = {}
    if in_conversation:
        id = client.conversations.create().id
        for letter in "xy":
            last = ask(http, conversation=id, input=letter * 1500)
    for letter in "abcde":
        before = {"previous_response_id": last["id"]} if last else {}
        last = ask(http, input=letter * 1500, **before, truncation="auto")
    error = ask(http, previous_response_id=last["id"], input="now")["error"]
    assert (error["param"], "set truncation to auto" in error["message"]) == ("previous_response_id", True)
    made = ask(http, previous_response_id=last["id"], input="now", truncation="auto")
    assert 1500 * 3 < made["usage"]["input_tokens"] < 1500 * 5


def test_an_input_of_too_many_items(served: Served) -> None:
    with serve(limits={"max_body_bytes": 2**21}, template=TEMPLATE) as roomy, roomy.http() as http:
        error = ask(http, input=[{"role": "user", "content": ""}] * (MAX_INPUT_ITEMS + 1))["error"]
        assert (error["param"], str(MAX_INPUT_ITEMS) in error["message"]) == ("input", True)
        roomy.settle()


def test_many_tools_cost_as_much_as_there_are() -> None:
    """40,000 functions in a namespace were compared each with each: minutes."""
    tools = [
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": f"f{k}"} for k in range(40_000)]}
    ]
    allowed = [{"type": "function", "name": f"n__f{k}"} for k in range(40_000)]
    begun = time.process_time()
    found, mode = chosen(tools, {"type": "allowed_tools", "mode": "auto", "tools": allowed})
    assert (len(found), mode) == (40_000, "auto")
    assert time.process_time() - begun < 10
