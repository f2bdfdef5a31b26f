"""LocalRuntime on hand-made plans against dense computations of whole sequences."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from cellar.core.errors import ConfigError, DeviceError
from cellar.core.messages import CopyBatch, Emit, Flag, StepResult, Tier
from cellar.core.sampling import SamplingParams
from cellar.models.loader import LoadedWeights, dummy
from cellar.models.model import Model
from cellar.models.quantization import is_linear
from cellar.models.registry import open_model
from cellar.ops.linear.pack import pack
from cellar.ops.sampling import Sampled, SamplingRows, sample
from cellar.runtime.steps.counts import TokenCounts
from cellar.runtime.steps.local import LocalRuntime
from cellar.runtime.steps.masks import MaskBox
from tests.limits import SECONDS, join_all, until
from tests.runtime.steps.steps import (
    CHUNK,
    CONFIG,
    Step,
    greedy,
    prompt_of,
    reference,
    results,
    run,
    runtime_of,
    tiny_model,
    tokens_of,
)

VOCAB = CONFIG["vocab_size"]
MODEL, WEIGHTS = tiny_model()


@pytest.fixture
def runtime() -> Iterator[LocalRuntime]:
    made = runtime_of(MODEL, WEIGHTS)
    yield made
    made.close()


def decodes(runtime: LocalRuntime, first: int, row: int, position: int, count: int) -> list[int]:
    """`count` tokens of one row, all steps submitted at once."""
    found = run(runtime, *[Step(first + k).decode(row, position + k) for k in range(count)])
    return [token for result in found for token in tokens_of(result)]


# -- what is computed ---------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_prompt_and_decode_with_run_ahead(runtime: LocalRuntime, length: int) -> None:
    prompt = prompt_of(length, seed=length)
    first = Step(0).open(0).place(0, [7, 2, 30, 11]).prompt(0, prompt)
    found = run(runtime, first, *[Step(1 + k).decode(0, length + k) for k in range(9)])
    assert [result.step for result in found] == list(range(10))
    assert [token for result in found for token in tokens_of(result)] == greedy(MODEL, WEIGHTS, prompt, 10)


def test_packed_weights_give_the_same_tokens() -> None:
    packed = LoadedWeights(
        WEIGHTS.embedding,
        [{name: pack(t) if t.dim() == 2 else t for name, t in layer.items()} for layer in WEIGHTS.layers],
        {name: pack(t) if t.dim() == 2 else t for name, t in WEIGHTS.head.items()},
    )
    runtime = runtime_of(MODEL, packed)
    prompt = prompt_of(20)
    found = run(
        runtime, Step(0).open(0).place(0, [0, 1]).prompt(0, prompt), *[Step(k).decode(0, 19 + k) for k in (1, 2)]
    )
    runtime.close()
    assert [token for result in found for token in tokens_of(result)] == greedy(MODEL, WEIGHTS, prompt, 3)


def test_chunked_prompts_decodes_and_another_prompt_in_one_step(runtime: LocalRuntime) -> None:
    a, b, c = prompt_of(40, 1), prompt_of(9, 2), prompt_of(25, 3)
    steps = [
        Step(0).open(0).open(5).place(0, [3, 1, 4]).place(5, [9]).prompt(0, a[:10], emit=Emit.NONE).prompt(5, b),
        Step(1).decode(5, 9).prompt(0, a[10:33], 10, emit=Emit.NONE),
        Step(2).open(2).place(2, [20, 21]).decode(5, 10).prompt(0, a[33:], 33).prompt(2, c),
        Step(3).decode(0, 40).decode(2, 25).decode(5, 11),
    ]
    found = [tokens_of(result) for result in run(runtime, *steps)]
    want_a, want_b, want_c = greedy(MODEL, WEIGHTS, a, 2), greedy(MODEL, WEIGHTS, b, 4), greedy(MODEL, WEIGHTS, c, 2)
    assert found == [
        [want_b[0]],
        [want_b[1]],
        [want_b[2], want_a[0], want_c[0]],
        [want_a[1], want_c[1], want_b[3]],
    ]


def test_a_row_that_cannot_be_opened_costs_no_other_anything(
    runtime: LocalRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stops it, half opened: the others of its step, and whoever has the row later, do not notice."""
    a, b = prompt_of(20, 1), prompt_of(9, 2)
    punished = SamplingParams(temperature=0.0, repetition_penalty=1.3)
    told = {"prompt": np.array([2], np.int32), "output": np.empty(0, np.int32)}
    first = Step(0).open(0).open(1, punished).open(2).place(0, [1, 2]).place(1, [3]).place(2, [4])
    first.prompt(0, a).prompt(1, [2]).prompt(2, b)
    result, after = run(runtime, first, Step(1).decode(0, 20).decode(1, 1).decode(2, 9))
    assert list(result.failed) == [1]
    assert "without its tokens" in result.failed[1]
    assert not after.failed
    assert (tokens_of(result)[0], tokens_of(after)[0]) == tuple(greedy(MODEL, WEIGHTS, a, 2))
    assert (tokens_of(result)[2], tokens_of(after)[2]) == tuple(greedy(MODEL, WEIGHTS, b, 2))
    # while its tokens are counted, too: the counts' slot is free again
    executor = runtime.executor
    assert executor is not None
    counts = executor.rows._counts
    with monkeypatch.context() as patched:
        patched.setattr(executor.rows, "_upload", lambda arrays: 1 / 0)
        again = Step(2).open(1, punished, **told).place(1, [5]).prompt(1, [2]).decode(0, 21)
        (result,) = run(runtime, again)
    assert list(result.failed) == [1]
    assert "ZeroDivisionError" in result.failed[1]
    (result,) = run(runtime, Step(3).open(1, punished, **told).place(1, [5]).prompt(1, [2]))
    assert not result.failed
    assert len(counts._free) == len(counts.prompt) - 1


def test_holes_and_tail_in_one_step(runtime: LocalRuntime) -> None:
    """Chunks 0 and 2 of a finished turn are gone; a new turn recomputes both beside its own tokens."""
    prompt, more = prompt_of(4 * CHUNK, 4), prompt_of(7, 5)
    run(runtime, Step(0).open(0).place(0, [1, 2, 3, 4]).prompt(0, prompt))
    executor = runtime.executor
    assert executor is not None
    for cache in (*executor.arena.k, *executor.arena.v):
        cache[[1, 3]] = torch.nan
    step = (
        Step(1)
        .open(6)
        .place(6, [10, 2, 11, 4, 12])
        .prompt(6, prompt[:CHUNK], 0, emit=Emit.NONE)
        .prompt(6, prompt[2 * CHUNK : 3 * CHUNK], 2 * CHUNK, emit=Emit.NONE)
        .prompt(6, more, 4 * CHUNK)
    )
    assert tokens_of(run(runtime, step)[0]) == greedy(MODEL, WEIGHTS, prompt + more, 1)


def test_rows_share_the_slots_of_a_prefix(runtime: LocalRuntime) -> None:
    prefix, a, b = prompt_of(2 * CHUNK, 6), prompt_of(5, 7), prompt_of(11, 8)
    first = Step(0).open(0).place(0, [8, 9]).prompt(0, prefix, emit=Emit.NONE)
    second = (
        Step(1)
        .open(1)
        .place(1, [8, 9, 10])
        .open(2)
        .place(2, [8, 9, 11])
        .prompt(1, a, 2 * CHUNK)
        .prompt(2, b, 2 * CHUNK)
    )
    assert tokens_of(run(runtime, first, second)[1]) == [
        *greedy(MODEL, WEIGHTS, prefix + a, 1),
        *greedy(MODEL, WEIGHTS, prefix + b, 1),
    ]


def test_a_row_is_used_again_with_and_without_a_close(runtime: LocalRuntime) -> None:
    a, b, c = prompt_of(20, 1), prompt_of(8, 2), prompt_of(18, 3)
    bias = SamplingParams(temperature=0.0, logit_bias={5: 100.0})
    first = Step(0).open(0, bias).place(0, [0, 1]).prompt(0, a)
    second = Step(1).open(0).place(0, [2]).prompt(0, b)
    second.closes = (0,)
    third = Step(2).open(0).place(0, [1, 0]).prompt(0, c)
    found = [tokens_of(result) for result in run(runtime, first, second, third)]
    assert found == [[5], greedy(MODEL, WEIGHTS, b, 1), greedy(MODEL, WEIGHTS, c, 1)]


@pytest.mark.parametrize("changes", [{"sliding_window": 9}, {"num_attention_heads": 3, "num_key_value_heads": 1}])
def test_other_shapes(changes: dict[str, int]) -> None:
    kind = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]} if "sliding_window" in changes else {}
    model, weights = tiny_model(**kind, **changes)
    runtime = runtime_of(model, weights)
    prompt = prompt_of(30, 9)
    found = run(
        runtime,
        Step(0).open(0).place(0, [4, 5, 6]).prompt(0, prompt[:21], emit=Emit.NONE),
        Step(1).prompt(0, prompt[21:], 21),
        *[Step(2 + k).decode(0, 30 + k) for k in range(5)],
    )
    runtime.close()
    assert [token for result in found for token in result.tokens[:, 0]] == greedy(model, weights, prompt, 6)


# -- what is emitted ----------------------------------------------------------------------------


def test_prompt_logprobs_over_two_steps_and_the_token_after_them(
    runtime: LocalRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cellar.runtime.steps.executor.SCORED_NBYTES", 4 * VOCAB * 4)  # four positions at a time
    prompt = prompt_of(24, 10)
    params = SamplingParams(temperature=0.0, prompt_logprobs=3, logprobs=2)
    steps = [
        Step(0)
        .open(1)
        .place(1, [0])
        .prompt(1, prompt_of(4))
        .open(3, params)
        .place(3, [5, 6])
        .prompt(3, prompt[:10], emit=Emit.ALL, targets=prompt[1:11]),
        Step(1).decode(1, 4).prompt(3, prompt[10:], 10, emit=Emit.ALL, targets=[*prompt[11:], -1]),
    ]
    found = run(runtime, *steps)
    wanted = reference(MODEL, WEIGHTS, prompt).log_softmax(-1)
    scores = [result.prompt_logprobs[3] for result in found]
    index = np.concatenate([score.index for score in scores])
    np.testing.assert_array_equal(index, np.arange(1, 24))
    targets = torch.tensor(prompt[1:])
    by_target = wanted[:-1].gather(1, targets[:, None])[:, 0]
    np.testing.assert_allclose(np.concatenate([s.logprob for s in scores]), by_target, atol=1e-4)
    ranks = (wanted[:-1] > by_target[:, None]).sum(-1)
    np.testing.assert_array_equal(np.concatenate([s.rank for s in scores]), ranks)
    best = wanted[:-1].topk(3)
    np.testing.assert_array_equal(np.concatenate([s.top_ids for s in scores]), best.indices)
    np.testing.assert_allclose(np.concatenate([s.top_logprobs for s in scores]), best.values, atol=1e-4)

    assert len(found[0].tokens) == 1
    assert tokens_of(found[1]) == [*greedy(MODEL, WEIGHTS, prompt_of(4), 2)[1:], int(wanted[-1].argmax())]
    sampled = found[1].logprobs
    assert found[0].logprobs is None
    assert sampled is not None
    assert sampled.index.tolist() == [1]
    assert sampled.rank.tolist() == [0]
    np.testing.assert_allclose(sampled.top_logprobs[0], wanted[-1].topk(2).values, atol=1e-4)


def test_hidden_states(runtime: LocalRuntime) -> None:
    prompt = prompt_of(20, 11)
    step = Step(0).open(0).open(1).place(0, [0, 1]).place(1, [2])
    step.prompt(0, prompt, emit=Emit.HIDDEN).prompt(1, prompt[:3])
    result = run(runtime, step)[0]
    logits = torch.from_numpy(result.hidden[0]) @ WEIGHTS.head["lm_head"].T
    torch.testing.assert_close(logits, reference(MODEL, WEIGHTS, prompt), atol=1e-4, rtol=1e-4)
    assert tokens_of(result) == greedy(MODEL, WEIGHTS, prompt[:3], 1)


def test_a_plan_without_spans_only_changes_rows(runtime: LocalRuntime) -> None:
    found = run(runtime, Step(0).open(0).place(0, [0]), Step(1).prompt(0, [1, 2, 3]))
    assert tokens_of(found[0]) == []
    assert tokens_of(found[1]) == greedy(MODEL, WEIGHTS, [1, 2, 3], 1)


# -- how tokens are chosen ----------------------------------------------------------------------


def test_company_does_not_change_a_seeded_request(runtime: LocalRuntime) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=11)
    prompt = prompt_of(6)
    run(runtime, Step(0).open(3, params).place(3, [0]).prompt(3, prompt))
    alone = decodes(runtime, 1, 3, 6, 6)
    company = [SamplingParams(temperature=2.0, top_k=5, seed=k) for k in range(3)]
    step = Step(10).open(0, params).place(0, [8]).prompt(0, prompt)
    for k, other in enumerate(company):
        step.open(1 + k, other).place(1 + k, [9 + k]).prompt(1 + k, prompt_of(4, k))
    steps = [step]
    for k in range(6):
        steps.append(Step(11 + k).decode(2, 4 + k).decode(0, 6 + k).decode(1, 4 + k))
    found = [tokens_of(result) for result in run(runtime, *steps)[1:]]
    assert [tokens[1] for tokens in found] == alone
    assert len(set(alone)) > 1


def test_a_request_that_returns_goes_on_with_its_output_index(runtime: LocalRuntime) -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    prompt = prompt_of(6)
    first = tokens_of(run(runtime, Step(0).open(0, params).place(0, [0]).prompt(0, prompt))[0])
    tokens = first + decodes(runtime, 1, 0, 6, 4)
    again = Step(9).open(1, params, num_output=3).place(1, [1]).prompt(1, prompt + tokens[:3])
    assert tokens_of(run(runtime, again)[0]) == tokens[3:4]


def test_penalties_count_prompt_and_output_and_are_forgotten(runtime: LocalRuntime) -> None:
    """Frequency and presence penalties of 2 and a bias of 3 for tokens 5, 6, 7: each is worth one or two turns."""
    bias = {5: 103.0 - 4, 6: 100.0 - 4, 7: 100.0 - 4.5}
    bias = {token: min(value, 100.0) for token, value in bias.items()}
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0, logit_bias=bias)
    prompt = prompt_of(5)
    none = np.empty(0, np.int32)

    def expected(counts: dict[int, int], count: int, known: list[int]) -> list[int]:
        chosen = []
        for _ in range(count):
            logits = reference(MODEL, WEIGHTS, known)[-1].clone()
            for token, value in bias.items():
                logits[token] += value
            for token, number in counts.items():
                logits[token] -= 2 * number + 2
            chosen.append(int(logits.argmax()))
            counts[chosen[-1]] = counts.get(chosen[-1], 0) + 1
            known = [*known, chosen[-1]]
        return chosen

    opened = Step(0).open(2, params, prompt=np.array(prompt, np.int32), output=none).place(2, [0, 1])
    first = tokens_of(run(runtime, opened.prompt(2, prompt))[0])
    tokens = first + decodes(runtime, 1, 2, 5, 8)
    want = expected({}, 9, prompt)
    assert tokens == want
    assert len(set(tokens)) > 1
    # The next request of the row brings three tokens of output; those of the first one are forgotten.
    output = [6, 6, 5]
    again = Step(20).open(2, params, num_output=3, prompt=np.array(prompt, np.int32), output=np.array(output, np.int32))
    again.place(2, [3]).prompt(2, prompt + output)
    assert tokens_of(run(runtime, again)[0]) == expected({6: 2, 5: 1}, 1, prompt + output)


def test_biases_and_bans_go_to_their_own_rows(runtime: LocalRuntime) -> None:
    prompts = [prompt_of(4, k) for k in range(4)]
    free = [greedy(MODEL, WEIGHTS, prompt, 1)[0] for prompt in prompts]
    step = Step(0)
    for row, prompt in enumerate(prompts):
        params, stop_ids = SamplingParams(temperature=0.0), ()
        if row == 1:
            params = SamplingParams(temperature=0.0, logit_bias={11: 100.0, 12: 50.0})
        if row == 2:
            params, stop_ids = SamplingParams(temperature=0.0, min_tokens=1), (free[2],)
        step.open(row, params, stop_ids=stop_ids).place(row, [row]).prompt(row, prompt)
    second = reference(MODEL, WEIGHTS, prompts[2])[-1].topk(2).indices[1]
    assert tokens_of(run(runtime, step)[0]) == [free[0], 11, int(second), free[3]]


def test_counts_begin_anew_for_each_row() -> None:
    counts = TokenCounts(9, 10, torch.device("cpu"))
    for row in range(9):
        counts.open(row, torch.tensor([row]), torch.tensor([1, 1, row]))
    slots = counts.slots(np.arange(9))
    assert sorted(slots) == list(range(9))
    assert counts.output[slots[5]].tolist() == [0, 2, 0, 0, 0, 1, 0, 0, 0, 0]
    counts.add(torch.from_numpy(slots[4:6]), torch.tensor([9, 0]))
    assert counts.output[slots[5]].tolist() == [1, 2, 0, 0, 0, 1, 0, 0, 0, 0]
    counts.release(5)
    counts.open(0, torch.tensor([3]), torch.empty(0, dtype=torch.int64))
    again = int(counts.slots(np.array([0]))[0])
    assert again == slots[5]
    assert counts.prompt[again].nonzero().flatten().tolist() == [3]
    assert not counts.output[again].any()
    assert counts.output[slots[4], 9] == 1


def test_a_closed_row_leaves_nothing_behind(runtime: LocalRuntime) -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=1.0)
    none = np.empty(0, np.int32)
    for step in range(6):
        made = Step(step).open(step, params, prompt=none, output=none).place(step, [0]).prompt(step, [1, 2])
        made.closes = (step,)
        tokens_of(run(runtime, made)[0])
    assert runtime.executor is not None
    assert len(runtime.executor.rows._counts.output) == 4, "rows that close give their counts back"
    assert "no slot" in (run(runtime, Step(9).decode(0, 2))[0].error or "")


def test_many_rows_with_penalties(runtime: LocalRuntime) -> None:
    """More than the first allotment of counts; every row keeps its own when that grows."""
    params = SamplingParams(temperature=0.0, repetition_penalty=50.0)
    steps = []
    for row in range(8):
        prompt = np.arange(10 * row, 10 * row + 10, dtype=np.int32)
        opened = Step(row).open(row, params, prompt=prompt, output=prompt[:0]).place(row, [row])
        steps.append(opened.prompt(row, prompt.tolist()))
    last = Step(8)
    for row in range(8):
        last.decode(row, 10)
    found = run(runtime, *steps, last)
    first = [tokens_of(result)[0] for result in found[:8]]
    for row, (one, two) in enumerate(zip(first, tokens_of(found[8]), strict=True)):
        assert one not in range(10 * row, 10 * row + 10)
        assert two not in (*range(10 * row, 10 * row + 10), one)


def test_stop_ids_are_banned_until_min_tokens(runtime: LocalRuntime) -> None:
    prompt = prompt_of(5)
    params = SamplingParams(temperature=0.0, min_tokens=2, logit_bias={9: 100.0, 4: 90.0})
    opened = Step(0).open(0, params, stop_ids=(9, VOCAB + 3)).place(0, [0]).prompt(0, prompt)
    assert tokens_of(run(runtime, opened)[0]) == [4]
    assert decodes(runtime, 1, 0, 5, 3) == [4, 9, 9]


# -- what goes wrong ----------------------------------------------------------------------------


def test_a_row_without_finite_logits_harms_no_other() -> None:
    bad = 7
    embedding = {"embed": WEIGHTS.embedding["embed"].clone()}
    embedding["embed"][bad] = torch.nan
    runtime = runtime_of(MODEL, LoadedWeights(embedding, WEIGHTS.layers, WEIGHTS.head))
    good = [t for t in prompt_of(20) if t != bad]
    poisoned = [1, 2, bad, 3]
    first = Step(0).open(0).open(1).place(0, [0, 1]).place(1, [2]).prompt(1, poisoned).prompt(0, good)
    second = Step(1).decode(0, len(good)).decode(1, 4)
    # The poisoned row's slot is given to another request that fills a part of it.
    third = Step(2).open(1).place(1, [2]).prompt(1, good[:3])
    found = run(runtime, first, second, third)
    runtime.close()
    want = greedy(MODEL, WEIGHTS, good, 2)
    assert bad not in want
    assert found[0].flags.tolist() == [Flag.NAN, Flag.OK]
    assert found[0].num_tokens.tolist() == [0, 1]
    assert found[0].tokens[1, 0] == want[0]
    assert found[1].flags.tolist() == [Flag.OK, Flag.NAN]
    assert found[1].tokens[0, 0] == want[1]
    assert found[2].flags.tolist() == [Flag.OK]
    assert tokens_of(found[2]) == greedy(MODEL, WEIGHTS, good[:3], 1)


def broken_plans() -> list[tuple[str, Step]]:
    no_targets = Step(1).open(0).place(0, [0]).prompt(0, [1, 2], emit=Emit.ALL)
    return [
        ("has a token that is not in [0, 101)", Step(1).open(0).place(0, [0]).prompt(0, [3, VOCAB])),
        ("but its chunk has no slot", Step(1).open(0).place(0, [0]).prompt(0, prompt_of(CHUNK + 1))),
        ("has an empty span", Step(1).open(0).place(0, [0]).prompt(0, [])),
        ("that does not exist", Step(1).open(0).place(0, [0]).prompt(0, [1], 10_000)),
        ("not as many targets", no_targets),
    ]


@pytest.mark.parametrize(("words", "step"), broken_plans(), ids=[words for words, _ in broken_plans()])
def test_a_step_that_fails_says_why_and_the_worker_lives_on(runtime: LocalRuntime, words: str, step: Step) -> None:
    prompt = prompt_of(9)
    before = Step(0).open(1).place(1, [3]).prompt(1, prompt)
    found = run(runtime, before, step, Step(2).decode(1, 9))
    assert words in (found[1].error or "")
    assert found[1].step == 1
    assert len(found[1].tokens) == 0
    assert tokens_of(found[2]) == greedy(MODEL, WEIGHTS, prompt, 2)[1:]


def impossible() -> Exception:
    """What torch says on a CPU that has no memory for something."""
    try:
        torch.empty(2**60, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError("there is a lot of memory")


def test_any_exception_is_one_line_of_the_result(runtime: LocalRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise RuntimeError("a tensor\nwas sad")

    with monkeypatch.context() as patch:
        patch.setattr(MODEL, "before_attention", explode, raising=False)
        failed = run(runtime, Step(0).open(0).place(0, [0]).prompt(0, [1, 2]))[0]
    assert failed.error == "step 0 failed: RuntimeError: a tensor was sad"
    for reason in (MemoryError(), impossible()):
        error = reason

        def too_large(*_: object, error: Exception = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(MODEL, "before_attention", too_large, raising=False)
            failed = run(runtime, Step(0).open(0).place(0, [0]).prompt(0, [1, 2]))[0]
        assert failed.error == (
            "step 0 ran out of memory on cpu; lower max_num_batched_tokens, max_num_seqs or kv_cache_memory_bytes."
        )
    # The step's deltas stand: the row is open and has its slot.
    assert tokens_of(run(runtime, Step(1).prompt(0, [1, 2]))[0]) == greedy(MODEL, WEIGHTS, [1, 2], 1)


def test_copies_are_refused_until_there_are_tiers(runtime: LocalRuntime) -> None:
    slots = np.zeros(1, np.int32)
    with pytest.raises(ConfigError, match="no tiers"):
        runtime.copy(CopyBatch(0, Tier.HOST, slots, Tier.DEVICE, slots))


# -- masks --------------------------------------------------------------------------------------


def bits(*tokens: int) -> np.ndarray:
    mask = np.zeros(-(-VOCAB // 32), np.int32)
    for token in tokens:
        mask[token // 32] |= np.array(1 << (token % 32), np.uint32).astype(np.int32)
    return mask


def test_masked_rows_wait_for_their_masks_and_others_do_not(runtime: LocalRuntime) -> None:
    prompts = [prompt_of(5, k) for k in range(3)]
    step = Step(0)
    for row, prompt in enumerate(prompts):
        step.open(row).place(row, [row]).prompt(row, prompt)
    step.masked = (0, 2)
    runtime.workers[0].submit(step.plan())
    free = greedy(MODEL, WEIGHTS, prompts[1], 2)
    assert runtime.executor is not None
    last = runtime.executor.rows.last
    until(lambda: int(last[1]) == free[0])  # the unmasked row does not wait
    assert runtime.poll(0.05) == []
    runtime.supply(0, {0: bits(31)})
    assert runtime.poll(0.05) == []
    runtime.supply(0, {2: bits(64, 95)})
    result = results(runtime, 1)[0]
    wanted = reference(MODEL, WEIGHTS, prompts[2])[-1]
    assert tokens_of(result) == [31, free[0], 64 if wanted[64] > wanted[95] else 95]
    assert runtime._masks._steps == {}
    # The masked tokens are what the next step starts from; masks that nobody expects are dropped.
    runtime.supply(0, {0: bits(1)})
    found = run(runtime, Step(1).decode(0, 5).decode(1, 5))[0]
    assert tokens_of(found) == [*greedy(MODEL, WEIGHTS, [*prompts[0], 31], 1), free[1]]


def test_a_late_mask_voids_its_row_and_no_other(runtime: LocalRuntime) -> None:
    prompts = [prompt_of(5, k) for k in range(3)]
    step = Step(0)
    for row, prompt in enumerate(prompts):
        step.open(row).place(row, [row]).prompt(row, prompt)
    step.masked = (0, 2)
    runtime.workers[0].submit(step.plan())
    runtime.supply(0, {0: None})
    runtime.supply(0, {2: bits(64)})
    result = results(runtime, 1)[0]
    assert result.flags.tolist() == [Flag.LATE, Flag.OK, Flag.OK]
    assert tokens_of(result)[1:] == [greedy(MODEL, WEIGHTS, prompts[1], 1)[0], 64]


def test_masks_may_come_while_the_step_before_runs(runtime: LocalRuntime) -> None:
    first = Step(0).open(0).place(0, [0]).prompt(0, prompt_of(5))
    first.masked = (0,)
    second = Step(1).decode(0, 5)
    second.masked = (0,)
    for step in (first, second):
        runtime.workers[0].submit(step.plan())
    runtime.supply(1, {0: bits(50)})
    runtime.supply(0, {0: bits(40)})
    assert [tokens_of(result) for result in results(runtime, 2)] == [[40], [50]]


DRAWN = (
    SamplingParams(seed=3, logprobs=1),
    SamplingParams(temperature=0.0),
    SamplingParams(seed=5, top_p=0.9, logprobs=3),
    SamplingParams(seed=6, top_k=30, logit_bias={7: 3.0}),
    SamplingParams(temperature=0.0, frequency_penalty=1.5),
)


def drawn_with_masks(late: bool, count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[StepResult], list[int]]:
    """`count` steps of five rows, three of them masked. -> results, and the rows of each call that sampled."""
    calls: list[int] = []
    awaited = threading.Event()

    class Box(MaskBox):
        """Masks come as late, or as early, as they are wanted to."""

        def complete(self, step: int, rows: Sequence[int]) -> bool:
            if not late:
                super().wait(step, rows)
            return super().complete(step, rows)

        def wait(self, step: int, rows: Sequence[int]) -> list[np.ndarray]:
            awaited.set()
            return super().wait(step, rows)

    def counted(logits: torch.Tensor, rows: SamplingRows) -> Sampled:
        calls.append(len(logits))
        return sample(logits, rows)

    monkeypatch.setattr("cellar.runtime.steps.local.MaskBox", Box)
    monkeypatch.setattr("cellar.runtime.steps.executor.sample", counted)
    runtime = runtime_of(MODEL, WEIGHTS)
    found = []
    for number in range(count):
        step = Step(number)
        for row, params in enumerate(DRAWN):
            if number:
                step.decode(row, 4 + number)
            else:
                none = np.empty(0, np.int32)
                tokens = {"prompt": none, "output": none} if params.penalized else {}
                step.open(row, params, **tokens).place(row, [2 * row, 2 * row + 1]).prompt(row, prompt_of(5, row))
        step.masked = (3, 0, 4)
        awaited.clear()
        runtime.workers[0].submit(step.plan())
        if late:
            assert awaited.wait(SECONDS)
        runtime.supply(number, {row: bits(*range(row + number, VOCAB, 3)) for row in step.masked})
        found += results(runtime, 1)
    runtime.close()
    return found, calls


def test_rows_with_and_without_masks_are_sampled_together_unless_a_mask_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together, calls = drawn_with_masks(False, 4, monkeypatch)
    assert calls == [5] * 4
    apart, calls = drawn_with_masks(True, 4, monkeypatch)
    assert calls == [2, 3] * 4
    for one, other in zip(together, apart, strict=True):
        assert one.error is None
        assert tokens_of(one) == tokens_of(other)
        assert one.flags.tolist() == other.flags.tolist()
        for row in (0, 3, 4):
            assert (tokens_of(one)[row] - row - one.step) % 3 == 0
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert one.logprobs.index.tolist() == other.logprobs.index.tolist() == [0, 2]
        np.testing.assert_array_equal(one.logprobs.logprob, other.logprobs.logprob)
        np.testing.assert_array_equal(one.logprobs.rank, other.logprobs.rank)


def test_a_mask_that_allows_nothing_is_flagged(runtime: LocalRuntime) -> None:
    step = Step(0).open(0).place(0, [0]).prompt(0, prompt_of(5))
    step.masked = (0,)
    runtime.workers[0].submit(step.plan())
    runtime.supply(0, {0: bits()})
    assert results(runtime, 1)[0].flags.tolist() == [Flag.NAN]


def test_log_probabilities_of_masked_and_unmasked_rows_come_in_order(runtime: LocalRuntime) -> None:
    step = Step(0)
    for row, best in enumerate((1, 3, None, 2)):
        step.open(row, SamplingParams(temperature=0.0, logprobs=best)).place(row, [row]).prompt(row, prompt_of(4, row))
    step.masked = (0, 2)
    runtime.workers[0].submit(step.plan())
    runtime.supply(0, {0: bits(*range(VOCAB)), 2: bits(*range(VOCAB))})
    found = results(runtime, 1)[0].logprobs
    assert found is not None
    assert found.index.tolist() == [0, 1, 3]
    assert found.rank.tolist() == [0, 0, 0]
    assert found.top_ids.shape == (3, 3)


# -- threads ------------------------------------------------------------------------------------


def test_in_flight_counts_until_polled(runtime: LocalRuntime) -> None:
    worker = runtime.workers[0]
    worker.submit(Step(0).open(0).place(0, [0]).prompt(0, [1, 2]).plan())
    worker.submit(Step(1).decode(0, 2).plan())
    assert worker.in_flight == 2
    results(runtime, 2)
    assert worker.in_flight == 0
    assert worker.id == 0


def test_poll_waits_no_longer_than_told_and_wake_ends_it(runtime: LocalRuntime) -> None:
    begin = time.monotonic()
    assert runtime.poll(0.05) == []
    assert 0.04 < time.monotonic() - begin < SECONDS
    assert runtime.poll(0) == []
    threading.Timer(0.05, runtime.wake).start()
    assert runtime.poll(None) == []
    runtime.wake()
    assert runtime.poll(None) == []


def test_closing_while_a_step_waits_for_masks() -> None:
    others = set(threading.enumerate())
    runtime = runtime_of(MODEL, WEIGHTS)
    step = Step(0).open(0).place(0, [0]).prompt(0, [1, 2])
    step.masked = (0,)
    runtime.workers[0].submit(step.plan())
    runtime.workers[0].submit(Step(1).decode(0, 2).plan())
    time.sleep(0.05)
    closer = threading.Thread(target=runtime.close, daemon=True)
    closer.start()
    join_all([closer])
    runtime.close()
    assert runtime.poll(None) == []
    assert runtime.executor is None
    with pytest.raises(DeviceError, match="closed"):
        runtime.workers[0].submit(Step(2).decode(0, 3).plan())
    left = set(threading.enumerate()) - others
    assert not any(thread.name.startswith("cellar-worker") for thread in left)


def test_two_runtimes_in_one_process() -> None:
    prompt = prompt_of(12)
    both = [runtime_of(MODEL, WEIGHTS), runtime_of(MODEL, WEIGHTS)]
    for runtime in both:
        runtime.workers[0].submit(Step(0).open(0).place(0, [3]).prompt(0, prompt).plan())
    found = [tokens_of(results(runtime, 1)[0]) for runtime in both]
    for runtime in both:
        runtime.close()
    assert found == [greedy(MODEL, WEIGHTS, prompt, 1)] * 2


# -- what it is made from -----------------------------------------------------------------------


def test_capacity(runtime: LocalRuntime) -> None:
    capacity = runtime.capacity
    assert (capacity.num_slots, capacity.num_rows) == (32, 8)
    assert (capacity.chunk_size, capacity.max_model_len) == (CHUNK, CONFIG["max_position_embeddings"])


def test_bfloat16_follows_float32() -> None:
    """The same weights in bfloat16: log-probabilities within what eight bits of mantissa allow."""
    config = {**CONFIG, "num_hidden_layers": 2}
    prompt = prompt_of(30)
    found = []
    for dtype in ("float32", "bfloat16"):
        model: Model = open_model(config, dtype, CHUNK)
        weights = dummy(model.spec, seed=1, transform=lambda s, t: pack(t) if is_linear(s) else t)
        runtime = runtime_of(model, weights)
        params = SamplingParams(temperature=0.0, logprobs=20)
        found.append(run(runtime, Step(0).open(0, params).place(0, [0, 1]).prompt(0, prompt))[0].logprobs)
        runtime.close()
    exact, rounded = found
    assert exact is not None
    assert rounded is not None
    np.testing.assert_allclose(rounded.top_logprobs, exact.top_logprobs, atol=0.06)
