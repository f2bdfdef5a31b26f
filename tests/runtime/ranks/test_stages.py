"""Models over pipeline stages, threads with real gloo between them: the tokens are those of one device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellar import LLM, CompletionOutput, PoolingParams, SamplingParams
from cellar.core.config import EngineConfig, ScheduleConfig
from cellar.core.messages import FinishReason, Request
from cellar.core.sampling import StructuredOutputsParams
from cellar.engine.steps import step_engine
from cellar.models.model import Hidden
from cellar.runtime.ranks.group import RankGroup
from cellar.runtime.ranks.opened import open_rank, open_ranks
from cellar.runtime.ranks.rank import ThreadRank
from cellar.runtime.ranks.stages import Stages
from cellar.runtime.steps.forward import Forward
from cellar.runtime.steps.local import LocalRuntime, open_local
from cellar.schedule.steps.scheduler import StepScheduler
from tests.limits import SECONDS
from tests.runtime.ranks.test_models import EIGHT, FAMILIES, ROUNDING, check_same
from tests.runtime.ranks.test_stages_gpu import STAGES, QueuePlace
from tests.tiny_checkpoint import write_checkpoint

FIVE: dict[str, Any] = EIGHT | {"num_hidden_layers": 5}


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads: the same code without the processes' start."""
    monkeypatch.setattr("cellar.runtime.ranks.opened.open_ranks", partial(open_ranks, make=ThreadRank))


def opened(path: Path, stages: int, tensor: int = 1, **options: Any) -> LLM:
    """With 17 chunks on the fullest rank, as on one device: not enough for all requests at once."""
    nbytes = options.pop("chunks", 17) * 16 * options.pop("token_nbytes")
    layers = options.pop("layers", 5)
    small = {
        "block_size": 16,
        "kv_cache_memory_bytes": nbytes * -(-layers // stages) // layers // tensor,
        "decode_reserve": 0.0,
        "max_num_seqs": 6,
    }
    ranks = {"pipeline_parallel_size": stages, "tensor_parallel_size": tensor}
    return LLM(str(path), device="cpu", num_threads=1, **ranks, **small | options)


def token_nbytes(path: Path) -> int:
    with LLM(str(path), device="cpu", num_threads=1, kv_cache_memory_bytes=2**22) as llm:
        return llm.spec.kv.nbytes_per_token()


def crowd() -> tuple[list[list[int]], list[SamplingParams]]:
    """Shared prefixes, prompts of one step and of several, penalties, log-probabilities."""
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
    return prompts, params


@dataclass
class Crowded:
    """A family's checkpoint, and what answers the crowd twice on one device, in which a token takes `nbytes` of KV."""

    path: Path
    nbytes: int
    alone: list[CompletionOutput] = field(default_factory=list)

    def run(self, stages: int, tensor: int) -> tuple[list[CompletionOutput], int, int]:
        """Answers, suspensions, and tokens that were computed again."""
        options = {"kv_offloading_size": 3 * 16 * self.nbytes / 2**30, "max_num_batched_tokens": 64}
        with opened(self.path, stages, tensor, token_nbytes=self.nbytes, **options) as llm:
            outputs = [llm.generate(*crowd(), use_tqdm=False) for _ in range(2)]
            stats = llm.stats()
            assert stats.total_chunks == 17
            found = [output.outputs[0] for each in outputs for output in each]
            return found, stats.preemptions, stats.recomputed_tokens


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Crowded]:
    """Of each family once: three ways of cutting it are held against it."""
    made: dict[str, Crowded] = {}

    def one(family: str) -> Crowded:
        if family not in made:
            path = write_checkpoint(
                tmp_path_factory.mktemp("crowded"), **FAMILIES[family][0] | {"num_hidden_layers": 5}
            )
            made[family] = Crowded(path, token_nbytes(path))
            made[family].alone = made[family].run(1, 1)[0]
        return made[family]

    return one


@pytest.mark.long
@pytest.mark.parametrize(("stages", "tensor"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_join_leave_and_are_suspended(
    family: str, stages: int, tensor: int, crowded: Callable[[str], Crowded]
) -> None:
    """With a host tier that loses nothing, holes, and twice the same: the very tokens, or those that rounding allows
    where ranks add.
    """
    case = crowded(family)
    found, suspensions, recomputed = case.run(stages, tensor)
    assert suspensions > 0
    assert recomputed > 0, "there were holes"
    for a, b in zip(case.alone, found, strict=True):
        if tensor == 1:
            assert a.token_ids == b.token_ids
        check_same(a, b)


@pytest.mark.long
def test_what_requests_may_ask_is_as_on_one_device(tmp_path: Path) -> None:
    """Structured output, drawn tokens, log-probabilities of both kinds, embeddings."""
    write_checkpoint(tmp_path, **FIVE)
    nbytes = token_nbytes(tmp_path)
    prompts = ["one", "two two", "three three three"]
    masked = SamplingParams(
        max_tokens=24, temperature=1.0, seed=4, structured_outputs=StructuredOutputsParams(regex="[ab]{3}")
    )
    drawn = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=5, logprobs=2, prompt_logprobs=1)

    def run(stages: int) -> tuple[Any, ...]:
        with opened(tmp_path, stages, token_nbytes=nbytes) as llm:
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

    alone, stages = run(1), run(3)
    assert all(set(text) <= set("ab") and len(text) == 3 for text in stages[0][:3])
    assert stages[0] == alone[0]
    for a, b in zip(alone[1:], stages[1:], strict=True):
        for one, other in zip(a, b, strict=True):
            np.testing.assert_allclose(one, other, atol=ROUNDING)


@pytest.mark.parametrize(
    "option",
    [{"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "fp8"}, {"dtype": "bfloat16"}],
    ids=str,
)
def test_other_formats_of_weights_and_kv_are_cut_too(option: dict[str, str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **FIVE | {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256})
    nbytes = token_nbytes(tmp_path)
    params = SamplingParams(max_tokens=20, temperature=0.0, logprobs=3, ignore_eos=True)

    def run(stages: int) -> list[CompletionOutput]:
        with opened(tmp_path, stages, token_nbytes=nbytes, **option) as llm:
            return [o.outputs[0] for o in llm.generate(["a b c", "once"], params, use_tqdm=False)]

    for a, b in zip(run(1), run(2), strict=True):
        check_same(a, b)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalRuntime, dict[int, RankGroup]]]:
    """One device, and two or four stages, with the same model and 24 chunks: engines come and go over all."""
    path = write_checkpoint(tmp_path_factory.mktemp("stages"), **EIGHT | {"num_hidden_layers": 4})
    nbytes = 24 * 16 * token_nbytes(path)

    def config(stages: int) -> EngineConfig:
        return EngineConfig.of(
            model=str(path),
            device="cpu",
            num_threads=1,
            pipeline_parallel_size=stages,
            kv_cache_memory_bytes=nbytes // stages,
            block_size=16,
            max_num_seqs=5,
            max_model_len=192,
        )

    alone = open_local(config(1), path).runtime
    groups = {stages: open_ranks(config(stages), path, make=ThreadRank).runtime for stages in (2, 4)}
    yield alone, groups
    for group in groups.values():
        group.close()
    alone.close()


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_an_engine_over_stages_is_one_over_one_device(
    pair: tuple[LocalRuntime, dict[int, RankGroup]], data: st.DataObject
) -> None:
    """Any requests, dropped and suspended ones among them, with few chunks or many: the same tokens."""
    slots, rows = data.draw(st.integers(12, 24)), data.draw(st.integers(1, 5))
    stages = data.draw(st.sampled_from([2, 4]))
    step_tokens = data.draw(st.sampled_from([16, 40, 256]))
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=6))
    counts = data.draw(st.lists(st.integers(1, 12), min_size=6, max_size=6))
    shared = data.draw(st.integers(0, 60))
    dropped = data.draw(st.sets(st.integers(0, 5), max_size=2))
    drawn = data.draw(st.booleans())
    generator = np.random.default_rng(data.draw(st.integers(0, 9)))
    prefix = generator.integers(3, 420, shared)
    prompts = [np.concatenate([prefix[: k % 2 * shared], generator.integers(3, 420, n)]) for k, n in enumerate(lengths)]

    def answers(runtime: LocalRuntime | RankGroup, stages: int) -> dict[str, list[int]]:
        config = ScheduleConfig(max_num_seqs=rows, max_num_batched_tokens=step_tokens, decode_reserve=0.0)
        scheduler = StepScheduler(slots, rows, 16, 192, config, stages=stages)
        engine = step_engine(scheduler, runtime, run_ahead=config.run_ahead + stages - 1)
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

    alone, groups = pair
    assert answers(groups[stages], stages) == answers(alone, 1)


Wrong = Callable[[pytest.MonkeyPatch], None]


def _rows_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    receive, kept = Stages.receive, dict[int, Hidden]()

    def late(stages: Stages, num_tokens: int, device: torch.device) -> Hidden:
        new = receive(stages, num_tokens, device)
        old = kept.get(stages.index, new)
        kept[stages.index] = new
        return old if old.residual.shape == new.residual.shape else new

    patch.setattr(Stages, "receive", late)


def _nothing_to_be_added(patch: pytest.MonkeyPatch) -> None:
    send = Stages.send
    patch.setattr(Stages, "send", lambda stages, h: send(stages, Hidden(h.residual)))


def _tokens_of_others(patch: pytest.MonkeyPatch) -> None:
    told = Stages.told
    patch.setattr(Stages, "told", lambda stages, fed: ((rows, t.flip(0)) for rows, t in told(stages, fed)))


def _tokens_too_late(patch: pytest.MonkeyPatch) -> None:
    told, empty = Stages.told, np.empty(0, np.int64)
    patch.setattr(Stages, "told", lambda stages, fed: told(stages, empty))


@pytest.mark.parametrize("wrong", [_rows_of_the_step_before, _nothing_to_be_added, _tokens_of_others, _tokens_too_late])
def test_what_goes_wrong_between_stages_shows(wrong: Wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons above can fail."""
    write_checkpoint(tmp_path, **FIVE)
    prompts = [[5, 6, 7], list(range(20, 60)), [9] * 30, [3], [20, 21, 22, 23]]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def tokens(stages: int) -> list[list[int]]:
        with opened(tmp_path, stages, chunks=40, token_nbytes=2**11) as llm:
            return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, greedy, use_tqdm=False)]

    alone = tokens(1)
    assert tokens(2) == alone
    wrong(monkeypatch)
    assert tokens(2) != alone


@pytest.mark.long
def test_stages_compute_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each stage takes as long for a step, so many steps take little longer than those of one stage."""
    path = write_checkpoint(tmp_path, **FIVE)
    config = EngineConfig.of(
        model=str(path), device="cpu", num_threads=1, max_num_seqs=6, kv_cache_memory_bytes=2**25
    ).on("cpu")
    run, each, rows, count = Forward.run_batches, 0.04, 6, 20

    def slow(*arguments: Any) -> Hidden:
        found = run(*arguments)
        time.sleep(each)
        return found

    monkeypatch.setattr(Forward, "run_batches", slow)
    pairs = [(a, b) for a in range(STAGES) for b in range(STAGES)]
    ways = tuple({pair: SimpleQueue[torch.Tensor]() for pair in pairs} for _ in range(2))
    openers = [partial(open_rank, config, path, None, QueuePlace(rank, ways)) for rank in range(STAGES)]
    group = RankGroup(openers, stages=STAGES)
    capacity = group.capacity
    scheduler = StepScheduler(
        capacity.num_slots, rows, capacity.chunk_size, 256, replace(config.schedule, max_num_seqs=rows), stages=STAGES
    )
    engine = step_engine(scheduler, group, run_ahead=2 + STAGES - 1)
    for k in range(rows):
        params = SamplingParams(max_tokens=count, temperature=0.0)
        engine.add(Request(f"r{k}", np.array([k + 3, 4], np.int32), params, frozenset(), count))
    steps, begin = 0, time.monotonic()
    while engine.has_work():
        steps += len(engine.turn(SECONDS))
    seconds = time.monotonic() - begin
    engine.close()
    assert steps >= count * STAGES - 2
    print(f"{steps} steps of {STAGES} stages with {each:g} s each took {seconds:.2f} s")
    assert seconds < 0.6 * steps * STAGES * each
