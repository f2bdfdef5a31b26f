"""The journal of what was forgotten: there after a crash, torn or not, until its time has passed."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from cellar.runtime.tiers.forgotten import Forgotten

DAY = 86400.0


def opened(path: Path, seconds: float = DAY, name: bytes = b"server") -> Forgotten:
    return Forgotten(path, name, seconds)


def one(number: int) -> bytes:
    return bytes([number]) * 16


def test_it_is_there_for_the_next_process(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.add([one(1), one(2)])
    journal.add([one(3)])
    journal.discard([one(2), one(9)])
    for again in (journal, opened(tmp_path), opened(tmp_path)):
        assert sorted(again.all()) == [one(1), one(3)]
        assert one(1) in again
        assert one(2) not in again
    assert not opened(tmp_path, name=b"another").all()
    assert (next(tmp_path.iterdir()).stat().st_mode & 0o777) == 0o600


def test_a_torn_record_costs_only_itself(tmp_path: Path) -> None:
    opened(tmp_path).add([one(1), one(2)])
    (path,) = tmp_path.iterdir()
    os.truncate(path, path.stat().st_size - 5)
    journal = opened(tmp_path)
    assert journal.all() == [one(1)]
    journal.add([one(3)])
    assert sorted(opened(tmp_path).all()) == [one(1), one(3)]
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    assert opened(tmp_path).all() == [one(3)]


def test_it_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(100):
        opened(tmp_path).add([one(number)])
    (path,) = tmp_path.iterdir()
    before, now = path.stat().st_size, time.time()
    monkeypatch.setattr(time, "time", lambda: now + DAY + 1)
    journal = opened(tmp_path)
    assert not journal.all()
    assert before == 100 * 32
    assert path.stat().st_size == 0


def test_threads_and_processes_append_whole_records(tmp_path: Path) -> None:
    journals = [opened(tmp_path) for _ in range(4)]
    threads = [
        threading.Thread(target=lambda k=k: [journals[k % 4].add([one(k * 20 + i)]) for i in range(20)])
        for k in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(opened(tmp_path).all()) == sorted(one(k) for k in range(160))


def test_without_a_directory_nothing_is_promised(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    journal = opened(tmp_path / "nowhere")
    journal.add([one(1)])
    with pytest.raises(OSError):
        opened(tmp_path / "file").add([one(1)])
