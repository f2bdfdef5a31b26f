"""Grammars: the tokens they allow, schemas with their instances, and the masker's order of things."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cellar.core.errors import RequestError
from cellar.core.sampling import StructuredOutputsParams
from cellar.text import aside
from cellar.text.expendable import Budget
from cellar.text.grammar import GrammarCheck, GrammarCompiler, Matcher
from cellar.text.tokenizer import Tokenizer
from tests.hostile.crowding import AMBIGUOUS
from tests.limits import until

TINY = Path(__file__).parents[1] / "data" / "tokenizers" / "gpt-tiny"
SHARED = Path(__file__).parents[3] / "shared" / "data"
SAMPLE = SHARED / "json_schema" / "maskbench_sample.jsonl"


def compiler(path: Path = TINY) -> tuple[Tokenizer, GrammarCompiler]:
    tokenizer = Tokenizer.load(path)
    eos = tokenizer.eos_token_ids or (tokenizer.piece_to_id("<|endoftext|>") or 2,)
    return tokenizer, GrammarCompiler(tokenizer, tokenizer.vocab_size + 7, eos)


def allows(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token // 32] >> (token % 32) & 1)


def walk(matcher: Matcher, tokens: list[int], eos: int, spent: list[float] | None = None) -> bool:
    """Is a text, as tokens, allowed to its end? Decided by masks alone."""
    for token in [*tokens, eos]:
        began = time.perf_counter()
        mask = matcher.mask()
        if spent is not None:
            spent.append(time.perf_counter() - began)
        if not allows(mask, token):
            return False
        matcher.consume(token)
    return True


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        ({"regex": "[ab]+c"}, ["abc", "bc"], ["c", "ab", "abcd"]),
        ({"choice": ["yes", 'n"o']}, ["yes", 'n"o'], ["ye", "no"]),
        ({"grammar": 'start: "a" start | "b"'}, ["b", "aab"], ["a", "ba"]),
        ({"json_object": True}, ['{"a": [1, null]}', "{}"], ["[1]", "3", "{"]),
        ({"json": {"type": "integer"}}, ["12", "-3"], ["1.5", '"1"']),
    ],
)
def test_what_a_grammar_allows(wanted: dict[str, Any], good: list[str], bad: list[str]) -> None:
    tokenizer, made = compiler()
    start = made.compile(StructuredOutputsParams(**wanted))
    eos = (tokenizer.eos_token_ids or (2,))[0]
    for text in (*good, *bad):
        assert walk(start.copy(), tokenizer.encode(text, add_special_tokens=False), eos) == (text in good), text
    assert start.mask().shape == (-(-(tokenizer.vocab_size + 7) // 32),)
    for token in range(tokenizer.vocab_size, tokenizer.vocab_size + 7):
        assert not allows(start.mask(), token)


def test_after_the_end_only_end_symbols() -> None:
    tokenizer, made = compiler()
    matcher = made.compile(StructuredOutputsParams(choice=["a"]))
    eos = (tokenizer.eos_token_ids or (2,))[0]
    ends = sorted(tokenizer.eos_token_ids)
    (token,) = tokenizer.encode("a", add_special_tokens=False)
    matcher.consume(token)
    for _ in range(3):
        assert [t for t in range(tokenizer.vocab_size) if allows(matcher.mask(), t)] == ends
        matcher.consume(eos)
    broken = made.compile(StructuredOutputsParams(choice=["a"]))
    broken.consume(eos)
    assert allows(broken.mask(), eos)


@pytest.mark.parametrize(
    "wanted", [{"regex": "(a|"}, {"grammar": "start: x"}, {"json": {"type": "nothing"}}, {"json": "["}, {"json": "{"}]
)
def test_what_does_not_compile(wanted: dict[str, Any]) -> None:
    _, made = compiler()
    check = GrammarCheck(Budget())
    for call in (check.check, check.check, made.compile):  # the second answer is remembered
        with pytest.raises(RequestError, match="cannot be enforced") as caught:
            call(StructuredOutputsParams(**wanted))
        assert caught.value.parameter == "structured_outputs"
    check.close()


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, ['{"a":[1,2]}', '{"a": [1, 2]}']),
        ({"disable_any_whitespace": True}, ['{"a":[1,2]}']),
        ({"whitespace_pattern": r"\n"}, ['{"a":[1,2]}', '{\n"a":[\n1,2\n]}']),
    ],
)
def test_blanks_of_json(options: dict[str, Any], allowed: list[str]) -> None:
    tokenizer, made = compiler()
    start = made.compile(StructuredOutputsParams(json_object=True, **options))
    eos = (tokenizer.eos_token_ids or (2,))[0]
    for text in ('{"a":[1,2]}', '{"a": [1, 2]}', '{"a":  [1,2]}', '{ "a":[1,2]}', '{\n"a":[\n1,2\n]}'):
        assert walk(start.copy(), tokenizer.encode(text, add_special_tokens=False), eos) == (text in allowed), text


def test_objects_have_what_they_list() -> None:
    tokenizer, made = compiler()
    eos = (tokenizer.eos_token_ids or (2,))[0]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for closed in (True, False):
        start = made.compile(StructuredOutputsParams(json=schema, disable_additional_properties=closed))
        assert walk(start.copy(), tokenizer.encode('{"a":1}', add_special_tokens=False), eos)
        assert walk(start, tokenizer.encode('{"a":1,"b":2}', add_special_tokens=False), eos) is not closed


def test_grammars_of_llama_cpp() -> None:
    tokenizer, made = compiler()
    eos = (tokenizer.eos_token_ids or (2,))[0]
    start = made.compile(StructuredOutputsParams(grammar='root ::= item+ # items\nitem ::= "- " [a-z]+ "\\n"'))
    for text, ok in (("- ab\n- c\n", True), ("- AB\n", False), ("", False)):
        assert walk(start.copy(), tokenizer.encode(text, add_special_tokens=False), eos) == ok
    for wrong in ("root ::= item", 'root ::= "a', "root ::= " + "(" * 5000):
        with pytest.raises(RequestError, match="cannot be enforced"):
            made.compile(StructuredOutputsParams(grammar=wrong))


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"oneOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, "give each branch a required property"),
        ({"contains": {"const": 1}}, 'no way to enforce "contains"'),
    ],
)
def test_refusals_name_what_to_change(schema: dict[str, Any], sentence: str) -> None:
    _, made = compiler()
    with pytest.raises(RequestError, match=sentence):
        made.compile(StructuredOutputsParams(json=schema))


OTHERWISE = {
    # Its instances have their properties in another order than the schema.
    "Github_medium---o58466.json",
    "Glaiveai2K---calculate_area_42c63970.json",
    "Glaiveai2K---calculate_area_3547f407.json",
    "Kubernetes---kb_1147_Normalized.json",
    # It counts on the format uri-reference, which is an annotation.
    "JsonSchemaStore---bounded-context.json",
}


def sample(every: int) -> tuple[int, int, int, list[float]]:
    """-> schemas, those that compile, instances, seconds of each mask; every instance is judged by the masks."""
    tokenizer, made = compiler(SHARED / "tokenizers" / "gpt2")
    eos = tokenizer.piece_to_id("<|endoftext|>") or 0
    spent: list[float] = []
    schemas = compiled = instances = 0
    for line in SAMPLE.read_text().splitlines()[::every]:
        row = json.loads(line)
        schemas += 1
        try:
            start = made.compile(StructuredOutputsParams(json=row["schema"], disable_additional_properties=False))
        except RequestError:
            continue
        compiled += 1
        for test in row["tests"]:
            text = json.dumps(test["data"], ensure_ascii=False)
            found = walk(start.copy(), tokenizer.encode(text, add_special_tokens=False), eos, spent)
            assert found == test["valid"] or row["name"] in OTHERWISE, (row["name"], text[:200])
            instances += 1
    return schemas, compiled, instances, spent


@pytest.mark.skipif(not SAMPLE.exists(), reason="the maskbench sample is not beside this checkout")
def test_some_schemas_of_maskbench() -> None:
    schemas, compiled, instances, _ = sample(10)
    assert compiled >= 0.8 * schemas
    assert instances > 50


@pytest.mark.long
@pytest.mark.skipif(not SAMPLE.exists(), reason="the maskbench sample is not beside this checkout")
def test_all_schemas_of_maskbench() -> None:
    schemas, compiled, instances, spent = sample(1)
    print(schemas, compiled, instances, len(spent), np.mean(spent), np.percentile(spent, 99))
    assert (schemas, compiled >= 383) == (400, True)
    assert np.median(spent) < 1e-3


def followed(matcher: Matcher, count: int) -> list[tuple[bytes, int]]:
    """The masks of an output, and the token that was taken from each."""
    found = []
    for k in range(count):
        mask = matcher.mask()
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = allowed[allowed > 5]
        found.append((mask.tobytes(), int(allowed[k % len(allowed)])))
        matcher.consume(found[-1][1])
    return found


def test_a_slow_matcher_is_told_its_tokens_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told aside it says what it says otherwise, and the interpreter is free meanwhile."""
    tokenizer = Tokenizer.load(TINY)
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size, (2,), time.perf_counter)
    start = made.compile(StructuredOutputsParams(grammar=AMBIGUOUS))
    monkeypatch.setattr(aside, "SLOW_SECONDS", float("inf"))
    expected = followed(start.copy(), 70)
    monkeypatch.setattr(aside, "SLOW_SECONDS", 0.0)
    assert followed(start.copy(), 40) == expected[:40]

    slow, ticks, ended = start.copy(), list[float](), threading.Event()
    for _, token in expected[:-1]:
        slow.consume(token)

    def tick() -> None:
        while not ended.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    until(lambda: ticks)
    slow.mask()
    begun = time.perf_counter()
    slow.consume(expected[-1][1])
    end = time.perf_counter()
    ended.set()
    thread.join()
    assert end - begun > 0.004, "it takes long"
    assert [at for at in ticks if begun + 0.001 < at < end - 0.001]


@pytest.mark.parametrize("slow", [0.0, float("inf")])
def test_a_token_that_is_not_allowed_leaves_the_end_symbols(slow: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "SLOW_SECONDS", slow)
    tokenizer = Tokenizer.load(TINY)
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size, (2,), time.perf_counter)
    matcher = made.compile(StructuredOutputsParams(choice=["aa"]))
    a, z = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "az")
    for token in (a, z, z):
        matcher.consume(token)
    assert matcher.mask().tobytes() == made._end_mask().tobytes()
