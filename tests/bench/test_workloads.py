"""Loads: arrivals and lengths have the distributions they promise, and a seed decides all of it."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellar.bench.workload import LengthRange
from cellar.bench.workloads import (
    Conversation,
    Load,
    Piece,
    Turn,
    Vocabulary,
    gamma_arrivals,
    is_sharegpt_text,
    prefix_requests,
    random_conversations,
    random_requests,
    read_lengths,
    read_trace,
    sharegpt_lengths,
    sharegpt_texts,
    spread_bins,
    with_think_times,
)
from cellar.core.errors import ConfigError

# -- arrivals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_vary_as_burstiness_says(burstiness: float) -> None:
    intervals = np.diff(gamma_arrivals(20_000, 5.0, burstiness, seed=1))
    assert (intervals >= 0).all()
    assert intervals.mean() == pytest.approx(0.2, rel=0.01)
    assert intervals.std() / intervals.mean() == pytest.approx(burstiness**-0.5, rel=0.1)


def test_the_offered_rate_is_the_one_asked_for() -> None:
    for count in (1, 7, 100):
        assert gamma_arrivals(count, 4.0, seed=3)[-1] == pytest.approx(count / 4)
    assert gamma_arrivals(4, 2.0, math.inf).tolist() == [0.5, 1.0, 1.5, 2.0]
    assert gamma_arrivals(3, math.inf).tolist() == [0, 0, 0]
    assert gamma_arrivals(0, 1.0).tolist() == []


def test_a_seed_decides_arrivals() -> None:
    assert gamma_arrivals(9, 1.0, seed=5).tolist() == gamma_arrivals(9, 1.0, seed=5).tolist()
    assert gamma_arrivals(9, 1.0, seed=5).tolist() != gamma_arrivals(9, 1.0, seed=6).tolist()
    with pytest.raises(ConfigError, match="request_rate is 0"):
        gamma_arrivals(1, 0.0)
    with pytest.raises(ConfigError, match="burstiness is -1"):
        gamma_arrivals(1, 1.0, -1)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=200), st.integers(0, 5))
def test_spread_stamps_stay_in_their_bins_and_in_order(bins: list[int], seed: int) -> None:
    stamps = np.sort(np.array(bins, dtype=np.float64)) * 3
    spread = spread_bins(stamps, seed)
    assert (np.diff(spread) >= 0).all()
    assert (spread >= stamps).all()
    if len(set(bins)) > 1:
        usual = float(np.median(np.diff(np.unique(stamps))))
        assert (spread < stamps + usual + 1e-9).all()


def test_stamps_are_spread_evenly() -> None:
    spread = spread_bins(np.repeat(np.arange(100) * 3.0, 50), 0)
    inside = spread % 3.0
    assert np.histogram(inside, bins=6, range=(0, 3))[0] == pytest.approx([833] * 6, rel=0.15)


# -- prompts --------------------------------------------------------------------------------------


@given(st.integers(0, 2**42), st.integers(0, 300), st.integers(0, 300), st.integers(0, 2**33))
def test_equal_pieces_are_equal_tokens(key: int, a: int, b: int, seed: int) -> None:
    vocabulary = Vocabulary(7, 90, seed)
    short, long = vocabulary.piece(Piece(key, min(a, b))), vocabulary.piece(Piece(key, max(a, b)))
    assert long[: len(short)].tolist() == short.tolist()
    assert long.dtype == np.int32
    assert ((long >= 7) & (long < 90)).all()


def test_other_keys_and_seeds_are_other_tokens() -> None:
    spelled = {
        tuple(Vocabulary(0, 1000, seed).piece(Piece(key, 20)).tolist()) for seed in range(5) for key in range(20)
    }
    assert len(spelled) == 100
    everything = Vocabulary(10, 20).piece(Piece(1, 2000))
    assert set(everything.tolist()) == set(range(10, 20))
    assert Vocabulary(0, 5).tokens(Turn((), 1)).tolist() == []
    with pytest.raises(ConfigError, match="low must be below high"):
        Vocabulary(5, 5)


def test_random_requests() -> None:
    found = random_requests(500, 100, 20, 0.5, prefix_len=8, seed=2)
    inputs = [c.turns[0].num_tokens - 8 for c in found]
    outputs = [c.turns[0].output_tokens for c in found]
    assert (min(inputs), max(inputs)) == (50, 150)
    assert (min(outputs), max(outputs)) == (10, 30)
    first, second = (Vocabulary(0, 1000).tokens(c.turns[0]) for c in found[:2])
    assert first[:8].tolist() == second[:8].tolist()
    assert first[8:16].tolist() != second[8:16].tolist()
    assert found == random_requests(500, 100, 20, 0.5, prefix_len=8, seed=2)
    assert all(c.turns[0].num_tokens == 7 for c in random_requests(5, 7, 1))
    with pytest.raises(ConfigError, match="random_range_ratio is 1"):
        random_requests(1, 10, 10, 1.0)
    with pytest.raises(ConfigError, match="random_output_len is 0"):
        random_requests(1, 10, 0)


def test_prefixes_are_shared_equally() -> None:
    found = prefix_requests(60, 16, 4, 6, 5, seed=1)
    spelled = [Vocabulary(0, 5000).tokens(c.turns[0]).tolist() for c in found]
    counts = Counter(tuple(tokens[:16]) for tokens in spelled)
    assert sorted(counts.values()) == [10] * 6
    assert len({tuple(tokens[16:]) for tokens in spelled}) == 60
    assert {(len(tokens), c.turns[0].output_tokens) for tokens, c in zip(spelled, found, strict=True)} == {(20, 5)}
    with pytest.raises(ConfigError, match="num_prefixes is 0"):
        prefix_requests(1, 1, 1, 0, 1)


def test_conversations_grow() -> None:
    talk = Conversation((Turn((Piece(1, 10),), 5), Turn((Piece(2, 3),), 7), Turn((Piece(3, 1),), 2)))
    assert talk.contexts() == [10, 18, 26]
    assert talk.within(25) == Conversation(talk.turns[:2])
    assert talk.within(28) == talk
    assert talk.within(14) is None
    load = Load((talk, Conversation(talk.turns[:1])), np.array([0.0, 2.0]))
    assert (load.num_requests, load.num_prompt_tokens, load.num_output_tokens) == (4, 64, 19)
    assert [len(c.turns) for c in load.within(20).conversations] == [1, 1]
    only = Load((Conversation((Turn((Piece(1, 50),), 5),)), talk), np.array([0.0, 2.0])).within(30)
    assert only.arrivals.tolist() == [2.0]
    with pytest.raises(ConfigError, match="1 arrivals do not fit 2"):
        Load((talk, talk), np.zeros(1))


def test_random_conversations_and_think_times() -> None:
    plain = random_conversations(200, LengthRange(2, 6), LengthRange(5, 9), LengthRange(1, 3), prefix_len=11, seed=4)
    assert {len(c.turns) for c in plain} == {2, 3, 4, 5, 6}
    assert {piece.key for c in plain for t in c.turns for piece in t.pieces if piece.length == 11} == {0}
    keys = [piece.key for c in plain for t in c.turns for piece in t.pieces if piece.length != 11]
    assert len(keys) == len(set(keys))
    found = with_think_times(plain, 3.0, seed=4)
    later = [t.think_time for c in found for t in c.turns[1:]]
    assert all(c.turns[0].think_time == 0 for c in found)
    assert np.mean(later) == pytest.approx(3.0, rel=0.15)
    assert np.std(later) == pytest.approx(3.0, rel=0.25)
    constant = with_think_times(plain, 2.0, "constant")
    assert {t.think_time for c in constant for t in c.turns[1:]} == {2.0}
    for mean, distribution, text in ((-1, "constant", "think_time is"), (1, "normal", "think_time_distribution is")):
        with pytest.raises(ConfigError, match=text):
            with_think_times(plain, mean, distribution)


# -- files ----------------------------------------------------------------------------------------


def test_length_sequences(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    one = [{"context_tokens": 331, "output_tokens": 319}, {"context_tokens": 684, "output_tokens": 275}]
    path.write_text(json.dumps([{"turns": one}, {"turns": [{"context_tokens": 5, "output_tokens": 6}]}]))
    sequences = read_lengths(path)
    assert sequences == [[(331, 319), (34, 275)], [(5, 6)]]
    assert not is_sharegpt_text(path)
    talks = sharegpt_lengths(sequences, 5, multi_turn=True, seed=1)
    assert sorted(len(c.turns) for c in talks[:2]) == [1, 2]  # each once before any twice
    assert sorted(len(c.turns) for c in talks[2:4]) == [1, 2]
    assert {tuple(c.contexts()) for c in talks} == {(331, 684), (5,)}
    spelled = {tuple(Vocabulary(0, 1000).tokens(c.turns[0]).tolist()) for c in talks}
    assert len(spelled) == 5  # the same lengths again are other tokens
    single = sharegpt_lengths(sequences, 4, output_len=9)
    assert {(len(c.turns), c.turns[0].output_tokens) for c in single} == {(1, 9)}
    for bad in ([{"turns": [{"context_tokens": 5}]}], [{"turns": [one[0], one[0]]}], [3], {"a": 1}):
        path.write_text(json.dumps(bad))
        with pytest.raises(ConfigError, match=r"lengths\.json"):
            read_lengths(path)
    with pytest.raises(ConfigError, match="empty"):
        sharegpt_lengths([], 1)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_lengths(tmp_path / "none.json")


def test_texts_of_sharegpt(tmp_path: Path) -> None:
    def said(*lengths: int) -> list[dict[str, str]]:
        return [{"from": ("human", "gpt")[k % 2], "value": "w " * n} for k, n in enumerate(lengths)]

    path = tmp_path / "sharegpt.json"
    entries = [
        {"conversations": said(10, 20, 30, 40)},
        {"conversations": said(2, 20)},  # a question of 2 tokens
        {"conversations": said(10, 20, 2000, 40)},  # its second question is too long
        {"conversations": said(10)},
        {"conversations": [{"from": "gpt", "value": "w w w w w"}, *said(10, 20)]},
    ]
    path.write_text(json.dumps(entries))
    assert is_sharegpt_text(path)

    def count(text: str) -> int:
        return len(text.split())

    talks = sharegpt_texts(path, 4, count, multi_turn=True)
    assert sorted(tuple(c.contexts()) for c in talks[:2]) == [(10,), (10, 60)]
    assert talks[2] == talks[0]
    assert talks[0].turns[0].text == "w " * 10
    assert all(len(c.turns) == 1 for c in sharegpt_texts(path, 2, count))
    path.write_text(json.dumps(entries[3:]))
    with pytest.raises(ConfigError, match="usable length"):
        sharegpt_texts(path, 1, count)


def test_mooncake_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(0, 1100, 7, [0, 1, 2]), (0, 600, 5, [0, 9]), (0, 512, 1, [0]), (3001, 600, 4, [0, 9]), (3001, 20, 2, [7])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    trace = read_trace(path)
    assert trace.is_binned
    load = trace.load(seed=1)
    assert [c.contexts() for c in load.conversations] == [[1100], [600], [512], [600], [20]]
    assert [c.turns[0].output_tokens for c in load.conversations] == [7, 5, 1, 4, 2]
    assert load.arrivals[0] == 0
    assert load.arrivals[2] < 3.001 - load.arrivals[0]
    assert (np.diff(load.arrivals) >= 0).all()
    a, b, c, d, e = (Vocabulary(0, 1000).tokens(one.turns[0]).tolist() for one in load.conversations)
    assert a[:512] == b[:512] == c
    assert b == d
    assert a[512:600] != b[512:]
    assert e != a[:20]
    fast = trace.load(4, speedup=10, seed=1)
    assert fast.num_requests == 4
    assert fast.arrivals == pytest.approx(load.arrivals[:4] / 10)
    twice = trace.load(seed=1, copies=2)
    assert twice.num_requests == 10
    assert sorted(c.contexts() for c in twice.conversations) == sorted(2 * [c.contexts() for c in load.conversations])
    assert (np.diff(twice.arrivals) >= 0).all()
    tokens = [Vocabulary(0, 1000).tokens(one.turns[0]).tolist() for one in twice.conversations]
    assert len({tuple(t[:20]) for t in tokens}) == 4  # two beginnings, each of two copies
    with pytest.raises(ConfigError, match="trace_speedup is 0"):
        trace.load(speedup=0)


def test_azure_traces_in_both_forms(tmp_path: Path) -> None:
    vidur, original = tmp_path / "a.csv", tmp_path / "b.csv"
    vidur.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.25,396,109\n4.75,91,16\n")
    original.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:51.4305900,91,16\n2023-11-16 18:15:50.9305900,396,109\n"
    )
    for path in (vidur, original):
        load = read_trace(path).load()
        assert load.arrivals == pytest.approx([0, 4.25, 4.75])
        assert [c.contexts() for c in load.conversations] == [[374], [396], [91]]
        assert [c.turns[0].output_tokens for c in load.conversations] == [44, 109, 16]
        assert len({c.turns[0].pieces[0].key for c in load.conversations}) == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "x,y\n1,2\n"),
        ("a.csv", ""),
        ("a.jsonl", "{}\n"),
        ("a.jsonl", "no\n"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n'),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="trace"):
        read_trace(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
