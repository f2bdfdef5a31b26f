"""Two keys, each with many conversations at once: no item, token, name or log line of one reaches the other."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cellar.server.keys import digest_of
from tests.limits import SECONDS
from tests.server.served import Served, serve

KEYS = ("ann-key", "bob-key")
SECRETS = {"ann-key": "quartz", "bob-key": "walnut"}
"""A word that each says in all that it sends, and the other never does."""


class Client:
    """One key's talks: creates, continues, looks, and keeps all that it was ever answered."""

    def __init__(self, served: Served, key: str) -> None:
        self.key, self.word = key, SECRETS[key]
        self._http = httpx.Client(base_url=served.url, headers={"x-api-key": key}, timeout=SECONDS)
        self._guard = threading.Lock()
        self.heard: list[str] = []
        self.conversations: list[str] = []
        self.responses: list[str] = []
        self.items: list[tuple[str, str]] = []

    def ask(self, method: str, path: str, **body: Any) -> tuple[int, Any]:
        answer = self._http.request(method, path, json=body or None)
        with self._guard:
            self.heard.append(answer.text)
        return answer.status_code, json.loads(answer.text or "null")

    def talk(self, number: int) -> int:
        """One conversation of two turns; -> cached tokens of the first, which has never been said under this key."""
        said = {"role": "user", "content": f"{self.word} number {number} " * 8}
        status, made = self.ask("POST", "/v1/conversations", metadata={"title": f"{self.word} {number}"}, items=[said])
        assert status == 200, made
        turn = {"conversation": made["id"], "input": f"and {self.word}?", "max_output_tokens": 4, "temperature": 0}
        turn["prompt_cache_key"] = "talk"  # both call all of their conversations so
        _, first = self.ask("POST", "/v1/responses", **turn)
        assert first["status"] in ("completed", "incomplete"), first
        following = {"input": "go on", "previous_response_id": first["id"], "max_output_tokens": 3}
        status, second = self.ask("POST", "/v1/responses", **following)
        assert status == 200, second
        _, page = self.ask("GET", f"/v1/conversations/{made['id']}/items?limit=100&order=asc")
        with self._guard:
            self.conversations.append(made["id"])
            self.responses += [first["id"], second["id"]]
            self.items += [(made["id"], item["id"]) for item in page["data"]]
        return int(first["usage"]["input_tokens_details"]["cached_tokens"])

    def meddle(self, other: Client, number: int) -> set[int | str]:
        """Everything that one can try with what belongs to the other; -> statuses, or codes where they are 400."""
        conversation, response = other.conversations[number], other.responses[2 * number]
        item = next(item for talk, item in other.items if talk == conversation)
        tries: list[tuple[str, str, dict[str, Any]]] = [
            ("GET", f"/v1/conversations/{conversation}", {}),
            ("GET", f"/v1/conversations/{conversation}/items", {}),
            ("GET", f"/v1/conversations/{conversation}/items/{item}", {}),
            ("POST", f"/v1/conversations/{conversation}", {"metadata": {"a": "b"}}),
            ("POST", f"/v1/conversations/{conversation}/items", {"items": [{"role": "user", "content": "x"}]}),
            ("DELETE", f"/v1/conversations/{conversation}/items/{item}", {}),
            ("DELETE", f"/v1/conversations/{conversation}", {}),
            ("GET", f"/v1/responses/{response}", {}),
            ("GET", f"/v1/responses/{response}/input_items", {}),
            ("POST", f"/v1/responses/{response}/cancel", {}),
            ("DELETE", f"/v1/responses/{response}", {}),
            ("POST", "/v1/responses", {"input": "x", "conversation": conversation}),
            ("POST", "/v1/responses", {"input": "x", "previous_response_id": response}),
            ("POST", "/v1/responses/input_tokens", {"input": "x", "previous_response_id": response}),
        ]
        answers = [self.ask(method, path, **body) for method, path, body in tries]
        return {said["error"]["code"] if status == 400 else status for status, said in answers}


def run_of_two(served: Served, count: int) -> tuple[Client, Client]:
    """Both at once, `count` conversations each; then each tries what is the other's."""
    ann, bob = (Client(served, key) for key in KEYS)
    with ThreadPoolExecutor(12) as threads:
        list(threads.map(lambda job: job[0].talk(job[1]), [(c, k) for k in range(count) for c in (ann, bob)]))
        jobs = [(a, b, k) for k in range(0, count, max(1, count // 20)) for a, b in ((ann, bob), (bob, ann))]
        for statuses in threads.map(lambda job: job[0].meddle(job[1], job[2]), jobs):
            assert statuses == {404, "previous_response_not_found"}, statuses
    return ann, bob


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.long)])
def test_nothing_of_one_reaches_the_other(tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int) -> None:
    caplog.set_level(logging.DEBUG)
    options = {"api_key": KEYS, "data_dir": str(tmp_path / "data"), "enable_log_requests": True, "log_level": "debug"}
    with serve(options, max_model_len=2048, num_slots=512, num_rows=16) as served:
        ann, bob = run_of_two(served, count)
        for one, other in ((ann, bob), (bob, ann)):
            everything = "\n".join(one.heard)
            assert one.word in everything
            # What was refused quotes an id that its sender knew already; nothing else of the other's may be there.
            assert other.word not in everything
            assert digest_of(other.key.encode()) not in everything
            listed, after = list[str](), ""
            while True:
                _, page = one.ask("GET", f"/v1/conversations?limit=100{after}")
                listed += [talk["id"] for talk in page["data"]]
                if not page["has_more"]:
                    break
                after = f"&after={page['last_id']}"
            assert sorted(listed) == sorted(one.conversations)
            for id in one.conversations:  # and all of it is still there
                assert one.ask("GET", f"/v1/conversations/{id}")[0] == 200
        with served.http() as http:
            public = "".join(http.get(path).text for path in ("/metrics", "/engine/status", "/health", "/"))
        logged = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith(("cellar", "uvicorn")))
        for client in (ann, bob):
            assert client.word not in public + logged
            assert client.key not in public + logged
            assert digest_of(client.key.encode()) not in public
        served.settle()


def test_a_prompt_that_the_other_has_stored_is_not_cached(tmp_path: Path) -> None:
    with serve({"api_key": KEYS, "data_dir": str(tmp_path / "data")}, max_model_len=2048, num_slots=512) as served:
        ann, bob = (Client(served, key) for key in KEYS)
        body = {"input": "the same words in every request " * 12, "max_output_tokens": 2, "temperature": 0}
        cached = []
        for client in (ann, ann, bob, bob):
            _, made = client.ask("POST", "/v1/responses", **body)
            cached.append(made["usage"]["input_tokens_details"]["cached_tokens"])
        assert cached[0] == cached[2] == 0
        assert cached[1] == cached[3] > 0
