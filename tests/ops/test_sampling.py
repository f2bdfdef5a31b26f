"""Sampling: exact kept sets, exact distributions, and tokens that depend on nothing but the row itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cellar.core.sampling import SamplingParams
from cellar.ops.sampling import Choice, Masks, Penalties, SamplingRows, choose, forbid, sample, target_logprobs, uniform
from cellar.ops.sampling.definition import choose_definition, draw, forbid_definition, thresholds
from cellar.ops.sampling.random import uniform_definition
from cellar.ops.sampling.triton import choose_kernel, uniform_kernel

WAYS = [choose, choose_definition, choose_kernel]
Way = Callable[..., Choice]


def chosen(way: Way, logits: Tensor, params: Sequence[SamplingParams], index: Sequence[int]) -> Choice:
    rows = SamplingRows.of(params, index)
    return way(
        logits,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seed,
        rows.output_index,
        rows.greedy,
        rows.cut,
    )


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- random numbers ----------------------------------------------------------------------------------------------


def exact_uniform(seed: int, index: int) -> float:
    """The documented formula in Python's integers."""
    size, golden = 2**64, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % size
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % size
        return z ^ (z >> 31)

    return (mix((mix((seed + golden) % size) + (index + 1) * golden) % size) >> 11) / 2**53


def test_the_vector_in_the_documentation() -> None:
    got = uniform(torch.tensor([0, 42]), torch.tensor([0, 3]))
    assert [u.hex() for u in got.tolist()] == ["0x1.4e0dba5e9a32fp-1", "0x1.13e5dec6f8fd8p-4"]


@settings(max_examples=50, deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_uniform_has_the_same_bits_everywhere(seed: int, index: int) -> None:
    expected = exact_uniform(seed, index)
    assert 0 <= expected < 1
    for way in (uniform, uniform_definition, uniform_kernel):
        assert way(torch.tensor([seed]), torch.tensor([index])).item() == expected


def test_uniforms_are_uniform_and_neighbours_independent() -> None:
    seeds, indices = torch.meshgrid(torch.arange(200), torch.arange(200), indexing="ij")
    u = uniform(seeds.flatten(), indices.flatten()).view(200, 200)
    for pairs in (u.flatten(), (u[1:] + u[:-1]).flatten() % 1, (u[:, 1:] - u[:, :-1]).flatten() % 1):
        assert chisquare(np.histogram(pairs, 64, (0, 1))[0]).pvalue > 1e-4


# -- what is kept ------------------------------------------------------------------------------------------------


def kept(params: SamplingParams, logits: Tensor) -> Tensor:
    """Which tokens may be drawn: bool [vocab]."""
    weights = ((logits - logits.max()) / params.temperature).exp()[None]
    least = thresholds(
        weights, torch.tensor([max(params.top_k, 0)]), torch.tensor([params.top_p]), torch.tensor([params.min_p])
    )
    return (weights >= least)[0]


FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 99},
    {"top_k": 100},
    {"top_k": 1000},
    {"top_p": 0.001},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 10, "top_p": 0.7},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.1},
]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_kept_sets_are_those_of_transformers(filters: dict[str, Any], temperature: float) -> None:
    for seed in range(5):
        logits = 2 * random(100, seed=seed)
        scores = TemperatureLogitsWarper(temperature)(None, logits[None].clone())
        if "min_p" in filters:
            scores = MinPLogitsWarper(filters["min_p"])(None, scores)
        if "top_k" in filters:
            scores = TopKLogitsWarper(filters["top_k"])(None, scores)
        if "top_p" in filters:
            scores = TopPLogitsWarper(filters["top_p"])(None, scores)
        assert kept(SamplingParams(temperature=temperature, **filters), logits).equal(scores[0] > -torch.inf)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("filters", FILTERS)
def test_all_of_the_kept_tokens_are_drawn_and_no_other(way: Way, filters: dict[str, Any]) -> None:
    logits = random(24, seed=3)
    params = SamplingParams(temperature=1.3, seed=0, **filters)
    draws = 6 if way is choose_kernel else 4000  # the interpreter is slow
    tokens = chosen(way, logits.expand(draws, 24), [params] * draws, range(draws)).tokens
    allowed = kept(params, logits)
    assert allowed[tokens].all()
    if draws > 1000:
        assert set(tokens.tolist()) == set(allowed.nonzero().flatten().tolist())


@pytest.mark.parametrize("way", WAYS)
def test_equal_tokens_are_kept_together(way: Way) -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0, -1.0])
    draws = 4 if way is choose_kernel else 60
    for filters in ({"top_k": 2}, {"top_p": 0.3}, {"min_p": 1.0}, {"top_k": 1, "top_p": 0.1}):
        params = [SamplingParams(seed=s, **filters) for s in range(draws)]
        tokens = chosen(way, logits.expand(draws, 6), params, [0] * draws).tokens
        assert set(tokens.tolist()) <= {1, 2, 3}
        assert draws < 60 or len(set(tokens.tolist())) == 3


def test_one_best_token_wins_where_only_it_is_kept() -> None:
    logits = random(4, 50)
    for filters in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        params = [SamplingParams(seed=s, **filters) for s in range(4)]
        for way in WAYS:
            assert chosen(way, logits, params, [0] * 4).tokens.equal(logits.argmax(-1))


@pytest.mark.parametrize(("scale", "vocab"), [(0.1, 3000), (1.0, 3000), (6.0, 3000), (1.0, 700)])
def test_sorting_the_heaviest_only_gives_the_same_tokens(scale: float, vocab: int) -> None:
    """Flat rows need all their tokens sorted, peaked ones a few, and both may meet in a batch."""
    logits = scale * random(40, vocab)
    logits[::2] *= 4
    mixed = [
        {"top_p": 0.9},
        {"top_k": 600},
        {"top_k": 30, "top_p": 0.5},
        {"min_p": 0.01, "top_p": 0.99},
        {"top_k": 520},
    ]
    params = [SamplingParams(seed=s, **mixed[s % 5]) for s in range(40)]
    for step in range(5):
        expected = chosen(choose_definition, logits, params, [step] * 40)
        assert chosen(choose, logits, params, [step] * 40).tokens.equal(expected.tokens)


# -- how it is drawn -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "filters", "draws"),
    [
        (way, filters, 20_000)
        for way in (choose, choose_definition)
        for filters in ({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2})
    ]
    + [(choose_kernel, {}, 300)],
)
def test_frequencies_are_probabilities(way: Way, filters: dict[str, Any], draws: int) -> None:
    logits = random(12, seed=1)
    params = SamplingParams(temperature=0.8, seed=7, **filters)
    tokens = chosen(way, logits.expand(draws, 12), [params] * draws, range(draws)).tokens
    allowed = kept(params, logits)
    probabilities = (logits / 0.8).masked_fill(~allowed, -torch.inf).double().softmax(0)[allowed].numpy()
    counts = np.bincount(tokens, minlength=12)[allowed.numpy()]
    assert chisquare(counts, draws * probabilities).pvalue > 1e-3


def test_a_uniform_beyond_all_weights_takes_the_last_kept_token() -> None:
    weights = torch.tensor([[0.0, 0.5, 0.0, 0.25, 0.0, 0.0]])
    largest = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert draw(weights, largest).tolist() == [3]
    assert draw(weights, torch.ones(1, dtype=torch.float64)).tolist() == [3]
    assert draw(weights, torch.zeros(1, dtype=torch.float64)).tolist() == [1]
    assert draw(weights, torch.tensor([2 / 3], dtype=torch.float64) + 1e-12).tolist() == [3]


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2.0**-53])
def test_extreme_uniforms_never_take_an_excluded_token(u: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cellar.ops.sampling.cpu.uniform_cpu", lambda seed, index: torch.full(seed.shape, u, dtype=torch.float64)
    )
    logits = random(50, 1000)
    logits[:, :3] = -torch.inf
    logits[:, 990:] = -torch.inf
    params = [SamplingParams(temperature=0.1 + 0.05 * r, top_k=5 * (r % 3), seed=r) for r in range(50)]
    tokens = chosen(choose, logits, params, [0] * 50).tokens
    for row, p in enumerate(params):
        assert kept(p, logits[row])[tokens[row]]
        assert logits[row, tokens[row]] > -torch.inf


def some_params(seed: int) -> SamplingParams:
    """One of many kinds of requests."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 9},
        {"top_p": 0.8, "temperature": 0.6},
        {"min_p": 0.1},
        {"top_k": 40, "top_p": 0.95, "min_p": 0.01},
        {"logit_bias": {3: 5.0, 4: -100.0}},
        {"temperature": 2.0, "logprobs": 3},
    ]
    return SamplingParams(seed=seed, **kinds[seed % len(kinds)])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 31), min_size=1, max_size=12), st.integers(0, 1000))
def test_a_row_draws_alone_what_it_draws_in_company(seeds: list[int], step: int) -> None:
    logits = 2 * random(32, 257, seed=5)
    together = sample(logits[seeds], SamplingRows.of([some_params(s) for s in seeds], [step] * len(seeds)))
    for place, seed in enumerate(seeds):
        alone = sample(logits[[seed]], SamplingRows.of([some_params(seed)], [step]))
        assert alone.tokens.item() == together.tokens[place].item()


def test_seed_and_index_decide() -> None:
    logits = torch.zeros(64, 1000)
    same = [SamplingParams(seed=11)] * 64
    assert len(set(sample(logits, SamplingRows.of(same, [4] * 64)).tokens.tolist())) == 1
    assert len(set(sample(logits, SamplingRows.of(same, range(64))).tokens.tolist())) > 50
    other = [SamplingParams(seed=s) for s in range(64)]
    first = sample(logits, SamplingRows.of(other, [4] * 64)).tokens
    assert len(set(first.tolist())) > 50
    assert first.equal(sample(logits, SamplingRows.of(other, [4] * 64)).tokens)


@pytest.mark.parametrize("way", WAYS)
def test_greedy_takes_the_first_of_equals(way: Way) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
    assert chosen(way, logits, [SamplingParams(temperature=0)] * 2, [0, 0]).tokens.tolist() == [1, 0]
    tiny = [SamplingParams(temperature=1e-30)] * 2
    assert chosen(way, logits, tiny, [0, 0]).tokens.tolist() == [1, 0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_are_marked_and_disturb_nobody(way: Way, temperature: float) -> None:
    logits = random(5, 40)
    logits[0, 7] = torch.nan
    logits[1, 7] = torch.inf
    logits[2] = -torch.inf
    logits[3, 8:] = -torch.inf  # finite: these cannot be chosen
    params = [SamplingParams(temperature=temperature, seed=s, top_p=0.9) for s in range(5)]
    tokens, finite = chosen(way, logits, params, [0] * 5)
    assert finite.tolist() == [False, False, False, True, True]
    assert tokens[:3].tolist() == [0, 0, 0]
    assert tokens[3] < 8
    assert chosen(way, logits[4:], params[4:], [0]).tokens.item() == tokens[4]


def test_no_rows() -> None:
    empty = SamplingRows.of([], [])
    got = sample(torch.empty(0, 10), empty)
    assert got.tokens.shape == got.finite.shape == (0,)


# -- what changes logits -------------------------------------------------------------------------------------------


def penalized(logits: np.ndarray, p: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """Token by token, as the formulas say."""
    x = logits.copy()
    for token in range(len(x)):
        count = output.count(token)
        if token in prompt or count:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        x[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    return x


def test_penalties_are_those_of_a_plain_loop() -> None:
    vocab, generator = 60, np.random.default_rng(0)
    logits = random(4, vocab)
    params = [
        SamplingParams(temperature=0, repetition_penalty=1.5),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, frequency_penalty=1.2, presence_penalty=-0.7),
        SamplingParams(temperature=0, repetition_penalty=0.6, frequency_penalty=-0.3, presence_penalty=2.0),
    ]
    prompts = [generator.integers(0, vocab, 20).tolist() for _ in params]
    outputs = [generator.integers(0, vocab, 30).tolist() for _ in params]
    expected = [penalized(logits[r].numpy(), p, prompts[r], outputs[r]) for r, p in enumerate(params)]
    rows = [0, 2, 3]
    slots = [4, 0, 2]
    prompt, output = torch.zeros(5, vocab, dtype=torch.bool), torch.zeros(5, vocab, dtype=torch.int32)
    for row, slot in zip(rows, slots, strict=True):
        prompt[slot, prompts[row]] = True
        output[slot] = torch.bincount(torch.tensor(outputs[row]), minlength=vocab)
    penalties = Penalties(
        torch.tensor(rows),
        torch.tensor(slots),
        prompt,
        output,
        *(
            torch.tensor([getattr(params[r], name) for r in rows], dtype=torch.float32)
            for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
        ),
    )
    before = logits.clone()
    got = sample(logits, SamplingRows.of(params, [30] * 4, penalties=penalties))
    assert logits.equal(before)
    assert got.tokens.tolist() == [int(x.argmax()) for x in expected]
    repeated = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([prompts[0] + outputs[0]]), logits[:1].clone())
    np.testing.assert_allclose(expected[0], repeated[0].numpy(), rtol=1e-6)


def test_bias_moves_single_logits() -> None:
    logits = torch.zeros(3, 10)
    params = [SamplingParams(temperature=0, logit_bias=b) for b in (None, {4: 1.0, 5: 2.0}, {0: -100.0})]
    assert sample(logits, SamplingRows.of(params, [0] * 3)).tokens.tolist() == [0, 5, 1]


def test_end_tokens_are_banned_until_min_tokens() -> None:
    logits = torch.zeros(3, 10)
    logits[:, 2], logits[:, 7] = 5.0, 4.0
    params = [SamplingParams(temperature=0, min_tokens=3, max_tokens=9)] * 2 + [SamplingParams(temperature=0)]
    rows = SamplingRows.of(params, [2, 3, 0], stop_ids={0: (2, 7), 1: (2, 7), 2: (2, 7)})
    assert sample(logits, rows).tokens.tolist() == [0, 2, 2]


def test_masks_leave_only_allowed_tokens() -> None:
    vocab = 70
    logits = random(3, vocab)
    allowed = torch.zeros(vocab, dtype=torch.bool)
    allowed[[5, 31, 32, 63, 69]] = True
    words = np.packbits(np.pad(allowed.numpy(), (0, 96 - vocab)), bitorder="little").view(np.int32)
    masks = Masks(torch.tensor([1, 2]), torch.from_numpy(np.stack((words, np.zeros_like(words)))))
    params = [SamplingParams(seed=s) for s in range(3)]
    for step in range(50):
        rows = replace(SamplingRows.of(params, [step] * 3), masks=masks)
        got = sample(logits, rows)
        assert allowed[got.tokens[1]]
        assert got.finite.tolist() == [True, True, False]
        assert got.tokens[2] == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.integers(1, 9), st.integers(0, 3), st.booleans(), st.integers(0, 2**32 - 1))
def test_masks_on_the_cpu_are_the_definition(vocab: int, n: int, spare: int, strided: bool, seed: int) -> None:
    """Whatever the sizes: vocabularies between words, bits of a wider table, rows in any order, infinite logits."""
    generator = np.random.default_rng(seed)
    logits = torch.from_numpy(generator.normal(size=(n, vocab)).astype(np.float32))
    logits[torch.from_numpy(generator.random((n, vocab)) < 0.2)] = -torch.inf
    logits[torch.from_numpy(generator.random((n, vocab)) < 0.05)] = torch.inf
    rows = torch.from_numpy(generator.permutation(n)[: generator.integers(0, n + 1)])
    words = -(-vocab // 32) + spare
    bits = torch.from_numpy(generator.integers(-(2**31), 2**31, (len(rows), words), dtype=np.int32))
    if strided:
        bits = torch.stack((bits, bits), dim=-1)[:, :, 0]
    wanted = logits.clone()
    forbid_definition(wanted, rows, bits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cellar.ops.sampling.cpu._PART", 2 * vocab)
        forbid(logits, rows, bits)
    assert logits.equal(wanted)


def test_adjusted_rows_that_were_not_finite_stay_marked() -> None:
    """A mask over the NaN would hide it."""
    logits = torch.zeros(1, 32)
    logits[0, 3] = torch.nan
    rows = SamplingRows.of([SamplingParams(temperature=0)], [0])
    masked = replace(rows, masks=Masks(torch.tensor([0]), torch.tensor([[1]], dtype=torch.int32)))
    got = sample(logits, masked)
    assert got.finite.tolist() == [False]
    assert got.tokens.tolist() == [0]


# -- log-probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_logits_and_only_for_those_who_ask() -> None:
    logits = random(4, 30)
    params = [
        SamplingParams(seed=1, temperature=3.0, logprobs=2, logit_bias={7: 50.0}),
        SamplingParams(seed=2),
        SamplingParams(seed=3, logprobs=5, top_k=3),
        SamplingParams(seed=4, temperature=0, logprobs=0),
    ]
    rows = SamplingRows.of(params, [0] * 4)
    got = sample(logits, rows)
    assert rows.logprob_rows is not None
    assert rows.logprob_rows.tolist() == [0, 2, 3]
    assert got.tokens[0] == 7
    assert got.logprobs is not None
    expected = logits.log_softmax(-1)
    for place, row in enumerate((0, 2, 3)):
        token = got.tokens[row]
        torch.testing.assert_close(got.logprobs.logprob[place], expected[row, token])
        assert got.logprobs.rank[place] == 1 + (logits[row] > logits[row, token]).sum()
        best = expected[row].topk(5)
        assert got.logprobs.top_ids[place].tolist() == best.indices.tolist()
        torch.testing.assert_close(got.logprobs.top_logprobs[place], best.values)
    assert sample(logits, SamplingRows.of([SamplingParams()] * 4, [0] * 4)).logprobs is None


def test_rank_counts_equals() -> None:
    found = target_logprobs(torch.tensor([[1.0, 1.0, 0.0], [3.0, 1.0, 0.0]]), torch.tensor([0, 2]), 0)
    assert found.rank.tolist() == [2, 3]
    assert found.top_ids.shape == (2, 0)
