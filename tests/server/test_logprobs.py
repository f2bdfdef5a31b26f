"""Log-probabilities as they travel between processes, and as streams write them."""

from __future__ import annotations

import json
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest

import cellar.demo
from cellar.core.messages import FinishReason, Logprobs
from cellar.engine.tables import LogprobStore, LogprobTables
from cellar.server.choices import FLOOR, SpeltLogprobs, chat_logprobs
from cellar.server.wire import Frame
from cellar.text.tokenizer import Tokenizer

VOCAB = 4000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(cellar.demo.path())


def _drawn(rows: int, top: int, seed: int) -> tuple[Logprobs, np.ndarray]:
    """Tables and the chosen tokens: every other one is among the best, the first best is as unlikely as can be."""
    draw = np.random.default_rng(seed)
    values = np.sort(-draw.exponential(size=(rows, top + 1)), axis=1)[:, ::-1].astype(np.float32)
    ids = np.stack([draw.permutation(VOCAB)[: top + 1] for _ in range(rows)]).astype(np.int32)
    chosen = np.array([0 if row % 2 and top else top for row in range(rows)])
    values[-1, 1:] = -np.inf
    each = np.arange(rows)
    found = Logprobs(each, values[each, chosen], chosen, ids[:, :top], values[:, :top])
    return found, ids[each, chosen]


@pytest.mark.parametrize("top", [0, 1, 20])
def test_a_stream_writes_what_a_whole_answer_says(tokenizer: Tokenizer, top: int) -> None:
    found, chosen = _drawn(9, top, seed=top)
    store = LogprobStore(top, tokenizer.id_to_text)
    for entry, token in enumerate(chosen.tolist()):
        if entry == 4:
            store.append_none()
        else:
            store.append(found, entry, token)
    ids, tables = chosen.tolist(), LogprobTables(store)
    whole: Any = json.loads(json.dumps(chat_logprobs(ids, tables, top, tokenizer), default=list))
    spelt = json.loads(SpeltLogprobs(top, tokenizer)(ids, tables))
    assert len(spelt["content"]) == 8, "a token without a table has no entry"
    _round(whole)
    _round(spelt)
    assert spelt == whole
    if top > 1:
        assert spelt["content"][-1]["top_logprobs"][-1]["logprob"] == FLOOR
    assert json.loads(SpeltLogprobs(top, tokenizer)(ids, None)) == {"content": [], "refusal": None}


def _round(said: Any) -> None:
    """Floats to the 32 bits that they were: a difference of one is seen."""
    for place in said["content"]:
        for entry in (place, *place["top_logprobs"]):
            entry["logprob"] = float(np.float32(entry["logprob"]))


def test_a_vocabulary_smaller_than_what_is_asked_for_has_no_more(tokenizer: Tokenizer) -> None:
    found, chosen = _drawn(2, 3, seed=0)
    store = LogprobStore(5, tokenizer.id_to_text)
    store.append(found, 0, int(chosen[0]))
    best = store.best(0)
    assert best is not None
    assert best[1].tolist() == found.top_ids[0].tolist()
    assert best[2].tolist() == found.top_logprobs[0].tolist()
    assert store.best(1) is None
    (place,) = json.loads(SpeltLogprobs(5, tokenizer)(chosen[:1].tolist(), LogprobTables(store)))["content"]
    assert len(place["top_logprobs"]) == 3


def test_a_frame_arrives_as_it_was_sent() -> None:
    """Sequences that asked for different numbers of the best or none, some with several places."""
    frame = Frame([3, 9], [7, 8], {9: (FinishReason.STOP, 2)}, num_cached_tokens={3: 16}, queue_seconds={3: 0.5})
    for number, (rows, top) in {3: (1, 20), 9: (1, 20), 4: (3, 2), 5: (1, 0)}.items():
        frame.logprobs[number] = _drawn(rows, top, seed=number)[0]
    frame.prompt_logprobs[3] = _drawn(40, 5, seed=1)[0]
    there: Frame = ForkingPickler.loads(ForkingPickler.dumps(frame))
    for name in ("numbers", "tokens", "finished", "num_cached_tokens", "queue_seconds", "pooled"):
        assert getattr(there, name) == getattr(frame, name)
    for name in ("logprobs", "prompt_logprobs"):
        ours, theirs = getattr(frame, name), getattr(there, name)
        assert ours.keys() == theirs.keys()
        for number, one in ours.items():
            for field in ("index", "logprob", "rank", "top_ids", "top_logprobs"):
                np.testing.assert_array_equal(getattr(one, field), getattr(theirs[number], field))
                assert getattr(one, field).dtype == getattr(theirs[number], field).dtype
