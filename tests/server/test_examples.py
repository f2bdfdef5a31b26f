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
