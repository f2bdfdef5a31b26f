"""Schemas in other words mean the same: judged by a validator of JSON schemas, on values near their borders."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellar.text import schema as schema_module
from cellar.text.schema import enforceable

SAMPLE = Path(__file__).parents[3] / "shared" / "data" / "json_schema" / "maskbench_sample.jsonl"

VALUES: list[Any] = [
    *(None, False, True, -1, 0, 1, 2, 2.5, 3, "", "a", "ab", "abc", "b", "\n", "a.", "\u00e9"),
    *([], [1], [1, 1], [1, 2], [2, 1], ["a"], [None, 1]),
    *({}, {"a": 1}, {"a": "b"}, {"b": 1}, {"a": 1, "b": 2}, {"a": None, "b": "a"}, {"c": 1}, {"a": 1, "b": 2, "c": 3}),
]

numbers = st.sampled_from([0, 1, 2, 2.5])
names = st.sampled_from(["a", "b", "c"])
scalars = st.sampled_from([None, False, True, 1, 1.0, 2, "a", "ab", "", "a.", "\u00e9"])
leaves = st.one_of(
    st.booleans(),
    st.builds(lambda value: {"const": value}, scalars),
    st.builds(lambda values: {"enum": values}, st.lists(scalars, min_size=1, max_size=4, unique_by=repr)),
    st.builds(
        lambda type: {"type": type},
        st.sampled_from(["null", "boolean", "number", "integer", "string", "array", "object", ["null", "string"]]),
    ),
    st.builds(
        lambda word, number: {word: number},
        st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
        numbers,
    ),
    st.builds(
        lambda word, number: {word: number},
        st.sampled_from(["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"]),
        st.integers(0, 3),
    ),
    st.builds(lambda found: {"required": found}, st.lists(names, unique=True, max_size=2)),
    st.just({"pattern": "^a"}),
    st.just({"format": "made-up"}),
    st.just({"uniqueItems": True, "items": {"enum": [1, 2, True]}}),
    st.just({"propertyNames": {"pattern": "^a"}}),
    st.just({"$ref": "#/$defs/x"}),
)


def combined(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(parts, min_size=1, max_size=3)
    return st.one_of(
        st.builds(lambda part: {"not": part}, parts),
        st.builds(lambda word, listed: {word: listed}, st.sampled_from(["allOf", "anyOf", "oneOf"]), some),
        st.builds(lambda found: {"properties": found}, st.dictionaries(names, parts, max_size=2)),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, parts, parts, parts),
        st.builds(lambda found: {"dependentSchemas": found}, st.dictionaries(names, parts, max_size=2)),
        st.builds(
            lambda found: {"dependentRequired": found}, st.dictionaries(names, st.lists(names, unique=True), max_size=2)
        ),
        st.builds(lambda found: merged(found), some),
    )


def merged(parts: list[Any]) -> dict[str, Any]:
    """One object of several: keywords side by side."""
    found: dict[str, Any] = {}
    for part in parts:
        found |= part if isinstance(part, dict) else {"allOf": [part]}
    return found


schemas = st.recursive(leaves, combined, max_leaves=8)


def verdicts(schema: Any) -> list[bool]:
    valid = jsonschema_rs.Draft202012Validator(schema)
    return [valid.is_valid(value) for value in VALUES]


@settings(deadline=None, max_examples=400, derandomize=True)
@given(schemas, leaves)
def test_other_words_mean_the_same(schema: Any, other: Any) -> None:
    root = {"$defs": {"x": {"not": {"const": "a"}} if other == {"$ref": "#/$defs/x"} else other}, "allOf": [schema]}
    before = verdicts(root)
    assert verdicts(enforceable(root, False)) == before, enforceable(root, False)
    assert all(was or not now for was, now in zip(before, verdicts(enforceable(root, True)), strict=True))


@pytest.mark.parametrize("word", ["const", "enum", "required", "properties", "minLength", "allOf", "not"])
def test_a_wrong_complement_is_found(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The property above can fail: with any one word's complement forgotten, some schema means something else."""
    forbidden = schema_module._Rewriter._forbidden

    def planted(self: Any, schema: Any, found: str, *rest: Any) -> Any:
        return False if found == word else forbidden(self, schema, found, *rest)

    monkeypatch.setattr(schema_module._Rewriter, "_forbidden", planted)
    parts = {
        "const": 1, "enum": [1, "a"], "required": ["a"], "properties": {"a": {"type": "string"}}, "minLength": 2,
        "allOf": [{"type": "string"}], "not": {"type": "string"},
    }  # fmt: skip
    root = {"not": {word: parts[word]}}
    assert verdicts(enforceable(root, False)) != verdicts(root)


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        ({"properties": {"a": {}}}, True),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "null"}}, False),
        ({"properties": {"a": {}}, "patternProperties": {"b": {}}}, False),
        ({"type": "object"}, False),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, False),
        ({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {"required": ["a"]}]}, False),
        ({"anyOf": [{"properties": {"a": {}}}, {"type": "null"}]}, True),
        ({"oneOf": [{"properties": {"a": {}}, "type": "object"}, {"type": "null"}]}, True),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {}}}}}, True),
        ({"$defs": {"x/y": {"properties": {"a": {}}}}, "allOf": [{"$ref": "#/$defs/x~1y"}]}, False),
        ({"$defs": {"x": {"properties": {"a": {}}}}, "$ref": "#/$defs/x", "properties": {"b": {}}}, False),
        ({"allOf": [{"$ref": "elsewhere"}], "properties": {"a": {}}}, False),
    ],
)
def test_objects_that_list_their_properties_are_closed(schema: Any, closed: bool) -> None:
    valid = jsonschema_rs.Draft202012Validator(_without_remote(enforceable(schema, True)))
    assert valid.is_valid({"a": 1})
    assert valid.is_valid({"a": 1, "z": None, "b": None}) is not closed


def _without_remote(schema: Any) -> Any:
    return json.loads(json.dumps(schema).replace('{"$ref": "elsewhere"}', "{}"))


def test_a_schema_is_closed_inside_too() -> None:
    inner = {"type": "object", "properties": {"b": {}}}
    for word in ({"properties": {"a": inner}}, {"items": inner}, {"prefixItems": [inner]}):
        assert '"additionalProperties": false' in json.dumps(enforceable(word, True))


def test_no_text_but_these() -> None:
    """The expression for all other texts, against the texts themselves."""
    random.seed(1)
    alphabet = 'ab.\\"^]-\n\u00e9'
    for _ in range(200):
        texts = {"".join(random.choices(alphabet, k=random.randrange(4))) for _ in range(random.randrange(1, 5))}
        valid = jsonschema_rs.Draft202012Validator(
            enforceable({"type": "string", "not": {"enum": sorted(texts)}}, True)
        )
        for _ in range(50):
            text = "".join(random.choices(alphabet, k=random.randrange(4)))
            assert valid.is_valid(text) == (text not in texts), (texts, text)


def test_what_is_no_schema_stays() -> None:
    for odd in (
        *({"not": 3}, {"oneOf": 3}, {"allOf": {}, "not": {"const": 1}}, {"if": []}, {"properties": []}, {"$ref": 3}),
        *({"not": {"enum": 3}}, {"not": {"required": 3}}, {"not": {"properties": 3}}, {"dependencies": 3}, {"type": 3}),
        *({"not": {"$ref": "#"}}, {"not": {"minLength": "x"}}, {"uniqueItems": 3, "items": 3}, {"propertyNames": 3}),
        *({"not": {"allOf": 3}}, {"not": {"type": [3]}}, {"enum": {}}, {"anyOf": [3]}, {"oneOf": [3, 3]}),
        *(
            {"not": {"exclusiveMinimum": True}},
            {"dependencies": {"a": 3}},
            {"required": 3},
            {"format": []},
            [],
            3,
            None,
        ),
    ):
        enforceable(odd, True)


def test_growth_has_a_bound() -> None:
    part: Any = {"const": 1}
    for depth in range(12):
        part = {"oneOf": [part, {"minimum": depth}, {"properties": {"a": part}}]}
    with pytest.raises(ValueError, match="too large"):
        enforceable(part, False)
