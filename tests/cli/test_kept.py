"""`cellar chat --conversation`: what was said is there the next time, and for a server on the same directory."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from cellar.cli.kept import KeptTalk
from cellar.cli.main import build
from cellar.core.errors import CellarError
from tests.server.served import serve


def talk(directory: Path, *lines: str, name: str = "A fox") -> str:
    options = ["--max-tokens", "8", "--num-threads", "1", "--conversation", name, "--data-dir", str(directory)]
    done = CliRunner().invoke(build(), ["chat", *options], input="".join(f"{line}\n" for line in lines))
    assert done.exit_code == 0, done.output
    return done.output


def kept(directory: Path, name: str = "A fox") -> list[tuple[str, str]]:
    found = KeptTalk(name, str(directory))
    messages = found.messages()
    found.close()
    return [(message["role"], message["content"]) for message in messages]


def test_a_conversation_goes_on(tmp_path: Path) -> None:
    assert "goes on" not in talk(tmp_path, "Once upon a time")
    first = kept(tmp_path)
    assert [role for role, _ in first] == ["user", "assistant"]
    assert first[0][1] == "Once upon a time"
    assert first[1][1]
    assert "(A fox goes on: 2 messages)" in talk(tmp_path, "And then")
    second = kept(tmp_path)
    assert second[:2] == first
    assert [role for role, _ in second] == ["user", "assistant"] * 2
    assert kept(tmp_path, "Another") == []
    assert "(forgotten)" in talk(tmp_path, "/reset")
    assert kept(tmp_path) == []


def test_a_server_and_a_terminal_share_them(tmp_path: Path) -> None:
    mine = KeptTalk("A fox", str(tmp_path))
    mine.add("Tell me of a fox", "It went far away.")
    with serve({"data_dir": str(tmp_path)}) as served, served.http() as http:
        (one,) = http.get("/v1/conversations").json()["data"]
        assert one["metadata"] == {"title": "A fox"}
        items = http.get(f"/v1/conversations/{one['id']}/items?order=asc").json()["data"]
        assert [item["content"][0]["text"] for item in items] == ["Tell me of a fox", "It went far away."]
        added = {"items": [{"type": "message", "role": "user", "content": "And then?"}]}
        assert isinstance(http, httpx.Client)
        assert http.post(f"/v1/conversations/{one['id']}/items", json=added).status_code == 200
    assert [message["content"] for message in mine.messages()][-1] == "And then?"
    mine.close()
    assert kept(tmp_path, one["id"])[-1] == ("user", "And then?")


def test_a_directory_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CellarError):
        KeptTalk("A fox", str(tmp_path / "file"))
