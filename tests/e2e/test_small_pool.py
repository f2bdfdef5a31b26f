"""A thousand prompts with 64 chunks of memory: all finish, and their tokens are those of a run with plenty.

Who shares a step with whom differs between the runs, and with it the last bit of a sum. So a request's tokens may
part where two are equally likely, or where its variate falls on the border of two; that is counted and, by the
log-probabilities on both sides, told from a wrong cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from cellar import LLM, CompletionOutput, SamplingParams
from tests.tiny_checkpoint import write_checkpoint

NUM_PROMPTS = 1000
MOST_PARTINGS = 3
ROUNDING = 1e-4


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.long
def test_a_thousand_prompts_in_64_chunks(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    rng = np.random.default_rng(0)
    prefix = rng.integers(3, 420, 40).tolist()
    prompts = [prefix[: 40 * (k % 2)] + rng.integers(3, 420, rng.integers(1, 60)).tolist() for k in range(NUM_PROMPTS)]
    params = [
        SamplingParams(
            max_tokens=int(rng.integers(1, 40)), temperature=k % 3 / 2, seed=k, ignore_eos=k % 5 > 0, logprobs=3
        )
        for k in range(NUM_PROMPTS)
    ]

    def run(num_chunks: int) -> tuple[list[CompletionOutput], int]:
        nbytes = num_chunks * 16 * 256  # 256 bytes of KV per token
        options = {"block_size": 16, "kv_cache_memory_bytes": nbytes, "decode_reserve": 0.0}
        with LLM(str(tmp_path), device="cpu", num_threads=1, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert llm.stats().total_chunks == num_chunks
            return [output.outputs[0] for output in outputs], llm.stats().preemptions

    plenty, none = run(8000)
    scarce, suspensions = run(64)
    assert none == 0
    assert suspensions > 0
    assert all(
        len(one.token_ids) == p.max_tokens or one.finish_reason == "stop" for one, p in zip(scarce, params, strict=True)
    )
    parted = [k for k in range(NUM_PROMPTS) if not same(plenty[k], scarce[k])]
    assert len(parted) <= MOST_PARTINGS, parted


def same(a: CompletionOutput, b: CompletionOutput) -> bool:
    """True if all tokens are equal. Fails if the distributions differ before or where they part."""
    assert a.logprobs is not None
    assert b.logprobs is not None
    for i, (one, other) in enumerate(zip(a.token_ids, b.token_ids, strict=False)):
        best = [
            {t: p.logprob for t, p in table.items() if (p.rank or 9) <= 3} for table in (a.logprobs[i], b.logprobs[i])
        ]
        both = best[0].keys() & best[1].keys()
        assert both
        assert all(abs(best[0][t] - best[1][t]) < ROUNDING for t in both), (i, best)
        if one != other:
            return False
    return len(a.token_ids) == len(b.token_ids)
