"""What a store refuses, and what goes wrong in one."""

from __future__ import annotations

from cellar.core.errors import CellarError


class StoreError(CellarError):
    """Base of all of them."""


class NotFound(StoreError):
    """There is no such conversation, item or response, or it is another owner's."""

    def __init__(self, kind: str, id: str) -> None:
        super().__init__(f"there is no {kind} with id {id[:128]!r}; it may have been deleted, or have expired.")
        self.kind = kind
        self.id = id


class ConversationLocked(StoreError):
    """Another response is being made in the same conversation."""

    def __init__(self, id: str) -> None:
        super().__init__(
            f"conversation {id[:128]!r} is being continued by another request; wait for its end, or begin another."
        )
        self.id = id


class Duplicate(StoreError):
    """An id is taken."""

    def __init__(self, kind: str, id: str) -> None:
        super().__init__(f"there is another {kind} with id {id[:128]!r}; leave the id out, or choose another.")
        self.kind = kind
        self.id = id


class TooLarge(StoreError):
    """Items are more than can be read at once."""

    def __init__(self, length: int, most: int) -> None:
        super().__init__(
            f"the items that are referred to have {length} characters together, but a request may refer to {most} "
            "(--max-body-bytes); refer to fewer."
        )


class Ended(StoreError):
    """A response has ended already: by itself, by a cancellation, or with the process that made it."""

    def __init__(self, id: str, status: str) -> None:
        super().__init__(f"response {id[:128]!r} has ended with status {status!r}; it cannot be changed any more.")
        self.id = id
        self.status = status


class StoreUnavailable(StoreError):
    """The database cannot do this now: full, locked by somebody else, out of reach. Nothing was stored."""


class StoreFull(StoreUnavailable):
    """The disk, or what the database may take of it, is full. Nothing was stored."""
