"""Routes whose answers are made of hidden states."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from starlette.responses import Response

from cellar.core.errors import RequestError
from cellar.core.messages import FloatArray, RequestOutput
from cellar.core.pooling import PoolingParams, cosine, embedded, pairs
from cellar.server.config import LimitConfig
from cellar.server.desk import Desk, Session
from cellar.server.errors import as_api_error
from cellar.server.host import ServedModel
from cellar.server.keys import owner_of
from cellar.server.pieces import answered, lazily
from cellar.server.pooling.body import EmbeddingRequest, RerankRequest, ScoreRequest
from cellar.server.prepare import Preparer
from cellar.server.request_id import name_of, new_id
from cellar.server.work import check_sequences

Body = EmbeddingRequest | ScoreRequest | RerankRequest


class PoolingApi:
    """Answers with vectors, or with how near they are, by the same prompts and engine as everything else."""

    def __init__(self, prepare: Preparer, desk: Desk, model: ServedModel, limits: LimitConfig) -> None:
        self._prepare = prepare
        self._desk = desk
        self._model = model
        self._limits = limits

    async def embeddings(self, body: EmbeddingRequest, request: Request) -> Response:
        """A vector of each input."""
        id = new_id("embd", body.request_id, request)
        session = await self._open(id, body, body.inputs(), request)
        params, coded = body.params(), body.encoding_format == "base64"

        async def answer() -> dict[str, Any]:
            outputs = await _complete(session)
            vectors = (embedded(output, params) for output in outputs)
            data = (
                {"object": "embedding", "index": k, "embedding": _base64(vector) if coded else vector.tolist()}
                for k, vector in enumerate(vectors)
            )
            count = len(outputs) * (1 if coded else params.dimensions or self._model.vector_size)
            return self._body(id, body, outputs, data=lazily(data, count))

        return await self._answered(request, answer())

    async def score(self, body: ScoreRequest, request: Request) -> Response:
        """How near texts are to each other, by the cosine of their vectors."""
        id, (first, second) = new_id("score", body.request_id, request), body.texts()
        try:
            wanted = pairs(len(first), len(second))
        except RequestError as error:
            raise as_api_error(error) from error
        session = await self._open(id, body, [*first, *second], request)

        async def answer() -> dict[str, Any]:
            outputs = await _complete(session)
            vectors = [embedded(output, PoolingParams()) for output in outputs]
            data = [
                {"index": k, "object": "score", "score": cosine(vectors[i], vectors[len(first) + j])}
                for k, (i, j) in enumerate(wanted)
            ]
            return self._body(id, body, outputs, data=data)

        return await self._answered(request, answer())

    async def rerank(self, body: RerankRequest, request: Request) -> Response:
        """Documents, those nearest to the query first."""
        id, texts = new_id("rerank", body.request_id, request), body.texts
        session = await self._open(id, body, [body.query, *texts], request)

        async def answer() -> dict[str, Any]:
            outputs = await _complete(session)
            query, *vectors = [embedded(output, PoolingParams()) for output in outputs]
            scores = [cosine(query, vector) for vector in vectors]
            best = sorted(range(len(texts)), key=lambda k: -scores[k])[: body.top_n or None]
            results: list[dict[str, Any]] = [{"index": k, "relevance_score": scores[k]} for k in best]
            if body.return_documents is not False:
                results = [{**one, "document": {"text": texts[one["index"]]}} for one in results]
            return self._body(id, body, outputs, results=results)

        return await self._answered(request, answer())

    # -- how --------------------------------------------------------------------------------------

    async def _open(self, id: str, body: Body, inputs: Sequence[str | list[int]], request: Request) -> Session:
        """The texts on their way through the engine."""
        body.check()
        self._prepare.check(body.model, body.priority)
        check_sequences(len(inputs), 1, self._limits, body.names["prompt"])
        owner = owner_of(request.scope)
        try:
            params = body.params().sampling(self._model.vector_size, self._model.pooling)
            special, cut = body.add_special_tokens is not False, body.truncate_prompt_tokens
            prompts = await self._prepare.inputs(inputs, special, cut)
            name = name_of(request.scope)
            return await self._desk.open(id, prompts, params, body.priority or 0, None, body.salt, name, owner=owner)
        except RequestError as error:
            raise as_api_error(error, body.names) from error

    async def _answered(self, request: Request, body: Coroutine[Any, Any, dict[str, Any]]) -> Response:
        return await answered(request, body, self._limits.request_timeout)

    def _body(self, id: str, body: Body, outputs: Sequence[RequestOutput], **found: Any) -> dict[str, Any]:
        count = sum(len(output.prompt_token_ids) for output in outputs)
        cached = sum(output.num_cached_tokens for output in outputs)
        return {
            "id": id,
            "object": "list",
            "created": int(time.time()),
            "model": self._prepare.name(body.model),
            **found,
            "usage": {
                "prompt_tokens": count,
                "total_tokens": count,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }


def install(app: FastAPI, api: PoolingApi, responses: dict[int | str, dict[str, Any]]) -> None:
    """Add the routes, with vLLM's other names for them. `responses` describes the errors that they may answer with."""
    routes: dict[str, Callable[..., Any]] = {"/v1/embeddings": api.embeddings}
    routes |= dict.fromkeys(("/v1/score", "/score"), api.score)
    routes |= dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), api.rerank)
    for path, endpoint in routes.items():
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None, responses=responses)


async def _complete(session: Session) -> list[RequestOutput]:
    async with session:
        return await session.whole()


def _base64(vector: FloatArray) -> str:
    """As OpenAI sends it: the bytes of little-endian float32."""
    return base64.b64encode(vector.astype(np.dtype("<f4")).tobytes()).decode()
