"""Requests with random parameters, cut behind each of their tokens: the rest is that of an undisturbed run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cellar import SamplingParams
from cellar.core.config import EngineConfig
from cellar.core.messages import FinishReason, Request
from cellar.core.sampling import StructuredOutputsParams
from cellar.engine.opened import Opened, open_front

WORDS = ("river", "house", "the", "stone", "a", "morning", "walked", "and", "bread", "old")
COUNT = 16
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

Ended = tuple[list[int], FinishReason, object]


@pytest.fixture(scope="module")
def opened() -> Iterator[Opened]:
    found = open_front(EngineConfig.of(kv_cache_memory_bytes=32 << 20, num_threads=1, dtype="float32"))
    yield found
    found.front.close()


def run(opened: Opened, requests: Sequence[Request]) -> dict[str, Ended]:
    """All at once: tokens from now on, how and by what each ended."""
    engine, tokens, ended = opened.front.engine, {request.id: list[int]() for request in requests}, dict[str, Ended]()
    engine.add(*requests)
    while len(ended) < len(requests):
        for output in engine.turn(1.0):
            for id, token in zip(output.ids, output.tokens, strict=True):
                tokens[id].append(token)
            for id, (reason, by) in output.finished.items():
                ended[id] = tokens[id], reason, by
    return ended


def params_of(chance: random.Random, kind: str, stops: Sequence[int]) -> SamplingParams:
    options: dict[str, Any] = {"max_tokens": COUNT, "ignore_eos": kind != "grammar"}
    if chance.random() < 0.7:
        options |= {"temperature": chance.choice((0.7, 1.0, 1.4)), "seed": chance.randrange(1 << 30)}
        options |= chance.choice(({}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.02}))
    else:
        options |= {"temperature": 0}
    if chance.random() < 0.6:
        options |= chance.choice(
            (
                {"presence_penalty": 1.1},
                {"frequency_penalty": 0.8, "presence_penalty": -0.4},
                {"repetition_penalty": 1.4},
            )
        )
    if kind == "grammar":
        wanted = chance.choice(({"json": OBJECT}, {"regex": "[a-z ]{4,40}[.]"}, {"choice": ["the river", "the house"]}))
        options |= {"structured_outputs": StructuredOutputsParams(**wanted)}
    elif kind == "words":
        options |= {"bad_words": chance.sample(WORDS, 3)}
    elif kind == "stops":
        options |= {"stop_token_ids": list(stops), "min_tokens": chance.randrange(COUNT)}
    return SamplingParams(**options)


@pytest.mark.parametrize("kind", ["plain", "grammar", "words", "stops"])
def test_behind_each_token(opened: Opened, kind: str) -> None:
    chance, reader = random.Random(f"continued {kind}"), opened.front.reader
    whole: dict[str, Request] = {}
    for k in range(4):
        prompt = reader.read(" ".join(chance.choices(WORDS, k=chance.randrange(2, 60))))
        stops = chance.sample(range(reader.vocab_size), 40)
        for request in reader.requests(f"{kind} {k}", prompt, params_of(chance, kind, stops).clone(n=1 + k % 2)):
            whole[request.id] = request
    undisturbed = run(opened, list(whole.values()))
    cut = {
        f"{id} behind {made}": (id, made)
        for id, (tokens, _, _) in undisturbed.items()
        for made in range(1, len(tokens))
    }
    assert len(cut) > 20
    onward = run(
        opened,
        [
            replace(whole[id], id=name, output=np.array(undisturbed[id][0][:made], np.int32))
            for name, (id, made) in cut.items()
        ],
    )
    for name, (id, made) in cut.items():
        tokens, reason, by = undisturbed[id]
        assert onward[name] == (tokens[made:], reason, by), name
