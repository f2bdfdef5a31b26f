"""A PostgreSQL that is out of reach: whose packets vanish, not one that says no."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
from sqlalchemy.exc import DBAPIError

from cellar.conversations import conversations, database
from cellar.conversations.errors import NotFound, StoreUnavailable
from cellar.conversations.liveness import AdvisoryLocks
from cellar.conversations.store import Store, open_store
from tests.conversations.postgres import Cluster
from tests.limits import SECONDS, until
from tests.network import Way, way

pytestmark = pytest.mark.long  # they need PostgreSQL, see scripts/setup-system

SILENCE = 2


@pytest.fixture
def far(postgres: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    """A way to an empty PostgreSQL, which is soon given up."""
    postgres.empty()
    monkeypatch.setattr(database, "SILENCE_SECONDS", SILENCE)
    with way(postgres.directory / ".s.PGSQL.5432") as made:
        yield made


@contextmanager
def opened(far: Way) -> Iterator[Store]:
    with open_store(f"postgresql://cellar@127.0.0.1:{far.port}/postgres", sweep_seconds=None) as store:
        yield store


def errors(futures: list[Future[None]]) -> set[type[BaseException]]:
    return {type(future.exception(SECONDS)) for future in futures}


def test_a_hundred_writes_are_given_up_together_and_the_next_ones_work(far: Way) -> None:
    with opened(far) as store:
        store.write(conversations.create, "a", "before", {})
        far.cut()
        begin = time.monotonic()
        made = [store.submit(conversations.create, "a", f"c{k}", {}) for k in range(100)]
        made += [store.submit_read(None, conversations.get, "a", "before") for _ in range(100)]  # type: ignore[misc]
        assert errors(made) == {StoreUnavailable}
        assert time.monotonic() - begin < 100 * SILENCE / 4  # not each by itself
        far.heal()

        def works() -> bool:
            try:
                store.write(conversations.create, "a", "after", {})
            except StoreUnavailable:
                return False
            return True

        until(works)
        with pytest.raises(NotFound):
            store.read(conversations.get, "a", "c7")
        assert store.read(conversations.get, "a", "before").id == "before"


def test_reads_of_many_threads_are_given_up_together(far: Way) -> None:
    with opened(far) as store:
        store.write(conversations.create, "a", "before", {})
        far.cut()
        failed: list[float] = []
        asked = time.monotonic()

        def read() -> None:
            with pytest.raises(StoreUnavailable):
                store.read_asked(asked, conversations.get, "a", "before")
            failed.append(time.monotonic() - asked)

        def several() -> None:
            for _ in range(10):
                read()

        threads = [threading.Thread(target=several, daemon=True) for _ in range(database.READERS)]
        for thread in threads:
            thread.start()
        until(lambda: len(failed) == 40)
        assert max(failed) < 40 * SILENCE / 4


def test_who_was_cut_off_has_its_lock_again(far: Way) -> None:
    """Its session of before still holds it at the server, which has not heard of the cut."""
    with opened(far) as store, opened(far) as other:
        alive = store._database.liveness
        assert isinstance(alive, AdvisoryLocks)
        far.cut()
        with pytest.raises(DBAPIError):
            alive.hold()
        far.heal()

        def held() -> bool:
            try:
                alive.hold()
                other._database.liveness.hold()
            except DBAPIError:
                return False
            return True

        until(held)
        assert alive._connection is not None
        holds = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
        assert alive._connection.exec_driver_sql(holds).scalar_one() == 1
        assert other._database.liveness.alive(store.worker)
        assert not other._database.liveness.alive(f"{int(store.worker, 16) ^ 1:016x}")


def test_the_server_is_told_to_give_up_who_is_gone(postgres: Cluster) -> None:
    """Over a Unix socket, which is where the way ends, PostgreSQL takes these settings and has no use for them."""
    told = database._session_options()
    for name in ("tcp_user_timeout", "tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count"):
        assert f"-c {name}=" in told
    postgres.empty()
    with way(postgres.directory / ".s.PGSQL.5432") as made, opened(made) as store:
        shown = store.write(lambda session: session.connection.exec_driver_sql("SHOW lock_timeout").scalar_one())
        assert shown == "5s"
