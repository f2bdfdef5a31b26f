"""Who is alive, by files that are locked; and what is left of the dead."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from cellar.conversations import conversations, responses
from cellar.conversations.database import FILE
from cellar.conversations.errors import StoreUnavailable
from cellar.conversations.liveness import FileLocks
from cellar.conversations.records import Response, Status
from cellar.conversations.store import open_store
from cellar.core.errors import ConfigError


def test_files_of_the_dead_are_removed_by_a_sweep_and_those_of_the_living_stay(tmp_path: Path) -> None:
    with open_store(tmp_path, sweep_seconds=None) as store, open_store(tmp_path, sweep_seconds=None) as other:
        folder = tmp_path / f"{FILE}.workers"
        for k in range(50):
            (folder / f"{k:016x}").touch()
        store.sweep()
        assert {path.name for path in folder.iterdir()} == {store.worker, other.worker}
        other.write(responses.begin, Response("r", "a", Status.IN_PROGRESS, 0.0, {}))
        store.sweep()
        assert store.read(responses.get, "a", "r").status is Status.IN_PROGRESS


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by another's sweep that comes between the two."""
    mine, other, lock, removed = FileLocks(tmp_path / "w", "1"), FileLocks(tmp_path / "w", "2"), fcntl.flock, [0]

    def late(file: int, how: int) -> None:
        if how == fcntl.LOCK_EX and removed[0] < 2:
            removed[0] += 1
            (tmp_path / "w" / "1").unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    mine.hold()
    assert removed == [2]
    assert other.alive("1")
    assert other.clear() == 0
    mine.close()
    assert not other.alive("1")


def test_two_who_look_do_not_take_each_other_for_the_owner(tmp_path: Path) -> None:
    locks = FileLocks(tmp_path / "w", "1")
    locks.hold()
    (tmp_path / "w" / "2").touch()
    looking = os.open(tmp_path / "w" / "2", os.O_RDWR)
    fcntl.flock(looking, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert not locks.alive("2")
    os.close(looking)
    locks.close()


def test_locks_that_do_not_work_give_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk of the network without a lock service, or where no file can be opened any more."""

    def refused(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with (
        open_store(tmp_path / "before", sweep_seconds=None) as store,
        open_store(tmp_path / "before", sweep_seconds=None) as other,
    ):
        store.write(conversations.create, "a", "c", {})
        other.write(responses.begin, Response("r", "a", Status.IN_PROGRESS, 0.0, {}, "c"))
        with monkeypatch.context() as patch:
            patch.setattr("cellar.conversations.liveness.fcntl.flock", refused)
            with pytest.raises(ConfigError, match="cannot be used"):
                open_store(tmp_path / "data", sweep_seconds=None)
            with pytest.raises(StoreUnavailable, match="locks"):
                store.write(responses.begin, Response("s", "a", Status.IN_PROGRESS, 0.0, {}, "c"))
            with pytest.raises(StoreUnavailable, match="locks"):
                store.sweep()
            store.write(conversations.create, "a", "d", {})
        assert store.read(responses.get, "a", "r").status is Status.IN_PROGRESS
