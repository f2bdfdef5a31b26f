"""X-Request-Id: every answer has it, whole, streamed or an error; the client's, or else the request's own id."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.served import Served, serve

SENT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 3,
        "ignore_eos": True,
    },
}
KEYS = {"authorization": "Bearer key"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    options = {"api_key": "key", "enable_log_requests": True, "allowed_origins": "*"}
    with serve(options, {"max_body_bytes": 5000, "max_prompt_len": 50}) as served:
        yield served


def post(served: Served, path: str, name: str | None = None, **fields: Any) -> httpx.Response:
    headers = KEYS | ({} if name is None else {"X-Request-Id": name})
    return httpx.post(served.url + path, json=SENT[path] | fields, headers=headers, timeout=60)


def id_in(answer: httpx.Response) -> str:
    text = answer.text
    body = text.split("\n\n")[0].removeprefix("data: ") if text.startswith("data: ") else text
    return str(json.loads(body)["id"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", SENT)
def test_the_clients_name_comes_back(served: Served, path: str, stream: bool) -> None:
    for name in ("r-1", "a.b:c_D-9", "x" * 128):
        answer = post(served, path, name, stream=stream)
        assert answer.status_code == 200
        assert answer.headers.get_list("x-request-id") == [name]
        assert name in id_in(answer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", SENT)
def test_without_one_it_is_the_requests_own_id(served: Served, path: str, stream: bool) -> None:
    one, two = (post(served, path, stream=stream) for _ in range(2))
    assert one.headers["x-request-id"] == id_in(one) != id_in(two)
    named = post(served, path, stream=stream, request_id="mine")
    assert named.headers["x-request-id"] == id_in(named)
    assert id_in(named).endswith("-mine")
    both = post(served, path, "proxy-7", stream=stream, request_id="mine")
    assert (both.headers["x-request-id"], id_in(both)) == ("proxy-7", id_in(named))


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "a\tb", "é", "<script>", "a,b", "٣"])
def test_what_may_not_be_repeated_is_not(served: Served, name: str) -> None:
    path = "/v1/completions"
    headers = [(b"authorization", b"Bearer key"), (b"x-request-id", name.encode())]
    answer = httpx.post(served.url + path, json=SENT[path], headers=headers, timeout=60)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == id_in(answer)
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", id_in(answer))


def test_errors_have_it_too(served: Served) -> None:
    path = "/v1/completions"
    url = served.url + path

    def answers(headers: dict[str, str]) -> Iterator[tuple[int, httpx.Response]]:
        keys = KEYS | headers
        yield 401, httpx.post(url, json=SENT[path], headers=headers)
        yield 400, httpx.post(url, content=b"{", headers=keys | {"content-type": "application/json"})
        yield 400, httpx.post(url, json=SENT[path] | {"top_p": 3}, headers=keys)
        yield 400, httpx.post(url, json=SENT[path] | {"prompt": [5] * 51, "stream": True}, headers=keys)
        yield 404, httpx.post(url, json=SENT[path] | {"model": "other"}, headers=keys)
        yield 413, httpx.post(url, json=SENT[path] | {"prompt": [5] * 3000}, headers=keys)
        yield 404, httpx.post(served.url + "/v1/nothing", headers=keys)
        yield 405, httpx.get(url, headers=keys)
        yield 200, httpx.get(served.url + "/health", headers=keys)

    for status, answer in answers({"x-request-id": "r-2"}):
        assert (answer.status_code, answer.headers.get_list("x-request-id")) == (status, ["r-2"])
    new = [answer.headers["x-request-id"] for _, answer in answers({})]
    assert len(set(new)) == len(new)


@pytest.mark.parametrize("stream", [False, True])
def test_a_defect_has_it_in_the_answer_and_in_the_log(
    served: Served, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    place = "events" if stream else "whole"
    monkeypatch.setattr(f"cellar.server.completions.Completions.{place}", broken)
    answer = post(served, "/v1/completions", "r-3", stream=stream)
    assert (answer.status_code, answer.headers.get_list("x-request-id")) == (500, ["r-3"])
    assert answer.headers["connection"] == "close", "as the server does: a next request would be lost"
    assert "request r-3 failed by a defect" in caplog.messages


def test_the_log_of_requests_names_it(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "cellar.server.desk"):
        ids = [
            post(served, "/v1/completions", name, **fields).headers["x-request-id"]
            for name, fields in (
                (None, {}),
                ("r-4", {}),
                ("r-5", {"request_id": "mine"}),
                (None, {"request_id": "other"}),
            )
        ]
    lines = [line for line in caplog.messages if line.startswith("request ")]
    assert len(lines) == 4
    for id, line in zip(ids, lines, strict=True):
        assert id in line.split(": prompt tokens")[0]
    assert lines[2].startswith("request cmpl-mine (r-5): ")


def test_pages_of_other_origins_may_read_it(served: Served) -> None:
    answer = httpx.get(served.url + "/health", headers={"origin": "http://page.example"})
    assert answer.headers["access-control-expose-headers"] == "x-request-id"


def test_openais_client_knows_it(served: Served) -> None:
    client = served.client(default_headers={"Authorization": "Bearer key", "X-Request-Id": "r-6"})
    made = client.completions.create(model="fake", prompt=[5], max_tokens=1)
    assert made._request_id == "r-6"
