"""LLM over the whole engine with a fake device: order, forms of prompts, n > 1, errors, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cellar import LLM, SamplingParams
from cellar.core.errors import CapacityError, CellarError, ConfigError, RequestError
from cellar.core.messages import StepPlan
from cellar.engine.progress import Progress
from cellar.text.tokenizer import Tokenizer
from tests.fake_front import TOKENIZER, continuation, open_fake
from tests.limits import SECONDS, join_all, run_python

TEXT = Tokenizer.load(TOKENIZER)
VOCAB = TEXT.vocab_size
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def llm(**options: Any) -> LLM:
    return LLM.over(open_fake(**options)[0])


def plain(prompt: list[int], count: int) -> list[int]:
    """The fake's tokens, past end symbols."""
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += continuation(prompt + tokens, count - len(tokens), VOCAB)
    return tokens


def test_every_form_of_a_prompt() -> None:
    ids = TEXT.encode("Once upon a time")
    model = llm()
    for prompt in ("Once upon a time", {"prompt": "Once upon a time"}, ids, {"prompt_token_ids": ids}, np.array(ids)):
        (output,) = model.generate(prompt, GREEDY, use_tqdm=False)
        assert list(output.prompt_token_ids) == ids
        assert output.outputs[0].token_ids == plain(ids, 8)
        assert output.outputs[0].text == TEXT.decode(plain(ids, 8))
        assert output.outputs[0].finish_reason == "length"
        assert output.finished
    mixed = model.generate(["Once upon a time", ids, {"prompt": "Once"}], GREEDY, use_tqdm=False)
    assert [output.prompt for output in mixed] == ["Once upon a time", None, "Once"]
    assert model.generate([], GREEDY, use_tqdm=False) == []


def test_results_come_in_order_and_each_has_its_own_parameters() -> None:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, VOCAB, rng.integers(1, 100)).tolist() for _ in range(50)]
    params = [SamplingParams(temperature=0, max_tokens=1 + k % 30, ignore_eos=True) for k in range(50)]
    outputs = llm(num_slots=40).generate(prompts, params, use_tqdm=False)
    for k, output in enumerate(outputs):
        assert list(output.prompt_token_ids) == prompts[k]
        assert output.outputs[0].token_ids == plain(prompts[k], 1 + k % 30)
    assert len({output.request_id for output in outputs}) == 50


def test_priorities_order_the_queue() -> None:
    order: list[int] = []

    def note(plan: StepPlan) -> None:
        order.extend(int(row.params.seed or 0) for row in plan.opens)

    model = llm(num_rows=1, policy="priority", fail=note)
    params = [GREEDY.clone(seed=k) for k in range(4)]
    model.generate([[1], [2], [3], [4]], params, use_tqdm=False, priority=[3, 0, 2, 1])
    assert order == [1, 3, 2, 0]
    with pytest.raises(RequestError, match="1 priorities for 2 prompts"):
        model.generate([[1], [2]], GREEDY, use_tqdm=False, priority=[1])
    for wrong in ("high", True, 2**63):
        with pytest.raises(RequestError, match=f"priority is {wrong!r}"):
            model.generate([[1]], GREEDY, use_tqdm=False, priority=[wrong])  # type: ignore[list-item]
    assert model.generate([[1]], GREEDY, use_tqdm=False, priority=[-(2**31) + 1])[0].finished


def test_defaults_are_those_of_vllm() -> None:
    (output,) = llm().generate([5, 6, 7], use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 16
    assert output.outputs[0].index == 0


def test_max_tokens_none_goes_to_the_end_of_the_context() -> None:
    (output,) = llm(max_model_len=64).generate([5] * 10, GREEDY.clone(max_tokens=None), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 54
    (output,) = llm(max_model_len=64).generate([5] * 63, GREEDY.clone(max_tokens=50), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1


def test_end_symbols_stop_ids_and_stop_strings() -> None:
    prompt = TEXT.encode("Once upon a time")
    tokens = plain(prompt, 30)
    model = llm()
    (output,) = model.generate(prompt, GREEDY.clone(max_tokens=30, stop_token_ids=[tokens[4]]), use_tqdm=False)
    end = tokens.index(tokens[4]) + 1
    assert output.outputs[0].token_ids == tokens[:end]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", tokens[4])

    text = TEXT.decode(tokens)
    stop = text[10:14]
    (output,) = model.generate(prompt, GREEDY.clone(max_tokens=30, stop=stop), use_tqdm=False)
    assert output.outputs[0].text == text[: text.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_an_end_symbol_ends_a_request_unless_ignored() -> None:
    model = LLM.over(open_fake(end_token=2, end_period=4)[0])
    (ended,) = model.generate([5, 6, 7, 8], SamplingParams(temperature=0, max_tokens=100), use_tqdm=False)
    assert ended.outputs[0].token_ids[-1] == 2
    assert ended.outputs[0].finish_reason == "stop"
    (on,) = model.generate([5, 6, 7, 8], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), use_tqdm=False)
    assert len(on.outputs[0].token_ids) == 100


# -- n > 1 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 20])
def test_n_sequences_compute_the_prompt_once(max_tokens: int) -> None:
    opened, runtime = open_fake()
    prompt = [7] * 100
    (output,) = LLM.over(opened).generate(prompt, GREEDY.clone(n=4, max_tokens=max_tokens), use_tqdm=False)
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    for completion in output.outputs:
        assert completion.token_ids == plain(prompt, max_tokens)
    # 96 tokens in whole chunks are shared; each of the three siblings computes 4 and its own output.
    assert runtime.num_tokens <= 100 + 3 * 4 + 4 * max_tokens + 8
    assert output.num_cached_tokens == 0


def test_n_sequences_have_different_seeds() -> None:
    seeds: list[int | None] = []

    def note(plan: StepPlan) -> None:
        seeds.extend(opened.seed for opened in plan.opens)

    opened, _ = open_fake(fail=note)
    LLM.over(opened).generate([1, 2, 3], SamplingParams(n=3, seed=11), use_tqdm=False)
    assert sorted(seeds, key=str) == [11, 12, 13]


def test_a_failed_first_sequence_takes_its_siblings_along() -> None:
    opened, _ = open_fake(fail=lambda plan: "broken" if plan.step == 0 else None)
    (output,) = LLM.over(opened).generate([1, 2, 3], GREEDY.clone(n=3), use_tqdm=False)
    assert [c.finish_reason for c in output.outputs] == ["error"] * 3
    assert output.outputs[2].stop_reason == "broken"


# -- seeds ----------------------------------------------------------------------------------------


def seeds_of(seed: int, calls: int = 2) -> list[int | None]:
    seeds: list[int | None] = []

    def note(plan: StepPlan) -> None:
        seeds.extend(opened.seed for opened in plan.opens)

    model = llm(seed=seed, fail=note)
    for _ in range(calls):
        model.generate([[1, 2], [3, 4]], SamplingParams(max_tokens=2), use_tqdm=False)
    return seeds


def test_seeds_follow_from_the_engine_seed_and_the_order_of_calls() -> None:
    assert seeds_of(0) == seeds_of(0)
    assert len(set(seeds_of(0))) == 4
    assert not set(seeds_of(0)) & set(seeds_of(1))
    assert all(s is not None and -(2**63) <= s < 2**63 for s in seeds_of(0))


# -- bad input ------------------------------------------------------------------------------------

BAD: list[tuple[Any, str]] = [
    ([[]], "empty"),
    ([[1], [-1]], "prompt 1 of 2: prompt contains token id -1"),
    ([[1], [VOCAB]], f"knows 0 to {VOCAB - 1}"),
    ([[1] * 256], "context holds 256"),
    ("", "empty"),
    (5, "type int"),
    ([[1, "a"]], "must be integers"),
    ([[1, 2.0]], "must be integers"),
    ([[True]], "must be integers"),
    (b"bytes", "type bytes"),
    ({"text": "x"}, "'text'"),
    ({}, "empty mapping"),
    ({"prompt": 3}, "must be a string"),
    ({"prompt_token_ids": "ab"}, "list of integers"),
    (np.zeros((2, 2), np.int32), "one row"),
    (np.zeros(3), "one row"),
    (None, "NoneType"),
]


@pytest.mark.parametrize(("prompts", "message"), BAD, ids=[f"{i}" for i in range(len(BAD))])
def test_a_bad_prompt_is_one_clear_sentence_and_starts_nothing(prompts: Any, message: str) -> None:
    opened, runtime = open_fake()
    model = LLM.over(opened)
    with pytest.raises(RequestError, match=message) as caught:
        model.generate(prompts, GREEDY, use_tqdm=False)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
    assert runtime.num_steps == 0
    (good,) = model.generate([1, 2], GREEDY, use_tqdm=False)
    assert good.outputs[0].token_ids == plain([1, 2], 8)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(stop_token_ids=[VOCAB]), "stop_token_ids"),
        (SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias"),
        ([GREEDY], "1 sampling_params for 2 prompts"),
        ("greedy", "is a str"),
        ([GREEDY, None], "must be SamplingParams"),
    ],
)
def test_bad_parameters_start_nothing(params: Any, message: str) -> None:
    opened, runtime = open_fake()
    with pytest.raises(RequestError, match=message):
        LLM.over(opened).generate([[1], [2]], params, use_tqdm=False)
    assert runtime.num_steps == 0


def test_too_little_memory_for_one_request_starts_none() -> None:
    opened, runtime = open_fake(num_slots=4)
    model = LLM.over(opened)
    with pytest.raises(CellarError, match="chunks"):
        model.generate([[1], [1] * 60], GREEDY.clone(max_tokens=100), use_tqdm=False)
    assert runtime.num_steps == 0
    assert len(model.generate([[1], [2]], GREEDY, use_tqdm=False)) == 2


def test_text_without_a_tokenizer() -> None:
    model = llm(tokenizer=False)
    (output,) = model.generate([1, 2], GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8
    assert output.outputs[0].text == ""
    for call in (
        lambda: model.generate("text"),
        lambda: model.generate([1], SamplingParams(stop="x")),
        lambda: model.chat([{"role": "user", "content": "x"}]),
        model.get_tokenizer,
    ):
        with pytest.raises(RequestError, match="tokenizer"):
            call()


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(max_num_sequences=3)


def test_more_requests_than_memory_has_room_for_are_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def crowded(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("cellar.schedule.steps.scheduler.Rows", crowded)
    with pytest.raises(CapacityError, match=r"7 requests; lower max_num_seqs"):
        LLM(max_num_seqs=7, max_model_len=64, num_threads=1, kv_cache_memory_bytes=2**20)


def test_a_failing_step_ends_only_its_requests() -> None:
    opened, _ = open_fake(nan=lambda step, row: row == 1 and step > 2)
    outputs = LLM.over(opened).generate([[1], [2], [3]], GREEDY, use_tqdm=False)
    assert sorted(o.outputs[0].finish_reason or "" for o in outputs) == ["error", "length", "length"]
    (reason,) = [o.outputs[0].stop_reason for o in outputs if o.outputs[0].finish_reason == "error"]
    assert "not finite" in str(reason)


# -- chat, streams --------------------------------------------------------------------------------


def test_chat_renders_the_template() -> None:
    model = llm()
    messages = [{"role": "user", "content": "Hi"}]
    (one,) = model.chat(messages, GREEDY, use_tqdm=False)
    assert one.prompt == "[user] Hi\n[assistant]"
    assert list(one.prompt_token_ids) == TEXT.encode(one.prompt, add_special_tokens=False)
    two = model.chat([messages, messages], GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert [output.prompt for output in two] == ["[user] Hi\n"] * 2
    (extra,) = model.chat(messages, GREEDY, use_tqdm=False, chat_template_kwargs={"extra": "!"})
    assert (extra.prompt or "").endswith("!")
    with pytest.raises(RequestError, match="role"):
        model.chat([{"role": "nobody", "content": "x"}], GREEDY, use_tqdm=False)


def test_streams_grow_and_may_be_mixed() -> None:
    model = llm()
    first = model.stream([1, 2, 3], GREEDY)
    second = model.stream([4, 5], GREEDY)
    one, two = next(first), next(second)
    assert one.outputs[0].token_ids == plain([1, 2, 3], 8)[: len(one.outputs[0].token_ids)]
    (batch,) = model.generate([9], GREEDY, use_tqdm=False)
    assert batch.outputs[0].token_ids == plain([9], 8)
    *_, one = first
    *_, two = second
    assert one.outputs[0].token_ids == plain([1, 2, 3], 8)
    assert two.outputs[0].token_ids == plain([4, 5], 8)
    assert one.finished
    assert two.finished


def test_leaving_a_stream_drops_its_request() -> None:
    model = llm()
    stream = model.stream([1, 2, 3], GREEDY.clone(max_tokens=200))
    next(stream)
    stream.close()
    model.generate([1], GREEDY, use_tqdm=False)
    assert not model._front.engine.has_work()
    assert model._front.engine.stats().running == 0


# -- Ctrl-C ---------------------------------------------------------------------------------------


def test_ctrl_c_drops_all_and_leaves_the_engine_usable() -> None:
    def interrupt(plan: StepPlan) -> None:
        if plan.step == 5:
            signal.raise_signal(signal.SIGINT)

    opened, _ = open_fake(fail=interrupt)
    model = LLM.over(opened)
    with pytest.raises(KeyboardInterrupt):
        model.generate([[k] for k in range(20)], GREEDY.clone(max_tokens=100), use_tqdm=False)
    (after,) = model.generate([1, 2], GREEDY, use_tqdm=False)
    assert after.outputs[0].token_ids == plain([1, 2], 8)
    assert model._front.engine.stats().running == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_from_outside_while_waiting() -> None:
    begun = threading.Event()

    def note(plan: StepPlan) -> None:
        if plan.step == 2:
            begun.set()

    def interrupt() -> None:
        if begun.wait(SECONDS):
            os.kill(os.getpid(), signal.SIGINT)

    opened, _ = open_fake(latency=0.05, fail=note)
    model = LLM.over(opened)
    outside = threading.Thread(target=interrupt)
    outside.start()
    with pytest.raises(KeyboardInterrupt):
        model.generate([1, 2], GREEDY.clone(max_tokens=200), use_tqdm=False)  # ten seconds
    join_all([outside])
    assert len(model.generate([1, 2], GREEDY.clone(max_tokens=2), use_tqdm=False)) == 1


# -- the package ----------------------------------------------------------------------------------


def test_the_progress_bar_shows_rates(capsys: pytest.CaptureFixture[str]) -> None:
    llm().generate([[1], [2]], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tok/s" in shown


def test_rates_are_shown_before_a_request_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sequences of a streamed model may end in the last step."""
    monkeypatch.setattr("cellar.engine.progress.SHOWN_SECONDS", 0.0)
    counts = iter((0, 40, 80))

    def stats() -> Any:
        tokens = next(counts)
        return SimpleNamespace(prompt_tokens=2 * tokens, generation_tokens=tokens)

    with Progress(2, True, 5.0, stats) as progress:
        progress.turned(0)
        assert re.search(r"0/2 .*in \d+ tok/s, out \S+ tok/s \(5 predicted\)", capsys.readouterr().err)
        progress.turned(2)
    assert "2/2" in capsys.readouterr().err


def test_importing_cellar_is_light() -> None:
    code = (
        "import sys, cellar; cellar.SamplingParams\n"
        "print([m for m in ('torch', 'numpy', 'typer', 'ray') if m in sys.modules])"
    )
    assert run_python(code).strip() == "[]"


def test_the_package_lists_its_names() -> None:
    import cellar

    assert set(cellar.__all__) <= set(dir(cellar))
    with pytest.raises(AttributeError):
        _ = cellar.nothing
