"""Items and conversations are found by id and by words, wherever their owner has them, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cellar.conversations import conversations, items, references, responses, search
from cellar.conversations.records import Item, Response, Status
from cellar.conversations.store import Store, open_store


@pytest.fixture
def store(place: str) -> Iterator[Store]:
    with open_store(place) as store:
        yield store


def message(id: str, text: str) -> Item:
    return Item(id, {"id": id, "type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]})


def answered(id: str, *new: Item, previous: str | None = None) -> Response:
    return Response(id, "ann", Status.COMPLETED, 1.0, {"object": "response"}, previous=previous, input=new)


def test_items_are_found_by_their_ids_alone(store: Store) -> None:
    store.write(conversations.create, "ann", "c1", {}, [message("m1", "One"), message("m2", "Two")])
    store.write(responses.add, answered("r1", message("m3", "Three")))
    store.write(responses.add, answered("r2", message("m3", "Three again"), previous="r1"))
    wanted = ["m1", "m2", "m3", "m4", *(f"x{k}" for k in range(1_200))]
    found = store.read(references.find, "ann", wanted)
    assert {id: item.body["content"][0]["text"] for id, item in found.items()} == {
        "m1": "One",
        "m2": "Two",
        "m3": "Three again",
    }
    assert not store.read(references.find, "bob", wanted)
    store.write(items.remove, "ann", "c1", "m1")
    store.write(responses.remove, "ann", "r1")
    assert store.read(references.find, "ann", ["m1"]) == {}
    store.write(responses.remove, "ann", "r2")
    assert store.read(references.find, "ann", ["m2", "m3"]).keys() == {"m2"}


def test_conversations_are_found_by_what_they_say(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for k in range(120):
        said = message(f"m{k}", f'Number {k}, said "Äpfel"\nand more')
        store.write(conversations.create, "ann", f"c{k:03}", {"title": f"Title {k}", "local": "c0ffee"}, [said])
    found = store.read(search.find, "ann", "TITLE äpfel", None, 50)
    assert (len(found.records), found.more) == (50, True)
    rest = store.read(search.find, "ann", "TITLE äpfel", found.last, 100)
    assert (len(rest.records), rest.more) == (70, False)
    assert {one.id for one in (*found.records, *rest.records)} == {f"c{k:03}" for k in range(120)}
    (only,) = store.read(search.find, "ann", '117 "äpfel"').records
    assert only.id == "c117"
    for words in ("input_text", "message", "117 Title 3x", "c0ffee"):
        assert not store.read(search.find, "ann", words).records, "what is said counts, not how it is written down"
    assert not store.read(search.find, "bob", "Title").records
    monkeypatch.setattr(search, "MAX_CONVERSATIONS", 30)
    seen, last, steps = set[str](), None, 0
    while True:
        part = store.read(search.find, "ann", "Number", last, 100)
        seen |= {one.id for one in part.records}
        last, steps = part.last, steps + 1
        if not part.more:
            break
    assert (len(seen), steps) == (120, 4), "each search is bounded, and goes on where the last one ended"
