"""A conversation of `cellar chat` that is kept: in the store that `cellar serve` uses, too."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cellar.core.extras import missing

if TYPE_CHECKING:
    from cellar.conversations.records import Conversation
    from cellar.conversations.session import Session
    from cellar.conversations.store import Store

OWNER = ""
"""Conversations of a server without keys: they are everybody's who may read the store."""

TITLE = "title"

Messages = list[dict[str, Any]]


class KeptTalk:
    """What was said in one conversation, and a place for more. Close it.

    `name` is a conversation's id or its title; of several with one title the last active is meant, and one that is
    not there is begun. Raises ConfigError, StoreUnavailable if the store cannot be opened.
    """

    def __init__(self, name: str, directory: str | None) -> None:
        try:
            from cellar.conversations.store import open_store
        except ModuleNotFoundError as error:
            raise missing("keeping conversations needs", error.name, "server") from error
        self._name = name
        self._store: Store = open_store(None if directory is None else Path(directory), sweep_seconds=None)
        try:
            self._id = self._store.read(_found, name) or self._begun()
        except BaseException:
            self._store.close()
            raise

    def messages(self) -> Messages:
        """What was said so far, as a chat has it."""
        from cellar.conversations import conversations
        from cellar.server.responses.items import messages_of

        items = [item.body for item in self._store.read(conversations.history, OWNER, self._id).items]
        kept = [item for item in items if item["type"] != "reasoning"]
        return messages_of(kept, lambda sealed: sealed)

    def add(self, question: str, answer: str) -> None:
        """One turn more; it is there for good when this returns."""
        from cellar.conversations import items
        from cellar.server.responses.items import read_input, with_own_ids
        from cellar.server.responses.records import records_of

        said = (("user", question), ("assistant", answer))
        new = read_input([{"type": "message", "role": role, "content": text} for role, text in said if text])
        self._store.write(items.add, OWNER, self._id, records_of(with_own_ids(new)))

    def reset(self) -> None:
        """Forget what was said, and begin anew under the same name."""
        from cellar.conversations import conversations

        self._store.write(conversations.remove, OWNER, self._id)
        self._id = self._begun()

    def close(self) -> None:
        """Leave the store."""
        self._store.close()

    def _begun(self) -> str:
        from cellar.conversations import conversations

        id = f"conv_{uuid.uuid4().hex}"
        return self._store.write(conversations.create, OWNER, id, {TITLE: self._name}).id


def _found(session: Session, name: str) -> str | None:
    """The id of a conversation that has this name."""
    from cellar.conversations import conversations

    after, more = None, True
    while more:
        page = conversations.page(session, OWNER, after, 100)
        one: Conversation
        for one in page.records:
            if name in (one.id, one.metadata.get(TITLE)):
                return one.id
        more, after = page.more, page.records[-1].id if page.records else None
    return None
