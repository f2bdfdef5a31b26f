"""Bodies of requests to user-defined models, typed by the unfold function's signature; and what answers look like.

Arrays (`numpy.ndarray` in the signature) come as nested lists, or in msgpack as {"dtype", "shape", "data": bytes}.
Types are strict: "1" is not a number. Answers are numbers and nested lists.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    create_model,
)

from cellar.core.errors import ConfigError
from cellar.server.errors import ApiError, refused
from cellar.server.fields import unknown

RESERVED = frozenset({"stream", "model"})
"""Fields of every body; an unfold function cannot have parameters of these names."""

ARRAY_KINDS = "biuf"
MAX_DIMENSIONS = 8


def request_type(name: str, fields: Sequence[Any]) -> type[BaseModel]:
    """A pydantic model with one field per parameter of an unfold function, and `stream`.

    `fields` have `name`, `annotation` and `default` (`inspect.Parameter.empty` where there is none). Raises
    ConfigError for a name that every body has already, or a type that no body can carry.
    """
    made: dict[str, Any] = {}
    for field in fields:
        if field.name in RESERVED:
            raise ConfigError(f"model {name!r} has a field {field.name!r}, which every request has; rename it.")
        required = isinstance(field.default, type) and field.default.__name__ == "_empty"
        made[field.name] = (on_the_wire(field.annotation), ... if required else field.default)
    made["stream"] = (bool, False)
    made["model"] = (str | None, None)
    config = ConfigDict(strict=True, extra="forbid", protected_namespaces=(), arbitrary_types_allowed=False)
    try:
        return create_model(f"{name}_request", __config__=config, **made)
    except Exception as error:  # whatever pydantic has against a type
        raise ConfigError(
            f"the fields of model {name!r} cannot be sent in a request ({_first_line(error)}); "
            "use numbers, strings, lists, dicts, tuples or numpy.ndarray."
        ) from error


def on_the_wire(annotation: Any) -> Any:
    """The type of a body's field: arrays and tuples are lists there."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is np.ndarray or origin is np.ndarray:
        schema = {"type": "array", "items": {}, "description": "nested lists of numbers"}
        return Annotated[Any, PlainValidator(as_array), WithJsonSchema(schema)]
    if annotation is tuple or origin is tuple:
        parts = tuple(one if one is Ellipsis else on_the_wire(one) for one in arguments)
        inner: Any = tuple.__class_getitem__(parts) if parts else tuple
        return Annotated[inner, BeforeValidator(_as_tuple)]
    if origin in (Union, types.UnionType):
        return Union[tuple(on_the_wire(one) for one in arguments)]  # noqa: UP007 (made at run time)
    if origin in (list, dict, Sequence, Mapping):
        return (
            origin[tuple(on_the_wire(one) for one in arguments)]
            if len(arguments) > 1
            else (origin[on_the_wire(arguments[0])] if arguments else origin)
        )
    return annotation


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """Nested lists of numbers, or {"dtype", "shape", "data"}, as an array. Raises ValueError."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, dict):
        return _from_bytes(value)
    if not isinstance(value, (list, tuple)):
        raise ValueError("must be a list of numbers")
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        raise ValueError("its lists are not of equal length") from None
    if array.dtype.kind not in ARRAY_KINDS and array.size:
        raise ValueError("must hold numbers only, in lists of equal length")
    return array if array.size else array.astype(np.int64)


def _from_bytes(value: dict[Any, Any]) -> np.ndarray[Any, Any]:
    try:
        dtype, shape, data = np.dtype(value["dtype"]), tuple(value["shape"]), value["data"]
        if dtype.kind not in ARRAY_KINDS or not isinstance(data, bytes) or len(shape) > MAX_DIMENSIONS:
            raise TypeError
        return np.frombuffer(data, dtype).reshape(shape)
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            'must be {"dtype": "float32", "shape": [...], "data": bytes} with as many bytes as the shape needs'
        ) from None


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def read_body(kind: type[BaseModel], body: Any) -> tuple[dict[str, Any], bool, str | None]:
    """-> the unfold function's arguments, whether to stream, and the model that the body names.

    Raises ApiError (400) that names the field, without repeating what the client sent.
    """
    if not isinstance(body, dict):
        raise refused("the body must be an object with the model's fields.")
    try:
        read = kind.model_validate(body)
    except ValidationError as error:
        raise _invalid(error) from None
    given = {name: getattr(read, name) for name in kind.model_fields if name in read.model_fields_set}
    stream, model = given.pop("stream", False), given.pop("model", None)
    return given, stream, model


def _invalid(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    name = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        return unknown(str(name))
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "missing":
        return refused(f"{name} is missing; give it.", name)
    return refused(f"{name or 'the body'} is not as it should be: {message[:1].lower()}{message[1:]}.", name)


def plain(value: Any) -> Any:
    """A response as numbers, lists and dicts. NaN and infinity become None: JSON has no words for them."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            return plain(value.tolist())
        return value.tolist()
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def response_schema(response: Any) -> dict[str, Any]:
    """JSON schema of a response, from its structure with a `ResponsePort` (kind, port) in place of each value."""
    if isinstance(response, dict):
        return {
            "type": "object",
            "properties": {str(key): response_schema(value) for key, value in response.items()},
            "required": [str(key) for key in response],
        }
    if isinstance(response, (list, tuple)):
        return {"type": "array", "prefixItems": [response_schema(value) for value in response], "items": False}
    schema: dict[str, Any] = {"type": "integer" if response.port.dtype.startswith(("int", "uint")) else "number"}
    if response.port.dtype == "bool":
        schema = {"type": "boolean"}
    if response.port.infinite:
        schema = {"type": [schema["type"], "null"], "description": "null where infinite"}
    for size in reversed(response.port.shape):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return schema if response.kind == "one" else {"type": "array", "items": schema}


def grows(response: Any) -> bool:
    """True if some value of a response grows while the request runs."""
    if isinstance(response, dict):
        return any(grows(value) for value in response.values())
    if isinstance(response, (list, tuple)):
        return any(grows(value) for value in response)
    return bool(response.kind == "growing")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
