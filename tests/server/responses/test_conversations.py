"""/v1/conversations by the official client, turns in them, and whose they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.limits import join_all, until
from tests.server.served import MODEL, Served, serve
from tests.server.spoken import says


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    kept = {"data_dir": str(tmp_path_factory.mktemp("data")), "api_key": ["ann", "bob"]}
    with serve(kept, max_model_len=8192, num_slots=2048) as served:
        yield served
        served.settle()


def client_of(served: Served, key: str = "ann") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return client_of(served)


def said(client: openai.OpenAI, id: str) -> list[str]:
    """The texts of a conversation's messages."""
    items = client.conversations.items.list(id, order="asc", limit=100)
    return [part.text for item in items if item.type == "message" for part in item.content]  # type: ignore[union-attr]


def test_a_conversation_from_its_beginning_to_its_end(client: openai.OpenAI) -> None:
    first: Any = {"type": "message", "role": "user", "content": "Hi", "id": "msg_mine"}
    made = client.conversations.create(metadata={"title": "A"}, items=[first])
    assert made.id.startswith("conv_")
    assert (made.object, made.metadata) == ("conversation", {"title": "A"})
    assert client.conversations.retrieve(made.id) == made
    renamed = client.conversations.update(made.id, metadata={"title": "B"})
    assert renamed.metadata == {"title": "B"}
    added = client.conversations.items.create(made.id, items=[{"role": "assistant", "content": "Ho"}, first])
    assert [item.role for item in added.data] == ["assistant", "user"]  # type: ignore[union-attr]
    assert (added.first_id, added.last_id, added.has_more) == (added.data[0].id, added.data[1].id, False)
    assert said(client, made.id) == ["Hi", "Ho", "Hi"]
    one = client.conversations.items.retrieve(added.first_id, conversation_id=made.id)
    assert one == added.data[0]
    pages = client.conversations.items.list(made.id, limit=2)
    assert pages.has_more
    assert [item.id for item in pages.data] == [added.last_id, added.first_id]
    assert len(list(pages)) == 3
    assert client.conversations.items.delete(added.first_id, conversation_id=made.id).id == made.id
    assert said(client, made.id) == ["Hi", "Hi"]
    gone = client.conversations.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "conversation.deleted")
    for ask in (
        lambda: client.conversations.retrieve(made.id),
        lambda: client.conversations.update(made.id, metadata={}),
        lambda: client.conversations.delete(made.id),
        lambda: client.conversations.items.list(made.id),
        lambda: client.conversations.items.create(made.id, items=[first]),
        lambda: client.conversations.items.retrieve("x", conversation_id=made.id),
        lambda: client.conversations.items.delete("x", conversation_id=made.id),
        lambda: client.responses.create(model=MODEL, input="x", conversation=made.id),
    ):
        with pytest.raises(openai.NotFoundError) as found:
            ask()
        assert made.id in found.value.message


def test_turns_are_added(served: Served, client: openai.OpenAI) -> None:
    id = client.conversations.create().id
    with says(served, "One."):
        first = client.responses.create(model=MODEL, input="Hi", conversation=id)
    assert first.conversation is not None
    assert first.conversation.id == id
    assert said(client, id) == ["Hi", "One."]
    with says(served, "Two."):
        named: Any = {"id": id}
        second = client.responses.create(model=MODEL, input="And?", conversation=named, stream=True)
        assert [event.type for event in second][-1] == "response.completed"
    assert said(client, id) == ["Hi", "One.", "And?", "Two."]
    with says(served, "Three."):
        third = client.responses.create(model=MODEL, input="And?", conversation=id, background=True)
        until(lambda: client.responses.retrieve(third.id).status == "completed")
    assert said(client, id)[4:] == ["And?", "Three."]
    # the conversation is what counts, not its responses
    client.responses.delete(first.id)
    assert len(said(client, id)) == 6
    fork = client.responses.create(model=MODEL, input="Or?", previous_response_id=third.id, max_output_tokens=2)
    assert fork.usage is not None
    assert len(said(client, id)) == 6
    same = client.responses.input_tokens.count(model=MODEL, input="Or?", conversation=id)
    assert fork.usage.input_tokens == same.input_tokens


def test_two_turns_at_once(served: Served, client: openai.OpenAI) -> None:
    id = client.conversations.create().id
    with client.responses.create(
        model=MODEL, input="Hi", conversation=id, stream=True, max_output_tokens=4000
    ) as stream:
        events = iter(stream)
        assert next(events).type == "response.created"
        for turn in (
            lambda: client.responses.create(model=MODEL, input="Ho", conversation=id),
            lambda: client.responses.create(model=MODEL, input="Ho", conversation=id, background=True),
            lambda: client.conversations.items.create(id, items=[{"role": "user", "content": "Ho"}]),
        ):
            with pytest.raises(openai.BadRequestError) as found:
                turn()
            assert found.value.code == "conversation_locked"
    # who hung up holds it no more, and has added nothing
    until(lambda: not _locked(client, id))
    assert said(client, id) == ["And?"]


def _locked(client: openai.OpenAI, id: str) -> bool:
    try:
        client.conversations.items.create(id, items=[{"role": "user", "content": "And?"}])
    except openai.BadRequestError:
        time.sleep(0.01)
        return True
    return False


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(
    served: Served, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    id = client.conversations.create(items=[{"role": "user", "content": "Hi"}]).id
    with monkeypatch.context() as patch:
        patch.setattr(served.app.state.api.desk, "open", broken)
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError):
                client.responses.create(model=MODEL, input="Ho", conversation=id, stream=stream)
    assert said(client, id) == ["Hi"]
    with says(served, "Fine."):
        client.responses.create(model=MODEL, input="Ho", conversation=id)
    assert said(client, id) == ["Hi", "Ho", "Fine."]


def test_turns_of_many_conversations_at_once(served: Served, client: openai.OpenAI) -> None:
    ids = [client.conversations.create().id for _ in range(8)]

    def talk(id: str) -> None:
        mine = client_of(served)
        for k in range(3):
            mine.responses.create(model=MODEL, input=f"{id} {k}", conversation=id, max_output_tokens=4)

    threads = [threading.Thread(target=talk, args=(id,)) for id in ids]
    for thread in threads:
        thread.start()
    join_all(threads)
    for id in ids:
        assert said(client, id)[::2] == [f"{id} {k}" for k in range(3)]


def test_the_list_is_the_owners(served: Served) -> None:
    ann, bob = client_of(served, "ann"), client_of(served, "bob")
    ids = [bob.conversations.create(metadata={"k": str(k)}).id for k in range(3)]
    bob.conversations.update(ids[0], metadata={"k": "new"})
    with served.http() as http:

        def listed(query: str = "", key: str = "bob") -> dict[str, Any]:
            answer = http.get(f"/v1/conversations?{query}", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        order = [ids[0], ids[2], ids[1]]
        assert [one["id"] for one in listed()["data"]] == order
        assert listed()["data"][0]["metadata"] == {"k": "new"}
        part = listed("limit=2")
        assert ([one["id"] for one in part["data"]], part["has_more"]) == (order[:2], True)
        assert [one["id"] for one in listed(f"after={order[1]}")["data"]] == order[2:]
        assert [one["id"] for one in listed("order=asc")["data"]] == order[::-1]
        assert not {one["id"] for one in listed("limit=100", "ann")["data"]} & set(ids)
        assert http.get("/v1/conversations?limit=101", headers={"authorization": "Bearer bob"}).status_code == 400
    with pytest.raises(openai.NotFoundError):
        ann.conversations.retrieve(ids[0])


def test_what_is_anothers_is_not_there(served: Served) -> None:
    ann, bob = client_of(served, "ann"), client_of(served, "bob")
    id = ann.conversations.create(items=[{"role": "user", "content": "secret"}]).id
    item = ann.conversations.items.list(id).data[0].id
    made = ann.responses.create(model=MODEL, input="secret", max_output_tokens=2)
    late = ann.responses.create(model=MODEL, input="secret", background=True, stream=True, max_output_tokens=2)
    (*_, last) = late
    assert last.type == "response.incomplete"
    for look in (
        lambda: bob.conversations.retrieve(id),
        lambda: bob.conversations.update(id, metadata={}),
        lambda: bob.conversations.delete(id),
        lambda: bob.conversations.items.list(id),
        lambda: bob.conversations.items.retrieve(item, conversation_id=id),
        lambda: bob.conversations.items.delete(item, conversation_id=id),
        lambda: bob.conversations.items.create(id, items=[{"role": "user", "content": "x"}]),
        lambda: bob.responses.create(model=MODEL, input="x", conversation=id),
        lambda: bob.responses.retrieve(made.id),
        lambda: bob.responses.retrieve(last.response.id, stream=True),
        lambda: bob.responses.cancel(last.response.id),
        lambda: bob.responses.delete(made.id),
        lambda: bob.responses.input_items.list(made.id),
    ):
        with pytest.raises(openai.NotFoundError) as found:
            look()
        assert "secret" not in found.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        bob.responses.create(model=MODEL, input="x", previous_response_id=made.id)
    assert refused.value.code == "previous_response_not_found"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"metadata": {"a": 3}}, "metadata"),
        ("", {"title": "x"}, "title"),
        ("", {"items": [{"type": "item_reference", "id": "x"}]}, "items"),
        ("", {"items": [{"role": "user", "content": "x"}] * 21}, "items"),
        ("/conv_x", {}, "metadata"),
        ("/conv_x/items", {}, "items"),
        ("/conv_x/items", {"items": []}, "items"),
        ("/conv_x/items?include=x", {"items": [{"role": "user", "content": "x"}]}, "include"),
    ],
)
def test_what_is_refused_names_its_parameter(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    with served.http() as http:
        headers = {"authorization": "Bearer ann"}
        answer = http.post(f"/v1/conversations{path}", json=body, headers=headers)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


def test_what_a_deleted_conversation_said_is_found_in_no_cache(served: Served, client: openai.OpenAI) -> None:
    """Its KV is gone before the answer; the store's and the engine's conversation have one name."""
    made = client.conversations.create(metadata={})
    question = "A story of a fox that went far away and came back home. " * 3
    with says(served, "So it went, and so it came back, as foxes do. " * 3):
        first = client.responses.create(model=MODEL, input=question, conversation=made.id, max_output_tokens=200)
    params = {"conversation": made.id}
    headers = {"authorization": "Bearer ann"}
    with served.http() as http:
        before = http.get("/engine/memory", params=params, headers=headers).json()["data"][0]["tokens"]["device"]
        assert first.usage is not None
        assert before >= first.usage.total_tokens - 32
        client.conversations.delete(made.id)
        after = http.get("/engine/memory", params=params, headers=headers).json()["data"][0]["tokens"]["device"]
    assert after == 0
    again = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": question}], max_completion_tokens=4
    )
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == 0


def test_conversations_are_searched(served: Served, client: openai.OpenAI) -> None:
    asked: Any = {"role": "user", "content": "Where do otters sleep?"}
    made = client.conversations.create(metadata={"title": "Rivers"}, items=[asked])
    item = client.conversations.items.list(made.id).data[0]
    with served.http() as http:

        def found(key: str, **query: Any) -> Any:
            return http.get("/v1/conversations", params=query, headers={"authorization": f"Bearer {key}"}).json()

        (one,) = found("ann", query="OTTERS rivers")["data"]
        assert (one["id"], one["metadata"]) == (made.id, {"title": "Rivers"})
        assert one["updated_at"] >= one["created_at"]
        assert found("bob", query="otters")["data"] == []
        assert found("ann", query="otters", order="asc")["error"]["param"] == "order"
        assert found("ann", query="otters", after="conv_x")["error"]["message"].count("conv_x")
        assert found("ann", query="x" * 513)["error"]["param"] == "query"
    for key, status in (("ann", 200), ("bob", 400)):
        with served.http() as http:
            body = {"input": [{"type": "item_reference", "id": item.id}], "max_output_tokens": 1}
            answer = http.post("/v1/responses", json=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status, "items of another key are not there"
