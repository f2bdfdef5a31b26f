"""A text that cannot fit, whatever its tokens, is refused before it is tokenized; one that may fit never is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cellar import LLM
from cellar.core.errors import RequestError
from cellar.text.tokenizer import Tokenizer
from tests.fake_front import open_fake
from tests.server.served import TEXT, Served, serve

CONTEXT = 256
LONGEST = 13  # characters of the fake's longest token, "<|endoftext|>"
LONG = "x" * (LONGEST * CONTEXT)
PATHS = ("/v1/completions", "/v1/chat/completions")


def body(path: str, text: str, **fields: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    return {**given, "max_tokens": 1, **fields}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server whose tokenizer counts its calls by their length."""
    encode = Tokenizer.encode
    seen: list[int] = []

    def counted(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        seen.append(len(text))
        return encode(self, text, add_special_tokens)

    with serve(max_model_len=CONTEXT) as served:
        monkeypatch.setattr(Tokenizer, "encode", counted)
        served.app.state.seen = seen
        yield served


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"add_special_tokens": False}, {"add_special_tokens": True}])
@pytest.mark.parametrize("path", PATHS)
def test_what_cannot_fit_is_not_tokenized(served: Served, path: str, fields: dict[str, Any]) -> None:
    for text in (LONG, LONG * 100):
        answer = httpx.post(served.url + path, json=body(path, text, **fields), timeout=60)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == ("messages" if "chat" in path else "prompt")
        assert error["message"].startswith("the prompt has at least ")
        assert error["message"].endswith(
            f"tokens, but the context holds {CONTEXT}, at least one of them output; "
            f"shorten it to {CONTEXT - 1} tokens or raise max_model_len."
        )
    assert served.app.state.seen == []


@pytest.mark.parametrize("fields", [{}, {"add_special_tokens": False}])
def test_what_may_fit_is_tokenized(served: Served, fields: dict[str, Any]) -> None:
    text = "<|endoftext|>" * (CONTEXT - 1)
    assert len(TEXT.encode(text)) == CONTEXT - 1
    answer = httpx.post(served.url + PATHS[0], json=body(PATHS[0], text, **fields), timeout=60)
    assert answer.status_code == 200
    answer = httpx.post(served.url + PATHS[0], json=body(PATHS[0], LONG[:-LONGEST], **fields), timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"the prompt has {len(TEXT.encode(LONG[:-LONGEST]))} tokens")


def test_counting_tokens_has_no_such_limit(served: Served) -> None:
    for given in ({"prompt": LONG}, {"messages": [{"role": "user", "content": LONG}]}):
        answer = httpx.post(served.url + "/tokenize", json=given, timeout=60)
        assert answer.json()["count"] > CONTEXT


@pytest.mark.parametrize("path", PATHS)
def test_the_servers_own_limit(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(limits={"max_prompt_len": 10}) as served:
        monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
        answer = httpx.post(served.url + path, json=body(path, "x" * (10 * LONGEST + 1)), timeout=60)
        assert answer.status_code == 400
        assert "at least 1" in answer.json()["error"]["message"]
        assert "this server allows 10; shorten it." in answer.json()["error"]["message"]


def test_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM.over(open_fake(max_model_len=CONTEXT)[0]) as llm:
        monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
        for call in (
            lambda: llm.generate(LONG, use_tqdm=False),
            lambda: llm.generate([{"prompt": LONG}, "x"], use_tqdm=False),
            lambda: llm.chat([{"role": "user", "content": LONG}], use_tqdm=False),
        ):
            with pytest.raises(RequestError, match=r"has at least 25. tokens, but the context holds 256"):
                call()
