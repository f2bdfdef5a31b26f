"""Weights in fewer bits change no token by company, history or suspension; what is asked of a text is kept."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cellar import LLM, SamplingParams
from cellar.core.sampling import StructuredOutputsParams
from tests.tiny_checkpoint import write_checkpoint

FORMATS = ("int8", "int4", "fp8")
CHUNK = 16
CONTEXT = 128
NAME = r"[A-Z][a-z]{2,6}, [0-9]{1,3}"

Answer = tuple[list[int], list[dict[int, float]]]
"""Tokens, and the log-probabilities at each of them to the bit."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 64 and 96 numbers: groups of 64 and of 32 in int4."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), hidden_size=64, intermediate_size=96, num_hidden_layers=3)


def engine(model: Path, form: str | None, chunks: int = 400, **others: Any) -> LLM:
    """With room for so many chunks of K and V: 2 x 3 layers, 2 heads of 16 numbers."""
    options = {
        "model": str(model),
        "quantization": form,
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "max_model_len": CONTEXT,
        "block_size": CHUNK,
        "kv_cache_memory_bytes": chunks * CHUNK * 2 * 3 * 2 * 16 * 4,
    }
    return LLM(**options | others)


def params(max_tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 3} | others)


def answers(llm: LLM, prompts: list[list[int]], asked: Sequence[SamplingParams]) -> list[Answer]:
    found = []
    for output in llm.generate(prompts, list(asked), use_tqdm=False):
        made = output.outputs[0]
        assert made.logprobs is not None
        found.append((list(made.token_ids), [{t: one.logprob for t, one in at.items()} for at in made.logprobs]))
    return found


@pytest.mark.parametrize("form", FORMATS)
def test_neither_company_nor_history_nor_suspension_changes_an_answer(form: str, model: Path) -> None:
    rng = np.random.default_rng(3)
    prefix = rng.integers(3, 420, 2 * CHUNK + 5).tolist()
    prompts = [prefix * (k % 2) + rng.integers(3, 420, 4 + 3 * k).tolist() for k in range(8)]
    asked = [params(12 + 5 * ((3 * k) % 8)) for k in range(8)]

    def alone(llm: LLM) -> list[Answer]:
        return [answers(llm, [prompt], [one])[0] for prompt, one in zip(prompts, asked, strict=True)]

    with engine(model, form, enable_prefix_caching=False) as llm:
        expected = alone(llm)
        assert answers(llm, prompts, asked) == expected, "in company"
        assert llm.stats().prefix_hits == 0
    with engine(model, form) as llm:
        assert alone(llm) == expected, "prefixes from the cache"
        assert llm.stats().prefix_hits > 0
        assert answers(llm, prompts, asked) == expected, "whole prompts from the cache, in company"
    with engine(model, form, enable_prefix_caching=False, max_num_seqs=3, max_num_batched_tokens=7) as llm:
        assert answers(llm, prompts, asked) == expected, "joining where another leaves, prompts in pieces"
    with engine(model, form, chunks=14, decode_reserve=0.0) as llm:
        assert answers(llm, prompts, asked) == expected, "suspended and computed again"
        assert llm.stats().preemptions > 0
    with engine(model, None) as llm:
        assert answers(llm, prompts, asked) != expected, "random weights feel the difference"


@pytest.mark.parametrize("form", FORMATS)
def test_structured_output_is_obeyed_and_is_the_same_in_company(form: str, model: Path) -> None:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 420, 5 + 7 * k).tolist() for k in range(6)]
    name = StructuredOutputsParams(regex=NAME)
    asked = [
        params(40, ignore_eos=False, temperature=0.8 * (k % 3), seed=k, structured_outputs=name if k % 2 else None)
        for k in range(6)
    ]
    with engine(model, form, enable_prefix_caching=False) as llm:
        expected = [answers(llm, [prompt], [one])[0] for prompt, one in zip(prompts, asked, strict=True)]
        texts = [llm.get_tokenizer().decode(tokens, skip_special_tokens=True) for tokens, _ in expected]
    assert all(re.fullmatch(NAME, text) for text in texts[1::2]), texts
    assert not any(re.fullmatch(NAME, text) for text in texts[::2]), "no text is like that by itself"
    for chunks in (400, 9):
        with engine(model, form, chunks, decode_reserve=0.0) as llm:
            assert answers(llm, prompts, asked) == expected, chunks
            assert (llm.stats().preemptions > 0) == (chunks == 9)
