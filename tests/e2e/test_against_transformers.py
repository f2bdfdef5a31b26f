"""Greedy tokens of the whole engine against transformers, for every family, in every way a request can be run.

transformers judges by teacher forcing: one forward over prompt and output says for each output token how far its
logit is from the best one. Identical tokens have distance 0; a distance of up to 2e-4 is a tie and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cellar import LLM, SamplingParams
from cellar.models.registry import MODELS
from tests.conformance.test_models import CASES, Case, saved_model

STEPS = 64
CONTEXT = 128
CHUNK = 16
TIE = 2e-4
GREEDY = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)

# Dynamic NTK is left out: transformers changes its frequencies from step to step, ours are fixed by the context.
RUN = [replace(c, config=c.config | {"max_position_embeddings": CONTEXT}) for c in CASES if c.context is None]
EVERY_WAY = [case for kind in MODELS for case in [c for c in RUN if c.kind == kind][:3]]
ONE_WAY = [case for case in RUN if case not in EVERY_WAY]

Prompts = list[list[int]]
Tokens = list[list[int]]


class Judge:
    """transformers' opinion of greedy tokens; each sequence is looked at once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._seen: dict[tuple[int, ...], int] = {}

    def ties(self, prompts: Prompts, outputs: Tokens) -> int:
        """How many tokens are not the best but as good as. Fails on one that is worse."""
        return sum(self._one(prompt, output) for prompt, output in zip(prompts, outputs, strict=True))

    def _one(self, prompt: list[int], output: list[int]) -> int:
        assert len(output) == STEPS
        key = (len(prompt), *prompt, *output)
        if key not in self._seen:
            with torch.no_grad():
                logits = self._model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
            distance = logits.max(-1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
            assert distance.max() <= TIE, f"token {int(distance.argmax())} is {float(distance.max())} below the best"
            self._seen[key] = int((distance > 0).sum())
        return self._seen[key]


def make_prompts() -> Prompts:
    """Different lengths, one of a single token, some with a common beginning of two chunks."""
    rng = np.random.default_rng(5)
    prefix = rng.integers(3, 101, 2 * CHUNK).tolist()
    alone = [rng.integers(3, 101, n).tolist() for n in (1, 17, 45)]
    return alone + [prefix + rng.integers(3, 101, n).tolist() for n in (1, 9, 30)]


def run(folder: Path, prompts: Sequence[Prompts], **options: Any) -> tuple[list[Tokens], LLM]:
    """Outputs of some batches, one after the other on one engine."""
    with LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        device="cpu",
        num_threads=1,
        max_model_len=CONTEXT,
        block_size=CHUNK,
        **({"kv_cache_memory_bytes": 8 << 20} | options),
    ) as llm:
        found = [[o.outputs[0].token_ids for o in llm.generate(batch, GREEDY, use_tqdm=False)] for batch in prompts]
        return found, llm


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", EVERY_WAY, ids=lambda case: f"{case.kind}: {case.name}")
def test_in_every_way(case: Case, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    judge = Judge(saved_model(case, tmp_path))
    prompts = make_prompts()
    ties = {}

    two = prompts[1:3]
    alone, _ = run(tmp_path, [[prompt] for prompt in two])
    ties["single"] = judge.ties(two, [batch[0] for batch in alone])

    (pieces,), _ = run(tmp_path, [prompts], enable_prefix_caching=False, max_num_batched_tokens=11)
    ties["in pieces"] = judge.ties(prompts, pieces)

    (fresh, shared), llm = run(tmp_path, [prompts, prompts])
    ties["fresh batch"], ties["shared prefix"] = judge.ties(prompts, fresh), judge.ties(prompts, shared)
    assert llm.stats().prefix_hits >= 16 + 2 * 16 + 3 * 2 * 16

    chunk = llm.spec.kv.chunk_nbytes()
    (suspended,), llm = run(tmp_path, [prompts], kv_cache_memory_bytes=11 * chunk)
    ties["suspended"] = judge.ties(prompts, suspended)
    assert llm.stats().preemptions > 0

    record_property("ties", ties)
    assert sum(ties.values()) <= 5, ties


@pytest.mark.parametrize("case", ONE_WAY, ids=lambda case: f"{case.kind}: {case.name}")
def test_in_one_batch(case: Case, tmp_path: Path) -> None:
    judge = Judge(saved_model(case, tmp_path))
    prompts = make_prompts()
    (outputs,), _ = run(tmp_path, [prompts])
    assert judge.ties(prompts, outputs) <= 1


def test_every_family_is_run() -> None:
    assert {case.kind for case in EVERY_WAY} == set(MODELS)
