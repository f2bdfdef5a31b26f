"""Conversations, items and responses in a store, with SQLite and with PostgreSQL."""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import sqlite3
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from cellar.conversations import conversations, events, items, references, responses, sweep
from cellar.conversations.database import FILE, open_database
from cellar.conversations.errors import ConversationLocked, Duplicate, Ended, NotFound, StoreFull, StoreUnavailable
from cellar.conversations.records import Event, Item, Response, Status, Tokens
from cellar.conversations.schema import metadata
from cellar.conversations.session import Session
from cellar.conversations.store import AsyncStore, Store, default_directory, open_store
from cellar.conversations.sweep import StoreLimits
from cellar.core.errors import ConfigError
from tests.limits import SECONDS, run_python, until


class Time:
    """A clock that goes on by one second whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def store(place: str) -> Iterator[Store]:
    with open_store(place, clock=Time(), sweep_seconds=None) as made:
        yield made


def message(id: str, text: str, role: str = "user") -> Item:
    return Item(id, {"id": id, "type": "message", "role": role, "content": text})


def response(id: str, owner: str = "a", **values: Any) -> Response:
    values = {"status": Status.IN_PROGRESS, "input": (message(f"{id}-in", "hello"),), **values}
    return Response(id, owner, values.pop("status"), 5.0, values.pop("body", {"id": id}), **values)


def ids(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def tokens(new: list[int], base: str | None = None, text: str = "") -> Tokens:
    return Tokens(ids(*new), base, 1, len(text), hashlib.sha256(text.encode()).digest())


def turn(store: Store, id: str, new: list[int] | None = None, base: str | None = None, **values: Any) -> Response:
    """A whole turn: begun and completed."""
    begun = store.write(responses.begin, response(id, **values))
    kept = None if new is None else tokens(new, base)
    out = (message(f"{id}-out", "hi", "assistant"),)
    store.write(responses.finish, begun.owner, id, Status.COMPLETED, {"id": id, "ok": True}, out, kept)
    return store.read(responses.get, begun.owner, id)


def names(found: tuple[Item, ...]) -> list[str]:
    return [item.id for item in found]


def test_a_conversation_lives(store: Store) -> None:
    made = store.write(
        conversations.create, "a", "c1", {"title": "Wine"}, (message("i1", "x"), message("i2", "\udcff\0é"))
    )
    assert store.read(conversations.get, "a", "c1") == made
    assert made.metadata == {"title": "Wine"}
    store.write(items.add, "a", "c1", [message("i3", "z")])
    assert names(store.read(items.page, "a", "c1").records) == ["i3", "i2", "i1"]
    first = store.read(items.page, "a", "c1", None, 2, True)
    assert names(first.records) == ["i1", "i2"]
    assert first.more
    assert first.records[1] == message("i2", "\udcff\0é")
    rest = store.read(items.page, "a", "c1", "i2", 2, True)
    assert names(rest.records) == ["i3"]
    assert not rest.more
    assert store.read(items.get, "a", "c1", "i3") == message("i3", "z")
    renamed = store.write(conversations.update, "a", "c1", {"title": "Cheese"})
    assert renamed.metadata == {"title": "Cheese"}
    assert renamed.updated_at > made.updated_at
    store.write(items.remove, "a", "c1", "i2")
    assert names(store.read(items.page, "a", "c1", ascending=True).records) == ["i1", "i3"]
    with pytest.raises(Duplicate):
        store.write(items.add, "a", "c1", [message("i4", ""), message("i3", "")])
    with pytest.raises(Duplicate):
        store.write(items.add, "a", "c1", [message("i5", ""), message("i5", "")])
    assert names(store.read(items.page, "a", "c1", ascending=True).records) == ["i1", "i3"]
    with pytest.raises(Duplicate):
        store.write(conversations.create, "a", "c1", {})
    store.write(conversations.remove, "a", "c1")
    with pytest.raises(NotFound):
        store.read(conversations.get, "a", "c1")
    assert store.read(sweep.total) == 0


def test_conversations_are_listed_by_their_last_activity(store: Store) -> None:
    for k in range(5):
        store.write(conversations.create, "a", f"c{k}", {})
    store.write(conversations.create, "b", "other", {})
    store.write(items.add, "a", "c1", [message("i", "x")])
    page = store.read(conversations.page, "a", None, 3)
    assert [one.id for one in page.records] == ["c1", "c4", "c3"]
    assert page.more
    page = store.read(conversations.page, "a", "c3", 3)
    assert [one.id for one in page.records] == ["c2", "c0"]
    assert not page.more
    assert [one.id for one in store.read(conversations.page, "a", "c2", 9, True).records] == ["c3", "c4", "c1"]


def test_a_chain_forks_and_keeps_its_ids(store: Store) -> None:
    turn(store, "r1", [1, 2, 3])
    turn(store, "r2", [4, 5], "r1", previous="r1")
    turn(store, "r3", [6], "r1", previous="r1")
    turn(store, "r4", [7, 8, 9], None, previous="r2")
    for id, expected in (("r1", [1, 2, 3]), ("r2", [1, 2, 3, 4, 5]), ("r3", [1, 2, 3, 6]), ("r4", [7, 8, 9])):
        history = store.read(responses.history, "a", id)
        assert history.tokens is not None
        assert history.tokens.ids.tolist() == expected
        assert history.tokens.base == id
        assert history.num_covered == len(history.items)
    assert names(store.read(responses.history, "a", "r4").items) == [
        "r1-in",
        "r1-out",
        "r2-in",
        "r2-out",
        "r4-in",
        "r4-out",
    ]
    assert names(store.read(responses.history, "a", "r3").items) == ["r1-in", "r1-out", "r3-in", "r3-out"]
    found = store.read(responses.get, "a", "r2")
    assert (found.previous, found.status, found.body) == ("r1", Status.COMPLETED, {"id": "r2", "ok": True})
    assert (names(found.input), names(found.output)) == (["r2-in"], ["r2-out"])
    with pytest.raises(NotFound):
        store.write(responses.begin, response("r5", previous="nothing"))
    with pytest.raises(ValueError, match="based on 'r3'"):
        turn(store, "r6", [1], "r3", previous="r2")


def test_a_response_without_ids_is_rendered_anew(store: Store) -> None:
    turn(store, "r1")
    history = store.read(responses.history, "a", "r1")
    assert history.tokens is None
    assert history.num_covered == 0
    assert names(history.items) == ["r1-in", "r1-out"]


def test_a_deleted_response_is_gone_but_not_for_those_that_go_on_from_it(store: Store) -> None:
    turn(store, "r1", [1])
    turn(store, "r2", [2], "r1", previous="r1")
    turn(store, "r3", [3], "r2", previous="r2")
    store.write(responses.remove, "a", "r2")
    store.write(responses.remove, "a", "r1")
    for gone in ("r1", "r2"):
        for operation in (responses.get, responses.history):
            with pytest.raises(NotFound):
                store.read(operation, "a", gone)
    history = store.read(responses.history, "a", "r3")
    assert history.tokens is not None
    assert history.tokens.ids.tolist() == [1, 2, 3]
    assert len(history.items) == 6
    store.write(responses.remove, "a", "r3")
    assert store.read(sweep.total) == 0
    assert store.read(_count) == (0, 0, 0, 0)


def _count(session: Session) -> tuple[int, ...]:
    return tuple(len(session.rows(table.select())) for table in metadata.sorted_tables)


def test_turns_of_a_conversation(store: Store) -> None:
    store.write(conversations.create, "a", "c", {}, (message("i0", "before"),))
    turn(store, "r1", [1, 2], conversation="c")
    store.write(items.add, "a", "c", [message("i1", "between")])
    history = store.read(conversations.history, "a", "c")
    assert names(history.items) == ["i0", "r1-in", "r1-out", "i1"]
    assert history.num_covered == 3
    assert history.tokens is not None
    assert (history.tokens.ids.tolist(), history.tokens.base) == ([1, 2], "r1")
    second = turn(store, "r2", [3], "r1", conversation="c")
    assert second.previous == "r1"
    assert second.conversation == "c"
    history = store.read(conversations.history, "a", "c")
    assert history.tokens is not None
    assert history.tokens.ids.tolist() == [1, 2, 3]
    assert history.num_covered == len(history.items) == 6
    fork = turn(store, "f1", [9], "r1", previous="r1")
    assert fork.conversation is None
    assert names(store.read(responses.history, "a", "f1").items) == ["i0", "r1-in", "r1-out", "f1-in", "f1-out"]
    assert len(store.read(conversations.history, "a", "c").items) == 6
    store.write(items.remove, "a", "c", "r1-out")
    history = store.read(conversations.history, "a", "c")
    assert history.tokens is None
    assert names(history.items) == ["i0", "r1-in", "i1", "r2-in", "r2-out"]
    assert names(store.read(responses.get, "a", "r1").output) == ["r1-out"]
    turn(store, "r3", [7, 7], conversation="c")
    store.write(responses.remove, "a", "r3")
    assert names(store.read(conversations.history, "a", "c").items)[-2:] == ["r3-in", "r3-out"]
    assert store.read(conversations.history, "a", "c").tokens is None
    store.write(conversations.remove, "a", "c")
    assert store.read(_count) == (0, 0, 0, 0)


def test_a_turn_that_fails_adds_nothing(store: Store) -> None:
    store.write(conversations.create, "a", "c", {}, (message("i0", "before"),))
    store.write(responses.begin, response("r1", conversation="c"))
    store.write(responses.finish, "a", "r1", Status.FAILED, {"id": "r1"})
    assert names(store.read(conversations.history, "a", "c").items) == ["i0"]
    assert names(store.read(responses.get, "a", "r1").input) == ["r1-in"]
    turn(store, "r2", [1], conversation="c")
    assert names(store.read(conversations.history, "a", "c").items) == ["i0", "r2-in", "r2-out"]


def test_two_turns_at_once_are_refused(store: Store, place: str) -> None:
    store.write(conversations.create, "a", "c", {})
    store.write(responses.begin, response("r1", conversation="c"))
    with open_store(place, sweep_seconds=None) as other:
        for one in (store, other):
            with pytest.raises(ConversationLocked):
                one.write(responses.begin, response("r2", conversation="c"))
            with pytest.raises(ConversationLocked):
                one.write(items.add, "a", "c", [message("i", "x")])
        with pytest.raises(Ended):
            other.write(responses.finish, "a", "r1", Status.COMPLETED, {})
    store.write(responses.finish, "a", "r1", Status.COMPLETED, {})
    turn(store, "r2", conversation="c")


def test_a_running_response_is_cancelled_from_elsewhere(store: Store, place: str) -> None:
    store.write(conversations.create, "a", "c", {})
    store.write(responses.begin, response("r1", conversation="c", background=True, status=Status.QUEUED))
    store.write(responses.proceed, "a", "r1", {"id": "r1", "now": 1})
    store.write(events.append, "a", "r1", [Event(0, b"zero"), Event(1, b"one")])
    with open_store(place, sweep_seconds=None) as other:
        assert other.read(events.after, "a", "r1", 0).events == (Event(1, b"one"),)
        assert other.read(events.after, "a", "r1").status is Status.IN_PROGRESS
        assert other.write(responses.cancel, "a", "r1").status is Status.CANCELLED
        assert other.write(responses.cancel, "a", "r1").status is Status.CANCELLED
    assert store.read(responses.running, ["r1", "r2"]) == frozenset()
    with pytest.raises(Ended, match="cancelled"):
        store.write(events.append, "a", "r1", [Event(2, b"two")])
    with pytest.raises(Ended):
        store.write(responses.finish, "a", "r1", Status.COMPLETED, {})
    assert len(store.read(events.after, "a", "r1").events) == 2
    turn(store, "r2", conversation="c")
    store.write(responses.begin, response("r3", background=True))
    assert store.read(responses.running, ["r1", "r3"]) == {"r3"}
    store.write(responses.finish, "a", "r3", Status.COMPLETED, {}, last_events=[Event(0, b"all")])
    assert store.read(events.after, "a", "r3") == events.Resumed((Event(0, b"all"),), Status.COMPLETED)


def _begin_and_wait(place: str, begun: Any) -> None:
    store = open_store(place, sweep_seconds=None)
    store.write(responses.begin, response("r1", conversation="c", background=True))
    begun.set()
    threading.Event().wait()


def test_what_a_killed_process_left_ends(store: Store, place: str) -> None:
    store.write(conversations.create, "a", "c", {})
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    process = context.Process(target=_begin_and_wait, args=(place, begun), daemon=True)
    process.start()
    assert begun.wait(SECONDS)
    with pytest.raises(ConversationLocked):
        store.write(responses.begin, response("r2", conversation="c"))
    assert store.sweep() == 0
    assert store.read(responses.get, "a", "r1").status is Status.IN_PROGRESS
    process.kill()
    process.join()

    def swept() -> bool:
        store.sweep()
        return not store.read(responses.get, "a", "r1").status.running

    until(swept)  # PostgreSQL notices a little later
    assert store.read(responses.get, "a", "r1").status is Status.FAILED
    turn(store, "r2", conversation="c")


def test_owners_see_nothing_of_each_other(store: Store) -> None:
    store.write(conversations.create, "a", "c", {}, (message("i", "secret"),))
    turn(store, "r", [1], conversation="c")
    store.write(responses.begin, response("run", background=True))
    for operation, arguments in (
        (conversations.get, ("c",)),
        (conversations.history, ("c",)),
        (items.page, ("c",)),
        (items.get, ("c", "i")),
        (responses.get, ("r",)),
        (responses.history, ("r",)),
        (events.after, ("run",)),
        (conversations.page, ("c",)),
    ):
        with pytest.raises(NotFound):
            store.read(operation, "b", *arguments)  # type: ignore[arg-type]
    for operation, arguments in (
        (conversations.update, ("c", {})),
        (conversations.remove, ("c",)),
        (items.add, ("c", [message("j", "")])),
        (items.remove, ("c", "i")),
        (responses.cancel, ("run",)),
        (responses.remove, ("r",)),
        (responses.finish, ("run", Status.COMPLETED, {})),
        (events.append, ("run", [Event(0, b"")])),
    ):
        with pytest.raises(NotFound):
            store.write(operation, "b", *arguments)  # type: ignore[arg-type]
    for values in ({"previous": "r"}, {"conversation": "c"}):
        with pytest.raises(NotFound):
            store.write(responses.begin, response("mine", "b", **values))
    assert store.read(conversations.page, "b").records == ()


def test_a_write_that_fails_leaves_its_neighbours_alone(store: Store) -> None:
    def broken(session: Session) -> None:
        conversations.create(session, "a", "half", {})
        raise RuntimeError("broken")

    block = threading.Event()
    store.submit(lambda session: block.wait(SECONDS))
    futures = [store.submit(conversations.create, "a", f"c{k}", {}) for k in range(20)]
    wrong = [store.submit(broken), store.submit(conversations.create, "a", "c7", {})]
    later = [store.submit(conversations.create, "a", f"d{k}", {}) for k in range(20)]
    block.set()
    assert len({future.result(SECONDS).id for future in futures + later}) == 40
    with pytest.raises(RuntimeError, match="broken"):
        wrong[0].result(SECONDS)
    with pytest.raises(Duplicate):
        wrong[1].result(SECONDS)
    assert len(store.read(conversations.page, "a", None, 100).records) == 40


def test_age_and_size_are_bounded_the_oldest_first(place: str) -> None:
    clock = Time()
    with open_store(place, StoreLimits(ttl=50, max_bytes=2**30), clock=clock, sweep_seconds=None) as store:
        for k in range(70):
            store.write(conversations.create, "a", f"old{k}", {})
        store.write(responses.begin, response("running"))
        clock.now += 1000
        store.write(conversations.create, "a", "new", {})
        assert store.sweep() == 70
        assert [one.id for one in store.read(conversations.page, "a").records] == ["new"]
        assert store.read(responses.get, "a", "running").status is Status.IN_PROGRESS
        store.write(responses.finish, "a", "running", Status.COMPLETED, {})
    with open_store(place, StoreLimits(ttl=None, max_bytes=500_000), clock=clock, sweep_seconds=None) as store:
        for k in range(100):
            store.write(conversations.create, "a", f"c{k}", {}, [message("i", "x" * 10_000)])
        turn(store, "r1", list(range(1000)))
        turn(store, "r2", list(range(1000)), "r1", previous="r1")
        assert store.read(sweep.used) >= store.read(sweep.total) > 1_000_000
        store.sweep()
        assert 300_000 < store.read(sweep.used) <= 500_000
        kept = {one.id for one in store.read(conversations.page, "a", None, 100).records}
        assert kept == {f"c{k}" for k in range(100 - len(kept), 100)}
        assert store.read(responses.history, "a", "r2").tokens is not None


def test_what_is_deleted_is_given_back_to_the_disk(tmp_path: Path) -> None:
    def pages(session: Session) -> tuple[int, int]:
        names = ("page_count", "freelist_count")
        count, free = (int(session.cursor.driver_rows(f"PRAGMA {name}")[0][0]) for name in names)
        return count, free

    with open_store(tmp_path, StoreLimits(ttl=None), sweep_seconds=None) as store:
        made = [store.submit(conversations.create, "a", f"c{k}", {}, [message("i", "x" * 20_000)]) for k in range(500)]
        wait(made, SECONDS)
        gone = [store.submit(conversations.remove, "a", f"c{k}") for k in range(480)]
        wait(gone, SECONDS)
        before, free = store.read(pages)
        assert free > 2000
        while store.write(sweep.shrink):  # as a sweep does, for a second at a time
            now, left = store.read(pages)
            assert free - left == sweep.PAGES_A_STEP, "a step is short"
            assert before - now >= free - left  # pages of SQLite's own go with them
            before, free = now, left
        store.sweep()
        assert store.read(pages)[1] <= sweep.PAGES_A_STEP
        assert len(store.read(conversations.page, "a", None, 100).records) == 20
        assert store.read(items.get, "a", "c499", "i").body["content"] == "x" * 20_000
    assert (tmp_path / FILE).stat().st_size < 3_000_000


def test_the_event_loop_goes_on(store: Store) -> None:
    async def main() -> None:
        facade = AsyncStore(store)
        block = threading.Event()
        waiting = asyncio.ensure_future(facade.write(lambda session: block.wait(SECONDS)))
        made = asyncio.ensure_future(facade.write(conversations.create, "a", "c", {}))
        assert (await facade.read(conversations.page, "a")).records == ()
        assert not made.done()
        block.set()
        assert await waiting
        assert (await made).id == "c"
        assert (await facade.read(conversations.get, "a", "c")).id == "c"
        with pytest.raises(NotFound):
            await facade.write(conversations.remove, "b", "c")
        await facade.close()
        with pytest.raises(StoreUnavailable):
            await facade.write(conversations.create, "a", "d", {})

    asyncio.run(main())


def test_the_tables_are_those_of_the_migrations(place: str) -> None:
    open_store(place, sweep_seconds=None).close()
    database = open_database(place, "1")
    with database.writer.begin() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
    database.close()


def test_a_store_of_the_first_version_is_brought_to_this_one(place: str) -> None:
    with open_store(place, sweep_seconds=None) as store:
        store.write(conversations.create, "a", "c", {}, [Item("i", {"id": "i"})])
    database = open_database(place, "1")
    with database.writer.begin() as connection:
        for sql in (
            "DROP INDEX items_by_id",
            "CREATE INDEX items_by_id ON items (thread, id)",
            "UPDATE alembic_version SET version_num = '0001'",
        ):
            connection.exec_driver_sql(sql)
    database.close()
    with open_store(place, sweep_seconds=None) as store:
        assert store.read(references.find, "a", ["i"]) == {"i": Item("i", {"id": "i"})}
    test_the_tables_are_those_of_the_migrations(place)


def test_items_are_found_by_their_ids_alone(tmp_path: Path) -> None:
    with open_store(tmp_path, sweep_seconds=None) as store:
        sql = "EXPLAIN QUERY PLAN SELECT threads.id FROM threads JOIN items ON items.thread = threads.id"
        found = store.read(
            lambda session: session.connection.exec_driver_sql(
                f"{sql} WHERE threads.owner = 'a' AND items.id IN ('x', 'y')"
            ).all()
        )
        assert any("items_by_id (id=?" in str(row) for row in found), found


def test_a_newer_store_is_refused(place: str) -> None:
    open_store(place, sweep_seconds=None).close()
    database = open_database(place, "1")
    with database.writer.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    database.close()
    with pytest.raises(ConfigError, match="another version of Cellar"):
        open_store(place, sweep_seconds=None)


def test_what_was_stored_is_there_after_reopening(place: str) -> None:
    with open_store(place, sweep_seconds=None) as store:
        store.write(conversations.create, "a", "c", {})
        turn(store, "r1", [5, 6], conversation="c")
    with open_store(place, sweep_seconds=None) as store:
        history = store.read(conversations.history, "a", "c")
        assert history.tokens is not None
        assert history.tokens.ids.tolist() == [5, 6]


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    with open_store(directory, sweep_seconds=None) as store:
        store.write(conversations.create, "a", "c", {})
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        files = [path for path in directory.rglob("*") if path.is_file()]
        assert len(files) == 5  # the database, -wal, -shm, two locks
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_sqlite_waits_for_the_disk(tmp_path: Path) -> None:
    def pragmas(session: Session) -> list[Any]:
        return [
            session.connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")
        ]

    with open_store(tmp_path, sweep_seconds=None) as store:
        assert store.write(pragmas) == ["wal", 2]


WHOLE_FILE = """
import fcntl, os, sys

file = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 510, 0x40000002)
    print("taken")
except BlockingIOError:
    print("held")
"""


def test_a_second_opening_in_one_process_keeps_the_locks_of_the_first(tmp_path: Path) -> None:
    """What SQLite locks while it has a file open; without it another process takes the log away from under it."""
    with open_store(tmp_path, sweep_seconds=None):
        assert run_python(WHOLE_FILE, str(tmp_path / FILE)).strip() == "held"
        open_store(tmp_path, sweep_seconds=None).close()
        assert run_python(WHOLE_FILE, str(tmp_path / FILE)).strip() == "held"


def test_a_locked_database_gives_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellar.conversations.database.BUSY_SECONDS", 0.2)
    with open_store(tmp_path, sweep_seconds=None) as store:
        other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="locked by another program"):
            store.write(conversations.create, "a", "c", {})
        assert store.read(conversations.page, "a").records == ()
        other.execute("ROLLBACK")
        other.close()
        store.write(conversations.create, "a", "c", {})


def test_a_full_database_gives_a_clear_error_and_no_half_conversation(tmp_path: Path) -> None:
    def bound(session: Session) -> None:
        pages = session.connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        session.connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 50}")

    with open_store(tmp_path, sweep_seconds=None) as store:
        store.write(bound)
        large = [message(f"i{k}", "x" * 20_000) for k in range(30)]
        block = threading.Event()
        store.submit(lambda session: block.wait(SECONDS))
        before = store.submit(conversations.create, "a", "before", {})
        refused = store.submit(conversations.create, "a", "large", {}, large)
        after = store.submit(conversations.create, "a", "after", {})
        block.set()
        with pytest.raises(StoreFull, match="full"):
            refused.result(SECONDS)
        assert {before.result(SECONDS).id, after.result(SECONDS).id} == {"before", "after"}
        assert {one.id for one in store.read(conversations.page, "a").records} == {"before", "after"}
        with pytest.raises(NotFound):
            store.read(items.page, "a", "large")


def test_places_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="data directory"):
        open_store(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be a mysql database"):
        open_store("mysql://host/name")
    with pytest.raises(StoreUnavailable, match="does not answer"):
        open_store(f"postgresql://nobody@/nothing?host={tmp_path}")
    with pytest.raises(ConfigError, match="ttl"):
        StoreLimits(ttl=-1)
    with pytest.raises(ConfigError, match="max_bytes"):
        StoreLimits(max_bytes=0)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "cellar"
