"""Conversations in tiny pools: greedy tokens with a host tier are those of an engine that never runs out of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cellar import LLM, SamplingParams
from cellar.core.config import EngineConfig
from cellar.core.messages import SchedulerStats, Tier, TierStats
from cellar.engine.opened import open_front
from cellar.kv.recovery import RecoveryRule
from cellar.models.registry import MODELS
from tests.conformance.test_models import CASES, Case, saved_model

CHUNK = 16
CONTEXT = 128
TALKS = 6
TURNS = 4
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
RUN = [replace(c, config=c.config | {"max_position_embeddings": CONTEXT}) for c in CASES if c.context is None]
FAMILIES = [next(case for case in RUN if case.kind == kind) for kind in MODELS]

FIRST_NOW = [pytest.param(c, id=c.name, marks=[pytest.mark.long] if k else []) for k, c in enumerate(FAMILIES)]
"""All families, of which one runs each time: what follows is of no model in particular."""

Tokens = list[list[int]]


def opened(folder: Path, /, **options: Any) -> LLM:
    """An engine that loads what slower tiers have, though these models compute it faster; or as `recovery` says."""
    recovery: RecoveryRule = options.pop("recovery", "load")
    return LLM.over(open_front(EngineConfig.of(model=str(folder), **options), recovery=recovery))


def talk(
    folder: Path,
    chunks: int,
    recovery: RecoveryRule = "load",
    then: Callable[[SchedulerStats], None] = lambda stats: None,
    **options: object,
) -> tuple[list[Tokens], tuple[TierStats, ...], int]:
    """TALKS conversations of TURNS turns, one turn of all at a time, each turn after the other; -> all answers."""
    rng = np.random.default_rng(7)
    common = rng.integers(3, 101, CHUNK + 3).tolist()
    said = [[rng.integers(3, 101, 9).tolist() for _ in range(TURNS)] for _ in range(TALKS)]
    histories = [common[: len(common) * (k % 2)] for k in range(TALKS)]
    answers = []
    with opened(folder, recovery=recovery, **small_options(folder, chunks, **options)) as llm:
        for turn in range(TURNS):
            for history, words in zip(histories, said, strict=True):
                history += words[turn]
            # Half of them now, half later: the first are cached while the others run.
            done = []
            for part in (histories[::2], histories[1::2]):
                done.append([o.outputs[0].token_ids for o in llm.generate(part, GREEDY, use_tqdm=False)])
            order = [done[k % 2][k // 2] for k in range(TALKS)]
            for history, answer in zip(histories, order, strict=True):
                history += answer
            answers.append(order)
        stats = llm.stats()
        then(stats)
        return answers, stats.tiers, stats.prefix_hits


def small_options(folder: Path, chunks: int, kv_cache_dtype: str = "auto", **others: object) -> dict[str, object]:
    """Of an engine with so many chunks on the CPU; and the others, as they are."""
    from cellar.models.registry import open_model, read_config

    model = open_model(read_config(folder), "float32", CHUNK, CONTEXT, kv_cache_dtype=kv_cache_dtype)
    nbytes = chunks * model.spec.kv.chunk_nbytes()
    return others | {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "max_model_len": CONTEXT,
        "block_size": CHUNK,
        "kv_cache_dtype": kv_cache_dtype,
        "kv_cache_memory_bytes": nbytes,
    }


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_tokens_from_the_host_are_those_of_plenty(case: Case, tmp_path: Path) -> None:
    saved_model(case, tmp_path)
    plenty, none, _ = talk(tmp_path, 400)
    assert [stats.tier for stats in none] == [Tier.DEVICE]
    scarce, tiers, hits = talk(tmp_path, 12, kv_offloading_size=0.01)
    alone, _, fewer = talk(tmp_path, 12)
    host = tiers[1]
    assert (host.tier, host.failed) == (Tier.HOST, 0)
    assert host.saved > 10, "what has no room goes to the host"
    assert host.loaded > 10, "and comes back"
    assert hits > fewer, "so less is computed again"
    assert scarce == plenty
    assert alone == plenty


@pytest.mark.parametrize("policy", ["value", "chance", "lru"])
@pytest.mark.parametrize("case", FIRST_NOW)
def test_a_host_without_room_changes_no_token(case: Case, policy: str, tmp_path: Path) -> None:
    """Three chunks of host memory: most is dropped, holes are computed again, anywhere."""
    saved_model(case, tmp_path)
    options = small_options(tmp_path, 3)
    size = int(str(options["kv_cache_memory_bytes"])) / 2**30
    scarce, tiers, _ = talk(tmp_path, 12, kv_offloading_size=size, kv_eviction_policy=policy)
    assert tiers[1].total == 3
    assert scarce == talk(tmp_path, 400)[0]


@pytest.mark.parametrize("case", FIRST_NOW)
def test_suspended_requests_come_back_from_the_host(case: Case, tmp_path: Path) -> None:
    """Twenty long answers at once in memory for two: most are suspended in the middle, some again and again."""
    saved_model(case, tmp_path)
    prompts = [np.random.default_rng(k).integers(3, 101, 5 + k).tolist() for k in range(20)]
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)

    def run(chunks: int, **options: object) -> tuple[Tokens, SchedulerStats]:
        with opened(tmp_path, decode_reserve=0.0, **small_options(tmp_path, chunks, **options)) as llm:
            found = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
            return found, llm.stats()

    plenty, calm = run(400)
    scarce, stats = run(16, kv_offloading_size=0.01)
    assert calm.preemptions == 0
    assert stats.preemptions > 5
    assert stats.tiers[1].loaded > 20, "they do not begin anew"
    assert stats.tiers[1].failed == 0
    assert scarce == plenty
