"""A model's own sampling defaults at the API: for fields that a request leaves out, and for no other."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from cellar.core.config import EngineConfig
from cellar.core.sampling import SamplingParams
from cellar.engine.stream import AsyncLLM
from cellar.server.app import build_app
from cellar.server.host import SameProcess, ServedModel
from cellar.server.supervisor import FrontMaker
from cellar.server.wire import Ready
from cellar.text.generation import GenerationConfig
from tests.fake_front import open_fake
from tests.server.served import running

MODELS = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "max_tokens": 30,
}
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
SENT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 6]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, list[SamplingParams]]]:
    """A server's address, and what its requests were sampled by."""
    seen: list[SamplingParams] = []

    def note(plan: Any) -> None:
        seen.extend(row.params for row in plan.opens)

    opened = replace(open_fake(fail=note)[0], generation=GenerationConfig(MODELS))
    app = build_app(SameProcess(AsyncLLM.over(opened)), ServedModel.of(opened, ("m",)))
    with running(app) as url:
        yield url, seen


def asked(served: tuple[str, list[SamplingParams]], path: str, **fields: Any) -> tuple[SamplingParams, int]:
    """How a request was sampled, and how many tokens it got."""
    url, seen = served
    seen.clear()
    answer = httpx.post(url + path, json=SENT[path] | {"ignore_eos": True} | fields, timeout=60)
    assert answer.status_code == 200, answer.text
    return seen[0], answer.json()["usage"]["completion_tokens"]


def shown(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in NEUTRAL}


@pytest.mark.parametrize("path", SENT)
def test_what_a_request_leaves_out_is_the_models(served: tuple[str, list[SamplingParams]], path: str) -> None:
    for fields in ({}, dict.fromkeys(NEUTRAL)):
        params, count = asked(served, path, **fields)
        assert shown(params) == {name: MODELS[name] for name in NEUTRAL}
        assert count == (30 if "chat" in path else 16)  # OpenAI's completions have 16


@pytest.mark.parametrize("path", SENT)
def test_no_default_stands_above_a_field_of_the_request(served: tuple[str, list[SamplingParams]], path: str) -> None:
    params, count = asked(served, path, **NEUTRAL, max_tokens=40)
    assert (shown(params), count) == (NEUTRAL, 40)
    for name, value in {"temperature": 0, "top_k": -1, "top_p": 0.5, "min_p": 1, "repetition_penalty": 2}.items():
        params, _ = asked(served, path, **{name: value})
        assert shown(params) == {k: MODELS[k] for k in NEUTRAL} | {name: value}


def test_the_newer_name_of_the_limit(served: tuple[str, list[SamplingParams]]) -> None:
    assert asked(served, "/v1/chat/completions", max_completion_tokens=41)[1] == 41


def test_a_probe_is_not_sampled_by_them(served: tuple[str, list[SamplingParams]]) -> None:
    url, seen = served
    seen.clear()
    assert httpx.get(url + "/health_generate", timeout=60).status_code == 200
    assert shown(seen[0]) == NEUTRAL | {"temperature": 0}


def test_a_front_in_a_process_of_its_own_has_them_too() -> None:
    opened = open_fake(tokenizer=False)[0]
    generation = GenerationConfig(MODELS, (9,))
    ready = Ready(EngineConfig.of(skip_tokenizer_init=True), opened.spec, None, 256, generation)
    attached = FrontMaker()(pickle.loads(pickle.dumps(ready)), opened.front.engine)
    assert ServedModel.of(attached, ("m",)).generation == generation
    assert attached.front.reader.eos_token_ids == (9,)
    opened.front.close()
