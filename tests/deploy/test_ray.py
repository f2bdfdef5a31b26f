"""Cellar on a real Ray cluster with PostgreSQL and Redis: two engines, and a front that outlives them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cellar import LLM, SamplingParams
from tests.deploy import storm
from tests.deploy.cluster import Cluster
from tests.limits import SECONDS, eventually, until

pytestmark = pytest.mark.long

PROMPT = "The house stood by the river, and"
ASK: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def served() -> Iterator[Cluster]:
    with storm.served(2) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> str:
    """What an engine in this process says."""
    with LLM(kv_cache_memory_bytes=64 << 20, num_threads=1, dtype="float32") as llm:
        (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))
        return output.outputs[0].text


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_the_same_api_and_the_same_tokens(served: Cluster, expected: str) -> None:
    with served.http() as http:
        assert text(http.post("/v1/completions", json=ASK)) == expected
        with http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as answer:
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert events[-1] == "[DONE]"
        parts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
        assert "".join(parts) == expected
        assert len(parts) > 1  # as they came, not at the end
        assert http.get("/v1/models").json()["data"][0]["id"] == "demo"
        assert http.get("/health").status_code == 200
        assert "<!doctype html>" in http.get("/").text.lower()
        wrong = http.post("/v1/completions", json={**ASK, "max_tokens": -1})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_tokens")


def test_a_name_that_is_not_the_servers_is_refused(served: Cluster) -> None:
    """Without keys and allowed_hosts only localhost is answered, wherever Ray listens."""
    with served.http() as http:
        answer = http.get("/v1/models", headers={"host": "rebound.example"})
        assert answer.json()["error"]["code"] == "host_not_allowed"


def test_streams_and_conversations_outlive_kills_and_an_upgrade(served: Cluster) -> None:
    figures = asyncio.run(storm.storm(served, 12, 2, 32, kills=1, upgrade={"max_num_seqs": 200}))
    assert figures["streams"] == figures["streams_equal"] >= 24
    assert figures["turns_kept"] == figures["streams"] + 24  # those of the calm run, too
    assert figures["choices"]["chunks"] > 0  # fronts go by what engines say that they hold
    assert figures["choices"]["moved"] > 0


def test_engines_come_and_go_with_the_load(served: Cluster) -> None:
    """The last test: the cluster has another number of engines afterwards. Who streams when one goes is not cut off."""
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "upscale_delay_s": 0,
        "downscale_delay_s": 0,
        "look_back_period_s": 2,
        "metrics_interval_s": 1,
        "policy": {"policy_function": "cellar.deploy.scaling:Policy", "policy_kwargs": {"requests": 4}},
    }
    served.deploy({**storm.ARGS, "max_num_seqs": 200}, {"autoscaling_config": scaling}, storm.FRONT)
    until(lambda: len(served.engines()) == 1)

    async def load() -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=SECONDS) as http:
            enough = asyncio.Event()

            async def one() -> None:
                while not enough.is_set():
                    answer = await http.post("/v1/completions", json={**ASK, "max_tokens": 256, "ignore_eos": True})
                    assert answer.json()["usage"]["completion_tokens"] == 256

            asking = [asyncio.create_task(one()) for _ in range(8)]
            await eventually(lambda: len(served.engines()) == 2)
            enough.set()
            await asyncio.gather(*asking)
            long = asyncio.create_task(
                http.post("/v1/completions", json={**ASK, "max_tokens": 700, "ignore_eos": True})
            )
            await eventually(lambda: len(served.engines()) == 1)
            assert (await long).json()["usage"]["completion_tokens"] == 700

    asyncio.run(load())
