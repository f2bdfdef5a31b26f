"""Large bodies: read beside the loop, with a limit of values, and refused in the same words as small ones."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellar.server import bodies
from cellar.server.bodies import LARGE, count_values
from cellar.server.requests import CompletionRequest
from tests.limits import SECONDS, until
from tests.server.served import serve

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a,[]{}\\"é', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='k,"\\[', max_size=3), inner),
    max_leaves=20,
)


@given(JSON)
def test_values_are_counted_outside_of_strings(value: Any) -> None:
    def marks(one: Any) -> int:
        if not isinstance(one, (list, dict)):
            return 0
        members = one.values() if isinstance(one, dict) else one
        return 1 + max(0, len(one) - 1) + sum(map(marks, members))

    data = json.dumps(value, ensure_ascii=False).encode()
    for enough in range(marks(value) + 2):
        assert (count_values(data, enough) <= enough) is (marks(value) <= enough)


def test_a_large_body_is_answered_as_a_small_one() -> None:
    with serve() as served, served.http() as http:
        padding = {"metadata": {"text": "x" * LARGE}}
        for body in (
            {"prompt": [1, 2, 3], "max_tokens": 4},
            {"prompt": "no tokenizer reads this", "max_tokens": 4, "top_p": 9},
            {"prompt": [1], "max_tokens": "many"},
            {"prompt": [1], "max_tokens": 1, "no_such_field": 1},
            {"prompt": [1.5], "max_tokens": 1},
        ):
            small, large = (http.post("/v1/completions", json={**body, **more}) for more in ({}, padding))
            assert small.status_code == large.status_code
            assert _without_id(small) == _without_id(large)
        for broken in ('{"prompt": [1', '["a"', '{"prompt": [1]} x', "[1]", '"text"'):
            small, large = (
                http.post("/v1/completions", content=" " * pad + broken, headers={"content-type": "application/json"})
                for pad in (0, LARGE)
            )
            assert small.status_code == large.status_code == 400
            assert "JSON" in large.json()["error"]["message"]


def _without_id(answer: httpx.Response) -> Any:
    body = answer.json()
    return body.get("error") or body["choices"]


def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(limits={"max_body_values": 50_000}) as served, served.http() as http:
        text = {"prompt": [1], "max_tokens": 1, "metadata": {"text": ",[{" * LARGE}}
        assert http.post("/v1/completions", json=text).status_code == 200, "what stands in a text is no value"
        unread = SimpleNamespace(loads=lambda data, **how: pytest.fail("it was parsed"), JSONDecodeError=ValueError)
        monkeypatch.setattr(bodies, "json", unread)
        answer = http.post("/v1/completions", json={"prompt": [[5]] * 40_000, "max_tokens": 1})
        assert answer.status_code == 400
        assert "--max-body-values" in answer.json()["error"]["message"]


def test_large_bodies_are_parsed_in_one_thread_while_the_collector_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def noted(data: bytes, **how: Any) -> Any:
        seen.append((threading.current_thread().name, gc.isenabled()))
        return json.loads(data, **how)

    with serve() as served, served.http() as http:
        monkeypatch.setattr(bodies, "json", SimpleNamespace(loads=noted, JSONDecodeError=json.JSONDecodeError))
        for _ in range(3):
            body = {"prompt": [1], "max_tokens": 1, "metadata": {"text": "x" * LARGE}}
            assert http.post("/v1/completions", json=body).status_code == 200
    assert seen == [("bodies_0", False)] * 3
    assert gc.isenabled()


def test_other_threads_have_their_turns_while_numbers_are_read() -> None:
    """A whole list of numbers is read in one call of C: its end would come before another thread's first look."""
    switching = sys.getswitchinterval()
    data = json.dumps({"prompt": "a", "metadata": {"a": [1, 2.5] * 200_000}}).encode()
    looks, done = [0], threading.Event()

    def look() -> None:
        while not done.is_set():
            looks[0] += 1
            time.sleep(0)

    other = threading.Thread(target=look)
    sys.setswitchinterval(1e-4)
    try:
        other.start()
        until(lambda: looks[0])
        before = looks[0]
        json.loads(data)
        unhooked, before = looks[0] - before, looks[0]
        bodies._read([data], CompletionRequest, 2**20)
        assert looks[0] - before > 10 * (unhooked + 1)
    finally:
        sys.setswitchinterval(switching)
        done.set()
        other.join(SECONDS)
