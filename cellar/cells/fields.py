"""The typed fields of a request, read from the signature of an unfold function."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from cellar.core.errors import ConfigError, RequestError

MISSING: Any = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class RequestField:
    """One field: its name, its annotation (Any without one) and its default (`MISSING` if it must be given)."""

    name: str
    annotation: Any
    default: Any = MISSING


def fields_of(unfold: Callable[..., Any]) -> tuple[RequestField, ...]:
    """The parameters after the graph. Raises ConfigError for *args, **kwargs, or no parameter for the graph."""
    parameters = list(inspect.signature(unfold).parameters.values())
    if not parameters:
        raise ConfigError("an unfold function takes the graph as its first parameter; add it.")
    try:
        hints = get_type_hints(unfold)
    except NameError:
        hints = {}
    fields = []
    for p in parameters[1:]:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY):
            raise ConfigError(f"parameter {p.name!r} of an unfold function has no name for requests; give plain ones.")
        fields.append(RequestField(p.name, hints.get(p.name, Any), p.default))
    return tuple(fields)


def check_fields(fields: tuple[RequestField, ...], given: Mapping[str, Any]) -> None:
    """Raises RequestError for an unknown or missing field, or a value of another type."""
    known = 0
    for field in fields:
        if field.name in given:
            known += 1
            if not _fits(given[field.name], field.annotation):
                expected = getattr(field.annotation, "__name__", None) if not get_args(field.annotation) else None
                raise RequestError(f"field {field.name!r} must be {expected or field.annotation}.", field.name)
        elif field.default is MISSING:
            raise RequestError(f"field {field.name!r} is missing; give {[f.name for f in fields]}.", field.name)
    if known < len(given):
        names = [field.name for field in fields]
        unknown = next(name for name in given if name not in names)
        raise RequestError(f"field {unknown!r} is unknown; this model takes {names}.", unknown)


def _fits(value: Any, expected: Any) -> bool:
    if expected is Any or expected is MISSING:
        return True
    origin = get_origin(expected)
    if origin is None:
        if expected is float:
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        if expected is int:
            return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if expected is None:
            return value is None
        return not isinstance(expected, type) or isinstance(value, expected)
    arguments = get_args(expected)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is Literal:
        return value in arguments
    if origin is np.ndarray:
        return isinstance(value, np.ndarray)
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(k, arguments[0]) and _fits(v, arguments[1]) for k, v in value.items()
        )
    if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        return isinstance(value, (tuple, list)) and len(value) == len(arguments) and all(map(_fits, value, arguments))
    if isinstance(value, np.ndarray):
        return True
    if isinstance(value, (list, tuple)):
        one = arguments[0]
        if one is int and value and set(map(type, value)) == {int}:
            return True
        if get_origin(one) is list and get_args(one) == (int,) and set(map(type, value)) == {list}:
            value, one = list(chain.from_iterable(value)), int
            if set(map(type, value)) == {int}:
                return True
        return all(_fits(v, one) for v in value)
    return not isinstance(origin, type) or isinstance(value, origin)
