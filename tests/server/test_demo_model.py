"""`cellar serve` as users run it, with the demo model: long, because it loads torch and a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.limits import SECONDS
from tests.server.served import running_demo

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Two fronts; one front's demo model is what tests/clients talk with."""
    with running_demo("--api-server-count", "2") as url:
        yield url


def test_stories(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    assert client.models.list().data[0].id == "cellar-demo"
    one = client.completions.create(model="cellar-demo", prompt="Once upon a time", max_tokens=20, temperature=0)
    chunks = client.completions.create(
        model="cellar-demo", prompt="Once upon a time", max_tokens=20, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == one.choices[0].text
    seeded = [client.completions.create(model="cellar-demo", prompt="A", max_tokens=10, seed=7) for _ in range(2)]
    assert seeded[0].choices[0].text == seeded[1].choices[0].text


def test_json_by_schema(url: str) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    body: dict[str, Any] = {
        "prompt": "A boy: ",
        "max_tokens": 400,
        "n": 4,
        "response_format": {"type": "json_schema", "json_schema": {"name": "boy", "schema": schema}},
    }
    for choice in httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS).json()["choices"]:
        assert choice["finish_reason"] == "stop"
        assert set(json.loads(choice["text"])) == {"name", "age"}
