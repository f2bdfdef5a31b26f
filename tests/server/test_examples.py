"""OpenAI's own worked examples of the endpoints that are served: the same requests, answers of the same form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.server.served import serve

EXAMPLES = Path(__file__).parents[3] / "shared" / "data" / "openai_api" / "examples.jsonl"
ELSEWHERE = {"annotations", "system_fingerprint", "service_tier", "completion_tokens_details", "audio_tokens"}
"""Fields of OpenAI's answers that say nothing about an answer of ours."""


def examples() -> list[tuple[str, dict[str, Any], str]]:
    found = []
    for line in EXAMPLES.read_text().splitlines():
        one = json.loads(line)
        if one["operationId"] in ("createChatCompletion", "createCompletion"):
            body = json.loads(re.search(r"-d '(.*)'", one["request_curl"], re.DOTALL)[1])  # type: ignore[index]
            found.append((f"/v1{one['path']}", body, one["response"]))
    return found


def missing(theirs: Any, ours: Any, where: str = "") -> list[str]:
    """Fields of an answer of theirs that one of ours lacks."""
    if isinstance(theirs, dict):
        gone = [f"{where}.{key}" for key in theirs.keys() - ours.keys() - ELSEWHERE]
        shared = theirs.keys() & ours.keys()
        return gone + [name for key in shared for name in missing(theirs[key], ours[key], f"{where}.{key}")]
    if isinstance(theirs, list) and isinstance(ours, list) and theirs and ours:
        return missing(theirs[0], ours[0], f"{where}[0]")
    return []


REFUSED = {"input_image": "input", "input_file": "input", "web_search_preview": "tools", "file_search": "tools"}
REFUSED |= {'"effort"': "reasoning.effort"}
"""What a text model without such tools, and without reasoning, does not take, and the field that the error names."""


@pytest.mark.skipif(not EXAMPLES.exists(), reason="OpenAI's examples are not beside this checkout")
def test_openais_examples_of_responses() -> None:
    """Each request as it stands, with an id that is there."""
    seen: set[str] = set()
    with serve({"tool_call_parser": "hermes"}, max_model_len=2048, num_slots=256) as served, served.http() as http:
        talk = http.post("/v1/conversations", json={"metadata": {"topic": "demo"}}).json()["id"]
        hello = {"items": [{"role": "user", "content": "Hello!"}] * 2}
        items = [one["id"] for one in http.post(f"/v1/conversations/{talk}/items", json=hello).json()["data"]]
        short = {"input": "Hi", "max_output_tokens": 4}
        late = {"input": "Hi", "background": True, "max_output_tokens": 1500}
        for line in EXAMPLES.read_text().splitlines():
            one = json.loads(line)
            if not one["path"].startswith(("/responses", "/conversations")):
                continue
            made = http.post("/v1/responses", json=late if "/cancel" in one["path"] else short).json()["id"]
            ids = {"response_id": made, "conversation_id": talk, "item_id": items[0]}
            path = f"/v1{one['path']}".format(**ids)
            given = re.search(r"-d '(.*)'", one["request_curl"], re.DOTALL)
            body = json.loads(given[1]) if given else None
            if "/compact" in path:
                assert http.post(path, json=body).status_code == 400
                continue
            if body is not None and "model" in body:
                limit = {} if "input_tokens" in path else {"max_output_tokens": 8}
                body = {**body, "model": "fake", **limit}
            if one["method"] == "delete" and path == f"/v1/conversations/{talk}":
                continue  # last
            answer = http.request(one["method"], path, json=body)
            refused = next((field for sign, field in REFUSED.items() if sign in json.dumps(body)), None)
            if refused is not None:
                assert answer.status_code == 400, answer.text
                assert answer.json()["error"]["param"] == refused
                continue
            if one["operationId"].endswith("deleteConversationItem"):
                items.pop(0)
            assert answer.status_code == 200, answer.text
            seen.add(one["operationId"].removeprefix("beta_"))
            if body is not None and body.get("stream"):
                theirs = re.findall(r"event: (\S+)", one["response"])
                ours = re.findall(r"event: (\S+)", answer.text)
                assert set(theirs) - {"response.completed"} <= set(ours)
                continue
            gone = missing(json.loads(one["response"]), answer.json())
            assert [name for name in gone if "tools[0]" not in name and not name.startswith(".output[0]")] == []
        assert http.delete(f"/v1/conversations/{talk}").json()["deleted"]
    assert len(seen) >= 13, seen


@pytest.mark.skipif(not EXAMPLES.exists(), reason="OpenAI's examples are not beside this checkout")
def test_openais_examples() -> None:
    seen = 0
    with serve({"tool_call_parser": "hermes"}, max_model_len=2048, num_slots=256) as served, served.http() as http:
        for path, body, theirs in examples():
            limit = {"max_tokens": 8, "model": "fake"}
            answer = http.post(path, json={**body, **limit})
            if "image_url" in json.dumps(body):
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == "messages"
                continue
            assert answer.status_code == 200, answer.text
            seen += 1
            if body.get("stream"):
                first = json.JSONDecoder().raw_decode(
                    re.sub(r'"\n\s*"system_f', '", "system_f', theirs).replace(",\n}", "\n}")
                )[0]
                chunk = json.loads(answer.text.split("\n")[0].removeprefix("data: "))
                assert missing(first, chunk) == []
                assert answer.text.endswith("data: [DONE]\n\n")
            else:
                gone = missing(json.loads(theirs), answer.json())
                assert [name for name in gone if not name.endswith(".tool_calls")] == []
    assert seen >= 6
