"""Half a surrogate pair, which JSON allows and UTF-8 does not, at every place of every body: never a 5xx."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from cellar.core.config import EngineConfig, ModelConfig
from cellar.core.errors import ConfigError, RequestError
from cellar.core.sampling import StructuredOutputsParams
from cellar.server.config import ServerConfig
from cellar.server.errors import refused
from cellar.server.run import model_names
from tests.server.served import serve

HALF = "\ud800x"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/completions",
        {
            "prompt": "hi",
            "max_tokens": 1,
            "stop": ["a"],
            "logit_bias": {"5": 1},
            "metadata": {"a": "b"},
            "prompt_cache_key": "k",
            "cache_salt": "s",
            "request_id": "r",
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        },
    ),
    ("/v1/completions", {"prompt": ["hi"], "max_tokens": 1, "structured_outputs": {"choice": ["a"]}, "stream": True}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "hi", "name": "bob"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]},
            ],
            "max_tokens": 1,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "chat_template_kwargs": {"a": 1},
        },
    ),
    ("/tokenize", {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"k": "v"}}),
    ("/detokenize", {"tokens": [1, 2]}),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all that a body holds, and to itself."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for k in range(len(value)):
            yield from places(value[k], (*path, k))


def spoilt(body: dict[str, Any], path: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """The body with half a pair at one place: as the value, in a list, as a key, and as one key more."""
    for how in range(4):
        root: dict[str, Any] = {"body": deepcopy(body)}
        at: Any = root
        for part in ("body", *path)[:-1]:
            at = at[part]
        last = ("body", *path)[-1]
        if how == 0 and path:
            at[last] = HALF
        elif how == 1 and path:
            at[last] = [HALF]
        elif how == 2 and path and isinstance(at, dict):
            at[HALF] = at.pop(last)
        elif how == 3 and isinstance(at[last], dict):
            at[last][HALF] = HALF
        else:
            continue
        yield root["body"]


@pytest.mark.long
def test_no_place_of_a_body_makes_it_a_defect() -> None:
    cases = [(url, sent) for url, body in BODIES for path in places(body) for sent in spoilt(body, path)]
    headers = {"content-type": "application/json"}
    with serve() as served, served.http() as http:
        statuses = Counter[int]()
        for url, sent in random.Random(4).sample(cases, 160):
            answer = http.post(url, content=json.dumps(sent), headers=headers)
            assert answer.status_code < 500, (url, sent, answer.text)
            statuses[answer.status_code] += 1
    assert statuses[400] > 80


def test_what_is_kept_can_be_said_again(tmp_path: Path) -> None:
    headers = {"content-type": "application/json"}
    with serve({"data_dir": str(tmp_path)}) as served, served.http() as http:
        for metadata in ({"a": HALF}, {HALF: "a"}, {"\ud83d": "\ude00"}):
            for path, body in (("/v1/conversations", {}), ("/v1/responses", {"input": "hi", "max_output_tokens": 1})):
                answer = http.post(path, content=json.dumps({**body, "metadata": metadata}), headers=headers)
                assert answer.status_code == 400, answer.text
                assert "surrogate pair" in answer.text
        assert http.get("/v1/conversations").json()["data"] == []


def test_errors_can_be_sent_whatever_they_quote() -> None:
    assert refused(f"there is no {HALF}.", HALF).response().body.count(b"?x") == 2


@pytest.mark.parametrize("given", [{"json": {HALF: 1}}, {"json": HALF}, {"choice": [HALF]}, {"regex": HALF}])
def test_grammars_are_valid_unicode(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        StructuredOutputsParams(**given)


def test_names_of_models_can_be_said() -> None:
    for name in (HALF, "a\nb"):
        with pytest.raises(ConfigError, match="served_model_name"):
            model_names(EngineConfig(), ServerConfig(served_model_name=name))
        with pytest.raises(ConfigError, match="served_model_name"):
            model_names(EngineConfig(model=ModelConfig(model=name)), ServerConfig())


@pytest.mark.parametrize("place", ["logit_bias", "temperature", "stop_token_ids", "metadata", "seed"])
def test_numbers_of_hundreds_of_digits_are_no_defect(place: str) -> None:
    """Found in 2026-11: a bias that no float holds was a 500."""
    huge = 10**400
    values: dict[str, Any] = {"logit_bias": {"5": huge}, "stop_token_ids": [huge], "metadata": {"a": huge}}
    with serve() as served, served.http() as http:
        body = {"prompt": "x", "max_tokens": 1, place: values.get(place, huge)}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == (200 if place == "metadata" else 400), answer.text
