"""bad_words, allowed_token_ids, truncate_prompt_tokens, continue_final_message, names: as vLLM's clients send them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import openai
import pytest

from cellar import LLM, SamplingParams
from cellar.core.config import EngineConfig
from cellar.core.errors import RequestError
from cellar.runtime.steps.fake.model import hidden_states
from cellar.server.config import ServerConfig
from cellar.server.run import model_names
from cellar.text.chat import ChatTemplate
from cellar.text.grammar import GrammarCompiler
from cellar.text.masker import Masker
from cellar.text.prefill import begun_answer
from cellar.text.reasoning.budget import Unbound
from cellar.text.words import WordsMatcher, mask_of
from tests.fake_front import open_fake
from tests.server.served import TEXT, VOCAB, Served, plain, serve

IDS = TEXT.encode("Once upon a time")
EXTRA: dict[str, Any] = {"ignore_eos": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(max_model_len=128) as served:
        yield served
        served.settle()


def made(served: Served, prompt: Any = IDS, count: int = 24, **extra: Any) -> list[int]:
    """Token ids of a greedy completion."""
    answer = served.client().completions.create(
        model="fake",
        prompt=prompt,
        max_tokens=count,
        temperature=0,
        extra_body={**EXTRA, "return_token_ids": True, **extra},
    )
    return answer.choices[0].token_ids  # type: ignore[attr-defined, no-any-return]


# -- tokens that may not come -----------------------------------------------------------------------


def test_allowed_token_ids(served: Served) -> None:
    allowed = [7, 11, 13, 200]
    found = made(served, allowed_token_ids=allowed)
    assert len(found) == 24
    assert set(found) <= set(allowed)
    assert made(served, allowed_token_ids=[5]) == [5] * 24
    with pytest.raises(openai.BadRequestError, match=f"contains token id {VOCAB}"):
        made(served, allowed_token_ids=[VOCAB])
    with pytest.raises(openai.BadRequestError, match="one or more token ids"):
        made(served, allowed_token_ids=[])


def test_bad_words(served: Served) -> None:
    free = plain(IDS, 24)
    one = TEXT.id_to_text(free[3])
    assert one.strip()
    assert TEXT.encode(one, add_special_tokens=False) == [free[3]]
    without = made(served, bad_words=[one])
    assert without[:3] == free[:3]
    assert free[3] not in without
    assert len(without) == 24
    assert made(served, bad_words=[]) == free


def test_bad_words_of_several_tokens(served: Served) -> None:
    """A word's last token is forbidden behind its others, and nowhere else."""
    free = plain([22, 5, 9], 24)
    word, pair = "Heron", (free[1], free[2])
    assert tuple(TEXT.encode(word, add_special_tokens=False)) == pair
    found = made(served, [22, 5, 9], bad_words=[word])
    assert found[:2] == free[:2]
    assert found[2] != free[2]
    assert pair not in set(pairwise(found))
    matcher = WordsMatcher(Unbound(mask_of(range(64), 2)), None, [(3, 4, 5), (7,), (5, 5)])
    forbidden = []
    for token in (3, 4, 3, 4, 5, 1, 4):
        forbidden.append([t for t in range(64) if not matcher.mask()[t // 32] >> (t % 32) & 1])
        matcher = matcher.copy()
        matcher.consume(token)
    assert forbidden == [[7], [7], [5, 7], [7], [5, 7], [5, 7], [7]]


def test_words_are_forbidden_within_structured_output(served: Served) -> None:
    one, other = "A", "B"  # a token each
    assert [len(TEXT.encode(text, add_special_tokens=False)) for text in (one, other)] == [1, 1]
    for bad, wanted in ((one, other), (other, one)):
        answer = served.client().completions.create(
            model="fake",
            prompt=IDS,
            max_tokens=8,
            temperature=0,
            extra_body={"structured_outputs": {"choice": [f"{one}!", f"{other}?"]}, "bad_words": [bad]},
        )
        assert answer.choices[0].text[:-1] == wanted


def test_the_python_api_forbids_them_too() -> None:
    llm = LLM.over(open_fake(masker=Masker(GrammarCompiler(TEXT, VOCAB, (2,))))[0])
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    both = llm.generate([IDS, IDS], [params.clone(allowed_token_ids=[9]), params], use_tqdm=False)
    assert [one.outputs[0].token_ids for one in both] == [[9] * 6, plain(IDS, 6)]
    without = LLM.over(open_fake(tokenizer=False)[0])
    with pytest.raises(RequestError, match="bad_words needs a tokenizer; load one"):
        without.generate([[1]], params.clone(bad_words=["a"]), use_tqdm=False)


# -- prompts that are cut ---------------------------------------------------------------------------


def test_prompts_are_cut_on_the_left(served: Served) -> None:
    text = "Once upon a time there was a lighthouse by the sea"
    ids = TEXT.encode(text)
    for prompt in (text, ids):
        assert made(served, prompt, 4, truncate_prompt_tokens=5) == plain(ids[-5:], 4)
        assert made(served, prompt, 4, truncate_prompt_tokens=500) == plain(ids, 4)
    assert made(served, [5] * 1000, 1, truncate_prompt_tokens=-1) == plain([5] * 127, 1)
    assert made(served, "a " * 1000, 1, truncate_prompt_tokens=20) == plain(TEXT.encode("a " * 1000)[-20:], 1)
    chat = [{"role": "user", "content": text}]
    answer = served.client().chat.completions.create(
        model="fake", messages=chat, max_tokens=3, temperature=0, extra_body={**EXTRA, "truncate_prompt_tokens": 6}
    )
    whole = TEXT.encode(f"[user] {text}\n[assistant]", add_special_tokens=False)
    assert answer.choices[0].message.content == TEXT.decode(plain(whole[-6:], 3))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 6
    for wrong in (0, -2):
        with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens"):
            made(served, truncate_prompt_tokens=wrong)


def test_texts_of_vectors_are_cut_on_the_right(served: Served) -> None:
    text = "Once upon a time there was a lighthouse by the sea"
    wanted = hidden_states(TEXT.encode(text)[:4])[-1]
    for given in (text, TEXT.encode(text)):
        cut = {"truncate_prompt_tokens": 4}
        (one,) = served.client().embeddings.create(model="fake", input=given, extra_body=cut).data
        np.testing.assert_allclose(one.embedding, wanted / np.linalg.norm(wanted), rtol=1e-5)
    long = served.client().embeddings.create(model="fake", input=[5] * 999, extra_body={"truncate_prompt_tokens": -1})
    assert long.usage.prompt_tokens == 128


# -- answers that are begun -------------------------------------------------------------------------


def test_an_answer_goes_on(served: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, I"}]
    ids = TEXT.encode("[user] Hi\n[assistant] Well, I", add_special_tokens=False)
    client = served.client()

    def answered(**extra: Any) -> str | None:
        answer = client.chat.completions.create(
            model="fake", messages=messages, max_tokens=5, temperature=0, extra_body={**EXTRA, **extra}
        )
        return answer.choices[0].message.content

    wanted = TEXT.decode(plain(ids, 5))
    assert answered(continue_final_message=True, add_generation_prompt=False) == wanted
    assert answered(continue_final_message=True) == wanted
    assert answered(continue_final_message=False) != wanted
    with pytest.raises(openai.BadRequestError, match="set one"):
        answered(continue_final_message=True, add_generation_prompt=True)
    with served.http() as http:
        body = {"messages": messages, "continue_final_message": True}
        assert http.post("/tokenize", json=body).json()["tokens"] == ids
    messages[-1] = {"role": "assistant", "content": " "}
    with pytest.raises(openai.BadRequestError, match="last message with text"):
        answered(continue_final_message=True)
    llm = LLM.over(open_fake()[0])
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    messages[-1] = {"role": "assistant", "content": "Well, I"}
    how: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    (output,) = llm.chat(messages, greedy, use_tqdm=False, **how)
    assert output.outputs[0].token_ids == plain(ids, 5)
    with pytest.raises(RequestError, match="set one"):
        llm.chat(messages, greedy, use_tqdm=False, continue_final_message=True)


def test_a_begun_answer_is_cut_where_transformers_cuts_it() -> None:
    """The oracle: transformers' own apply_chat_template, with templates that trim, and that do not."""
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=TEXT._backend)
    plain_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    trims = plain_template.replace("m.content", "m.content | trim")
    for template in (plain_template, trims):
        for content in ("Well", "Well, ", "  Well  ", "a</s>a", "two\nlines \n"):
            messages = [{"role": "user", "content": "Well"}, {"role": "assistant", "content": content}]
            wanted = theirs.apply_chat_template(
                messages, chat_template=template, tokenize=False, continue_final_message=True
            )
            ours = ChatTemplate(template, {}).render(messages, add_generation_prompt=False)
            assert begun_answer(ours, messages) == wanted, (template, content)
    with pytest.raises(RequestError, match="does not show the last message"):
        begun_answer("<user>Hi", [{"role": "assistant", "content": "Well"}])


# -- names, and what clients send for nothing --------------------------------------------------------


def test_a_model_has_several_names() -> None:
    for given in ("a, b", ["a", "b"], ["a,b", "a"], ("a", " b ,")):
        assert model_names(EngineConfig(), ServerConfig(served_model_name=given)) == ("a", "b")


def test_defaults_are_accepted(served: Served) -> None:
    neutral = {"best_of": 1, "function_call": "none", "functions": [], "return_tokens_as_token_ids": False}
    nulls = dict.fromkeys(("logits_processors", "mm_processor_kwargs", "chat_template", "bad_words", "vllm_xargs"))
    messages: Any = [{"role": "user", "content": "Hi"}]
    answer = served.client().chat.completions.create(
        model="fake", messages=messages, max_tokens=2, extra_body={**neutral, **nulls, "include_reasoning": True}
    )
    assert answer.choices[0].message.content is not None
    assert made(served, count=2, best_of=1, **nulls)
    for name, value in (("best_of", 2), ("function_call", "auto"), ("logits_processors", [1])):
        with pytest.raises(openai.BadRequestError, match=name):
            served.client().chat.completions.create(model="fake", messages=messages, extra_body={name: value})
