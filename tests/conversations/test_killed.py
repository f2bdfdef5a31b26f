"""kill -9 at random moments under load: what was acknowledged is there, once, and is gone on from."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cellar.conversations import conversations
from cellar.conversations.records import Status
from cellar.conversations.schema import responses as response_table
from cellar.conversations.session import Session
from cellar.conversations.store import Store, open_store
from tests.conversations.killed import EACH, THREADS, check
from tests.conversations.postgres import Cluster
from tests.limits import ROOT, SECONDS, until


def _start(place: str, said: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.conversations.killed", place, str(said)], cwd=ROOT)


def _has(process: subprocess.Popen[bytes], said: Path, lines: int) -> None:
    """Wait until it has said so many lines."""
    until(lambda: _lines(said) >= lines or process.poll() is not None)


def _lines(said: Path) -> int:
    return said.read_bytes().count(b"\n") if said.exists() else 0


def _check(store: Store, acknowledged: dict[str, int]) -> None:
    for conversation, turns in acknowledged.items():
        owner = f"owner{conversation[1:].partition('-')[0]}"
        stored = check(conversation, store.read(conversations.history, owner, conversation))
        # A turn may have been stored without anybody hearing of it any more; never more than the one.
        assert turns <= stored <= turns + 1


def _swept(store: Store) -> None:
    """Wait until nothing is unended: PostgreSQL notices a little later that a process is gone."""

    def ended() -> bool:
        store.sweep()
        return store.read(_unended) == 0

    until(ended)


def _unended(session: Session) -> int:
    return len([row for row in session.rows(response_table.select()) if Status(row.status).running])


def test_what_was_acknowledged_survives_a_kill(place: str, tmp_path: Path) -> None:
    draw, said, before = random.Random(7), tmp_path / "said", dict[str, int]()
    for _ in range(3):
        process = _start(place, said)
        try:
            _has(process, said, _lines(said) + draw.randrange(1, 200))
        finally:
            process.kill()
            process.wait(SECONDS)
        with open_store(place, sweep_seconds=None) as store:
            _swept(store)
            now = _acknowledged(said, before)
            _check(store, now)
            before = _stored(store)
    assert len(before) == THREADS * EACH
    assert sum(before.values()) > 20


def _stored(store: Store) -> dict[str, int]:
    names = [(f"owner{k}", f"c{k}-{j}") for k in range(THREADS) for j in range(EACH)]
    return {name: check(name, store.read(conversations.history, owner, name)) for owner, name in names}


def _acknowledged(said: Path, before: dict[str, int]) -> dict[str, int]:
    """Turns by conversation that are known to be stored. At a kill one may have been stored that nobody was told of."""
    found = dict[str, int]()
    for line in said.read_text().splitlines():
        assert not line.startswith("!"), line
        conversation, turn = line.split()
        last = found.get(conversation, -1)
        assert last < int(turn) <= last + 2, f"{line} was said twice, or two before it were not"
        found[conversation] = int(turn)
    turns = {conversation: turn + 1 for conversation, turn in found.items()}
    return {name: max(count, before.get(name, 0)) for name, count in turns.items()}


@pytest.mark.long
def test_what_was_acknowledged_survives_a_crash_of_the_database(postgres: Cluster, tmp_path: Path) -> None:
    postgres.empty()
    said, before = tmp_path / "said", dict[str, int]()
    for turns in (30, 120):
        process = _start(postgres.url, said)
        try:
            _has(process, said, _lines(said) + turns)
            postgres.stop(signal.SIGQUIT)  # at once, and recovered at the next start
            assert process.wait(SECONDS) == 0, "it noticed"
        finally:
            process.kill()
            postgres.stop()
            postgres.start()
        with open_store(postgres.url, sweep_seconds=None) as store:
            _swept(store)
            _check(store, _acknowledged(said, before))
            before = _stored(store)
    assert sum(before.values()) >= 150
