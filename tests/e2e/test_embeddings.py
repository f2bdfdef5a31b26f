"""Vectors of prompts against transformers' final hidden states: every family, and every way that a prompt can run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cellar import LLM, PoolingParams, SamplingParams
from cellar.core.errors import RequestError
from tests.conformance.test_models import CASES, Case, saved_model

CONTEXT, CHUNK = 64, 16
RAW = {pooling: PoolingParams(pooling=pooling, normalize=False) for pooling in ("last", "mean")}  # type: ignore[arg-type]
# One of each family, and those whose words are narrower than their layers: a vector is what the head takes.
NARROW = [case for case in CASES if "word_embed_proj_dim" in case.config]
FAMILIES = [*{case.kind: case for case in reversed(CASES) if case not in NARROW}.values(), *NARROW]


def opened(folder: Path, **options: Any) -> LLM:
    sizes = {"max_model_len": CONTEXT, "block_size": CHUNK, "kv_cache_memory_bytes": 8 << 20, "num_threads": 1}
    return LLM(str(folder), skip_tokenizer_init=True, dtype="float32", device="cpu", **(sizes | options))


def prompts() -> list[list[int]]:
    """Of one token, with a common beginning of two chunks, and as long as the context is."""
    rng = np.random.default_rng(3)
    prefix = rng.integers(3, 101, 2 * CHUNK).tolist()
    alone = [rng.integers(3, 101, n).tolist() for n in (1, 17, CONTEXT)]
    return [*alone, prefix, *(prefix + rng.integers(3, 101, n).tolist() for n in (1, 20))]


def states(model: Any, prompt: list[int]) -> torch.Tensor:
    """transformers' final hidden states: [tokens, hidden]."""
    with torch.no_grad():
        return model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: f"{case.kind}: {case.name}")
def test_vectors_are_the_final_hidden_states(case: Case, tmp_path: Path) -> None:
    theirs, texts = saved_model(case, tmp_path), prompts()
    wanted = {
        "last": [states(theirs, prompt)[-1].tolist() for prompt in texts],
        "mean": [states(theirs, prompt).mean(0).tolist() for prompt in texts],
    }
    # Whole prompts, then prompts in pieces of 8 tokens with too little memory for all.
    for options in ({}, {"max_num_batched_tokens": 8, "kv_cache_memory_bytes": 160 << 10}):
        with opened(tmp_path, **options) as llm:
            for again in range(2):
                for pooling, vectors in wanted.items():
                    found = llm.embed(texts, pooling_params=RAW[pooling], use_tqdm=False)
                    for k, one in enumerate(found):
                        np.testing.assert_allclose(one.outputs.embedding, vectors[k], atol=1e-4)
                        assert one.prompt_token_ids == texts[k]
                    cached = sum(one.num_cached_tokens for one in found)
                    assert (cached > 0) == (pooling == "last") or not again or options


def test_vectors_are_made_beside_tokens(tmp_path: Path) -> None:
    """Requests for tokens, for scores and for vectors in the same steps: each as if it were alone."""
    theirs, texts = saved_model(CASES[1], tmp_path), [prompt[: CONTEXT - 10] for prompt in prompts()]
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    kinds = [greedy, greedy.clone(prompt_logprobs=0), *(SamplingParams(pooling=p) for p in ("last", "mean"))]
    with opened(tmp_path, max_num_batched_tokens=24) as llm:
        alone = [[llm.generate(text, kind, use_tqdm=False)[0] for kind in kinds] for text in texts]
        both = llm.generate([t for t in texts for _ in kinds], kinds * len(texts), use_tqdm=False)
    for k, output in enumerate(both):
        text, lonely = texts[k // len(kinds)], alone[k // len(kinds)][k % len(kinds)]
        assert output.outputs[0].token_ids == lonely.outputs[0].token_ids
        assert (output.pooled is None) == (kinds[k % len(kinds)].pooling is None)
        if output.pooled is not None:
            of = states(theirs, text)
            wanted = of[-1] if kinds[k % len(kinds)].pooling == "last" else of.mean(0)
            np.testing.assert_allclose(output.pooled, wanted, atol=1e-4)
            assert output.outputs[0].token_ids == []
            assert output.outputs[0].finish_reason == "stop"


def test_dimensions_length_and_scores(tmp_path: Path) -> None:
    theirs, texts = saved_model(CASES[0], tmp_path), prompts()
    size = theirs.config.hidden_size
    with opened(tmp_path) as llm:
        cut = llm.embed(texts, pooling_params=PoolingParams(dimensions=5), use_tqdm=False)
        for text, one in zip(texts, cut, strict=True):
            wanted = states(theirs, text)[-1][:5].numpy()
            np.testing.assert_allclose(one.outputs.embedding, wanted / np.linalg.norm(wanted), atol=1e-4)
            assert one.outputs.hidden_size == 5
        last = [states(theirs, text)[-1] for text in texts]
        for found, wanted in (
            (llm.score(texts[0], texts[1:], use_tqdm=False), [(last[0], other) for other in last[1:]]),
            (llm.score(texts[:3], texts[3:], use_tqdm=False), list(zip(last[:3], last[3:], strict=True))),
        ):
            cosines = [float(torch.cosine_similarity(a, b, dim=0)) for a, b in wanted]
            np.testing.assert_allclose([one.outputs.score for one in found], cosines, atol=1e-4)
        with pytest.raises(RequestError, match="2 first texts for 3 second ones"):
            llm.score(texts[:2], texts[:3], use_tqdm=False)
        with pytest.raises(RequestError, match=f"dimensions is {size + 1}, but the model's vectors have {size}"):
            llm.embed(texts[0], pooling_params=PoolingParams(dimensions=size + 1), use_tqdm=False)
        with pytest.raises(RequestError, match=f"context holds {CONTEXT}; shorten it to {CONTEXT} tokens"):
            llm.embed([3] * (CONTEXT + 1), use_tqdm=False)
        with pytest.raises(RequestError, match="logprobs is for requests that make tokens"):
            SamplingParams(pooling="last", logprobs=1)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean", "word_embedding_dimension": 64}, "mean"),
        ({"pooling_mode_cls_token": True}, None),
    ],
)
def test_a_model_says_how_it_is_pooled(config: dict[str, Any], pooling: str | None, tmp_path: Path) -> None:
    theirs, text = saved_model(CASES[0], tmp_path), prompts()[1]
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    of = states(theirs, text)
    with opened(tmp_path) as llm:
        if pooling is None:
            with pytest.raises(RequestError, match="pooling is 'cls', but must be last or mean"):
                llm.embed(text, use_tqdm=False)
            return
        (found,) = llm.embed(text, use_tqdm=False)
    wanted = of[-1] if pooling == "last" else of.mean(0)
    np.testing.assert_allclose(found.outputs.embedding, wanted / wanted.norm(), atol=1e-4)
