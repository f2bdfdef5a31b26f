"""Grammars that break their compiler or take gigabytes: a sentence for who sent them, nothing for anybody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cellar.core.errors import RequestError
from cellar.core.sampling import StructuredOutputsParams
from cellar.text.expendable import Budget
from cellar.text.grammar import GrammarCheck

SMALL = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def references(count: int) -> dict[str, Any]:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": {**chain, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def properties(count: int) -> dict[str, Any]:
    """Objects within objects, by reference, so that the JSON itself is flat."""
    chain = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}
        for i in range(count)
    }
    return {"$defs": {**chain, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def arrays(count: int) -> dict[str, Any]:
    chain = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count)}
    return {"$defs": {**chain, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def unions(count: int) -> dict[str, Any]:
    chain = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "null"}]} for i in range(count)}
    return {"$defs": {**chain, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def product(count: int) -> dict[str, Any]:
    """4^count ways to choose a branch of each union."""

    def branch(name: str) -> dict[str, Any]:
        return {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}

    return {"allOf": [{"anyOf": [branch(f"a{i}_{k}") for k in range(4)]} for i in range(count)]}


def rules(count: int) -> str:
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(count)) + f'r{count}: "x"\n'


HOSTILE: dict[str, dict[str, Any]] = {
    "references": {"json": references(5000)},
    "properties": {"json": properties(2000)},
    "arrays": {"json": arrays(5000)},
    "unions": {"json": unions(3000)},
    "rules": {"grammar": rules(6000)},
    "optional letters": {"regex": "a?" * 100_000},
    "optional classes": {"regex": "[ab]?" * 20_000},
    "patterns in one": {"json": {"allOf": [{"type": "string", "pattern": f"[ab]{{{k}}}c"} for k in range(50, 90)]}},
    "a product of unions": {"json": product(14)},
    "groups in groups": {"regex": "(" * 20_000 + "a" + ")" * 20_000},
}


@pytest.fixture(scope="module")
def check() -> Iterator[GrammarCheck]:
    made = GrammarCheck(Budget(seconds=3.0, memory_bytes=384 * 2**20))
    yield made
    made.close()


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(one, marks=[pytest.mark.long] * name.startswith(("optional", "patterns")))
        for name, one in HOSTILE.items()
    ],
    ids=HOSTILE,
)
def test_it_is_refused_and_the_next_one_is_tried(check: GrammarCheck, wanted: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="cannot be enforced") as caught:
        check.check(StructuredOutputsParams(**wanted))
    assert caught.value.parameter == "structured_outputs"
    check.check(StructuredOutputsParams(json=json.dumps(SMALL)))


def test_what_leads_to_itself_alone(check: GrammarCheck) -> None:
    """The compiler's answer was its inner state."""
    mutual = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    for wanted in ({"json": {"$ref": "#"}}, {"json": mutual}, {"grammar": 'start: %json {"$ref": "#"}\n'}):
        with pytest.raises(RequestError, match="no text satisfies it") as caught:
            check.check(StructuredOutputsParams(**wanted))
        assert len(str(caught.value)) < 200


def test_honest_depth_passes(check: GrammarCheck) -> None:
    for schema in (references(100), properties(60), arrays(60), unions(60)):
        check.check(StructuredOutputsParams(json=schema))
    check.check(StructuredOutputsParams(grammar=rules(100)))
