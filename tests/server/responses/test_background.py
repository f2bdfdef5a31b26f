"""Background responses: polled, followed, cancelled, from any front; and what becomes of those whose process dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from cellar.conversations import events, responses
from cellar.conversations.records import Event, Response, Status
from cellar.conversations.store import open_store
from tests.limits import until
from tests.server.served import MODEL, Served, serve
from tests.server.spoken import says

LONG: dict[str, Any] = {"model": MODEL, "input": "Hi", "background": True, "max_output_tokens": 7000}
"""It takes 14 s at 2 ms a step: far longer than any step of a test that does not wait for its end."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def served(data: Path) -> Iterator[Served]:
    with serve({"data_dir": str(data)}, max_model_len=8192, num_slots=2048, latency=0.002) as served:
        yield served
        served.settle()


@pytest.fixture(scope="module")
def beside(data: Path) -> Iterator[Served]:
    """Another front over the same store."""
    with serve({"data_dir": str(data)}, max_model_len=8192, num_slots=2048) as served:
        yield served


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return served.client()


def test_it_is_polled(served: Served, client: openai.OpenAI) -> None:
    with says(served, "Hello there."):
        made = client.responses.create(model=MODEL, input="Hi", background=True)
        assert (made.status, made.output, made.background) == ("queued", [], True)
        until(lambda: client.responses.retrieve(made.id).status == "completed")
    whole = client.responses.retrieve(made.id)
    assert whole.output_text == "Hello there."
    assert whole.usage is not None
    next = client.responses.create(model=MODEL, input="x", previous_response_id=made.id, max_output_tokens=2)
    assert next.usage is not None
    assert next.usage.input_tokens > whole.usage.total_tokens


def test_a_stream_is_taken_up_where_it_broke_off(served: Served, beside: Served, client: openai.OpenAI) -> None:
    stream = client.responses.create(model=MODEL, input="Hi", background=True, stream=True, max_output_tokens=600)
    first = []
    for event in stream:
        first.append(event)
        if event.sequence_number == 9:
            break
    stream.close()
    assert [event.type for event in first[:3]] == ["response.created", "response.queued", "response.in_progress"]
    id = first[0].response.id  # type: ignore[union-attr]
    for other in (client, beside.client()):
        rest = list(other.responses.retrieve(id, stream=True, starting_after=9))
        assert [event.sequence_number for event in rest] == list(range(10, 10 + len(rest)))
        assert rest[-1].type == "response.incomplete"
        told = "".join(e.delta for e in [*first, *rest] if e.type == "response.output_text.delta")
        assert rest[-1].response == other.responses.retrieve(id)
        assert told == rest[-1].response.output_text
    again = [event.sequence_number for event in client.responses.retrieve(id, stream=True)]
    assert again == list(range(len(again)))


def test_only_what_was_streamed_can_be_streamed_again(client: openai.OpenAI) -> None:
    for made in (
        client.responses.create(model=MODEL, input="Hi", max_output_tokens=2),
        client.responses.create(model=MODEL, input="Hi", max_output_tokens=2, background=True),
    ):
        with pytest.raises(openai.BadRequestError) as found:
            client.responses.retrieve(made.id, stream=True)
        assert found.value.param == "stream"


def test_it_is_cancelled(served: Served, client: openai.OpenAI) -> None:
    stream = client.responses.create(**LONG, stream=True)
    id = next(event.response.id for event in stream if event.type == "response.created")
    until(lambda: client.responses.retrieve(id).status == "in_progress")
    gone = client.responses.cancel(id)
    assert gone.status == "cancelled"
    assert gone.output_text
    assert client.responses.cancel(id) == client.responses.retrieve(id) == gone
    kinds = [event.type for event in stream]
    assert "response.completed" not in kinds
    served.settle()
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.responses.create(model=MODEL, input="x", previous_response_id=id)


def test_one_that_has_ended_stays_as_it_is(served: Served, client: openai.OpenAI) -> None:
    with says(served, "Hello."):
        made = client.responses.create(model=MODEL, input="Hi", background=True)
        until(lambda: client.responses.retrieve(made.id).status == "completed")
    assert client.responses.cancel(made.id).status == "completed"
    at_once = client.responses.create(model=MODEL, input="Hi", max_output_tokens=2)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(at_once.id)


@pytest.mark.parametrize("stream", [False, True])
def test_another_front_cancels(served: Served, beside: Served, client: openai.OpenAI, stream: bool) -> None:
    if stream:
        made = next(iter(client.responses.create(**LONG, stream=True))).response  # type: ignore[union-attr]
    else:
        made = client.responses.create(**LONG)
    assert beside.client().responses.cancel(made.id).status == "cancelled"
    served.settle()  # it is made no further
    assert client.responses.retrieve(made.id).status == "cancelled"


def test_deleting_one_ends_it(served: Served, client: openai.OpenAI) -> None:
    made = client.responses.create(**LONG)
    client.responses.delete(made.id)
    served.settle()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_failure_is_told(client: openai.OpenAI, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("cellar.server.responses.answer.Answer.push", broken)
    made = client.responses.create(model=MODEL, input="Hi", background=True)
    until(lambda: client.responses.retrieve(made.id).status == "failed")
    failed = client.responses.retrieve(made.id)
    assert failed.error is not None
    assert failed.error.code == "server_error"
    (*_, last) = client.responses.create(model=MODEL, input="Hi", background=True, stream=True)
    assert last.type == "response.failed"
    (*_, last) = client.responses.create(model=MODEL, input="Hi", stream=True)
    assert last.type == "response.failed"
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model=MODEL, input="Hi")


def test_what_a_dead_process_left_has_failed(data: Path, client: openai.OpenAI, served: Served) -> None:
    """A process that dies lets go of its lock; what it made is found by whoever looks for it."""
    body = client.responses.create(model=MODEL, input="Hi", max_output_tokens=2).to_dict()
    body.pop("output")
    with open_store(data, sweep_seconds=None) as store:
        for id in ("resp_dead", "resp_mute"):
            begun = Response(id, "", Status.QUEUED, time.time(), {**body, "id": id}, background=True)
            store.write(responses.begin, begun)
        store.write(events.append, "", "resp_dead", [Event(0, b'event: response.created\ndata: {"a":1}\n\n')])
        assert client.responses.retrieve("resp_mute").status == "queued"
    served.app.state.conversations.store.store.sweep()
    dead = client.responses.retrieve("resp_mute")
    assert dead.status == "failed"
    assert dead.error is not None
    assert "the server ended" in dead.error.message
    (last,) = client.responses.retrieve("resp_dead", stream=True, starting_after=0)
    assert last.type == "response.failed"
    assert last.sequence_number == 1
    assert last.response.error is not None


def test_the_end_of_the_server_ends_it(tmp_path: Path) -> None:
    kept = {"data_dir": str(tmp_path)}
    with serve(kept, max_model_len=8192, num_slots=2048, latency=0.002) as served:
        client = served.client()
        made = client.responses.create(**LONG)
        until(lambda: client.responses.retrieve(made.id).status == "in_progress")
    with serve(kept) as served:
        ended = served.client().responses.retrieve(made.id)
    assert ended.status == "failed"
    assert ended.error is not None
    assert "stopped" in ended.error.message
