"""/engine/memory: where the KV of a client's conversations lies, forgetting and pinning it, and flushing a tier.

What lies in a tier is everybody's. So flushing, and pinning, which keeps others out, are for servers with one key, or
none.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from starlette.responses import JSONResponse, Response

from cellar.core.messages import Tier
from cellar.server.desk import Desk
from cellar.server.errors import ApiError
from cellar.server.keys import owner_of
from cellar.server.requests import MAX_NAME

PATH = "/engine/memory"

MAX_PIN_SECONDS = 7 * 86400.0

Names = Annotated[
    list[Annotated[str, Query(min_length=1, max_length=MAX_NAME)]],
    Query(min_length=1, max_length=256, description="Names of conversations, as their requests give them."),
]
Seconds = Annotated[
    float, Query(ge=0, le=MAX_PIN_SECONDS, allow_inf_nan=False, description="How long the pin holds; 0 ends it.")
]


def install(app: FastAPI, desk: Desk, responses: dict[int | str, dict[str, Any]], num_keys: int) -> None:
    """Add the routes. `responses` describes the errors that they may answer with; the server has `num_keys` keys."""

    async def memory(request: Request, conversation: Names) -> Response:
        """Tokens of each conversation, by the fastest tier that has them."""
        return await told(request, conversation)

    async def forget(request: Request, conversation: Names) -> Response:
        """Forget conversations: none of their KV is found any more, unless others share it. Says what there was."""
        return await told(request, conversation, forget=True)

    async def pin(request: Request, conversation: Names, pin_seconds: Seconds) -> Response:
        """Pin conversations: for so long their KV leaves each tier after all that is not pinned. Says what there is."""
        check_alone("pin conversations")
        return await told(request, conversation, pin_seconds=pin_seconds)

    async def flush(tier: Literal["device", "host", "disk", "remote"]) -> Response:
        """Have a tier drop all KV that nobody uses at the moment, whoever it belongs to."""
        check_alone("flush a tier")
        return JSONResponse({"object": "flushed", "tier": tier, "chunks": await desk.flush(Tier[tier.upper()])})

    async def told(
        request: Request, names: list[str], forget: bool = False, pin_seconds: float | None = None
    ) -> Response:
        found = await desk.memory(owner_of(request.scope), names, forget, pin_seconds)
        data = [{"conversation": name, "tokens": tokens} for name, tokens in zip(names, found, strict=True)]
        return JSONResponse({"object": "list", "data": data})

    def check_alone(what: str) -> None:
        if num_keys > 1:
            raise ApiError(
                403,
                f"this server has {num_keys} keys, whose KV shares the tiers, so none of them may {what}; "
                "serve with one key to do it.",
            )

    for method, path, endpoint in (
        ("GET", PATH, memory),
        ("DELETE", PATH, forget),
        ("PUT", PATH, pin),
        ("DELETE", PATH + "/{tier}", flush),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_model=None, responses=responses)
