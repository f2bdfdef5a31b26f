"""LLM and AsyncLLM over real (tiny) weights and over the model that ships with the package."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from cellar import LLM, AsyncLLM, RequestOutput, SamplingParams
from cellar.core.errors import CapacityError, ConfigError
from tests.tiny_checkpoint import write_checkpoint

SMALL = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": 2_000_000}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny")))


def test_streams_give_what_batches_give(tiny: str) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 420, rng.integers(1, 60)).tolist() for _ in range(20)]
    with LLM(tiny, **SMALL) as llm:
        wanted = [o.outputs[0] for o in llm.generate(prompts, GREEDY, use_tqdm=False)]

    async def one(llm: AsyncLLM, prompt: list[int]) -> RequestOutput:
        *_, last = [output async for output in llm.generate(prompt, GREEDY)]
        return last

    async def every() -> list[RequestOutput]:
        async with AsyncLLM(tiny, **SMALL) as llm:
            return list(await asyncio.gather(*(one(llm, prompt) for prompt in prompts)))

    found = [output.outputs[0] for output in asyncio.run(every())]
    assert [c.token_ids for c in found] == [c.token_ids for c in wanted]
    assert [c.text for c in found] == [c.text for c in wanted]


def test_seeded_sampling_does_not_depend_on_company(tiny: str) -> None:
    params = SamplingParams(max_tokens=20, seed=5, ignore_eos=True, n=3)
    with LLM(tiny, **SMALL) as llm:
        (alone,) = llm.generate([[7, 8, 9]], params, use_tqdm=False)
        crowd = llm.generate([[7, 8, 9], *([k, k] for k in range(30))], params, use_tqdm=False)
    assert [c.token_ids for c in crowd[0].outputs] == [c.token_ids for c in alone.outputs]
    assert len({tuple(c.token_ids) for c in alone.outputs}) == 3


def test_the_same_calls_give_the_same_tokens(tiny: str) -> None:
    def call(seed: int) -> list[list[int]]:
        with LLM(tiny, seed=seed, **SMALL) as llm:
            return [o.outputs[0].token_ids for o in llm.generate([[5], [6]] * 4, use_tqdm=False)]

    assert call(3) == call(3) != call(4)


def test_log_probabilities_add_up(tiny: str) -> None:
    params = GREEDY.clone(logprobs=4, prompt_logprobs=2, max_tokens=5)
    with LLM(tiny, **SMALL) as llm:
        (output,) = llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [len(table or ()) >= 2 for table in output.prompt_logprobs[1:]] == [True] * 3
    chosen = [table[token].logprob for table, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert all(table[t].rank == 1 for table, t in zip(completion.logprobs, completion.token_ids, strict=True))
    assert completion.cumulative_logprob == pytest.approx(sum(chosen))


def test_dummy_weights_need_no_checkpoint_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with LLM(str(tmp_path), load_format="dummy", **SMALL) as llm:
        assert len(llm.generate([[5]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 20
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        LLM("llama-3.2-1b", load_format="dummy")


def test_too_little_memory_for_one_request(tiny: str) -> None:
    with pytest.raises(CapacityError) as caught:
        LLM(tiny, **(SMALL | {"kv_cache_memory_bytes": 1000}))
    assert str(caught.value).endswith(".")


def test_two_engines_live_in_one_process(tiny: str) -> None:
    with LLM(tiny, **SMALL) as one, LLM(tiny, dtype="bfloat16", **SMALL) as two:
        first, second = one.stream([5, 6], GREEDY), two.stream([5, 6], GREEDY)
        next(first)
        next(second)
        *_, a = first
        *_, b = second
        assert len(a.outputs[0].token_ids) == len(b.outputs[0].token_ids) == 20
        assert one.generate([[5, 6]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == a.outputs[0].token_ids


def test_the_demo_model_tells_a_story() -> None:
    with LLM(dtype="float32", device="cpu", num_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=40)
        (output,) = llm.generate("Once upon a time", params, use_tqdm=False)
        text = output.outputs[0].text
        assert len(text.split()) > 15
        assert text.isprintable() or "\n" in text
        (again,) = llm.generate("Once upon a time", params, use_tqdm=False)
        assert again.outputs[0].text == text
        (reply,) = llm.chat([{"role": "user", "content": "A fox"}], params, use_tqdm=False)
        assert reply.outputs[0].text
