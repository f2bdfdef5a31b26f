"""Lists: how much of one is asked for, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Query

from cellar.conversations.errors import NotFound
from cellar.server.requests import MAX_NAME

Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]
After = Annotated[str | None, Query(max_length=MAX_NAME)]
Words = Annotated[str | None, Query(min_length=1, max_length=512)]
Include = Annotated[list[str] | None, Query()]


def shown_list(data: Sequence[dict[str, Any]], more: bool) -> dict[str, Any]:
    """OpenAI's list."""
    return {
        "object": "list",
        "data": list(data),
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": more,
    }


def part_of(all: Sequence[dict[str, Any]], after: str | None, limit: int, order: Order) -> dict[str, Any]:
    """A part of a short list that is in ascending order. Raises NotFound."""
    ordered = list(all) if order == "asc" else list(reversed(all))
    if after is not None:
        ids = [one["id"] for one in ordered]
        if after not in ids:
            raise NotFound("item", after)
        ordered = ordered[ids.index(after) + 1 :]
    return shown_list(ordered[:limit], len(ordered) > limit)
