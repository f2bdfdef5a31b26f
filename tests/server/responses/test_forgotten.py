"""What is deleted leaves no KV, in the answer's time: but what others go on from stays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from sqlalchemy import bindparam, update

from cellar.conversations.schema import threads
from cellar.conversations.session import Session
from cellar.kv.conversations import MAX_MEMBERS
from tests.limits import until
from tests.server.served import MODEL, Served, serve
from tests.server.spoken import says

STORY = "A story of a fox that went far away and came back home. "
SAID = "So it went, and so it came back, as foxes do. " * 2


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(max_model_len=8192, num_slots=4096) as served, says(served, SAID):
        yield served
        served.settle()


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return served.client()


def ask(client: openai.OpenAI, text: str, previous: Response | None = None, **fields: Any) -> Response:
    last = {} if previous is None else {"previous_response_id": previous.id}
    made = client.responses.create(model=MODEL, input=text, max_output_tokens=200, **last, **fields)
    assert isinstance(made, Response)
    return made


def cached(made: Response) -> int:
    assert made.usage is not None
    return made.usage.input_tokens_details.cached_tokens


def total(made: Response) -> int:
    assert made.usage is not None
    return made.usage.total_tokens


def memory(served: Served, name: str) -> int:
    with served.http() as http:
        (found,) = http.get("/engine/memory", params={"conversation": name}).json()["data"]
    return sum(found["tokens"].values())


def test_a_turn_computes_what_is_new_and_one_token(client: openai.OpenAI) -> None:
    """The last token of an answer has no KV, and its end symbol is the template's; the rest is there, to the token."""
    last = ask(client, "One. " + STORY)
    for _ in range(4):
        following = ask(client, "And then?", last)
        assert cached(following) >= total(last) - 2
        last = following


def test_the_last_of_a_chain_goes_and_what_came_before_stays(served: Served, client: openai.OpenAI) -> None:
    first = ask(client, "Two. " + STORY)
    second, fork = ask(client, STORY * 2, first), ask(client, "Another. " + STORY, first)
    third = ask(client, STORY * 3, second)
    assert memory(served, first.id) > total(third)
    client.responses.delete(third.id)
    left = memory(served, first.id)
    assert total(second) <= left < total(third) + total(fork) - total(first)
    again = ask(client, STORY * 3, second, store=False)
    assert total(second) - 2 <= cached(again) <= total(second), "nothing of the third is found"
    assert cached(ask(client, "More.", fork)) >= total(fork) - 2


def test_what_others_go_on_from_stays_until_they_are_gone_too(served: Served, client: openai.OpenAI) -> None:
    first = ask(client, "Three. " + STORY)
    second = ask(client, STORY, first)
    client.responses.delete(first.id)
    third = ask(client, "More.", second)
    assert cached(third) >= total(second) - 2
    client.responses.delete(third.id)
    client.responses.delete(second.id)
    assert memory(served, first.id) == 0
    assert cached(ask(client, "Three. " + STORY, store=False)) <= 16, "what all prompts begin with"


def test_a_long_chain_leaves_nothing(served: Served, client: openai.OpenAI) -> None:
    """Its beginning is never everybody's, however many turns share it."""
    made = [ask(client, "Four. " + STORY)]
    for _ in range(MAX_MEMBERS + 2):
        made.append(ask(client, "And then?", made[-1]))
    for response in made:
        client.responses.delete(response.id)
    assert memory(served, made[0].id) == 0
    assert cached(ask(client, "Four. " + STORY, store=False)) <= 16


def test_a_conversation_keeps_the_turns_of_a_deleted_response_but_no_deleted_item(
    served: Served, client: openai.OpenAI
) -> None:
    id = client.conversations.create().id
    first = ask(client, "Five. " + STORY, conversation=id)
    second = ask(client, "More. " + STORY, conversation=id)
    before = memory(served, id)
    client.responses.delete(first.id)
    assert memory(served, id) == before >= total(second) - 2
    items = client.conversations.items.list(id, order="asc")
    client.conversations.items.delete(str(items.data[0].id), conversation_id=id)
    assert memory(served, id) == 0
    assert cached(ask(client, "Five. " + STORY, store=False)) <= 16


def test_what_is_not_there_forgets_nothing(served: Served, client: openai.OpenAI) -> None:
    id = client.conversations.create().id
    ask(client, "Six. " + STORY, conversation=id)
    before = memory(served, id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.delete("msg_x", conversation_id=id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete("resp_x")
    assert memory(served, id) == before > 0


def test_what_a_sweep_deletes_leaves_no_kv(served: Served, client: openai.OpenAI) -> None:
    """As if it had been too old: the sweep of the store that the server has tells the engine."""
    id = client.conversations.create().id
    made = ask(client, "Seven. " + STORY, conversation=id)
    chain = ask(client, "Eight. " + STORY)
    assert memory(served, id) > 0 < memory(served, chain.id)
    store = served.app.state.conversations.store.store

    def gone() -> bool:
        store.write(_aged, [id, chain.id])  # again, if the answer's own last write came behind it
        store.sweep()  # unless the server's own came first
        return memory(served, id) == 0 == memory(served, chain.id)

    until(gone)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    assert cached(ask(client, "Seven. " + STORY, store=False)) <= 16


def _aged(session: Session, ids: list[str]) -> None:
    for id in ids:
        session.do(update(threads).where(threads.c.id == bindparam("which")).values(active_at=0.0), which=id)
