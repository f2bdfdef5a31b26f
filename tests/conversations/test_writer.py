"""Many writes in one transaction: what each costs, and that what fails leaves the others alone."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from cellar.conversations import conversations, items
from cellar.conversations.errors import Duplicate, NotFound, StoreUnavailable
from cellar.conversations.records import Item
from cellar.conversations.session import Session
from cellar.conversations.store import Steady, Store, open_store
from tests.limits import SECONDS, join_all


def _heard(store: Store) -> list[str]:
    """What SQLite is told from now on by the writer."""
    said: list[str] = []
    store.write(lambda session: session.connection.connection.dbapi_connection.set_trace_callback(said.append))  # type: ignore[union-attr]
    return said


def _kinds(said: list[str]) -> Counter[str]:
    return Counter(one.split()[0] for one in said)


def _blocked(store: Store) -> threading.Event:
    """The writer does nothing until this is set; what is submitted meanwhile is one group."""
    begun, block = threading.Event(), threading.Event()
    store.submit(lambda _: (begun.set(), block.wait(SECONDS)))
    assert begun.wait(SECONDS)
    return block


def _half(session: Session) -> None:
    conversations.create(session, "a", "half", {})
    raise RuntimeError("broken")


def test_a_group_is_one_transaction_without_savepoints(tmp_path: Path) -> None:
    with open_store(tmp_path, sweep_seconds=None) as store:
        said, block = _heard(store), _blocked(store)
        made = [store.submit(conversations.create, "a", f"c{k}", {}) for k in range(20)]
        missing = store.submit(conversations.remove, "a", "nothing")
        said.clear()
        block.set()
        wait([*made, missing], SECONDS)
        with pytest.raises(NotFound):  # it had changed nothing: the others need not be done again
            missing.result()
        assert all(future.exception() is None for future in made)
        kinds = _kinds(said)
        assert kinds["INSERT"] == 20
        assert kinds["SAVEPOINT"] == 0
        assert kinds["COMMIT"] == 2  # that of the one that blocked, too


def test_what_fails_after_a_change_is_taken_back_alone(tmp_path: Path) -> None:
    with open_store(tmp_path, sweep_seconds=None) as store:
        said, block = _heard(store), _blocked(store)
        made = [store.submit(conversations.create, "a", f"c{k}", {}, [Item(f"i{k}", {})]) for k in range(10)]
        broken, twice = store.submit(_half), store.submit(conversations.create, "a", "c3", {})
        said.clear()
        block.set()
        wait([*made, broken, twice], SECONDS)
        assert all(future.exception() is None for future in made)
        with pytest.raises(RuntimeError, match="broken"):
            broken.result()
        with pytest.raises(Duplicate):
            twice.result()
        assert _kinds(said)["SAVEPOINT"] == 12
        assert _kinds(said)["COMMIT"] == 2
        assert len(store.read(conversations.page, "a", None, 100).records) == 10
        assert [len(store.read(items.page, "a", f"c{k}").records) for k in range(10)] == [1] * 10


def test_one_write_that_fails_leaves_nothing(place: str) -> None:
    with open_store(place, sweep_seconds=None) as store:
        with pytest.raises(RuntimeError, match="broken"):
            store.write(_half)
        with pytest.raises(NotFound):
            store.read(conversations.get, "a", "half")
        store.write(conversations.create, "a", "half", {})


def test_a_clock_that_is_set_back_does_not_make_the_newest_the_oldest(tmp_path: Path) -> None:
    times = iter([1000.0, 2000.0, 500.0, 501.0, 3000.0])
    steady = Steady(lambda: next(times))
    seen = [steady() for _ in range(5)]
    assert seen == sorted(set(seen))
    assert seen[-1] == 3000.0
    now = [1_000_000.0]
    with open_store(tmp_path, clock=lambda: now[0], sweep_seconds=None) as store:
        store.write(conversations.create, "a", "before", {})
        now[0] -= 86400
        store.write(conversations.create, "a", "after", {})
        assert [one.id for one in store.read(conversations.page, "a").records] == ["after", "before"]


def test_whoever_comes_while_the_store_closes_is_answered(tmp_path: Path) -> None:
    store, futures, ready = open_store(tmp_path, sweep_seconds=None), list[Future[Any]](), threading.Barrier(5)

    def ask(k: int) -> None:
        ready.wait(SECONDS)
        try:
            for j in range(10_000):
                futures.append(store.submit(conversations.create, "a", f"c{k}-{j}", {}))
        except StoreUnavailable:
            return

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    ready.wait(SECONDS)
    store.close()
    join_all(threads)
    assert not wait(futures, SECONDS).not_done
    with pytest.raises(StoreUnavailable, match="closed"):
        store.submit(conversations.create, "a", "late", {})


def test_reads_between_writes_see_what_was_done_and_fail_by_themselves(tmp_path: Path) -> None:
    with open_store(tmp_path, sweep_seconds=None) as store:
        store.write(conversations.create, "a", "c", {"title": "done"})
        block, told = _blocked(store), list[str]()
        found = store.submit_read(lambda: told.append("told"), conversations.get, "a", "c")
        missing = store.submit_read(None, conversations.get, "a", "nothing")
        broken = store.submit_read(None, lambda session: session.connection.exec_driver_sql("SELECT * FROM nowhere"))
        refused = store.submit_read(None, lambda session: conversations.create(session, "a", "d", {}))
        after = store.submit_read(None, conversations.get, "a", "c")
        block.set()
        assert found.result(SECONDS).metadata == {"title": "done"}
        assert after.result(SECONDS).id == "c"
        with pytest.raises(NotFound):
            missing.result(SECONDS)
        with pytest.raises(StoreUnavailable, match="nowhere"):
            broken.result(SECONDS)
        with pytest.raises(StoreUnavailable):  # its connection only reads
            refused.result(SECONDS)
        store.write(lambda _: None)  # what is told of the group has been told
        assert told == ["told"]
        with pytest.raises(NotFound):
            store.read(conversations.get, "a", "d")


def test_who_waits_for_many_writes_is_told_once_for_all_of_a_transaction(tmp_path: Path) -> None:
    with open_store(tmp_path, sweep_seconds=None) as store:
        block, told = _blocked(store), list[int]()
        made = [
            store.submit_told(
                lambda: told.append(sum(future.done() for future in made)), conversations.create, "a", f"c{k}", {}
            )
            for k in range(20)
        ]
        block.set()
        wait(made, SECONDS)
        store.write(lambda _: None)  # what is told of the group has been told
        assert told == [20] * 20, "each of these callables is another one; all futures were done"

        calls = list[int]()
        block, one = _blocked(store), lambda: calls.append(1)
        several = [store.submit_told(one, conversations.create, "a", f"d{k}", {}) for k in range(20)]
        block.set()
        wait(several, SECONDS)
        store.write(lambda _: None)
        assert calls == [1]
