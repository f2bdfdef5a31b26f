"""A request that comes with tokens that another engine has made of it: the rest is what that one would have made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from cellar import SamplingParams
from cellar.core.config import EngineConfig
from cellar.core.errors import RequestError
from cellar.core.messages import FinishReason, Request
from cellar.core.sampling import StructuredOutputsParams
from cellar.engine.opened import Opened, open_front

PROMPT = "The house stood by the river, and the river"
COUNT = 20

CASES = {
    "greedy": SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True),
    "sampled": SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=COUNT, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0.8, seed=3, max_tokens=COUNT, ignore_eos=True, frequency_penalty=0.9, repetition_penalty=1.3
    ),
    "min_tokens": SamplingParams(temperature=1.2, seed=5, max_tokens=COUNT, min_tokens=COUNT - 2),
    "json": SamplingParams(
        temperature=0.9,
        seed=11,
        max_tokens=COUNT,
        structured_outputs=StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "string"}}}),
    ),
    "logprobs": SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=2),
}


@pytest.fixture(scope="module")
def opened() -> Iterator[Opened]:
    found = open_front(EngineConfig.of(kv_cache_memory_bytes=32 << 20, num_threads=1, dtype="float32"))
    yield found
    found.front.close()


def run(opened: Opened, request: Request) -> tuple[list[int], FinishReason]:
    """Its tokens from now on, and how it ended."""
    engine, tokens = opened.front.engine, list[int]()
    engine.add(request)
    while True:
        for output in engine.turn(1.0):
            tokens += [token for id, token in zip(output.ids, output.tokens, strict=True) if id == request.id]
            if request.id in output.finished:
                return tokens, output.finished[request.id][0]


@pytest.mark.parametrize("name", CASES)
def test_the_rest_is_that_of_an_undisturbed_run(opened: Opened, name: str) -> None:
    reader = opened.front.reader
    (request,) = reader.requests(name, reader.read(PROMPT), CASES[name])
    whole, reason = run(opened, request)
    assert len(whole) > 3
    for cut in (1, 2, len(whole) // 2, len(whole) - 1):
        onward = replace(request, id=f"{name}-{cut}", output=np.array(whole[:cut], np.int32))
        assert run(opened, onward) == (whole[cut:], reason), cut


def test_one_that_has_all_its_tokens_is_refused(opened: Opened) -> None:
    reader = opened.front.reader
    (request,) = reader.requests("full", reader.read(PROMPT), CASES["greedy"])
    opened.front.engine.add(replace(request, output=np.zeros(COUNT, np.int32)))
    assert "it has ended" in opened.front.engine.refused()["full"]
    opened.front.engine.turn(0.0)


def test_cached_tokens_never_exceed_those_that_came(opened: Opened) -> None:
    stats = opened.front.engine.stats()
    assert stats.prefix_hits <= stats.prefix_queries


def test_limits_know_what_is_there() -> None:
    from cellar.schedule.steps.limits import limit_of

    request = Request("a", np.array([1, 2], np.int32), SamplingParams(), frozenset(), 3)
    assert limit_of(replace(request, output=np.array([5, 6], np.int32)), 64, 16, 10) == 5
    with pytest.raises(RequestError, match="has ended"):
        limit_of(replace(request, output=np.array([5, 6, 7], np.int32)), 64, 16, 10)
