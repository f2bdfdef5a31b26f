"""A server that is killed under load: what it acknowledged is there after the next start, and can be gone on from."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.limits import SECONDS, join_all, until
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


def killed(fronts: int, data: Path, talkers: int, acknowledged: int, salt: int) -> list[Talker]:
    """A server's life."""
    process, url = started(
        fronts=fronts, server={"data_dir": str(data)}, max_model_len=4096, num_slots=4096, latency=0.001
    )
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
        ended = client.responses.retrieve(one.background)
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


def live(fronts: int, data: Path, talked: list[Talker]) -> None:
    process, url = started(fronts=fronts, server={"data_dir": str(data)}, max_model_len=4096, num_slots=4096)
    try:
        check(url, talked)
    finally:
        process.kill()
        process.communicate(timeout=SECONDS)


@pytest.mark.long
@pytest.mark.parametrize(("fronts", "times"), [(1, 1), (2, 2)])
def test_what_was_acknowledged_survives(tmp_path: Path, fronts: int, times: int) -> None:
    chance = random.Random(fronts)
    talked: list[Talker] = []
    for round in range(times):
        talked += killed(fronts, tmp_path, 4, chance.randrange(12, 48), round)
    live(fronts, tmp_path, talked)
