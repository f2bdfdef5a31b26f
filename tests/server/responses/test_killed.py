"""A server that is killed under load: what it acknowledged is there after the next start, and can be gone on from."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from cellar.conversations.session import Session
from cellar.conversations.store import open_store
from cellar.conversations.tokens import context
from tests.conversations.postgres import Cluster
from tests.limits import ROOT, SECONDS, join_all, until
from tests.server.fake_process import children_of, started

MODEL = "fake"


class Talker:
    """Turns in a conversation and in a chain, until the server is gone; what was acknowledged."""

    def __init__(self, url: str, name: str) -> None:
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SECONDS)
        self.conversation = self.client.conversations.create(metadata={"name": name}).id
        self.kept: list[dict[str, Any]] = []
        self.turns: list[tuple[str, str]] = []
        self.background: str | None = None
        self.killed = threading.Event()
        self.thread = threading.Thread(target=self._talk, args=(name,))

    def _talk(self, name: str) -> None:
        previous, k = None, 0
        asked: dict[str, Any] = {"model": MODEL, "max_output_tokens": 6, "temperature": 0}
        try:
            while True:
                k += 1
                said = f"{name} {k}"
                made = self.client.responses.create(**asked, input=said, previous_response_id=previous)
                previous = made.id
                self.kept.append(made.to_dict())
                turn = self.client.responses.create(**asked, input=said, conversation=self.conversation, stream=True)
                for event in turn:
                    if event.type == "response.incomplete":
                        self.kept.append(event.response.to_dict())
                        self.turns.append((said, event.response.output_text))
                    if event.type == "error":  # a front that lost its keeper says so
                        return
                    if event.type == "response.failed":  # or that lost its engine first
                        assert self.killed.is_set(), event
                        return
                if self.background is None:
                    late = {**asked, "max_output_tokens": 4000}
                    self.background = self.client.responses.create(**late, input=said, background=True).id
        except (openai.APIConnectionError, openai.APIError, OSError):
            return


def killed(fronts: int, server: dict[str, Any], talkers: int, acknowledged: int, salt: int) -> list[Talker]:
    """A server's life."""
    process, url = started(fronts=fronts, server=server, max_model_len=4096, num_slots=4096, latency=0.001)
    talking: list[Talker] = []
    try:
        talking += [Talker(url, f"t{salt}.{k}") for k in range(talkers)]
        for one in talking:
            one.thread.start()
        until(lambda: sum(len(one.kept) for one in talking) >= acknowledged and all(one.background for one in talking))
        children = children_of(process.pid)
    finally:
        for one in talking:
            one.killed.set()
        process.kill()
        process.communicate(timeout=SECONDS)
    join_all([one.thread for one in talking])
    until(lambda: not any(child.exists() for child in children))
    return talking


def check(url: str, talked: list[Talker]) -> None:
    names = [kept["id"] for one in talked for kept in one.kept]
    assert len(set(names)) == len(names)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SECONDS)
    for one in talked:
        for kept in one.kept:
            assert client.responses.retrieve(kept["id"]).to_dict() == kept
        items = client.conversations.items.list(one.conversation, order="asc", limit=100)
        texts = [part.text for item in items if item.type == "message" for part in item.content]  # type: ignore[union-attr]
        turns = list(zip(texts[::2], texts[1::2], strict=True))  # no half of a turn
        # the answer to one more may have been lost with the server
        assert turns[: len(one.turns)] == one.turns
        assert len(turns) - len(one.turns) in (0, 1)
        assert len({question for question, _ in turns}) == len(turns)
        assert one.background is not None
        id = one.background
        # PostgreSQL may notice a little later that a process is gone; the next sweep ends what it left
        until(lambda: client.responses.retrieve(id).status not in ("queued", "in_progress"))  # noqa: B023
        ended = client.responses.retrieve(id)
        assert ended.status == "failed"
        assert ended.error is not None
        # it goes on from all that was said, and twice the same
        last = next(kept for kept in reversed(one.kept) if kept["conversation"] is None)
        asked: dict[str, Any] = {"model": MODEL, "max_output_tokens": 8, "temperature": 0}
        forks = [client.responses.create(**asked, input="And?", previous_response_id=last["id"]) for _ in range(2)]
        assert forks[0].output_text == forks[1].output_text
        for fork in forks:
            assert fork.usage is not None
            assert fork.usage.input_tokens > last["usage"]["total_tokens"] - 2
        client.responses.create(**asked, input="And then?", conversation=one.conversation)


def live(fronts: int, server: dict[str, Any], talked: list[Talker]) -> None:
    process, url = started(fronts=fronts, server=server, max_model_len=4096, num_slots=4096)
    try:
        check(url, talked)
    finally:
        process.kill()
        process.communicate(timeout=SECONDS)


@pytest.mark.long
@pytest.mark.parametrize(("fronts", "times", "kind"), [(2, 2, "sqlite"), (1, 1, "postgresql")])
def test_what_was_acknowledged_survives(
    tmp_path: Path, fronts: int, times: int, kind: str, request: pytest.FixtureRequest
) -> None:
    server = _server(kind, tmp_path, request)
    chance = random.Random(fronts)
    talked: list[Talker] = []
    for round in range(times):
        talked += killed(fronts, server, 4, chance.randrange(12, 48), round)
    live(fronts, server, talked)


def _server(kind: str, data: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of a server that keeps its conversations in a database of this kind."""
    server = {"data_dir": str(data)}
    if kind == "postgresql":
        made: Cluster = request.getfixturevalue("postgres")
        made.empty()
        server["conversation_store"] = made.url
    return server


@contextmanager
def _demo(server: dict[str, Any]) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    """The demo model in float32, killed at the end."""
    command = [sys.executable, "-m", "cellar", "serve", "--port", "0", "--log-level", "warning", "--num-threads", "1"]
    command += ["--dtype", "float32"]
    for name, value in server.items():
        command += [f"--{name.replace('_', '-')}", value]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " is served at http://" in line, line
        url = line.split(" at ")[1].strip()
        yield process, openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=SECONDS)
    finally:
        children = children_of(process.pid)
        process.kill()
        process.communicate(timeout=SECONDS)
        until(lambda: not any(child.exists() for child in children))


SAID = ("Once upon a time", "And then the fox", "What did it eat?", "Was it cold there?")


def _ask(client: openai.OpenAI, said: str, **place: Any) -> openai.types.responses.Response:
    return client.responses.create(model="cellar-demo", input=said, max_output_tokens=24, temperature=0, **place)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_kill_between_two_turns_changes_no_token(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    """Against talks that no kill interrupted: the same text, and in the store the same ids."""
    server = _server(kind, tmp_path, request)
    heard: dict[str, list[str]] = {}
    last: dict[str, str] = {}
    with _demo(server) as (_, client):
        conversations = {name: client.conversations.create().id for name in ("whole", "killed")}
        for name, turns in (("whole", len(SAID)), ("killed", 2)):
            chain, conversation = f"chain {name}", f"conversation {name}"
            for said in SAID[:turns]:
                before = {"previous_response_id": last[chain]} if chain in last else {}
                for talk, place in ((chain, before), (conversation, {"conversation": conversations[name]})):
                    made = _ask(client, said, **place)
                    heard.setdefault(talk, []).append(made.output_text)
                    last[talk] = made.id
        # it is killed in the middle of a turn, of which nothing may stay
        endless: dict[str, Any] = {"max_output_tokens": 1500, "extra_body": {"ignore_eos": True}}
        stream = client.responses.create(
            model="cellar-demo", input="Tell more", conversation=conversations["killed"], stream=True, **endless
        )
        assert next(event for event in stream if event.type == "response.output_text.delta")
    with _demo(server) as (_, client):

        def free() -> bool:  # PostgreSQL may notice a little later that the holder is gone
            try:
                made = _ask(client, SAID[2], conversation=conversations["killed"])
            except openai.BadRequestError as error:
                if error.code != "conversation_locked":
                    raise
                return False
            heard["conversation killed"].append(made.output_text)
            return True

        until(free)
        for said in SAID[2:]:
            made = _ask(client, said, previous_response_id=last["chain killed"])
            heard["chain killed"].append(made.output_text)
            last["chain killed"] = made.id
        made = _ask(client, SAID[3], conversation=conversations["killed"])
        heard["conversation killed"].append(made.output_text)
        last["conversation killed"] = made.id
    assert heard["chain killed"] == heard["chain whole"]
    assert heard["conversation killed"] == heard["conversation whole"]
    assert all(len(texts) == len(SAID) and all(texts) for texts in heard.values())
    with open_store(server.get("conversation_store", tmp_path), sweep_seconds=None) as store:
        ids = {talk: store.read(_ids, id) for talk, id in last.items()}
    assert ids["chain killed"] == ids["chain whole"] == ids["conversation killed"] == ids["conversation whole"]
    assert len(ids["chain whole"]) > 4 * 24


def _ids(session: Session, response: str) -> list[int]:
    tokens = context(session, response)
    assert tokens is not None
    return [int(id) for id in tokens.ids]
