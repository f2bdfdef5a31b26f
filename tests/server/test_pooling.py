"""/v1/embeddings, /v1/score and /v1/rerank: through the official client and over plain HTTP, on the fake device."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from cellar.runtime.steps.fake.model import hidden_states
from tests.limits import SECONDS
from tests.server.served import MODEL, TEXT, Served, serve

TEXTS = ["Once upon a time", "there was a lighthouse by the sea", "a", "Once upon a time there was a fox. " * 5]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(max_model_len=256, num_slots=256) as served:
        yield served
        served.settle()


def vector(text: str | list[int], pooling: str = "last", dimensions: int | None = None) -> np.ndarray:
    """By hand, of length 1."""
    states = hidden_states(TEXT.encode(text) if isinstance(text, str) else text).astype(np.float64)
    found = (states[-1] if pooling == "last" else states.mean(0))[:dimensions]
    return found / np.linalg.norm(found)


def cosine(a: str, b: str) -> float:
    return float(vector(a) @ vector(b))


def test_the_official_client(served: Served) -> None:
    client = served.client()
    for given in (TEXTS[0], TEXTS, TEXT.encode(TEXTS[1]), [TEXT.encode(text) for text in TEXTS]):
        each: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
        for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            answer = client.embeddings.create(model=MODEL, input=given, **options)  # type: ignore[call-overload]
            assert [one.index for one in answer.data] == list(range(len(each)))
            assert answer.model == MODEL
            count = sum(len(TEXT.encode(one)) if isinstance(one, str) else len(one) for one in each)
            assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
            for text, one in zip(each, answer.data, strict=True):
                found = one.embedding
                if options.get("encoding_format") == "base64":
                    assert isinstance(found, str)
                    found = np.frombuffer(base64.b64decode(found), "<f4").tolist()
                np.testing.assert_allclose(found, vector(text), rtol=1e-5)
    (cut,) = client.embeddings.create(model=MODEL, input="Once", dimensions=2).data
    np.testing.assert_allclose(cut.embedding, vector("Once", dimensions=2), rtol=1e-5)
    more = {"pooling": "mean", "normalize": False}
    (mean,) = client.embeddings.create(model=MODEL, input=TEXTS[3], extra_body=more, user="me").data
    wanted = hidden_states(TEXT.encode(TEXTS[3])).astype(np.float64).mean(0)
    np.testing.assert_allclose(mean.embedding, wanted, rtol=1e-5)


def test_many_at_a_time_beside_streams(served: Served) -> None:
    """Embeddings and completions share steps, and each gets what it gets alone."""

    async def all_of_them() -> None:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=SECONDS)

        async def embed(k: int) -> None:
            text = f"{k} " * (1 + k)
            (one,) = (await client.embeddings.create(model=MODEL, input=text)).data
            np.testing.assert_allclose(one.embedding, vector(text), rtol=1e-5)

        async def complete(k: int) -> str:
            made = await client.completions.create(model=MODEL, prompt=f"{k} ", max_tokens=12, temperature=0)
            return made.choices[0].text

        alone = [await complete(k) for k in range(8)]
        beside = await asyncio.gather(*(complete(k) for k in range(8)), *(embed(k) for k in range(40)))
        assert beside[:8] == alone

    asyncio.run(all_of_them())


def test_scores_and_reranking(served: Served) -> None:
    with served.http() as http:
        for path in ("/v1/score", "/score"):
            for first, second in ((TEXTS[0], TEXTS[1:]), (TEXTS[:2], TEXTS[2:]), (TEXTS[0], TEXTS[2])):
                answer = http.post(path, json={"model": MODEL, "text_1": first, "text_2": second}).json()
                ones = [first] if isinstance(first, str) else first
                others = [second] if isinstance(second, str) else second
                wanted = [cosine(ones[k % len(ones)], other) for k, other in enumerate(others)]
                assert [one["index"] for one in answer["data"]] == list(range(len(others)))
                np.testing.assert_allclose([one["score"] for one in answer["data"]], wanted, atol=1e-6)
        order = sorted(range(1, 4), key=lambda k: -cosine(TEXTS[0], TEXTS[k]))
        for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
            documents = [TEXTS[1], {"text": TEXTS[2]}, TEXTS[3]]
            body = {"query": TEXTS[0], "documents": documents, "top_n": 2}
            answer = http.post(path, json=body).json()
            assert [one["index"] + 1 for one in answer["results"]] == order[:2]
            assert [one["document"]["text"] for one in answer["results"]] == [TEXTS[k] for k in order[:2]]
            scores = [one["relevance_score"] for one in answer["results"]]
            np.testing.assert_allclose(scores, [cosine(TEXTS[0], TEXTS[k]) for k in order[:2]], atol=1e-6)
            assert answer["usage"]["total_tokens"] == sum(len(TEXT.encode(text)) for text in TEXTS)
            plain = http.post(path, json={**body, "top_n": 0, "return_documents": False}).json()["results"]
            assert [sorted(one) for one in plain] == [["index", "relevance_score"]] * 3


def test_a_prompt_may_fill_the_context(served: Served) -> None:
    client = served.client()
    (one,) = client.embeddings.create(model=MODEL, input=[5] * 256).data
    np.testing.assert_allclose(one.embedding, vector([5] * 256), rtol=1e-5)
    with pytest.raises(openai.BadRequestError, match="has 257 tokens, but the context holds 256; shorten it to 256"):
        client.embeddings.create(model=MODEL, input=[5] * 257)


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/embeddings", {"input": []}, "input", "empty list"),
    ("/v1/embeddings", {"input": [[]]}, "input", "empty"),
    ("/v1/embeddings", {"input": ""}, "input", "empty"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "must be an integer, 1 or more"),
    ("/v1/embeddings", {"input": "a", "dimensions": 2000}, "dimensions", "ask for at most that"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
    ("/v1/embeddings", {"input": "a", "pooling": "cls"}, "pooling", "last"),
    ("/v1/embeddings", {"input": ["a"] * 9}, "input", "9 prompts"),
    ("/v1/embeddings", {"input": "a", "temperature": 1}, "temperature", "not a parameter"),
    ("/v1/embeddings", {"input": "\ud800"}, "input", "surrogate"),
    ("/v1/embeddings", {"input": "a", "model": "other"}, "model", "does not exist"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "2 first texts for 3"),
    ("/v1/score", {"text_1": [], "text_2": ["a"]}, "text_1", "empty list"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents", "1"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "0"),
]


@pytest.fixture(scope="module")
def narrow() -> Iterator[httpx.Client]:
    with serve(limits={"max_request_sequences": 8}) as served, served.http() as http:
        yield http


@pytest.mark.parametrize(("path", "body", "parameter", "said"), REFUSED)
def test_refusals_name_the_field(
    narrow: httpx.Client, path: str, body: dict[str, Any], parameter: str, said: str
) -> None:
    answer = narrow.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == (404 if parameter == "model" else 400)
    assert said in error["message"]
    assert error["param"] in (parameter, None if said == "surrogate" else parameter)
