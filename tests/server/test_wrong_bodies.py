"""A body that is wrong a thousand times is one error, or a few: a list of all would be larger than the body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from tests.server.served import serve

COUNT = 1000
WRONG: tuple[Any, ...] = (
    {str(k): 1 for k in range(COUNT)},
    {str(k): {} for k in range(COUNT)},
    [1] * COUNT,
    [0.5] * COUNT,
    ["a"] * COUNT,
    [None] * COUNT,
    [{}] * COUNT,
    [[]] * COUNT,
    [["a", 1]] * COUNT,
    [{"text": "a", **{str(k): 1 for k in range(COUNT)}}],
    [{str(k): 1 for k in range(COUNT)}],
    [[1, "a"] * COUNT],
    [{"text": 1}] * COUNT,
)
MOST = 20


def models(app: Any) -> Iterator[type[BaseModel]]:
    """What the routes read."""
    for route in app.routes:
        if isinstance(route, APIRoute) and route.body_field is not None:
            kind = route.body_field.field_info.annotation
            for one in (kind, *getattr(kind, "__args__", ())):
                if isinstance(one, type) and issubclass(one, BaseModel):
                    yield one


def errors_of(model: type[BaseModel], body: dict[str, Any]) -> int:
    try:
        model.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


def test_wrong_bodies_have_few_errors() -> None:
    with serve() as served:
        found = set(models(served.app))
        assert len(found) > 12
        for model in found:
            fields = {name: field.alias or name for name, field in model.model_fields.items()}
            for name in (*fields.values(), "none of them"):
                for value in WRONG:
                    assert errors_of(model, {name: value}) <= MOST, (model, name, str(value)[:80])
        served.settle()
