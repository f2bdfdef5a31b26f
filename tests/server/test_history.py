"""A history tells each stream what it was told, however streams come, go and return under the same names."""

from __future__ import annotations

import random
import time
from multiprocessing import Pipe
from threading import Timer

import numpy as np
import pytest

from cellar import SamplingParams
from cellar.core.messages import Request
from cellar.server.bell import Bell
from cellar.server.pool import history as module
from cellar.server.pool.history import History
from cellar.server.pool.stream import Stream
from tests.limits import SECONDS


def stream(name: str) -> Stream[None]:
    return Stream(Request(name, np.array([1], np.int32), SamplingParams(), frozenset(), 8))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("most", [1, 50, 10**6])
def test_what_is_dealt_out_is_what_was_told(seed: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TOKENS", most)
    draw, history = random.Random(seed), History()
    streams: dict[str, Stream[None]] = {}
    expected: dict[str, list[int]] = {}
    ids: list[str] = []
    for step in range(200):
        for name in [name for name in streams if draw.random() < 0.02]:
            del streams[name], expected[name]
        for name in "abcdefgh":
            if name not in streams and draw.random() < 0.05:
                streams[name] = stream(name)
                streams[name].since = history.now
                expected[name] = []
        if draw.random() < 0.3 or not set(ids) <= streams.keys():
            several = draw.random() < 0.2  # as when one step makes two tokens of a stream
            ids = [name for name in streams if draw.random() < 0.8 for _ in range(2 if several else 1)]
        tokens = [1000 * step + k for k in range(len(ids))]
        for name, token in zip(ids, tokens, strict=True):
            expected[name].append(token)
        history.add(ids, tokens, streams)
        if draw.random() < 0.02:
            history.deal(streams)
            assert {name: one.tokens for name, one in streams.items()} == expected
    history.deal(streams)
    assert {name: one.tokens for name, one in streams.items()} == expected


def test_a_history_does_not_grow_without_end() -> None:
    history, one = History(), stream("one")
    for k in range(3 * module.MOST_TOKENS):
        history.add(["one", "gone"], [k, k], {"one": one})
        assert len(history._frames) <= module.MOST_TOKENS
    assert len(one.tokens) > 2 * module.MOST_TOKENS


def test_a_bell_ends_a_wait_for_news_and_for_the_end_of_a_connection() -> None:
    bell = Bell()
    ours, theirs = Pipe()
    bell.listen(ours)
    ringer = Timer(0.05, bell.ring)
    ringer.start()
    begun = time.monotonic()
    bell.wait(SECONDS)
    ringer.join()
    theirs.send("news")
    bell.wait(SECONDS)
    assert ours.recv() == "news"
    theirs.close()
    bell.wait(None)
    bell.ignore(ours)
    ours.close()
    assert time.monotonic() - begun < SECONDS / 2
    for _ in range(100_000):  # far more than a pipe holds
        bell.ring()
    bell.close()
    bell.ring()
    bell.close()
