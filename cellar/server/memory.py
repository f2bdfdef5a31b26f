"""/engine/memory: where the KV of a client's conversations lies, and forgetting it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from starlette.responses import JSONResponse, Response

from cellar.server.desk import Desk
from cellar.server.keys import owner_of
from cellar.server.requests import MAX_NAME

PATH = "/engine/memory"

Names = Annotated[
    list[Annotated[str, Query(min_length=1, max_length=MAX_NAME)]],
    Query(min_length=1, max_length=256, description="Names of conversations, as their requests give them."),
]


def install(app: FastAPI, desk: Desk, responses: dict[int | str, dict[str, Any]]) -> None:
    """Add the routes. `responses` describes the errors that they may answer with."""

    async def memory(request: Request, conversation: Names) -> Response:
        """Tokens of each conversation, by the fastest tier that has them."""
        return await told(request, conversation, False)

    async def forget(request: Request, conversation: Names) -> Response:
        """Forget conversations: none of their KV is found any more, unless others share it. Says what there was."""
        return await told(request, conversation, True)

    async def told(request: Request, names: list[str], forget: bool) -> Response:
        found = await desk.memory(owner_of(request.scope), names, forget)
        data = [{"conversation": name, "tokens": tokens} for name, tokens in zip(names, found, strict=True)]
        return JSONResponse({"object": "list", "data": data})

    for method, endpoint in (("GET", memory), ("DELETE", forget)):
        app.add_api_route(PATH, endpoint, methods=[method], response_model=None, responses=responses)
