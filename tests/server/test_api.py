"""Every endpoint, driven by the official client and by plain HTTP, over a device whose tokens are known."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from cellar.core.errors import RequestError
from cellar.core.messages import FinishReason
from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from cellar.server.run import served_at
from cellar.server.serving import server_config
from cellar.text.incremental import IncrementalTokenizer
from cellar.text.rendering import Rendering
from cellar.text.tokenizer import Tokenizer
from tests.fake_front import TOKENIZER, engine_of
from tests.limits import SECONDS, join_all
from tests.server.served import TEXT, VOCAB, Served, plain, serve
from tests.server.spoken import paced

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
PROMPT = "Once upon a time"
IDS = TEXT.encode(PROMPT)
CHAT_IDS = TEXT.encode("[user] Hi\n[assistant]", add_special_tokens=False)
EXTRA = {"ignore_eos": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as found:
        yield found
        found.settle()


def test_a_completion(served: Served) -> None:
    made = served.client().completions.create(
        model="fake", prompt=PROMPT, max_tokens=8, temperature=0, extra_body=EXTRA
    )
    assert made.object == "text_completion"
    assert made.id.startswith("cmpl-")
    assert made.choices[0].text == TEXT.decode(plain(IDS, 8))
    assert made.choices[0].finish_reason == "length"
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (len(IDS), 8)


@pytest.mark.parametrize("prompt", [[PROMPT, "Once"], [IDS, TEXT.encode("Once")]], ids=["texts", "ids"])
def test_lists_of_prompts_and_n(served: Served, prompt: Any) -> None:
    made = served.client().completions.create(model="alias", prompt=prompt, max_tokens=4, n=2, extra_body=EXTRA)
    assert made.model == "alias"
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    expected = [TEXT.decode(plain(ids, 4)) for ids in (IDS, TEXT.encode("Once")) for _ in range(2)]
    assert [choice.text for choice in made.choices] == expected


def test_token_ids_in_and_out(served: Served) -> None:
    body = {**EXTRA, "return_token_ids": True}
    made = served.client().completions.create(model="fake", prompt=IDS, max_tokens=5, extra_body=body)
    extra = made.choices[0].model_extra
    assert extra is not None
    assert extra["token_ids"] == plain(IDS, 5)
    assert extra["prompt_token_ids"] == IDS


def test_a_streamed_completion_and_its_usage(served: Served) -> None:
    stream = served.client().completions.create(
        model="fake",
        prompt=[IDS, TEXT.encode("Once")],
        max_tokens=6,
        stream=True,
        extra_body=EXTRA,
        stream_options={"include_usage": True},
    )
    texts, reasons, usage = ["", ""], {}, None
    for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [TEXT.decode(plain(ids, 6)) for ids in (IDS, TEXT.encode("Once"))]
    assert reasons == {0: "length", 1: "length"}
    assert usage is not None
    assert usage.completion_tokens == 12


def test_echo_and_scores(served: Served) -> None:
    client = served.client()
    made = client.completions.create(model="fake", prompt=PROMPT, max_tokens=3, echo=True, extra_body=EXTRA)
    assert made.choices[0].text == PROMPT + TEXT.decode(plain(IDS, 3))
    scored = client.completions.create(model="fake", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    assert scored.choices[0].text == PROMPT
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert "".join(logprobs.tokens) == PROMPT
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx([-(t + 1) / VOCAB for t in IDS[1:]])
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0
    chunks = list(
        client.completions.create(model="fake", prompt=PROMPT, max_tokens=3, echo=True, stream=True, extra_body=EXTRA)
    )
    assert "".join(c.choices[0].text for c in chunks) == made.choices[0].text


@pytest.mark.parametrize("count", [0, 3])
def test_echo_and_scores_in_a_stream(served: Served, count: int) -> None:
    client = served.client()
    options: Any = {"model": "fake", "prompt": [PROMPT, "Once"], "max_tokens": count, "echo": True, "logprobs": 1}
    whole = client.completions.create(**options, n=1, extra_body=EXTRA)
    texts: dict[int, str] = {}
    joined: dict[int, dict[str, list[Any]]] = {}
    for chunk in client.completions.create(**options, n=1, stream=True, extra_body=EXTRA):
        (choice,) = chunk.choices
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        assert choice.logprobs is not None
        for name, values in choice.logprobs.model_dump().items():
            joined.setdefault(choice.index, {}).setdefault(name, []).extend(values or [])
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert texts[choice.index] == choice.text
        assert joined[choice.index] == choice.logprobs.model_dump()
        offsets, tokens = choice.logprobs.text_offset, choice.logprobs.tokens
        assert offsets is not None
        assert tokens is not None
        assert all(choice.text[at:].startswith(token) for at, token in zip(offsets, tokens, strict=True))


def test_offsets_in_a_stream_count_text_that_is_still_held(served: Served) -> None:
    text = TEXT.decode(plain(IDS, 30))
    stop = text[4:12] + "\0"  # nearly there, so its beginning is held back for a while
    options: Any = {"model": "fake", "prompt": PROMPT, "max_tokens": 30, "logprobs": 0, "stop": stop}
    whole = served.client().completions.create(**options, extra_body=EXTRA).choices[0].logprobs
    assert whole is not None
    with paced(served, 0.03):
        chunks = list(served.client().completions.create(**options, stream=True, extra_body=EXTRA))
    assert any(not chunk.choices[0].text for chunk in chunks)
    offsets = [at for c in chunks if c.choices[0].logprobs for at in c.choices[0].logprobs.text_offset or []]
    assert offsets == whole.text_offset


def test_no_event_without_news(served: Served) -> None:
    stop = TEXT.decode(plain(CHAT_IDS, 30))[4:12] + "\0"
    options: Any = {"model": "fake", "max_tokens": 30, "stop": stop, "stream": True, "extra_body": EXTRA}
    usage: Any = {"include_usage": True}
    for chunk in served.client().chat.completions.create(messages=MESSAGES, stream_options=usage, **options):
        said = chunk.choices[0].delta.model_dump(exclude_unset=True) if chunk.choices else None
        assert said or chunk.usage or chunk.choices[0].finish_reason
    stop = options["stop"] = TEXT.decode(plain(IDS, 30))[4:12] + "\0"
    for part in served.client().completions.create(prompt=PROMPT, stream_options=usage, **options):
        assert part.usage or part.choices[0].text or part.choices[0].finish_reason


def test_special_tokens_around_a_chat_if_asked_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = served.app.state.api.prepare
    opt = Tokenizer.load(TOKENIZER.parent / "opt-tiny")
    monkeypatch.setattr(prepare, "_model", replace(prepare._model, tokenizer=opt))
    monkeypatch.setattr(prepare, "_incremental", IncrementalTokenizer(opt))
    text = "[user] Hi\n[assistant]"
    with served.http() as http:
        for asked in (None, False, True):
            body = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True, "add_special_tokens": asked}
            made = http.post("/v1/chat/completions", json=body).json()
            assert made["prompt_token_ids"] == opt.encode(text, add_special_tokens=bool(asked))


def test_a_defect_is_counted_too(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(served.app.state.api.desk, "open", broken)
    with served.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
    with served.http() as http:
        assert 'route="/v1/completions",status="500"} 1.0' in http.get("/metrics").text


def test_reasons_of_an_end_are_those_that_there_are(served: Served) -> None:
    with served.http() as http:
        found = re.findall(r'request_success_total{finished_reason="(\w+)"', http.get("/metrics").text)
    assert sorted(found) == sorted(FinishReason)


def test_an_idle_connection_outlives_those_of_proxies() -> None:
    config = server_config(FastAPI(), ServerConfig(), LimitConfig())
    assert config.timeout_keep_alive > 60


def test_the_address_can_be_copied() -> None:
    for host, api, page in (
        ("::1", "[::1]", "[::1]"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "0.0.0.0", "127.0.0.1"),
        ("::", "[::]", "[::1]"),
    ):
        told, open_it = served_at(("m",), ServerConfig(host=host), 80).splitlines()
        assert told == f"m is served at http://{api}:80/v1"
        assert f" http://{page}:80/ " in open_it


def test_completion_logprobs(served: Served) -> None:
    made = served.client().completions.create(model="fake", prompt=IDS, max_tokens=4, logprobs=1, extra_body=EXTRA)
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == pytest.approx([-(t + 1) / VOCAB for t in plain(IDS, 4)])
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0
    assert logprobs.top_logprobs is not None
    assert len(logprobs.top_logprobs) == 4


def test_a_chat(served: Served) -> None:
    made = served.client().chat.completions.create(
        model="fake", messages=MESSAGES, max_completion_tokens=8, logprobs=True, top_logprobs=1, extra_body=EXTRA
    )
    assert made.object == "chat.completion"
    message = made.choices[0].message
    assert (message.role, message.content) == ("assistant", TEXT.decode(plain(CHAT_IDS, 8)))
    assert made.choices[0].logprobs is not None
    content = made.choices[0].logprobs.content
    assert content is not None
    assert [bytes(c.bytes or []) for c in content] == [TEXT.id_to_bytes(t) for t in plain(CHAT_IDS, 8)]
    assert all(len(c.top_logprobs) == 1 for c in content)
    assert made.usage is not None
    assert made.usage.prompt_tokens == len(CHAT_IDS)
    assert made.usage.prompt_tokens_details is not None


@pytest.mark.parametrize("usage", [False, True])
def test_a_streamed_chat(served: Served, usage: bool) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = list(
        served.client().chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=8, n=2, stream=True, extra_body=EXTRA, **options
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    roles = [c.choices[0].delta.role for c in chunks if c.choices and c.choices[0].delta.role]
    assert roles == ["assistant", "assistant"]
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert "".join(c.delta.content or "" for c in mine) == TEXT.decode(plain(CHAT_IDS, 8))
        assert [c.finish_reason for c in mine if c.finish_reason] == ["length"]
    assert (chunks[-1].usage is not None) == usage
    if usage:
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 16


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("usage", [False, True])
def test_each_event_has_the_usage_that_was_asked_for(served: Served, path: str, usage: bool) -> None:
    """It is null until the last one, as OpenAI says, and not there where nobody asked for it."""
    asked = {"prompt": [5, 6, 7]} if path == "/v1/completions" else {"messages": MESSAGES}
    body = {**asked, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": usage}, **EXTRA}
    with paced(served), served.http() as http:
        lines = http.post(path, json=body).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]
    assert len(events) >= 2
    if usage:
        assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
        assert events.pop()["usage"]["completion_tokens"] == 8
    else:
        assert not any("usage" in event for event in events)
    keys = {"id", "object", "created", "model", "choices"} | ({"usage"} if usage else set())
    assert all(event.keys() == keys for event in events)


def test_the_async_client(served: Served) -> None:
    async def run() -> None:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)

        async def one(k: int) -> None:
            prompt = [k + 3, 5, 7]
            stream = await client.completions.create(
                model="fake", prompt=prompt, max_tokens=10, stream=True, extra_body=EXTRA
            )
            text = "".join([chunk.choices[0].text async for chunk in stream])
            assert text == TEXT.decode(plain(prompt, 10))

        await asyncio.gather(*(one(k) for k in range(24)))
        chat = await client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=4, extra_body=EXTRA)
        assert chat.choices[0].message.content == TEXT.decode(plain(CHAT_IDS, 4))
        await client.close()

    asyncio.run(run())


def test_stop_strings_and_ids(served: Served) -> None:
    tokens = plain(IDS, 30)
    text = TEXT.decode(tokens)
    stop = text[10:14]
    client = served.client()
    made = client.completions.create(model="fake", prompt=PROMPT, max_tokens=30, stop=stop, extra_body=EXTRA)
    assert made.choices[0].text == text[: text.index(stop)]
    assert made.choices[0].finish_reason == "stop"
    body = {**EXTRA, "stop_token_ids": [tokens[4]]}
    made = client.completions.create(model="fake", prompt=PROMPT, max_tokens=30, extra_body=body)
    assert made.choices[0].model_extra is not None
    assert made.choices[0].model_extra["stop_reason"] == tokens[4]


def test_models_and_text(served: Served) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == ["fake", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    with served.http() as http:
        found = http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
        assert found["tokens"] == IDS
        assert found["count"] == len(IDS)
        assert len(found["token_strs"]) == len(IDS)
        assert http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"] == CHAT_IDS
        assert http.post("/detokenize", json={"tokens": IDS}).json() == {"prompt": PROMPT}
        assert http.post("/detokenize", json={"tokens": [VOCAB]}).json()["error"]["param"] == "tokens"
        long = "word " * 3000
        assert http.post("/tokenize", json={"prompt": long}).json()["tokens"] == TEXT.encode(long)


def test_health_and_version(served: Served) -> None:
    with served.http() as http:
        assert http.get("/health").status_code == 200
        assert http.get("/health_generate").status_code == 200
        assert http.get("/version").json()["version"]
        assert http.get("/nothing").json()["error"]["type"] == "not_found_error"


def test_neutral_fields_are_accepted(served: Served) -> None:
    body = {
        **EXTRA,
        "user": "me",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "store": False,
        "prompt_cache_key": "k",
        "modalities": ["text"],
        "safety_identifier": "x",
        "seed": None,
        "nonsense": None,
        "audio": None,
        "reasoning_effort": None,
        "response_format": {"type": "text", "json_schema": None},
        "top_logprobs": 0,
    }
    made = served.client().chat.completions.create(model="fake", messages=MESSAGES, max_tokens=2, extra_body=body)
    assert made.choices[0].message.content == TEXT.decode(plain(CHAT_IDS, 2))


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"best_of": 2}, "best_of"),
    ("completions", {"suffix": "end"}, "suffix"),
    ("completions", {"nonsense": 1}, "nonsense"),
    ("completions", {"temperature": -1}, "temperature"),
    ("completions", {"temperature": "hot"}, "temperature"),
    ("completions", {"top_p": 0}, "top_p"),
    ("completions", {"n": 0}, "n"),
    ("completions", {"n": 10**9}, "n"),
    ("completions", {"n": True}, "n"),
    ("completions", {"max_tokens": 0}, "max_tokens"),
    ("completions", {"max_tokens": -5}, "max_tokens"),
    ("completions", {"logprobs": 1000}, "logprobs"),
    ("completions", {"logit_bias": {"a": 1}}, "logit_bias"),
    ("completions", {"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": [[]]}, "prompt"),
    ("completions", {"prompt": ""}, "prompt"),
    ("completions", {"prompt": [VOCAB]}, "prompt"),
    ("completions", {"prompt": {"a": 1}}, "prompt"),
    ("completions", {"prompt": [1] * 300}, "prompt"),
    ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("completions", {"priority": 3}, "priority"),
    ("completions", {"request_id": "a b"}, "request_id"),
    ("chat/completions", {"store": True}, "store"),
    ("chat/completions", {"functions": [{}]}, "functions"),
    ("chat/completions", {"audio": {}}, "audio"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x " * 400}]}, "messages"),
    ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
    ("chat/completions", {"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
    ("chat/completions", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ("chat/completions", {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ("completions", {"stop": "x" * 10_000}, "stop"),
    ("completions", {"logit_bias": {"1": "x"}}, "logit_bias"),
    ("completions", {"prompt": ["a"] * 1025}, "prompt"),
]


@pytest.mark.parametrize(
    ("path", "change", "param"), BAD, ids=[f"{p}-{next(iter(c))}-{i}" for i, (p, c, _) in enumerate(BAD)]
)
def test_what_is_not_allowed_names_its_parameter(served: Served, path: str, change: dict[str, Any], param: str) -> None:
    base: dict[str, Any] = {"prompt": PROMPT} if path == "completions" else {"messages": MESSAGES}
    with served.http() as http:
        answer = http.post(f"/v1/{path}", json={"model": "fake", **base, **change})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"].endswith(".")


def test_a_prompt_that_is_too_long_has_openais_code() -> None:
    long = "x " * 400
    for limits in ({}, {"max_prompt_len": 20}):
        with serve(limits=limits) as served, served.http() as http:
            for path, body, param in (
                ("completions", {"prompt": long}, "prompt"),
                ("completions", {"prompt": ["x", long]}, "prompt"),
                ("chat/completions", {"messages": [{"role": "user", "content": long}]}, "messages"),
            ):
                error = http.post(f"/v1/{path}", json=body).json()["error"]
                assert (error["code"], error["param"]) == ("context_length_exceeded", param)


def test_one_wrong_entry_among_many_is_a_handful_of_errors() -> None:
    many: list[Any] = [1] * 20_000
    for kind, body in (
        (CompletionRequest, {"prompt": [*many, "a"]}),
        (CompletionRequest, {"prompt": ["a"] * 20_000 + [1]}),
        (CompletionRequest, {"prompt": [*([[1]] * 20_000), ["a"]]}),
        (CompletionRequest, {"prompt": "a", "stop": many}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * 20_000}),
        (CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(20_000)), "a")}),
        (ChatRequest, {"messages": many, "tools": many}),
        (TokenizeRequest, {"messages": many, "tools": many}),
        (DetokenizeRequest, {"tokens": ["a"] * 20_000}),
    ):
        with pytest.raises((ValidationError, RequestError)) as caught:
            kind.model_validate(body).params()
        assert not isinstance(caught.value, ValidationError) or caught.value.error_count() < 10


def test_a_wrong_type_says_which_are_right(served: Served) -> None:
    with served.http() as http:
        message = http.post("/v1/completions", json={"prompt": "x", "stop": 5}).json()["error"]["message"]
    assert "valid string" in message
    assert "valid list" in message


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": ""}] * 80_000},
        {"messages": MESSAGES, "chat_template_kwargs": {"extra": ["x"] * 200_000}},
    ],
    ids=["messages", "variables"],
)
def test_others_are_answered_while_a_long_conversation_is_read(
    served: Served, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go, render = threading.Event(), threading.Event(), Rendering.render

    def held(*arguments: Any, **options: Any) -> str:
        reading.set()
        assert go.wait(SECONDS)
        return render(*arguments, **options)

    monkeypatch.setattr(Rendering, "render", held)
    statuses: list[int] = []

    def ask() -> None:
        with served.http() as http:
            statuses.append(http.post("/tokenize", json=body).status_code)

    thread = threading.Thread(target=ask)
    with served.http() as http:
        thread.start()
        try:
            assert reading.wait(SECONDS)
            for _ in range(3):
                assert http.get("/version", timeout=SECONDS / 4).status_code == 200
        finally:
            go.set()
            join_all([thread])
    assert statuses == [200]


def test_a_route_that_is_not_there(served: Served) -> None:
    with served.http() as client:
        answer = client.post("/v1/chat/completion", json={})
        assert answer.status_code == 404
        message = answer.json()["error"]["message"]
        assert message.startswith("there is no /v1/chat/completion on this server; did you mean /v1/chat/completions?")
        assert "/v1/models" in message
        assert "did you mean" not in client.get("/" + "x" * 500).json()["error"]["message"]
        assert len(client.get("/" + "x" * 500).text) < 1000
        answer = client.delete("/v1/completions")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert answer.json()["error"]["message"] == "/v1/completions does not take DELETE; it takes POST."
        assert client.get("/ping").status_code == 200
        assert client.get("/load").json() == {"server_load": 0}


def test_another_model_is_404(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        served.client().completions.create(model="gpt-4", prompt="x")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"\xff\xfe{}", b'{"prompt": "\xff"}', b"[" * 100_000, b'{"prompt": "\\ud800"}'],
    ids=["empty", "cut", "list", "text", "bom", "utf8", "deep", "surrogate"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_malformed_bodies(served: Served, path: str, body: bytes) -> None:
    with served.http() as http:
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert "error" in answer.json()
        deep: Any = []
        for _ in range(400):
            deep = [deep]
        for content in ("\ud800", deep):
            sent = json.dumps({"messages": [{"role": "user", "content": content}]})
            answer = http.post(
                "/v1/chat/completions", content=sent.encode(), headers={"content-type": "application/json"}
            )
            assert answer.status_code == 400, answer.text


def test_ids_of_requests(served: Served) -> None:
    client = served.client()
    made = client.completions.create(model="fake", prompt=IDS, max_tokens=2, extra_headers={"X-Request-Id": "r-1"})
    assert made.id.startswith("cmpl-r-1-")
    named = client.completions.create(model="fake", prompt=IDS, max_tokens=2, extra_body={"request_id": "mine"})
    assert named.id == "cmpl-mine"


def test_conversations_are_named_and_counted() -> None:
    with serve() as served:
        seen: list[tuple[str | None, bytes]] = []
        scheduler = engine_of(served.opened).scheduler
        add = scheduler.add

        def noted(request: Any, now: float) -> None:
            seen.append((request.conversation, request.salt))
            add(request, now)

        scheduler.add = noted  # type: ignore[method-assign]
        client = served.client()
        first = [7] * 40
        client.completions.create(model="fake", prompt=first, max_tokens=2, extra_headers={"X-Session-ID": "s"})
        body: Any = {"prompt_cache_key": "k", "n": 2}
        client.completions.create(
            model="fake", prompt=first * 2, max_tokens=2, extra_body=body, extra_headers={"X-Session-ID": "s"}
        )
        made = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=2, prompt_cache_key="c")
        assert made.choices[0].message.content
        apart = client.completions.create(model="fake", prompt=first, max_tokens=2, extra_body={"cache_salt": "x"})
        assert apart.usage is not None
        assert apart.usage.prompt_tokens_details is not None
        assert apart.usage.prompt_tokens_details.cached_tokens == 0  # the salt keeps it from what others computed
        assert seen == [("s", b""), ("k", b""), ("k", b""), ("c", b""), (None, b"x")]
        with served.http() as http:
            text = http.get("/metrics").text
            assert 'cellar:conversation_requests_total{model_name="fake"} 3.0' in text
            assert f'cellar:conversation_prompt_tokens_total{{model_name="fake"}} {120.0 + len(CHAT_IDS)}' in text
            assert 'cellar:conversation_cached_tokens_total{model_name="fake"} 32.0' in text
            for change, headers, param in (
                ({"prompt_cache_key": "k" * 300}, {}, "prompt_cache_key"),
                ({}, {"X-Session-ID": "k" * 300}, "X-Session-ID"),
                ({"cache_salt": ""}, {}, "cache_salt"),
            ):
                answer = http.post("/v1/completions", json={"prompt": [1], **change}, headers=headers)
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == param
