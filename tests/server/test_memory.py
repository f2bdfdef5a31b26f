"""Where the KV of conversations lies, by HTTP; and forgetting it, so that nothing of it is found."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.limits import SECONDS
from tests.server.served import serve

LONG = [{"role": "user", "content": "A story of a fox that went far away and came back. " * 4}]


def cached(http: httpx.Client, **fields: Any) -> int:
    answer = http.post("/v1/chat/completions", json={"messages": LONG, "max_tokens": 4, **fields})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_conversation_is_forgotten_before_the_answer() -> None:
    with serve(max_model_len=1024, num_slots=256) as served, served.http() as http:
        assert cached(http, prompt_cache_key="mine") == 0
        assert cached(http, prompt_cache_key="mine") > 16
        asked = {"conversation": ["mine", "nobody's"]}
        (mine, nobody) = http.get("/engine/memory", params=asked).json()["data"]
        assert mine["conversation"] == "mine"
        assert mine["tokens"]["device"] > 16
        assert nobody["tokens"] == {"device": 0}
        gone = http.delete("/engine/memory", params={"conversation": "mine"}).json()["data"]
        assert gone == [mine]
        assert http.get("/engine/memory", params=asked).json()["data"][0]["tokens"] == {"device": 0}
        assert cached(http) == 0
        for wrong in ({}, {"conversation": ""}, {"conversation": ["x"] * 300}):
            assert http.get("/engine/memory", params=wrong).status_code == 400
        served.settle()


def test_each_key_sees_and_forgets_its_own_alone() -> None:
    with serve({"api_key": ["k1", "k2"]}, max_model_len=1024, num_slots=256) as served:
        one, two = (
            httpx.Client(base_url=served.url, timeout=SECONDS, headers={"authorization": f"Bearer {key}"})
            for key in ("k1", "k2")
        )
        with one, two, served.http() as nobody:
            for http in (one, two):
                cached(http, prompt_cache_key="talk", cache_salt="s")
            two.delete("/engine/memory", params={"conversation": "talk"})
            assert one.get("/engine/memory", params={"conversation": "talk"}).json()["data"][0]["tokens"]["device"] > 16
            assert cached(one, cache_salt="s") > 16
            assert cached(two, cache_salt="s") == 0
            assert nobody.get("/engine/memory", params={"conversation": "talk"}).status_code == 401


def test_a_tier_is_flushed_and_a_tier_that_is_not_there_is_refused() -> None:
    with serve(max_model_len=1024, num_slots=256) as served, served.http() as http:
        cached(http)
        assert cached(http) > 16
        told = http.delete("/engine/memory/device").json()
        assert told["tier"] == "device"
        assert told["chunks"] >= 1
        assert cached(http) == 0
        missing = http.delete("/engine/memory/disk")
        assert missing.status_code == 404
        assert "no tier disk" in missing.json()["error"]["message"]
        assert http.delete("/engine/memory/cloud").status_code == 400
        served.settle()


@pytest.mark.long
def test_a_pinned_conversation_stays_while_others_come_and_go() -> None:
    """Memory for three or four such prompts: who is pinned is there after twenty others, until the pin ends."""
    with serve(max_model_len=512, num_slots=40) as served, served.http() as http:

        def others(first: int) -> None:
            for k in range(first, first + 20):
                text = f"{k} and again. " + "A story of quite another animal. " * 6
                body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
                assert http.post("/v1/chat/completions", json=body).status_code == 200

        cached(http, prompt_cache_key="mine")
        (told,) = http.put("/engine/memory", params={"conversation": "mine", "pin_seconds": 3600}).json()["data"]
        assert told["tokens"]["device"] > 16
        others(0)
        assert cached(http, prompt_cache_key="mine") > 16
        http.put("/engine/memory", params={"conversation": "mine", "pin_seconds": 0})
        others(50)
        assert cached(http, prompt_cache_key="mine") == 0
        for wrong in ({"pin_seconds": 5}, {"conversation": "mine"}, {"conversation": "mine", "pin_seconds": -1}):
            assert http.put("/engine/memory", params=wrong).status_code == 400
        served.settle()


def test_who_shares_the_tiers_may_neither_flush_nor_pin() -> None:
    with serve({"api_key": ["k1", "k2"]}, max_model_len=1024, num_slots=256) as served, served.http() as nobody:
        assert nobody.delete("/engine/memory/device").status_code == 401
        with httpx.Client(base_url=served.url, timeout=SECONDS, headers={"authorization": "Bearer k1"}) as http:
            for answer in (
                http.delete("/engine/memory/device"),
                http.put("/engine/memory", params={"conversation": "talk", "pin_seconds": 5}),
            ):
                assert answer.status_code == 403
                assert answer.json()["error"]["type"] == "permission_error"
                assert "one key" in answer.json()["error"]["message"]
