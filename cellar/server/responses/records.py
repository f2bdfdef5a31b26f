"""Between the store's records and what the API shows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cellar.conversations.records import Conversation, Response, Status
from cellar.conversations.records import Item as Record
from cellar.server.responses.items import Item
from cellar.server.responses.turns import Turn

LOST = {"code": "server_error", "message": "the server ended while it made this response; send the request again."}
"""Of a response whose process died: it could not say so itself."""


def records_of(items: Iterable[Item]) -> tuple[Record, ...]:
    """Items as they are stored."""
    return tuple(Record(item["id"], item) for item in items)


def record_of(turn: Turn, body: dict[str, Any]) -> Response:
    """A response as it is stored; its output stands apart from its body."""
    return Response(
        turn.id,
        turn.owner,
        Status(body["status"]),
        turn.created_at,
        stored_body(body),
        turn.request.conversation_id,
        turn.request.previous_response_id,
        bool(turn.request.background),
        records_of(turn.input),
        records_of(body["output"]),
    )


def stored_body(body: dict[str, Any]) -> dict[str, Any]:
    """The object of a response, without what is stored beside it."""
    return {name: value for name, value in body.items() if name != "output"}


def shown_response(response: Response) -> dict[str, Any]:
    """The object of a stored response, as it is now."""
    body: dict[str, Any] = {**response.body, "output": [item.body for item in response.output]}
    body["status"] = str(response.status)
    if response.status is Status.FAILED and body["error"] is None:
        body["error"] = LOST
    return body


def shown_conversation(conversation: Conversation) -> dict[str, Any]:
    """The object of a conversation."""
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": int(conversation.created_at),
        "metadata": conversation.metadata,
    }
