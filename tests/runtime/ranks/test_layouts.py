"""Engines over layouts, on ranks that are threads with real gloo between them: the tokens of one device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellar.core.config import EngineConfig, ScheduleConfig
from cellar.core.layouts import Layout, Layouts, Mesh
from cellar.core.messages import (
    FinishReason,
    Partition,
    Placed,
    PlacedUnits,
    Placement,
    Request,
    SchedulerStats,
)
from cellar.core.sampling import SamplingParams
from cellar.engine.steps import StepsScheduler, step_engine
from cellar.models.registry import open_model
from cellar.models.stored import stored
from cellar.planner.partition import distinct_layouts
from cellar.runtime.ranks import opened
from cellar.runtime.ranks.group import RankGroup
from cellar.runtime.ranks.lane import HostLane
from cellar.runtime.ranks.opened import open_ranks
from cellar.runtime.ranks.place import LaidPlace
from cellar.runtime.ranks.rank import ThreadRank
from cellar.runtime.steps.local import LocalRuntime, open_local
from cellar.schedule.steps.homes import HomesScheduler, shares
from cellar.schedule.steps.scheduler import StepScheduler
from tests.limits import SECONDS
from tests.tiny_checkpoint import CONFIG, write_checkpoint

SMALL: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 96, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"num_key_value_heads": 2, "attention_bias": True},
    "llama, one head of K and V": SMALL | {"num_key_value_heads": 1},
    "qwen2": SMALL
    | {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "head_dim": None,
    },
    "opt": SMALL
    | {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "num_key_value_heads": 8,
        "ffn_dim": 96,
        "word_embed_proj_dim": 32,
        "head_dim": None,
    },
    "falcon": SMALL
    | {
        "model_type": "falcon",
        "architectures": ["FalconForCausalLM"],
        "bias": True,
        "num_key_value_heads": 1,
        "head_dim": None,
    },
    "cohere": SMALL
    | {
        "model_type": "cohere",
        "architectures": ["CohereForCausalLM"],
        "num_key_value_heads": 2,
        "logit_scale": 0.5,
        "head_dim": None,
    },
    "gpt_bigcode": {
        "model_type": "gpt_bigcode",
        "architectures": ["GPTBigCodeForCausalLM"],
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 8,
        "n_positions": 256,
    },
}
MESHES = (Mesh(1, 1, 2), Mesh(2, 1, 1), Mesh(1, 2, 2), Mesh(2, 1, 2), Mesh(4, 1, 1))
CHUNK, LONGEST = 16, 192
CHUNKS, ROWS = 24, 6


def options(path: Path, nbytes: int) -> EngineConfig:
    return EngineConfig.of(
        model=str(path),
        device="cpu",
        num_threads=1,
        kv_cache_memory_bytes=nbytes,
        block_size=CHUNK,
        max_num_seqs=ROWS,
        max_model_len=LONGEST,
    )


def pairs(family: str) -> list[Layouts]:
    """Every layout by itself, and those of prompts and of decodes that keep K and V in one place."""
    kv_heads = open_model(CONFIG | FAMILIES[family], "float32").spec.num_kv_heads
    found = []
    for mesh in MESHES:
        every = distinct_layouts(mesh, kv_heads)
        found += [Layouts(a, b) for a in every for b in every if not Layouts(a, b).moves(kv_heads)]
    return found


@lru_cache(maxsize=16)
def alone(path: Path) -> LocalRuntime:
    """One device with as many chunks as any run may want."""
    return open_local(options(path, 2**21), path).runtime


def placed(path: Path, layouts: Layouts, chunks: int) -> Placement:
    """What a plan says of these layouts, with so many chunks on each rank."""
    raw = json.loads((path / "config.json").read_text())
    first = stored(open_model(raw, "float32", CHUNK, LONGEST).spec, layouts.mesh, 0)
    weights = (Placed(name, "device", 0, t.shape[0], "float32") for name, t in first.named_tensors())
    mesh, a, b = layouts.mesh, layouts.prefill, layouts.decode
    split = Partition((mesh.x, mesh.y, mesh.z), "", a.gather, a.head_axes, b.gather, b.head_axes)
    split = replace(split, looped=layouts.looped)
    kv = (PlacedUnits("device", chunks, "device"),)
    return Placement(tuple(weights), "device", "device", "partition", kv, partition=split)


@contextmanager
def ranks_of(path: Path, layouts: Layouts) -> Iterator[RankGroup]:
    runtime = open_ranks(options(path, 2**20), path, placed(path, layouts, CHUNKS), ThreadRank).runtime
    try:
        yield runtime
    finally:
        runtime.close()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_checkpoint(tmp_path_factory.mktemp("model"), **config) for name, config in FAMILIES.items()}


def scheduler_of(runtime: LocalRuntime | RankGroup, slots: int, rows: int, tokens: int) -> Any:
    """With so many chunks, rows and tokens of a step in all."""
    schedule = ScheduleConfig(max_num_seqs=rows, max_num_batched_tokens=tokens, decode_reserve=0.0)
    homes, each = runtime.capacity.homes, runtime.capacity.num_rows // runtime.capacity.homes
    assert slots // homes <= runtime.capacity.num_slots
    found = [StepScheduler(slots // homes, each, CHUNK, LONGEST, part) for part in shares(schedule, homes)]
    return found[0] if homes == 1 else HomesScheduler(found, each)


def answers(
    runtime: LocalRuntime | RankGroup, scheduler: StepsScheduler, requests: list[Request], dropped: frozenset[int]
) -> tuple[dict[str, list[int]], SchedulerStats]:
    """Tokens by request: half of them come at first, the others one by one, and some are dropped on the way."""
    engine = step_engine(scheduler, runtime)
    half = len(requests) // 2
    engine.add(*requests[:half])
    later = requests[half:]
    tokens: dict[str, list[int]] = {}
    while engine.has_work() or later:
        if later:
            engine.add(later.pop(0))
        for k in dropped:
            if len(tokens.get(f"r{k}", ())) >= 2:
                engine.abort(f"r{k}")
        for output in engine.turn(SECONDS):
            assert all(reason is not FinishReason.ERROR for reason, _ in output.finished.values()), output.finished
            for id, token in zip(output.ids, output.tokens, strict=True):
                tokens.setdefault(id, []).append(token)
    scheduler.check_integrity()
    return tokens, scheduler.stats()


def some_requests(seed: int, count: int, longest: int, most: int = 36) -> list[Request]:
    rng = np.random.default_rng(seed)
    prefix = rng.integers(3, 420, 40)
    found = []
    for k in range(count):
        own = rng.integers(3, 420, rng.integers(1, longest))
        prompt = np.concatenate([prefix[: 40 * (k % 2)], own]).astype(np.int32)
        new = int(rng.integers(10, most))
        params = SamplingParams(max_tokens=new, temperature=0.0, seed=k)
        found.append(Request(f"r{k}", prompt, params, frozenset(), new))
    return found


def check(path: Path, layouts: Layouts) -> SchedulerStats:
    """Few chunks: requests are suspended, and begin again with holes. Twice: the second time finds prefixes."""
    with ranks_of(path, layouts) as ranks:
        homes = ranks.capacity.homes
        assert ranks.capacity.num_slots == CHUNKS
        one, many = scheduler_of(alone(path), 40, ROWS, 64), scheduler_of(ranks, 8 * homes, max(ROWS, 3 * homes), 64)
        requests = some_requests(3, 4 * max(2, homes), 40, most=26)
        expected, _ = answers(alone(path), one, requests, frozenset())
        for _ in range(2):
            found, stats = answers(ranks, many, requests, frozenset())
            assert found == expected, layouts
        assert stats.prefix_hits > 0
        assert stats.preemptions > 0
        assert stats.total_chunks == 8 * homes
        return stats


HOMES: dict[str, tuple[str, Layouts]] = {
    "four homes, a gather of prompts": ("llama", Layouts(Layout(Mesh(1, 2, 2), "xyz"), Layout(Mesh(1, 2, 2)))),
    "two homes of two heads": ("llama", Layouts(Layout(Mesh(2, 1, 2), "", "z"), Layout(Mesh(2, 1, 2), "", "z"))),
}


@pytest.fixture(scope="module", params=HOMES)
def homes(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Iterator[tuple[LocalRuntime, RankGroup]]:
    """One device, and four ranks where rows have homes: engines come and go over both."""
    family, layouts = HOMES[request.param]
    with ranks_of(checkpoints[family], layouts) as ranks:
        yield alone(checkpoints[family]), ranks


@pytest.mark.long
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_requests_over_homes_are_as_on_one_device(
    homes: tuple[LocalRuntime, RankGroup], data: st.DataObject
) -> None:
    """Requests that come together and later, that share prefixes, are suspended, begin again with holes, or leave."""
    one, ranks = homes
    count = ranks.capacity.homes
    each = data.draw(st.integers(8, 14), label="chunks of a home")
    rows = count * data.draw(st.integers(1, 3), label="rows of a home")
    tokens = data.draw(st.sampled_from([16, 40, 128]), label="tokens of a step")
    requests = some_requests(data.draw(st.integers(0, 99)), data.draw(st.integers(1, 4 * count)), 60, most=18)
    dropped = frozenset(data.draw(st.sets(st.integers(0, 11), max_size=2), label="dropped"))
    expected, _ = answers(one, scheduler_of(one, 40, ROWS, 64), requests, frozenset())
    found, _ = answers(ranks, scheduler_of(ranks, each * count, rows, tokens * count), requests, dropped)
    for k, request in enumerate(requests):
        made = found[request.id]
        assert made == expected[request.id][: len(made)]
        assert len(made) == len(expected[request.id]) or k in dropped


ALL = [(family, layouts) for family in FAMILIES for layouts in pairs(family)]


def name(value: object) -> str:
    if not isinstance(value, Layouts):
        return str(value)
    mesh = value.mesh
    each = (f"{one.name}-{one.attention}-{one.head_axes}" for one in (value.prefill, value.decode))
    return f"{mesh.x}{mesh.y}{mesh.z}-" + "-".join(each)


# A few of two ranks; of four in the long test.
SHORT = [case for case in ALL if case[1].mesh.size == 2][3::31]
LONG = [case for case in ALL if case[1].mesh.size == 4][5::37]


@pytest.mark.long
@pytest.mark.parametrize(("family", "layouts"), SHORT, ids=name)
def test_an_engine_over_layouts_is_one_over_one_device(
    family: str, layouts: Layouts, checkpoints: dict[str, Path]
) -> None:
    check(checkpoints[family], layouts)


LOOPED = {
    "sums and gathers in chunks": Layouts(Layout(Mesh(2, 1, 2), "", "z"), Layout(Mesh(2, 1, 2), "", "z"), looped=True),
    "weights a layer ahead": Layouts(Layout(Mesh(1, 1, 2), "xyz"), Layout(Mesh(1, 1, 2))),
}


@pytest.mark.long
@pytest.mark.parametrize("layouts", LOOPED.values(), ids=LOOPED)
def test_an_engine_that_overlaps_is_one_that_does_not(
    layouts: Layouts, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over gloo: chunks of four tokens beside their products, on a thread of each rank, which are seen to be used."""
    begun: list[str] = []
    run = HostLane.run

    def noted(self: HostLane, work: Callable[[], Any]) -> Any:
        begun.append("")
        return run(self, work)

    monkeypatch.setattr(HostLane, "run", noted)
    monkeypatch.setattr(opened, "LaidPlace", partial(LaidPlace, loop_tokens=4))
    check(checkpoints["llama"], layouts)
    assert begun


@pytest.mark.long
@pytest.mark.parametrize(("family", "layouts"), LONG, ids=name)
def test_more_layouts(family: str, layouts: Layouts, checkpoints: dict[str, Path]) -> None:
    check(checkpoints[family], layouts)
