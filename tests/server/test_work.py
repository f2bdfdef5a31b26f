"""What a request may ask for, and large answers in pieces."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellar import AsyncLLM
from cellar.server import pieces as pieces_module
from cellar.server.pieces import PIECE, dumps, pieces
from tests.fake_front import ROOMY
from tests.limits import SECONDS, until
from tests.server.served import serve

SMALL = {"max_request_sequences": 6, "max_listed_tokens": 4, "max_request_logprobs": 100}


@pytest.mark.parametrize(
    ("body", "parameter", "words"),
    [
        ({"prompt": [[5]] * 7}, "prompt", "7 prompts with n 1 are 7 sequences, but a request may have 6"),
        ({"prompt": [[5]] * 2, "n": 4}, "prompt", "8 sequences"),
        ({"prompt": [5], "n": 7}, "n", "7 sequences"),
        ({"prompt": [5], "stop_token_ids": [1, 2, 3, 4, 5]}, "stop_token_ids", "5 entries, but may have 4"),
        ({"prompt": [5], "logit_bias": {str(k): 1 for k in range(5)}}, "logit_bias", "5 entries"),
        ({"prompt": [5], "n": 2, "max_tokens": 10, "logprobs": 5}, "logprobs", "120 log-probabilities"),
        ({"prompt": [5] * 40, "prompt_logprobs": 2}, "prompt_logprobs", "120 log-probabilities"),
    ],
)
def test_more_than_a_request_may_ask_is_refused(body: dict[str, Any], parameter: str, words: str) -> None:
    with serve(limits=SMALL) as served, served.http() as http:
        answer = http.post("/v1/completions", json={"model": "fake", "max_tokens": 1, **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, parameter)
        assert words in error["message"]
        served.settle()


def test_sequences_that_wait_are_counted_one_by_one() -> None:
    """A prompt with n 5 is five, of which one waits no longer when it has a token."""
    with serve(num_rows=1, latency=0.001, **ROOMY) as served, served.http() as http:
        admission = served.app.state.api.desk.admission
        body = {"model": "fake", "prompt": [5], "n": 5, "max_tokens": 200, "ignore_eos": True, "stream": True}
        seen = set()
        with http.stream("POST", "/v1/completions", json=body) as answer:
            for _ in answer.iter_lines():
                seen.add(admission.num_requests)
        assert {4, 0} <= seen
        served.settle()


def test_others_are_answered_while_many_prompts_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[float] = []
    deltas = AsyncLLM.deltas

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.005)
        opened.append(time.monotonic())
        return deltas(*arguments, **options)

    monkeypatch.setattr(AsyncLLM, "deltas", slow)
    with serve() as served, served.http() as http, ThreadPoolExecutor(1) as pool:
        body = {"model": "fake", "prompt": [[5]] * 100, "max_tokens": 1}
        asked = pool.submit(httpx.post, f"{served.url}/v1/completions", json=body, timeout=SECONDS)
        until(lambda: opened)
        assert http.get("/health").status_code == 200
        assert len(opened) < 50
        assert asked.result().status_code == 200
        assert len(opened) == 100
        served.settle()


def test_sequences_share_one_set_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as served, served.http() as http:
        seen = []
        add = served.opened.front.engine.add
        monkeypatch.setattr(served.opened.front.engine, "add", lambda *them: (seen.extend(them), add(*them)))
        body = {"model": "fake", "prompt": [[5], [6], [7]], "n": 2, "max_tokens": 2, "stop": ["xyz", "zyx"]}
        assert http.post("/v1/completions", json={**body, "logit_bias": {"7": 1}, "seed": 3}).status_code == 200
        assert len(seen) == 6
        assert len({id(request.params) for request in seen}) == len({id(request.stop_ids) for request in seen}) == 1
        assert {request.drawn_seed for request in seen} == {3, 4}
        served.settle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_large_answer_is_the_small_one_in_pieces(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same JSON, whatever it is cut into."""
    asked: dict[str, Any] = {"model": "fake", "n": 3, "max_tokens": 20, "seed": 1, "ignore_eos": True}
    if path.endswith("chat/completions"):
        asked |= {"messages": [{"role": "user", "content": "a b"}], "logprobs": True, "top_logprobs": 3}
    else:
        asked |= {"prompt": [[5, 6, 7], [8, 9]], "echo": True, "logprobs": 3, "prompt_logprobs": 2}
    with serve(**ROOMY) as served, served.http() as http:
        monkeypatch.setattr(pieces_module, "PIECE", 10**6)
        whole = http.post(path, json=asked)
        assert "content-length" in whole.headers
        monkeypatch.setattr(pieces_module, "PIECE", 4)
        monkeypatch.setattr(pieces_module, "SENT", 100)
        cut = http.post(path, json=asked)
        assert "content-length" not in cut.headers
        assert _said(cut) == _said(whole)
        served.settle()


def _said(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200
    return {name: value for name, value in answer.json().items() if name not in ("id", "created", "usage")}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=60,
)


@given(values, st.integers(1, 20))
def test_pieces_are_the_same_json(value: Any, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "PIECE", size)
        assert "".join(pieces(value)) == dumps(value)


def test_pieces_are_small_and_made_one_by_one() -> None:
    made = []

    def member(k: int) -> dict[str, int]:
        made.append(k)
        return {"a": k, "b": k}

    found = pieces({"all": map(member, range(10 * PIECE)), "list": [[k] * 5 for k in range(PIECE)]})
    first = [next(found) for _ in range(3)]
    assert len(made) < PIECE
    rest = list(found)
    assert max(map(len, rest)) < 40 * PIECE
    whole = json.loads("".join(first + rest))
    assert whole["all"] == [{"a": k, "b": k} for k in range(10 * PIECE)]
    assert len(whole["list"]) == PIECE


def test_nothing_more_is_made_once_the_client_has_gone() -> None:
    """A client that hangs up in the middle of a large answer leaves nothing running."""
    with serve(**ROOMY) as served, served.http() as http:
        body = {"model": "fake", "prompt": [[5] * 500] * 8, "max_tokens": 1, "prompt_logprobs": 20}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            assert next(answer.iter_raw(1000))
        served.settle()
