"""schemathesis over the served OpenAPI document: no answer is a 500, whatever is sent."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.limits import SECONDS
from tests.server.served import serve

PATHS = {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/responses/compact",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel",
    "/v1/responses/{response_id}/input_items",
    "/v1/conversations",
    "/v1/conversations/{conversation_id}",
    "/v1/conversations/{conversation_id}/items",
    "/v1/conversations/{conversation_id}/items/{item_id}",
    "/v1/embeddings",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/v1/models",
    "/v1/models/{model}",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/health",
    "/health_generate",
    "/ping",
    "/load",
    "/version",
    "/metrics",
    "/engine/status",
    "/engine/memory",
    "/engine/memory/{tier}",
}


POSTS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/conversations",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/tokenize",
    "/detokenize",
]


def fuzz(examples: int, paths: Collection[str]) -> None:
    """Random calls of some paths; each answers without a defect."""
    with serve(max_model_len=512, num_slots=512) as served:
        with served.http() as http:
            document: dict[str, Any] = http.get("/openapi.json").json()
        assert set(document["paths"]) == PATHS
        schema = schemathesis.openapi.from_dict(document)
        seen: dict[str, set[int]] = {}
        for operation in schema.get_all_operations():
            found = operation.ok()
            if found.path not in paths:
                continue

            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            def once(case: Any) -> None:
                answer = case.call(base_url=served.url, timeout=SECONDS)
                seen.setdefault(case.path, set()).add(answer.status_code)
                assert answer.status_code < 500, answer.text

            given(case=found.as_strategy())(once)()
        assert seen.keys() == set(paths)
        served.settle()


@pytest.mark.long
def test_no_500_for_some_requests() -> None:
    fuzz(15, PATHS)


@pytest.mark.long
@pytest.mark.parametrize("path", POSTS)
def test_no_500_for_many_requests(path: str) -> None:
    fuzz(100, [path])
