"""A store that is locked by others, or damaged, while the server runs: 503 with the reason, and chats go on."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import httpx
import pytest

from cellar.conversations.database import FILE
from tests.limits import run_python, until
from tests.server.served import MODEL, serve

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
TURN = {"model": MODEL, "input": "Hello", "max_output_tokens": 4}


def _error(answer: httpx.Response) -> str:
    assert answer.status_code == 503, answer.text
    return str(answer.json()["error"]["message"])


def test_a_locked_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellar.conversations.database.BUSY_SECONDS", 0.2)
    with serve({"data_dir": str(tmp_path)}) as served, served.http() as http:
        assert http.post("/v1/responses", json=TURN).status_code == 200
        other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert "locked by another program" in _error(http.post("/v1/conversations", json={}))
        assert "locked by another program" in _error(http.post("/v1/responses", json=TURN))
        assert http.post("/v1/responses", json={**TURN, "store": False}).status_code == 200
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
        other.execute("ROLLBACK")
        other.close()
        assert http.post("/v1/conversations", json={}).status_code == 200
        assert http.post("/v1/responses", json=TURN).status_code == 200


DAMAGE = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
connection.close()
with open(sys.argv[1], "r+b") as file:
    size = file.seek(0, 2)
    file.seek(4096)
    file.write(b"\\xa5" * (size - 4096))
"""


@pytest.mark.long
def test_a_damaged_store(tmp_path: Path) -> None:
    with serve({"data_dir": str(tmp_path)}) as served, served.http() as http:
        said = {"type": "message", "role": "user", "content": "x" * 100_000}
        kept = [http.post("/v1/conversations", json={"items": [said]}).json()["id"] for _ in range(60)]
        run_python(DAMAGE, str(tmp_path / FILE))  # in another process: see `database._sqlite`

        def damaged() -> bool:
            answers = [http.get(f"/v1/conversations/{id}/items") for id in kept]
            assert {answer.status_code for answer in answers} <= {200, 404, 503}
            return any("damaged" in answer.text for answer in answers if answer.status_code == 503)

        until(damaged)
        assert http.post("/v1/responses", json=TURN).status_code in (200, 503)
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert http.get("/health").status_code == 200
