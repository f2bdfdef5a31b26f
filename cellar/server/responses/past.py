"""What a turn follows: the items of a chain of responses, or of a conversation."""

from __future__ import annotations

from dataclasses import dataclass, field

from cellar.conversations import conversations, responses
from cellar.conversations.errors import NotFound
from cellar.conversations.records import ANSWERED, History, Response
from cellar.conversations.session import Session
from cellar.conversations.store import AsyncStore
from cellar.server.errors import refused
from cellar.server.responses.items import Item


@dataclass(frozen=True)
class Past:
    """Items so far, and what else the store knows of them. `thread` is what the engine calls the conversation."""

    items: list[Item] = field(default_factory=list)
    history: History | None = None
    thread: str | None = None

    @property
    def last(self) -> str | None:
        """The id of the last item."""
        return self.items[-1]["id"] if self.items else None

    @property
    def head(self) -> str | None:
        """The response whose context the conversation goes on from."""
        return None if self.history is None or self.history.tokens is None else self.history.tokens.base


async def read_past(store: AsyncStore, owner: str, previous: str | None, conversation: str | None, most: int) -> Past:
    """What came before, of `most` characters at most.

    Raises NotFound for a conversation, ApiError for a response that cannot be followed.
    """
    if conversation is not None:
        history = await store.read(conversations.history, owner, conversation, most)
        return Past([item.body for item in history.items], history, conversation)
    if previous is None:
        return Past()
    try:
        response, history = await store.read(_followed, owner, previous, most)
    except NotFound:
        raise refused(
            f"previous response with id {previous!r} was not found; it may have been deleted, or have expired.",
            "previous_response_id",
            "previous_response_not_found",
        ) from None
    if response.status not in ANSWERED:
        raise refused(
            f"previous response {previous!r} has the status {response.status}, and no answer to go on from; "
            "wait for its end, or follow another.",
            "previous_response_id",
        )
    return Past([item.body for item in history.items], history, history.thread)


def _followed(session: Session, owner: str, id: str, most: int) -> tuple[Response, History]:
    return responses.get(session, owner, id), responses.history(session, owner, id, most)
