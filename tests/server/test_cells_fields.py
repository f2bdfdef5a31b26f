"""Typed bodies from unfold functions' signatures."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from cellar.core.errors import ConfigError
from cellar.core.tasks import Port
from cellar.server.cells.fields import as_array, grows, plain, read_body, request_type, response_schema
from cellar.server.errors import ApiError


@dataclass
class Field:
    name: str
    annotation: Any
    default: Any = inspect.Parameter.empty


@dataclass
class Response:
    kind: str
    port: Port


FIELDS = (
    Field("tokens", list[int]),
    Field("children", NDArray[np.int64] | None, None),
    Field("pair", tuple[int, float], (1, 2.0)),
    Field("mode", Literal["fast", "good"], "good"),
    Field("weights", dict[str, list[float]], {}),
)


def read(body: Any) -> Any:
    return read_body(request_type("m", FIELDS), body)


def test_fields_are_what_the_signature_says() -> None:
    fields, stream, model = read({"tokens": [1, 2]})
    assert (fields, stream, model) == ({"tokens": [1, 2]}, False, None)
    fields, stream, model = read(
        {"tokens": [], "pair": [3, 1], "weights": {"a": [1, 2.5]}, "mode": "fast", "stream": True, "model": "m"}
    )
    assert fields == {"tokens": [], "pair": (3, 1.0), "weights": {"a": [1.0, 2.5]}, "mode": "fast"}
    assert (stream, model) == (True, "m")


def test_arrays_are_lists_or_bytes() -> None:
    fields, *_ = read({"tokens": [1], "children": [[0, 1], [2, -1]]})
    assert fields["children"].tolist() == [[0, 1], [2, -1]]
    packed = {"dtype": "float32", "shape": [2, 1], "data": np.array([1.5, 2.5], np.float32).tobytes()}
    assert as_array(packed).tolist() == [[1.5], [2.5]]
    assert as_array([]).dtype == np.int64


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ([1], None),
        ({}, "tokens"),
        ({"tokens": "12"}, "tokens"),
        ({"tokens": ["1"]}, "tokens"),
        ({"tokens": [1.5]}, "tokens"),
        ({"tokens": [True]}, "tokens"),
        ({"tokens": [1], "mode": "slow"}, "mode"),
        ({"tokens": [1], "pair": [1, 2.0, 3]}, "pair"),
        ({"tokens": [1], "children": [[1], [2, 3]]}, "children"),
        ({"tokens": [1], "children": ["a"]}, "children"),
        ({"tokens": [1], "children": {"dtype": "float32", "shape": [3], "data": b"1234"}}, "children"),
        ({"tokens": [1], "children": {"dtype": "O", "shape": [1], "data": b"12345678"}}, "children"),
        ({"tokens": [1], "stream": 1}, "stream"),
        ({"tokens": [1], "token": [2]}, "token"),
    ],
)
def test_other_bodies_are_refused_by_field(body: Any, parameter: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        read(body)
    assert caught.value.status == 400
    assert caught.value.parameter == parameter
    assert "1234" not in str(caught.value)  # what was sent is not repeated


def test_signatures_that_no_body_can_carry() -> None:
    with pytest.raises(ConfigError, match="stream"):
        request_type("m", [Field("stream", int)])
    with pytest.raises(ConfigError, match="cannot be sent"):
        request_type("m", [Field("thing", type("Custom", (), {}))])


def test_responses() -> None:
    h = Port("h", (2, 3), "float32", 0)
    token = Port("token", (), "int64", None)
    response = {"h": Response("one", h), "steps": [Response("growing", token), Response("many", token)]}
    schema = response_schema(response)
    assert schema["properties"]["h"]["items"] == {
        "type": "array",
        "items": {"type": "number"},
        "minItems": 3,
        "maxItems": 3,
    }
    assert schema["properties"]["steps"]["prefixItems"][0] == {"type": "array", "items": {"type": "integer"}}
    assert grows(response)
    assert not grows({"h": Response("many", h)})
    value = {"h": np.array([1.0, np.inf], np.float32), "t": np.int64(3), "all": (1, np.float32(0.5)), "x": float("nan")}
    assert plain(value) == {"h": [1.0, None], "t": 3, "all": [1, 0.5], "x": None}


def test_a_schema_says_that_unknown_fields_are_refused() -> None:
    kind = request_type("m", FIELDS)
    assert kind.model_json_schema()["additionalProperties"] is False
    with pytest.raises(ApiError, match="colour is not a parameter"):
        read_body(kind, {"tokens": [1], "colour": 1})


def test_what_may_be_infinite_is_null_in_a_body_and_so_in_its_schema() -> None:
    response = Response("one", Port("logits", (2,), "float32", None, infinite=True))
    assert response_schema(response)["items"]["type"] == ["number", "null"]
    assert plain(np.array([1.0, -np.inf])) == [1.0, None]
