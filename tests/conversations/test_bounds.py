"""Many conversations, many owners at once, and a disk that is full."""

from __future__ import annotations

import random
import threading
from concurrent.futures import wait
from pathlib import Path

import pytest

from cellar.conversations import conversations, items, responses, sweep
from cellar.conversations.errors import NotFound
from cellar.conversations.records import Item, Response, Status, Tokens
from cellar.conversations.schema import metadata
from cellar.conversations.session import Session
from cellar.conversations.store import Store, open_store
from cellar.conversations.sweep import StoreLimits
from tests.conversations.killed import ids_of
from tests.limits import SECONDS, join_all, run_python

pytestmark = pytest.mark.long


def _sizes(session: Session) -> dict[str, int]:
    """Rows by table, and the bytes that they take."""
    counts = {
        table.name: int(session.connection.exec_driver_sql(f"SELECT count(*) FROM {table.name}").scalar_one())
        for table in metadata.sorted_tables
    }
    return {**counts, "bytes": sweep.used(session)}


def test_ten_thousand_conversations_half_of_them_deleted(place: str) -> None:
    content = "x" * 400
    with open_store(place, StoreLimits(ttl=None, max_bytes=3_000_000), sweep_seconds=None) as store:
        made = [
            store.submit(conversations.create, "a", f"c{k}", {}, [Item(f"i{k}", {"content": content})])
            for k in range(5_000)
        ]
        wait(made, SECONDS)
        made += [store.submit(conversations.create, "b", f"c{k}", {}) for k in range(5_000, 10_000)]
        wait(made, SECONDS)
        assert all(future.exception() is None for future in made)
        assert store.read(_sizes)["threads"] == 10_000
        gone = [store.submit(conversations.remove, "b", f"c{k}") for k in range(5_000, 10_000)]
        wait(gone, SECONDS)
        assert all(future.exception() is None for future in gone)
        sizes = store.read(_sizes)
        assert (sizes["threads"], sizes["items"]) == (5_000, 5_000)
        deleted = store.sweep()
        sizes = store.read(_sizes)
        assert sizes["threads"] == sizes["items"] == 5_000 - deleted
        assert 2_500_000 < sizes["bytes"] <= 3_000_000
        assert store.read(conversations.page, "b").records == ()
        left = store.read(conversations.page, "a", None, 10_000).records
        assert {one.id for one in left} == {f"c{k}" for k in range(deleted, 5_000)}, "the oldest went"


def _hammer(store: Store, owner: str, seed: int, faults: list[str]) -> None:
    """Random operations on one's own conversations, and on the other's, which are not there."""
    draw, other = random.Random(seed), "b" if owner == "a" else "a"
    turns = dict.fromkeys(range(200), 0)
    for k in turns:
        store.write(conversations.create, owner, f"{owner}-{k}", {"of": owner})
    for step in range(400):
        k = draw.randrange(200)
        mine, theirs = f"{owner}-{k}", f"{other}-{k}"
        kind = draw.randrange(4)
        if kind == 0:
            id = f"{owner}-r{step}"
            past = store.read(conversations.history, owner, mine)
            begun = Response(id, owner, Status.IN_PROGRESS, 0.0, {"of": owner}, mine)
            store.write(responses.begin, begun)
            base = None if past.tokens is None else past.tokens.base
            output = [Item(f"{id}-out", {"of": owner})]
            tokens = Tokens(ids_of(mine, turns[k]), base)
            store.write(responses.finish, owner, id, Status.COMPLETED, {"of": owner}, output, tokens)
            turns[k] += 1
        elif kind == 1:
            page = store.read(conversations.page, owner, None, 300)
            if len(page.records) != 200 or any(one.owner != owner for one in page.records):
                faults.append(f"{owner} sees {len(page.records)} conversations")
        elif kind == 2:
            history = store.read(conversations.history, owner, mine)
            expected = [id for turn in range(turns[k]) for id in ids_of(mine, turn).tolist()]
            if history.tokens is not None and history.tokens.ids.tolist() != expected:
                faults.append(f"{mine} has other ids")
            faults += [f"{mine} has {item.id}" for item in history.items if item.body != {"of": owner}]
        for operation in (conversations.get, conversations.history, items.page):
            try:
                store.read(operation, owner, theirs)  # type: ignore[arg-type]
                faults.append(f"{owner} reads {theirs}")
            except NotFound:
                pass
        if kind == 3:
            for operation in (conversations.remove, conversations.update, items.add):
                arguments = {conversations.remove: (), conversations.update: ({},), items.add: ([Item("i", {})],)}
                try:
                    store.write(operation, owner, theirs, *arguments[operation])  # type: ignore[arg-type, index]
                    faults.append(f"{owner} writes {theirs}")
                except NotFound:
                    pass


def test_two_owners_see_nothing_of_each_other(place: str) -> None:
    faults: list[str] = []
    with open_store(place, sweep_seconds=0.2) as store:
        threads = [threading.Thread(target=_hammer, args=(store, owner, 3, faults)) for owner in ("a", "b")]
        for thread in threads:
            thread.start()
        join_all(threads)
        assert faults == []
        assert len(store.read(conversations.page, "a", None, 300).records) == 200


FULL = """
import resource, sys
from cellar.conversations import conversations
from cellar.conversations.errors import StoreFull
from cellar.conversations.records import Item
from cellar.conversations.store import open_store

store = open_store(sys.argv[1], sweep_seconds=None)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
stored = 0
try:
    for k in range(1000):
        new = [Item(f"i{k}-{j}", {"text": "x" * 3000}) for j in range(5)]
        store.write(conversations.create, "a", f"c{k}", {}, new)
        stored += 1
except StoreFull as error:
    print(stored, error)
assert len(store.read(conversations.page, "a", None, 1000).records) == stored
store.close()
"""


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    count, said = run_python(FULL, str(tmp_path)).strip().split(" ", 1)
    assert "cannot be written" in said
    assert int(count) > 5
    with open_store(tmp_path, sweep_seconds=None) as store:
        found = store.read(conversations.page, "a", None, 1000).records
        assert len(found) == int(count)
        for one in found:
            assert len(store.read(items.page, "a", one.id).records) == 5
        store.write(conversations.create, "a", "after", {})
