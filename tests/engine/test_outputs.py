"""OutputProcessor over real (tiny) tokenizers and hand-made frames."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellar.core.collector import collector_rests
from cellar.core.errors import RequestError
from cellar.core.messages import FinishReason, Logprobs, RequestOutput, StepOutput
from cellar.core.sampling import SamplingParams
from cellar.engine.outputs import Delta, OutputProcessor, Processed, SequenceEnd
from cellar.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data" / "tokenizers"
GPT = Tokenizer.load(DATA / "gpt-tiny")
LLAMA = Tokenizer.load(DATA / "llama-tiny")
EOS = 2  # of both
PROMPT = GPT.encode("Once upon")
STOP, LENGTH, ABORT, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR


def frame(tokens: dict[str, int], finished: dict[str, Any] | None = None, **more: Any) -> StepOutput:
    return StepOutput(list(tokens), list(tokens.values()), finished or {}, **more)


def run(
    params: SamplingParams,
    tokens: Sequence[int],
    end: Any = (LENGTH, None),
    tokenizer: Tokenizer | None = GPT,
    prompt: Sequence[int] = PROMPT,
) -> tuple[RequestOutput, list[Delta], list[SequenceEnd]]:
    """One streamed request, a token a frame; `end` comes with the last token."""
    outputs = OutputProcessor(tokenizer)
    outputs.add("r", "Once upon", prompt, params, stream=True)
    deltas: list[Delta] = []
    for n, token in enumerate(tokens):
        done = outputs.process(frame({"r": token}, {"r": end} if n == len(tokens) - 1 else {}))
        deltas += done.deltas
        if done.finished:
            return done.finished[0], deltas, done.ends
    raise AssertionError("the request did not end")


def text_of(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_a_plain_request() -> None:
    tokens = GPT.encode(" a time — 日本 \U0001f600")
    output, deltas, ends = run(SamplingParams(max_tokens=99), tokens)
    one = output.outputs[0]
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "Once upon", PROMPT)
    assert output.finished
    assert one.text == text_of(deltas) == " a time — 日本 \U0001f600"
    assert one.token_ids == tokens == [token for delta in deltas for token in delta.token_ids]
    assert (one.finish_reason, one.stop_reason, one.logprobs, one.cumulative_logprob) == ("length", None, None, None)
    assert [delta.finished for delta in deltas] == [False] * (len(tokens) - 1) + [True]
    assert deltas[-1].finish_reason == "length"
    assert ends == []


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.integers(3, 371), min_size=1, max_size=30),
    skip=st.booleans(),
    tokenizer=st.sampled_from([GPT, LLAMA]),
)
def test_deltas_join_to_the_text_and_to_decode(tokens: list[int], skip: bool, tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=99, skip_special_tokens=skip, stop=["never this"])
    prompt = tokenizer.encode("The", add_special_tokens=False)
    output, deltas, _ = run(params, tokens, tokenizer=tokenizer, prompt=prompt)
    assert output.outputs[0].text == text_of(deltas)
    assert tokenizer.decode([*prompt, *tokens], skip) == "The" + output.outputs[0].text


def test_the_end_symbol_is_an_id_and_no_text() -> None:
    tokens = [*GPT.encode(" the house"), EOS]
    for skip in (True, False):
        params = SamplingParams(max_tokens=99, skip_special_tokens=skip)
        output, deltas, _ = run(params, tokens, (STOP, EOS))
        one = output.outputs[0]
        assert (one.text, one.token_ids) == (" the house", tokens)
        assert (one.finish_reason, one.stop_reason) == ("stop", None)
        assert deltas[-1].token_ids == [EOS]


def test_a_stop_token_of_the_request_is_the_stop_reason() -> None:
    tokens = GPT.encode(" the house.")
    params = SamplingParams(max_tokens=99, stop_token_ids=[tokens[-1]])
    output, _, _ = run(params, tokens, (STOP, tokens[-1]))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == (" the house", tokens[-1])
    kept, _, _ = run(params.clone(include_stop_str_in_output=True), tokens, (STOP, tokens[-1]))
    assert kept.outputs[0].text == " the house."


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_the_text_and_is_reported(include: bool) -> None:
    """The ids end with the token that completed the stop string; what lay after it in that token is dropped."""
    tokens = GPT.encode(" the old house was cold")
    stop = "e w"
    params = SamplingParams(max_tokens=99, stop=["zzz", stop], include_stop_str_in_output=include)
    completing = next(n for n in range(len(tokens)) if stop in GPT.decode(tokens[: n + 1])) + 1
    output, deltas, ends = run(params, tokens)
    one = output.outputs[0]
    assert one.text == text_of(deltas) == " the old hous" + (stop if include else "")
    assert one.token_ids == tokens[:completing]
    assert (one.finish_reason, one.stop_reason) == ("stop", stop)
    assert ends == [SequenceEnd("r", completing, STOP)]


def test_what_may_be_a_stop_string_is_held_back_and_given_in_the_end() -> None:
    tokens = GPT.encode(" the ho", False)
    outputs = OutputProcessor(GPT)
    outputs.add("r", None, PROMPT, SamplingParams(max_tokens=99, stop="house"), stream=True)
    deltas = [delta for token in tokens for delta in outputs.process(frame({"r": token})).deltas]
    assert text_of(deltas) == outputs.output("r").outputs[0].text == " the "
    done = outputs.process(frame({"r": EOS}, {"r": (STOP, EOS)}))
    assert done.deltas[0].text == "ho"
    assert done.finished[0].outputs[0].text == " the ho"
    assert done.ends == []


def test_tokens_after_a_stop_string_are_ignored() -> None:
    outputs = OutputProcessor(GPT)
    outputs.add("r", None, PROMPT, SamplingParams(max_tokens=99, stop="."))
    token = GPT.encode(".")[0]
    first = outputs.process(frame({"r": token}))
    assert first.ends == [SequenceEnd("r", 1, STOP)]
    assert first.finished[0].outputs[0].text == ""
    late = outputs.process(frame({"r": token, "other": 7}, {"r": (ABORT, None)}))
    assert late == Processed()
    assert len(outputs) == 0


def test_a_stop_string_on_the_last_token_needs_no_ending() -> None:
    tokens = GPT.encode(" the end.")
    output, _, ends = run(SamplingParams(max_tokens=99, stop="."), tokens, (LENGTH, None))
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", ".")
    assert ends == []


def test_stop_strings_wait_for_min_tokens() -> None:
    tokens = GPT.encode("......", False)
    dot = GPT.encode(".", False)
    tokens = dot * 6
    for least in range(6):
        params = SamplingParams(max_tokens=99, min_tokens=least, stop=".")
        output, _, _ = run(params, tokens)
        assert output.outputs[0].token_ids == tokens[: least + 1]
        assert output.outputs[0].text == "." * least


def test_a_newline_of_byte_fallback_stops_on_its_own_token() -> None:
    """The detokenizer holds Llama 2's newline, but the stop string ends the sequence with that very token."""
    newline = LLAMA.piece_to_id("<0x0A>")
    assert newline is not None
    word = LLAMA.encode("the", False)
    tokens = [*word, newline, *word, newline, newline, *word]
    params = SamplingParams(max_tokens=99, stop="\n\n")
    output, deltas, ends = run(params, tokens, tokenizer=LLAMA, prompt=[1])
    assert output.outputs[0].text == text_of(deltas) == "the\n the"
    assert output.outputs[0].token_ids == tokens[:-1][: 2 * len(word) + 3]
    assert ends == [SequenceEnd("r", 2 * len(word) + 3, STOP)]
    broken = LLAMA.piece_to_id("<0xFF>")
    assert broken is not None
    params = SamplingParams(max_tokens=99, stop="\n\n")
    output, _, _ = run(params, [newline, broken, newline, *word], tokenizer=LLAMA, prompt=word)
    assert output.outputs[0].text == "\ufffd\ufffd\ufffd the"


def test_an_unfinished_character_is_flushed() -> None:
    tokens = GPT.encode("a\U0001f600", False)[:-1]
    output, deltas, _ = run(SamplingParams(max_tokens=99), tokens)
    assert output.outputs[0].text == text_of(deltas) == "a\ufffd"
    assert output.outputs[0].text == GPT.decode(tokens)


def test_without_text() -> None:
    for tokenizer, params in (
        (None, SamplingParams(max_tokens=9)),
        (GPT, SamplingParams(max_tokens=9, detokenize=False)),
    ):
        output, deltas, _ = run(params, [5, 6, 7], tokenizer=tokenizer)
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [5, 6, 7])
        assert text_of(deltas) == ""
    with pytest.raises(RequestError, match="tokenizer"):
        OutputProcessor(None).add("r", None, PROMPT, SamplingParams(stop="x"))


def test_many_continuations_of_one_request() -> None:
    outputs = OutputProcessor(GPT)
    outputs.add("r", None, np.array(PROMPT, np.int32), SamplingParams(n=2, max_tokens=9), ["r#0", "r#1"], stream=True)
    a, b = GPT.encode(" a", False)[0], GPT.encode(" the", False)[0]
    assert [GPT.id_to_text(a), GPT.id_to_text(b)] == [" a", " the"]
    assert outputs.live("r") == ["r#0", "r#1"]
    first = outputs.process(frame({"r#1": b, "r#0": a}, num_cached_tokens={"r#0": 1, "r#1": 2}))
    assert [(d.index, d.text) for d in first.deltas] == [(1, " the"), (0, " a")]
    second = outputs.process(frame({"r#0": a, "r#1": b}, {"r#1": (LENGTH, None)}))
    assert [(d.index, d.finish_reason, d.finished) for d in second.deltas] == [(0, None, False), (1, "length", False)]
    assert second.finished == []
    assert outputs.live("r") == ["r#0"]
    snapshot = outputs.output("r")
    assert [one.text for one in snapshot.outputs] == [" a a", " the the"]
    assert not snapshot.finished
    third = outputs.process(frame({"r#0": a}, {"r#0": (LENGTH, None)}))
    assert third.deltas[0].finished
    assert [one.text for one in third.finished[0].outputs] == [" a a a", " the the"]
    assert [one.index for one in third.finished[0].outputs] == [0, 1]
    assert third.finished[0].num_cached_tokens == 1
    assert third.finished[0].prompt_token_ids == PROMPT
    assert [one.text for one in snapshot.outputs] == [" a a", " the the"], "a snapshot stays as it was"
    assert len(outputs) == 0


def test_an_end_without_a_token() -> None:
    outputs = OutputProcessor(GPT)
    outputs.add("r", None, PROMPT, SamplingParams(max_tokens=9, stop="xyz"), stream=True)
    x = GPT.encode("x", False)[0]
    assert outputs.process(frame({"r": x})).deltas[0].text == ""
    done = outputs.process(frame({}, {"r": (ERROR, "the logits were not finite")}))
    assert [(d.text, d.token_ids, d.finish_reason, d.finished) for d in done.deltas] == [("x", [], "error", True)]
    one = done.finished[0].outputs[0]
    assert (one.text, one.finish_reason, one.stop_reason) == ("x", "error", "the logits were not finite")


def test_abort_gives_what_there_is() -> None:
    outputs = OutputProcessor(GPT)
    outputs.add("r", None, PROMPT, SamplingParams(n=2, max_tokens=9), ["a", "b"])
    outputs.process(frame({"a": PROMPT[0], "b": PROMPT[0]}, {"a": (LENGTH, None)}))
    output = outputs.abort("r")
    assert output is not None
    assert [one.finish_reason for one in output.outputs] == ["length", "abort"]
    assert outputs.abort("r") is None
    assert len(outputs) == 0
    outputs.add("r", None, PROMPT, SamplingParams(), ["a", "b"])


@pytest.mark.parametrize("tokenizer", [GPT, LLAMA, None])
def test_who_has_ended_is_no_work_for_the_collector(tokenizer: Tokenizer | None) -> None:
    """A thousand prompts in cycles hold up a front for a tenth of a second."""
    outputs = OutputProcessor(tokenizer)
    params = SamplingParams(stop=None if tokenizer is None else ["never"], n=2)
    while gc.collect():  # what an earlier test has left, and what that was the last to hold
        pass
    with collector_rests():
        for k in range(50):
            outputs.add(f"{k}", None, PROMPT, params, [f"{k}-0", f"{k}-1"], stream=True)
            outputs.process(frame({f"{k}-0": 7}))
            outputs.process(frame({}, {f"{k}-0": (LENGTH, None)}))
            outputs.abort(f"{k}")
        assert not len(outputs)
        assert gc.collect() == 0


def test_ids_in_use_are_refused() -> None:
    outputs = OutputProcessor(GPT)
    outputs.add("r", None, PROMPT, SamplingParams(), ["a"])
    for id, sequences in (("r", ["b"]), ("s", ["a"]), ("s", ["c", "c"])):
        with pytest.raises(RequestError, match="in use"):
            outputs.add(id, None, PROMPT, SamplingParams(), sequences)
    assert len(outputs) == 1
    outputs.add("s", None, PROMPT, SamplingParams(), ["c"])


def logprobs(*entries: tuple[int, float, int, list[int], list[float]]) -> Logprobs:
    index, logprob, rank, ids, best = zip(*entries, strict=True)
    return Logprobs(
        np.array(index, np.int32),
        np.array(logprob, np.float32),
        np.array(rank, np.int32),
        np.array(ids, np.int32),
        np.array(best, np.float32),
    )


def test_logprob_tables() -> None:
    the = GPT.encode(" the", False)[0]
    outputs = OutputProcessor(GPT)
    outputs.add("r", None, PROMPT, SamplingParams(max_tokens=9, logprobs=2), stream=True)
    done = outputs.process(frame({"r": the}, logprobs={"r": logprobs((0, -1.5, 4, [7, 8, 9], [-0.5, -1.0, -1.25]))}))
    [table] = done.deltas[0].logprobs or []
    assert list(table) == [the, 7, 8], "the sampled token, then the best two; the third was not asked for"
    assert [(e.logprob, e.rank, e.decoded_token) for e in table.values()] == [
        (-1.5, 5, " the"),
        (-0.5, 1, GPT.id_to_text(7)),
        (-1.0, 2, GPT.id_to_text(8)),
    ]
    best = logprobs((0, -0.25, 0, [the, 8, 9], [-0.25, -1.0, -1.25]))
    done = outputs.process(frame({"r": the}, {"r": (LENGTH, None)}, logprobs={"r": best}))
    one = done.finished[0].outputs[0]
    assert one.logprobs is not None
    assert [list(table) for table in one.logprobs] == [[the, 7, 8], [the, 8]]
    assert one.logprobs[1][the].rank == 1
    assert one.cumulative_logprob == -1.75


def test_only_the_sampled_token_with_logprobs_0() -> None:
    outputs = OutputProcessor(None)
    outputs.add("r", None, PROMPT, SamplingParams(max_tokens=9, logprobs=0))
    done = outputs.process(frame({"r": 5}, {"r": (LENGTH, None)}, logprobs={"r": logprobs((0, -1.5, 4, [7], [-0.5]))}))
    [table] = done.finished[0].outputs[0].logprobs or []
    assert [(id, e.logprob, e.rank, e.decoded_token) for id, e in table.items()] == [(5, -1.5, 5, None)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["table", "push", "flush"])
def test_an_answer_that_cannot_be_told_ends_alone(where: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = OutputProcessor(GPT)
    outputs.add(
        "bad", None, PROMPT, SamplingParams(max_tokens=9, logprobs=1 if where == "table" else None), stream=stream
    )
    outputs.add("good", None, PROMPT, SamplingParams(max_tokens=9), stream=stream)
    if where != "table":

        def broken(*_: object) -> str:
            raise ZeroDivisionError("a defect")

        monkeypatch.setattr(outputs._sequences["bad"], "_detokenizer", SimpleNamespace(push=broken, flush=broken))
    ended = {"bad": (LENGTH, None)} if where == "flush" else None
    if ended:
        monkeypatch.setattr(outputs._sequences["bad"]._detokenizer, "push", lambda token: "")
        monkeypatch.setattr(outputs._sequences["bad"]._detokenizer, "ahead", "", raising=False)
    done = outputs.process(frame({"bad": 5, "good": 6}, ended))
    (output,) = done.finished
    assert (output.request_id, output.outputs[0].finish_reason) == ("bad", "error")
    assert "could not be made" in str(output.outputs[0].stop_reason)
    assert [(end.sequence_id, end.reason) for end in done.ends] == [("bad", FinishReason.ERROR)]
    assert [d.finish_reason for d in done.deltas if d.request_id == "bad"] == (["error"] if stream else [])
    assert outputs.output("good").outputs[0].token_ids == [6]
    assert len(outputs) == 1


def test_what_cannot_be_expected_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = OutputProcessor(GPT)
    made = iter([outputs._detokenizer])

    def second_fails(request: Any) -> Any:
        return next(made)(request)

    monkeypatch.setattr(outputs, "_detokenizer", second_fails)
    with pytest.raises(StopIteration):
        outputs.add("r", None, PROMPT, SamplingParams(n=2, max_tokens=9), ["a", "b"])
    assert not len(outputs)
    assert not outputs._sequences


def test_prompt_logprobs_arrive_in_parts() -> None:
    prompt = [10, 11, 12, 13]
    outputs = OutputProcessor(GPT)
    outputs.add("r", None, prompt, SamplingParams(n=2, max_tokens=9, prompt_logprobs=1), ["a", "b"])
    part = logprobs((1, -1.0, 2, [5], [-0.5]), (2, -2.0, 0, [12], [-2.0]))
    outputs.process(frame({}, prompt_logprobs={"a": part}))
    rest = logprobs((3, -3.0, 1, [6], [-0.75]), (4, -9.0, 1, [6], [-0.75]))
    outputs.process(frame({"a": 5}, prompt_logprobs={"a": rest, "b": logprobs((1, 0.0, 0, [1], [0.0]))}))
    output = outputs.output("r")
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [list(table or {}) for table in output.prompt_logprobs] == [[], [11, 5], [12], [13, 6]]
    assert output.prompt_logprobs[1] is not None
    assert output.prompt_logprobs[1][11].rank == 3
    assert output.prompt_logprobs[1][11].logprob == -1.0


def test_a_frame_may_bring_several_tokens_of_one_sequence() -> None:
    """Speculation will: all go into one delta; a stop string in between cuts off the rest."""
    a, b = GPT.encode("a", False)[0], GPT.encode("b", False)[0]
    outputs = OutputProcessor(GPT)
    outputs.add("r", None, PROMPT, SamplingParams(max_tokens=9, stop="ab", logprobs=0), stream=True)
    many = logprobs((0, -1.0, 0, [1], [0.0]), (0, -2.0, 0, [1], [0.0]), (0, -3.0, 0, [1], [0.0]))
    done = outputs.process(StepOutput(["r", "r", "r"], [a, b, a], {}, {"r": many}))
    [delta] = done.deltas
    assert (delta.text, delta.token_ids) == ("", [a, b])
    assert len(delta.logprobs or []) == 2
    assert done.ends == [SequenceEnd("r", 2, STOP)]
    assert done.finished[0].outputs[0].cumulative_logprob == -3.0
