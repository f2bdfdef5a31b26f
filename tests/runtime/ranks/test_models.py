"""Models over several ranks, which are threads with real gloo between them: the answers are those of one device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellar import LLM, CompletionOutput, PoolingParams, SamplingParams
from cellar.core.config import EngineConfig, ScheduleConfig
from cellar.core.messages import FinishReason, Request
from cellar.core.sampling import StructuredOutputsParams
from cellar.engine.steps import step_engine
from cellar.runtime.ranks.group import RankGroup
from cellar.runtime.ranks.opened import open_ranks
from cellar.runtime.ranks.rank import ThreadRank
from cellar.runtime.steps.local import LocalRuntime, open_local
from cellar.schedule.steps.scheduler import StepScheduler
from tests.limits import SECONDS
from tests.tiny_checkpoint import write_checkpoint

ROUNDING = 1e-4
EIGHT: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 80}
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "llama": (EIGHT, 4),
    "mistral": (EIGHT | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 40}, 2),
    "qwen2, tied": (
        EIGHT | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
        3,
    ),
    "qwen3": (EIGHT | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8}, 2),
    "opt": (
        EIGHT
        | {
            "model_type": "opt",
            "architectures": ["OPTForCausalLM"],
            "num_key_value_heads": 8,
            "ffn_dim": 256,
            "word_embed_proj_dim": 32,
        },
        4,
    ),
}


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads: the same code without the processes' start."""
    monkeypatch.setattr("cellar.runtime.ranks.opened.open_ranks", partial(open_ranks, make=ThreadRank))


def opened(path: Path, size: int, **options: Any) -> LLM:
    """With as many chunks on the fullest of `size` ranks as on one device: 17, not enough for all requests at once."""
    nbytes = options.pop("chunks", 17) * 16 * options.pop("token_nbytes")
    small = {
        "block_size": 16,
        "kv_cache_memory_bytes": nbytes * -(-4 // size) // 4,
        "decode_reserve": 0.0,
        "max_num_seqs": 6,
    }
    return LLM(str(path), device="cpu", num_threads=1, tensor_parallel_size=size, **small | options)


def token_nbytes(path: Path) -> int:
    with LLM(str(path), device="cpu", num_threads=1, kv_cache_memory_bytes=2**20) as llm:
        return llm.spec.kv.nbytes_per_token()


def check_same(a: CompletionOutput, b: CompletionOutput) -> None:
    """Equal tokens; they may part where the best two are as likely as rounding can tell."""
    assert a.logprobs is not None
    for i, (one, other) in enumerate(zip(a.token_ids, b.token_ids, strict=False)):
        if one != other:
            table = a.logprobs[i]
            assert abs(table[one].logprob - table[other].logprob) < ROUNDING
            return
    assert len(a.token_ids) == len(b.token_ids)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_join_leave_and_are_suspended(family: str, tmp_path: Path) -> None:
    """Shared prefixes, a host tier that loses nothing, prompts in several steps, and twice the same."""
    config, size = FAMILIES[family]
    write_checkpoint(tmp_path, **config)
    rng = np.random.default_rng(3)
    prefix = rng.integers(3, 420, 40).tolist()
    prompts = [prefix[: 40 * (k % 2)] + rng.integers(3, 420, rng.integers(1, 70)).tolist() for k in range(10)]
    params = [
        SamplingParams(
            max_tokens=int(rng.integers(1, 40)),
            temperature=0.0,
            ignore_eos=True,
            logprobs=3,
            presence_penalty=0.5 * (k % 3 == 0),
        )
        for k in range(10)
    ]
    nbytes = token_nbytes(tmp_path)

    def run(count: int) -> tuple[list[CompletionOutput], int, int]:
        options = {"kv_offloading_size": 3 * 16 * nbytes / 2**30, "max_num_batched_tokens": 64}
        with opened(tmp_path, count, token_nbytes=nbytes, **options) as llm:
            outputs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
            stats = llm.stats()
            assert stats.total_chunks == 17
            return (
                [output.outputs[0] for each in outputs for output in each],
                stats.preemptions,
                stats.recomputed_tokens,
            )

    alone, _, _ = run(1)
    found, suspensions, recomputed = run(size)
    assert suspensions > 0
    assert recomputed > 0, "there were holes"
    for a, b in zip(alone, found, strict=True):
        check_same(a, b)


def test_what_requests_may_ask_is_as_on_one_device(tmp_path: Path) -> None:
    """Structured output, drawn tokens, log-probabilities of both kinds, embeddings."""
    write_checkpoint(tmp_path, **EIGHT)
    nbytes = token_nbytes(tmp_path)
    prompts = ["one", "two two", "three three three"]
    masked = SamplingParams(
        max_tokens=24, temperature=1.0, seed=4, structured_outputs=StructuredOutputsParams(regex="[ab]{3}")
    )
    drawn = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=5, logprobs=2, prompt_logprobs=1)

    def run(size: int) -> tuple[Any, ...]:
        with opened(tmp_path, size, token_nbytes=nbytes) as llm:
            mixed = llm.generate([*prompts, *prompts], [*[masked] * 3, *[drawn] * 3], use_tqdm=False)
            vectors = llm.embed(prompts, use_tqdm=False)
            means = llm.embed(prompts, pooling_params=PoolingParams(pooling="mean"), use_tqdm=False)
        texts = [output.outputs[0].text for output in mixed]
        scores = [
            [p[token].logprob for p, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)]
            for output in mixed[3:]
        ]
        prompt = [
            [p[token].logprob for p, token in zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:], strict=True)]
            for o in mixed[3:]
        ]
        return texts, scores, prompt, [v.outputs.embedding for v in vectors], [v.outputs.embedding for v in means]

    alone, ranks = run(1), run(2)
    assert all(set(text) <= set("ab") and len(text) == 3 for text in ranks[0][:3])
    assert ranks[0] == alone[0]
    for a, b in zip(alone[1:], ranks[1:], strict=True):
        for one, other in zip(a, b, strict=True):
            np.testing.assert_allclose(one, other, atol=ROUNDING)


@pytest.mark.parametrize(
    "option", [{"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "fp8"}], ids=str
)
def test_quantized_weights_and_kv_are_shared_too(option: dict[str, str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **EIGHT | {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256})
    nbytes = token_nbytes(tmp_path)
    params = SamplingParams(max_tokens=20, temperature=0.0, logprobs=3, ignore_eos=True)

    def run(size: int) -> list[CompletionOutput]:
        with opened(tmp_path, size, token_nbytes=nbytes, **option) as llm:
            return [o.outputs[0] for o in llm.generate(["a b c", "once"], params, use_tqdm=False)]

    for a, b in zip(run(1), run(2), strict=True):
        check_same(a, b)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalRuntime, RankGroup]]:
    """One device, and four ranks, with the same model and 24 chunks: engines come and go over both."""
    path = write_checkpoint(tmp_path_factory.mktemp("four"), **EIGHT | {"num_hidden_layers": 1})
    nbytes = 24 * 16 * token_nbytes(path)

    def config(size: int) -> EngineConfig:
        return EngineConfig.of(
            model=str(path),
            device="cpu",
            num_threads=1,
            tensor_parallel_size=size,
            kv_cache_memory_bytes=nbytes // size,
            block_size=16,
            max_num_seqs=5,
            max_model_len=192,
        )

    alone = open_local(config(1), path).runtime
    ranks = open_ranks(config(4), path, make=ThreadRank).runtime
    yield alone, ranks
    ranks.close()
    alone.close()


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_an_engine_over_four_ranks_is_one_over_one_device(
    four: tuple[LocalRuntime, RankGroup], data: st.DataObject
) -> None:
    """Any requests, dropped and suspended ones among them, with few chunks or many: the same tokens."""
    slots, rows = data.draw(st.integers(12, 24)), data.draw(st.integers(1, 5))
    step_tokens = data.draw(st.sampled_from([16, 40, 256]))
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=6))
    counts = data.draw(st.lists(st.integers(1, 12), min_size=6, max_size=6))
    shared = data.draw(st.integers(0, 60))
    dropped = data.draw(st.sets(st.integers(0, 5), max_size=2))
    drawn = data.draw(st.booleans())
    generator = np.random.default_rng(data.draw(st.integers(0, 9)))
    prefix = generator.integers(3, 420, shared)
    prompts = [np.concatenate([prefix[: k % 2 * shared], generator.integers(3, 420, n)]) for k, n in enumerate(lengths)]

    def answers(runtime: LocalRuntime | RankGroup) -> dict[str, list[int]]:
        config = ScheduleConfig(max_num_seqs=rows, max_num_batched_tokens=step_tokens, decode_reserve=0.0)
        scheduler = StepScheduler(slots, rows, 16, 192, config)
        engine = step_engine(scheduler, runtime)
        for k, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=counts[k], temperature=0.7 * drawn, seed=k)
            engine.add(Request(f"r{k}", prompt.astype(np.int32), params, frozenset(), counts[k]))
        for k in dropped:
            engine.abort(f"r{k}")
        tokens: dict[str, list[int]] = {}
        while engine.has_work():
            for output in engine.turn(SECONDS):
                assert all(reason is not FinishReason.ERROR for reason, _ in output.finished.values())
                for id, token in zip(output.ids, output.tokens, strict=True):
                    tokens.setdefault(id, []).append(token)
        scheduler.check_integrity()
        return tokens

    alone, ranks = (answers(runtime) for runtime in four)
    assert ranks == alone
