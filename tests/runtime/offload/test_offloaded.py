"""The whole mechanism: models of every family in random placements give the resident engine's tokens, in company."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from cellar import LLM, SamplingParams
from cellar.cli.main import build
from cellar.core.errors import BuffersError, CapacityError, ConfigError, DeviceError
from cellar.core.messages import Placement, RequestOutput
from cellar.core.specs import ModelSpec
from cellar.models.decoder import Decoder
from cellar.models.registry import MODELS, open_model, read_config
from cellar.planner.capped import Room, capped_plan, fits
from cellar.planner.saved import Limits, load_plan
from cellar.runtime.offload import host_kv, opened
from cellar.runtime.offload.cpu_jobs import CpuJobs
from cellar.runtime.offload.file import WeightFile
from cellar.runtime.offload.held import HeldMemory
from cellar.runtime.offload.host_kv import DividedContext
from cellar.runtime.offload.layers import StreamedLayers
from cellar.runtime.offload.mover import Fence, HostMover
from cellar.runtime.offload.ring import WeightRing
from cellar.runtime.offload.signal import WaitingSignal
from cellar.runtime.steps import forward
from cellar.runtime.steps.capacity import plan_slots
from cellar.runtime.steps.forward import Forward
from tests.conformance.chatglm import config_of
from tests.engine.test_plan import profile
from tests.limits import ROOT, until
from tests.runtime.offload.placements import plan_of, random_placement
from tests.tiny_checkpoint import CONFIG, write_checkpoint

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 9},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 12, "tie_word_embeddings": True},
    "opt": {"architectures": ["OPTForCausalLM"], "ffn_dim": 48, "word_embed_proj_dim": 20},
    "chatglm": config_of(4, 2, 16, 64),
    "falcon": {"architectures": ["FalconForCausalLM"], "multi_query": True},
    "cohere": {"architectures": ["CohereForCausalLM"], "logit_scale": 0.5, "tie_word_embeddings": True},
    "gpt_bigcode": {"architectures": ["GPTBigCodeForCausalLM"], "n_embd": 32, "n_head": 4, "n_positions": 256},
}
DEEP, DEEP_LAYERS = "deep", 12
"""A llama of so many layers that a device without most of them is much smaller."""
LAYERS = {"num_hidden_layers": 4, "num_layers": 4, "n_layer": 4}
KV_HERE = ("device", "device")
LIMITS = Limits(max_num_seqs=3, max_num_batched_tokens=40, max_model_len=128)
OPTIONS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "skip_tokenizer_init": True}


def requests(seed: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
    """Nine prompts of 1 to 60 tokens, two of which begin alike; they end at different times, some are drawn."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(3, 60, int(n)).tolist() for n in random.integers(1, 60, 8)]
    prompts.append([*prompts[0], 7])
    params = [
        SamplingParams(temperature=0.8 * (k % 3 == 2), seed=k, max_tokens=int(n), ignore_eos=True, logprobs=2)
        for k, n in enumerate(random.integers(2, 14, 9))
    ]
    return prompts, params


def tokens_of(found: list[RequestOutput]) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in found]


def spec_of(model: Path) -> ModelSpec:
    return open_model(read_config(model), "float32", 16, LIMITS.max_model_len).spec


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model of a family, written when it is first asked for."""
    made: dict[str, Path] = {}

    def model(kind: str) -> Path:
        if kind not in made:
            changes = {"model_type": kind} | FAMILIES[kind] | LAYERS if kind != DEEP else {"num_hidden_layers": 12}
            made[kind] = write_checkpoint(tmp_path_factory.mktemp(kind) / "model", **changes)
        return made[kind]

    return model


@pytest.fixture(scope="module")
def expected(models: Callable[[str], Path]) -> Callable[[str], list[RequestOutput]]:
    """What the resident engine answers."""
    made: dict[str, list[RequestOutput]] = {}

    def answers(kind: str) -> list[RequestOutput]:
        if kind not in made:
            options = OPTIONS | {"dtype": "float32", "block_size": 16, "kv_cache_memory_bytes": 10**6}
            with LLM(models(kind), **options, max_model_len=LIMITS.max_model_len) as llm:
                made[kind] = llm.generate(*requests(), use_tqdm=False)
        return made[kind]

    return answers


def answers_of(model: Path, placement: Placement, folder: Path, **options: Any) -> list[RequestOutput]:
    """What the engine with this placement answers."""
    file = folder / "plan.json"
    file.write_text(plan_of(spec_of(model), placement, LIMITS).to_json())
    with LLM(model, plan=file, disk_path=folder / "disk", **(OPTIONS | options)) as llm:
        return llm.generate(*requests(), use_tqdm=False)


def test_every_family_is_here() -> None:
    assert set(FAMILIES) == set(MODELS)


@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_are_those_of_the_resident_engine(
    kind: str, models: Callable[[str], Path], expected: Callable[[str], list[RequestOutput]], tmp_path: Path
) -> None:
    """Nine requests in rows for three, in GPU batches of one and two; log-probabilities to the last digits."""
    wanted, spec = expected(kind), spec_of(models(kind))
    for seed in range(2):
        placement = random_placement(spec, seed, batch=1 + seed)
        found = answers_of(models(kind), placement, tmp_path)
        assert tokens_of(found) == tokens_of(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-4)


@pytest.mark.parametrize("kind", FAMILIES)
def test_sequences_that_begin_one_after_another_have_the_same_tokens(
    kind: str, models: Callable[[str], Path], expected: Callable[[str], list[RequestOutput]], tmp_path: Path
) -> None:
    """The diagonal schedule, disk included: nine requests that end at different times, others joining as they do."""
    wanted, spec = expected(kind), spec_of(models(kind))
    placement = random_placement(spec, 7, batch=2, order="diagonal", kv=("host", "host") if kind == "opt" else KV_HERE)
    assert tokens_of(answers_of(models(kind), placement, tmp_path)) == tokens_of(wanted)


@pytest.mark.long
def test_the_diagonal_schedule_spreads_the_starts(models: Callable[[str], Path], tmp_path: Path) -> None:
    """`--schedule diagonal`: of three rows one begins every four passes, for twelve tokens each."""
    begun: list[int] = []
    sizes = {"device_memory": 440_000 / 2**30, "host_memory": 1e-4, "disk": 1.0, "disk_path": tmp_path}
    rest = {"dtype": "float32", "block_size": 16, "kv_cache_memory_bytes": 200_000, "max_num_batched_tokens": 40}
    options: dict[str, Any] = OPTIONS | rest | sizes | {"max_model_len": 128, "max_num_seqs": 3}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7 + k] for k in range(9)]
    with LLM(models(DEEP), **options, schedule="diagonal") as llm:
        assert llm.plan is not None
        assert llm.plan.placement.block is not None
        assert llm.plan.placement.block.order == "diagonal"
        llm.generate(prompts[0], SamplingParams(max_tokens=2), use_tqdm=False)
        submit = llm._front.engine.runtime.workers[0].submit
        passes = 0

        def seen(plan: Any) -> None:
            nonlocal passes
            begun.extend([passes] * len(plan.opens))
            passes += 1
            submit(plan)

        llm._front.engine.runtime.workers[0].submit = seen  # type: ignore[method-assign]
        found = tokens_of(llm.generate(prompts, params, use_tqdm=False))
    with LLM(models(DEEP), **options) as llm:
        assert tokens_of(llm.generate(prompts, params, use_tqdm=False)) == found
    assert len(begun) == 9
    assert {later - earlier for earlier, later in itertools.pairwise(begun)} <= {3, 4, 5}
    with pytest.raises(ConfigError, match="schedule diagonal is of models that device_memory does not hold, but this"):
        LLM(models(DEEP), **(options | {"device_memory": 0.1}), schedule="diagonal")
    with pytest.raises(ConfigError, match="schedule diagonal is of models that device_memory does not hold, but that"):
        LLM(models(DEEP), **OPTIONS, schedule="diagonal")


@pytest.mark.parametrize(
    ("kind", "by"), [*itertools.product(FAMILIES, ("host", "device")), ("llama", "both"), ("opt", "both")]
)
def test_kv_in_host_memory_gives_the_resident_engines_tokens(
    kind: str, by: str, models: Callable[[str], Path], expected: Callable[[str], list[RequestOutput]], tmp_path: Path
) -> None:
    """Decodes and prompts in one pass; prompts in pieces, prompts that share chunks, prompts of one token."""
    wanted, spec = expected(kind), spec_of(models(kind))
    found = answers_of(models(kind), random_placement(spec, 5, batch=2, kv=("host", by)), tmp_path)
    assert tokens_of(found) == tokens_of(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-4)


def jobs_beside(patch: pytest.MonkeyPatch) -> None:
    """The CPU attends as it does for an accelerator: by a thread of its own, to what was brought and taken away."""
    patch.setattr(opened, "jobs_for", lambda *_: CpuJobs(WaitingSignal(torch.device("cpu")), 1))


@pytest.mark.parametrize(("kind", "by"), [("llama", "host"), ("opt", "both")])
def test_kv_attended_to_by_jobs_of_the_cpu(
    kind: str,
    by: str,
    models: Callable[[str], Path],
    expected: Callable[[str], list[RequestOutput]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next step may have changed the table of slots when the CPU comes to it."""
    wanted = tokens_of(expected(kind))
    jobs_beside(monkeypatch)
    batches, passed, alone, changed = Forward.batches, Forward.passed, [False], [0]

    def seen(self: Forward, inputs: Any) -> Any:
        found = batches(self, inputs)
        alone[0] = not any(batch.divided.parts for batch in found)  # the device's table is the same memory
        return found

    def late(self: Forward, *rest: Any) -> Any:
        if not alone[0]:
            return passed(self, *rest)
        assert self._table_host is not None
        table, self._table_host[:] = self._table_host.copy(), 0
        changed[0] += 1
        try:
            return passed(self, *rest)
        finally:
            self._table_host[:] = table

    monkeypatch.setattr(Forward, "batches", seen)
    monkeypatch.setattr(Forward, "passed", late)
    found = answers_of(models(kind), random_placement(spec_of(models(kind)), 5, batch=2, kv=("host", by)), tmp_path)
    assert tokens_of(found) == wanted
    assert changed[0] or by == "both"


@pytest.mark.parametrize("batch", [2, 9])
def test_prompts_are_computed_while_the_cpu_attends_to_decodes(
    batch: int,
    models: Callable[[str], Path],
    expected: Callable[[str], list[RequestOutput]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a layer: the decodes' attention is begun, the prompts go through all of it, the decodes' rest follows."""
    jobs_beside(monkeypatch)
    wanted, order = tokens_of(expected("llama")), list[tuple[str, int]]()
    first, second, begin = Decoder.before_attention, Decoder.after_attention, DividedContext.begin

    def before(self: Any, j: int, weights: Any, h: Any, ctx: Any) -> Any:
        order.append(("before", len(ctx.positions)))
        return first(self, j, weights, h, ctx)

    def after(self: Any, j: int, weights: Any, carried: Any, attended: Tensor, ctx: Any) -> Any:
        order.append(("after", len(attended)))
        return second(self, j, weights, carried, attended, ctx)

    def begun(self: DividedContext, j: int, *rest: Any, **named: Any) -> Any:
        order.append(("begin", len(self.positions)))
        return begin(self, j, *rest, **named)

    monkeypatch.setattr(Decoder, "before_attention", before)
    monkeypatch.setattr(Decoder, "after_attention", after)
    monkeypatch.setattr(DividedContext, "begin", begun)
    spec = spec_of(models("llama"))
    found = answers_of(models("llama"), random_placement(spec, 5, batch=batch, kv=("host", "host")), tmp_path)
    assert tokens_of(found) == wanted
    told = " ".join(f"{name} {count}" for name, count in order)
    assert re.search(r"before (\d) begin \1 before (\d\d) after \2 after \1 ", told), "decodes around a prompt"


def test_tiers_below_kv_in_host_memory_are_refused_before_anything_is_placed(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, spec = tmp_path / "plan.json", spec_of(models("llama"))
    file.write_text(plan_of(spec, random_placement(spec, 5, kv=("host", "host")), LIMITS).to_json())
    monkeypatch.setattr("cellar.runtime.steps.local.open_offloaded", lambda *_: pytest.fail("weights were placed"))
    with pytest.raises(ConfigError, match="not kept in tiers below that yet; leave kv_offloading_size"):
        LLM(models("llama"), plan=file, disk_path=tmp_path, kv_offloading_size=0.01, **OPTIONS)


def test_a_job_of_the_cpu_that_fails_ends_its_step_and_the_engine_goes_on(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs_beside(monkeypatch)
    attend, bad = host_kv.decode_attention, [False]

    def attended(*arguments: Any) -> Tensor:
        if bad[0]:
            raise DeviceError("the CPU cannot attend")
        return attend(*arguments)

    monkeypatch.setattr(host_kv, "decode_attention", attended)
    file = tmp_path / "plan.json"
    spec = spec_of(models("llama"))
    file.write_text(plan_of(spec, random_placement(spec, 5, kv=("host", "host")), LIMITS).to_json())
    with LLM(models("llama"), plan=file, disk_path=tmp_path, **OPTIONS) as llm:
        before = tokens_of(llm.generate(*requests(), use_tqdm=False))
        bad[0] = True
        for one in llm.generate(*requests(), use_tqdm=False):
            assert one.outputs[0].finish_reason == "error"
            assert "the CPU cannot attend" in str(one.outputs[0].stop_reason)
        bad[0] = False
        assert tokens_of(llm.generate(*requests(), use_tqdm=False)) == before


@pytest.mark.long
@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_in_many_placements(
    kind: str, models: Callable[[str], Path], expected: Callable[[str], list[RequestOutput]], tmp_path: Path
) -> None:
    wanted, spec = tokens_of(expected(kind)), spec_of(models(kind))
    for seed in range(10, 12):
        placement = random_placement(spec, seed, batch=1 + seed % 4, order="diagonal" if seed % 2 else "zigzag")
        assert tokens_of(answers_of(models(kind), placement, tmp_path)) == wanted


class LateMover(HostMover):
    """Copies of a thread of its own, in order, some time later: what a copy engine does."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    @property
    def is_asynchronous(self) -> bool:
        return True

    def move(self, source: Tensor, target: Tensor) -> None:
        def copy() -> None:
            time.sleep(1e-4)
            target.copy_(source)

        self._last = self._thread.submit(copy)

    def over(self) -> Fence:
        last = self._last
        return lambda: None if last is None else last.result(120)

    def moved(self) -> Fence:
        return self.over()


@pytest.mark.parametrize("kind", FAMILIES)
def test_records_of_the_disk_pass_buffers_where_slots_are_elsewhere(
    kind: str,
    models: Callable[[str], Path],
    expected: Callable[[str], list[RequestOutput]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: the disk is read into a buffer, from which something else copies it while the loader goes on."""
    monkeypatch.setattr("cellar.runtime.offload.opened.mover_for", lambda _: LateMover())
    placement = random_placement(spec_of(models(kind)), 17, places=("device", "disk", "disk", "host"))
    assert tokens_of(answers_of(models(kind), placement, tmp_path)) == tokens_of(expected(kind))


def test_a_model_larger_than_its_device_plans_by_itself(
    models: Callable[[str], Path], expected: Callable[[str], list[RequestOutput]], tmp_path: Path
) -> None:
    """Half of its weights are on disk; the device's arena is held to its cap; one table says so."""
    model, spec = models(DEEP), spec_of(models(DEEP))
    gib = 2.0**30
    rest = {"dtype": "float32", "block_size": 16, "kv_cache_memory_bytes": 200_000, "max_num_batched_tokens": 40}
    sizes = {"device_memory": 440_000 / gib, "host_memory": 20_000 / gib, "disk": 1.0, "disk_path": tmp_path}
    with LLM(model, max_model_len=128, max_num_seqs=3, **OPTIONS, **rest, **sizes) as llm:
        report = llm.offload
        found = llm.generate(*requests(), use_tqdm=False)
    assert tokens_of(found) == tokens_of(expected(DEEP))
    assert report is not None
    layers = sum(layer.nbytes for layer in spec.layers)
    assert report.weights["disk"] > 0.5 * layers
    assert 10_000 < report.weights["host"] <= 20_000
    assert report.weights["device"] + report.kv + report.ring <= report.device == 440_000 < spec.nbytes() + report.kv
    assert sum(report.weights.values()) == spec.nbytes()
    assert report.seconds["disk"] > 0
    gc.collect()
    assert not any(type(thing) is HeldMemory for thing in gc.get_objects()), "the report keeps no weights"


@pytest.mark.parametrize("short", [1, 2, 3])
def test_a_plan_that_leaves_too_little_for_buffers_is_made_again(
    short: int,
    models: Callable[[str], Path],
    expected: Callable[[str], list[RequestOutput]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Buffers are seen once weights are there: an engine's own plan is not refused by the engine, until a third one
    leaves too little.
    """
    monkeypatch.setattr("cellar.engine.opened.SPARED", 1000)
    found, wanted = list[int](), tokens_of(expected(DEEP))

    def slots(*arguments: Any, **more: Any) -> int:
        found.append(more["offloaded"].report.weights["device"])
        if len(found) <= short:
            raise BuffersError("buffers take more.", 5000)
        return plan_slots(*arguments, **more)

    monkeypatch.setattr("cellar.runtime.steps.local.plan_slots", slots)
    gib = 2.0**30
    rest = {"dtype": "float32", "block_size": 16, "kv_cache_memory_bytes": 200_000, "max_num_batched_tokens": 40}
    sizes = {"device_memory": 440_000 / gib, "host_memory": 20_000 / gib, "disk": 1.0, "disk_path": tmp_path}
    options: dict[str, Any] = {**OPTIONS, **rest, **sizes, "max_model_len": 128, "max_num_seqs": 3}
    if short == 3:
        with pytest.raises(BuffersError, match="buffers take more"):
            LLM(models(DEEP), **options)
        assert len(found) == 3
        return
    with LLM(models(DEEP), **options) as llm:
        assert tokens_of(llm.generate(*requests(), use_tqdm=False)) == wanted
        assert llm.offload is not None
        assert len(found) == short + 1
        assert llm.offload.weights["device"] == found[-1] < found[0]
        assert found == sorted(found, reverse=True)
    assert (
        caplog.text.count("a step's buffers take 4.88 KiB more than was expected; the model is planned again") == short
    )


def test_a_model_that_fits_runs_as_ever_within_its_memory(models: Callable[[str], Path]) -> None:
    with LLM(models("llama"), dtype="float32", device_memory=0.1, max_num_batched_tokens=64, **OPTIONS) as llm:
        assert llm.plan is None
        assert llm.offload is None
        assert llm.stats().total_chunks == int(0.1 * 2**30 * 0.25) // llm.spec.kv.chunk_nbytes()


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"device_memory": 4.1e-4}, r"weights are left, but disk is 0 GiB"),
        ({"device_memory": 1e-4, "disk": 1.0}, r"tables, head, the ring of two layers, KV and buffers take"),
        ({"device_memory": 2e-4, "kv": 100}, r"one request of max_model_len 128 needs .* of KV, but"),
    ],
)
def test_places_that_are_too_small_are_named(
    models: Callable[[str], Path], sizes: dict[str, float], sentence: str
) -> None:
    kv = int(sizes.pop("kv", 200_000))
    options = OPTIONS | {"host_memory": 1e-6, "max_num_seqs": 3, "max_num_batched_tokens": 16, **sizes}
    with pytest.raises(CapacityError, match=sentence):
        LLM(models(DEEP), dtype="float32", max_model_len=128, kv_cache_memory_bytes=kv, **options)


def test_what_does_not_run_offloaded_is_refused(models: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="host_memory and disk are for what device_memory does not hold"):
        LLM(models("llama"), disk=1.0, **OPTIONS)


def test_a_disk_that_fails_ends_requests_clearly_and_the_engine_goes_on(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the disk is well again, and so are the answers."""
    model, bad = models("llama"), [False]
    plain = WeightFile._pread

    def read(self: WeightFile, part: Any, offset: int) -> int:
        count = plain(self, part, offset)
        part[0] ^= bad[0]
        return count

    monkeypatch.setattr(WeightFile, "_pread", read)
    file = tmp_path / "plan.json"
    file.write_text(plan_of(spec_of(model), random_placement(spec_of(model), 3), LIMITS).to_json())
    with LLM(model, plan=file, disk_path=tmp_path, **OPTIONS) as llm:
        before = tokens_of(llm.generate(*requests(), use_tqdm=False))
        bad[0] = True
        for one in llm.generate(*requests(), use_tqdm=False)[1:]:
            assert one.outputs[0].finish_reason == "error"
            assert "damaged: a checksum is another" in str(one.outputs[0].stop_reason)
        bad[0] = False
        llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)
        assert tokens_of(llm.generate(*requests(), use_tqdm=False)) == before


def test_the_block_schedule_loads_a_layer_once_for_all_batches(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over three sequences in batches of one takes each layer's weights once."""
    taken: list[int] = []
    computed: list[int] = []
    take = WeightRing.take

    def counted(self: WeightRing, layer: int) -> int:
        taken.append(layer)
        return take(self, layer)

    passing = Forward.passed

    def seen(self: Forward, batches: Any, *rest: Any) -> Any:
        computed.append(len(batches))
        return passing(self, batches, *rest)

    monkeypatch.setattr(WeightRing, "take", counted)
    monkeypatch.setattr(Forward, "passed", seen)
    spec = spec_of(models("llama"))
    answers_of(models("llama"), random_placement(spec, 0, batch=1), tmp_path)
    assert len(taken) == 4 * len(computed)
    assert max(computed) == 3


# -- planted bugs: each is found by comparing tokens ------------------------------------------------


def _given_too_early(patch: pytest.MonkeyPatch) -> None:
    """The other layer's bytes come into a slot before it was used."""
    take = WeightRing.take

    def early(self: WeightRing, layer: int) -> int:
        slot = take(self, layer)
        self._fill(slot, (layer + 1) % DEEP_LAYERS)
        return slot

    patch.setattr(WeightRing, "take", early)


def _stale_slot(patch: pytest.MonkeyPatch) -> None:
    """A slot keeps what it had before."""
    fill, done = StreamedLayers._fill, set[int]()

    def once(self: StreamedLayers, slot: int, layer: int) -> Fence:
        if slot in done:
            return self._mover.moved()
        done.add(slot)
        return fill(self, slot, layer)

    patch.setattr(StreamedLayers, "_fill", once)


def _off_by_one(patch: pytest.MonkeyPatch) -> None:
    """The layer after the next is loaded."""
    fill = StreamedLayers._fill
    patch.setattr(StreamedLayers, "_fill", lambda self, slot, layer: fill(self, slot, (layer + 1) % DEEP_LAYERS))


@pytest.mark.parametrize("plant", [_given_too_early, _stale_slot, _off_by_one])
def test_planted_bugs_change_tokens(
    plant: Callable[[pytest.MonkeyPatch], None],
    models: Callable[[str], Path],
    expected: Callable[[str], list[RequestOutput]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = spec_of(models(DEEP))
    # The same rows of each layer are away, so that any layer's bytes fit any slot.
    plan = capped_plan(spec, Room(440_000, 20_000, 10**6, 200_000), LIMITS, model="tiny", machine="any")
    assert tokens_of(answers_of(models(DEEP), plan.placement, tmp_path)) == tokens_of(expected(DEEP))
    plant(monkeypatch)
    assert tokens_of(answers_of(models(DEEP), plan.placement, tmp_path)) != tokens_of(expected(DEEP))


# -- plans made of bytes ----------------------------------------------------------------------------


@pytest.mark.long
def test_plans_fill_the_faster_place_first() -> None:
    """More of the device: less elsewhere. Nothing is placed twice, and what is counted is what the runtime carves."""
    from cellar.runtime.offload.layout import placed_rows, planned_nbytes
    from cellar.runtime.offload.opened import device_nbytes

    spec = open_model(CONFIG | {"num_hidden_layers": 6}, "float32", 16, 64).spec
    limits = Limits(2, 16, 64)
    last = 0
    for device in range(255_000, 345_000, 10_000):
        for host in (0, 30_000, None):
            room = Room(device, host, 10**9, 50_000)
            if fits(spec, room, limits):
                continue
            plan = capped_plan(spec, room, limits, model="m", machine="any")
            rows = placed_rows(plan.placement, spec)
            found = planned_nbytes(rows)
            assert device_nbytes(spec, rows, plan.placement.num_chunks) <= device
            assert host is None or found["host"] <= host
            assert found["disk"] == 0 or (host is not None and found["host"] > host - 6000)
            assert sum(found.values()) == spec.nbytes()
            if host == 0:
                assert found["device"] >= last
                last = found["device"]


# -- for people -------------------------------------------------------------------------------------


def cellar(*arguments: str) -> str:
    result = CliRunner().invoke(build(), list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


SMALL = ("--dtype", "float32", "--max-num-batched-tokens", "40", "--max-num-seqs", "3", "--num-threads", "1")
HELD = ("--device-memory", "0.00041", "--host-memory", "0.00002", "--disk", "1", "--kv-cache-memory-bytes", "200000")


def test_generate_says_what_goes_where(models: Callable[[str], Path], tmp_path: Path) -> None:
    model = ("--model", str(models(DEEP)), "--device", "cpu", "--max-model-len", "128", *SMALL)
    output = cellar("generate", "Once", *model, *HELD, "--disk-path", str(tmp_path), "--max-tokens", "4")
    words = (
        "What goes where",
        "device",
        "host",
        "disk",
        "a pass moves",
        "KV",
        "ring",
        "predicted:",
        "tok/s",
        "a pass of",
    )
    for word in words:
        assert word in output
    # It ends with what was predicted beside what was measured.
    assert "predicted by the plan for cpu" in output
    assert "generated tok/s" in output
    assert re.search(r"disk busy +\d+\.\d+ +\d+\.\d+ +\d", output), output
    assert re.search(r"device busy +\d+\.\d+ +\d+\.\d+ +\d", output), output


@pytest.mark.long
def test_a_latency_bounds_what_runs_at_once(models: Callable[[str], Path], tmp_path: Path) -> None:
    """The engine of a bound that one request needs runs one at a time; of none, three. Too tight a bound says so."""
    sizes = {"device_memory": 440_000 / 2**30, "host_memory": 1e-4, "disk": 1.0, "disk_path": tmp_path}
    rest = {"dtype": "float32", "block_size": 16, "kv_cache_memory_bytes": 200_000, "max_num_batched_tokens": 40}
    options: dict[str, Any] = OPTIONS | rest | sizes | {"max_model_len": 128, "max_num_seqs": 3}
    with LLM(models(DEEP), **options, latency=1e6) as llm:
        assert llm.config.schedule.max_num_seqs == 3
        assert llm.plan is not None
        assert llm.plan.figures["predicted"]["request_seconds"] <= 1e6
    with pytest.raises(ConfigError, match=r"a latency of 1e-06 s is impossible: one request of 1 \+ 127 tokens takes"):
        LLM(models(DEEP), **options, latency=1e-6)
    fitting: dict[str, Any] = options | {"device_memory": 0.1}
    with pytest.raises(ConfigError, match="a latency of 1e-06 s is impossible"):
        LLM(models(DEEP), **fitting, latency=1e-6)
    with LLM(models(DEEP), **fitting, latency=1e6) as llm:
        assert llm.plan is None


def test_pure_loss_is_said(models: Callable[[str], Path], caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """What this machine holds need not move; nor what fits in fewer bits. A server's log has what is predicted, too."""
    caplog.set_level("INFO", "cellar")
    wide = write_checkpoint(tmp_path / "wide", num_hidden_layers=12, hidden_size=128, intermediate_size=256)
    options: dict[str, Any] = OPTIONS | {"dtype": "float32", "max_num_batched_tokens": 40, "max_num_seqs": 3}
    held = {"device_memory": 0.005, "kv_cache_memory_bytes": 800_000, "max_model_len": 128}
    with LLM(wide, **options, **held) as llm:
        assert llm.offload is not None
    assert "offloading is pure loss here" in caplog.text
    assert "with --quantization int8 the model would fit device_memory" in caplog.text
    assert "tok/s, 1 sequence a pass of" in caplog.text


def test_a_plan_for_a_processor_held_to_a_part_runs(models: Callable[[str], Path], tmp_path: Path) -> None:
    """`cellar plan` writes it, `cellar generate --plan` runs it; options that would change nothing are refused."""
    machine, file = str(profile(tmp_path / "machine.json")), tmp_path / "plan.json"
    lengths = ("--prompt", "40", "--generate", "20", "--block-size", "16")
    held = ("--device-memory", "0.003", "--host-memory", "0.00002", "--disk", "1")
    output = cellar("plan", str(models(DEEP)), "--machine", machine, *lengths, *held, "-o", str(file))
    assert "What goes where" in output
    saved = load_plan(file)
    places = {part.device for part in saved.placement.weights}
    assert places == {"device", "host", "disk"}
    output = cellar("generate", "Once", "--plan", str(file), "--device", "cpu", "--disk-path", str(tmp_path), *held)
    assert "What goes where, read back" in output
    assert "predicted:" in output
    assert "40 + 20 tokens end within" in " ".join(output.split())
    bound = ("plan", str(models(DEEP)), "--machine", machine, *lengths, *held, "--latency")
    assert "predicted:" in cellar(*bound, "1000")
    refused = CliRunner().invoke(build(), [*bound, "1e-9"])
    assert "a latency of 1e-09 s is impossible: one request of 40 + 20 tokens takes" in " ".join(refused.output.split())
    refused = CliRunner().invoke(build(), ["plan", str(models(DEEP)), "--machine", machine, *held, "--json"])
    assert refused.exit_code == 2
    assert "json has no effect on a processor held to device_memory" in " ".join(refused.output.split())


@pytest.mark.long
def test_batch_runs_an_offloaded_model(models: Callable[[str], Path], tmp_path: Path) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(line))
    model = ("--model", str(models(DEEP)), "--device", "cpu", "--max-model-len", "128", "--served-model-name", "m")
    output = cellar("batch", str(source), "-o", str(tmp_path / "out.jsonl"), *model, *SMALL, *HELD)
    assert "What goes where" in output
    assert json.loads((tmp_path / "out.jsonl").read_text())["response"]["status_code"] == 200


def batch_of(folder: Path, model: Path, count: int) -> list[str]:
    """Arguments of `cellar batch` for a file of so many lines, over a model half of which lies on disk."""
    lines = []
    for k in range(count):
        body = {"prompt": [5, 6, 7 + k], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        lines.append(json.dumps({"custom_id": str(k), "method": "POST", "url": "/v1/completions", "body": body}))
    (folder / "in.jsonl").write_text("\n".join(lines))
    options = ["--device", "cpu", "--max-model-len", "128", "--served-model-name", "m", "--max-in-flight", "3"]
    places = [*SMALL, *HELD, "--disk-path", str(folder / "disk")]
    return [
        "batch",
        str(folder / "in.jsonl"),
        "-o",
        str(folder / "out.jsonl"),
        "--model",
        str(model),
        *options,
        *places,
    ]


def answered(folder: Path) -> list[str]:
    """Lines of the results that are whole."""
    output = folder / "out.jsonl"
    text = output.read_text() if output.exists() else ""
    return [json.loads(line)["custom_id"] for line in text.split("\n")[:-1] if line]


@pytest.mark.long
def test_a_batch_that_was_killed_goes_on(models: Callable[[str], Path], tmp_path: Path) -> None:
    """kill -9 in the middle: nothing is left on the disk, and the same command does the rest, each line once."""
    arguments = batch_of(tmp_path, models(DEEP), 60)
    command = [sys.executable, "-m", "cellar", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: len(answered(tmp_path)) >= 3)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    before = answered(tmp_path)
    assert 3 <= len(before) < 60
    assert not list((tmp_path / "disk").iterdir())
    output = cellar(*arguments)
    assert f"{60 - len(before)} succeeded, 0 failed, {len(before)} were done before" in " ".join(output.split())
    assert sorted(answered(tmp_path), key=int) == [str(k) for k in range(60)]


@pytest.mark.long
def test_a_batch_without_room_on_the_disk_ends_in_a_sentence_and_goes_on(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    arguments = batch_of(tmp_path, models(DEEP), 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", _no_room)
        refused = CliRunner().invoke(build(), arguments)
    assert refused.exit_code == 2
    assert "has no room for" in " ".join(refused.output.split())
    assert answered(tmp_path) == []
    assert "3 succeeded, 0 failed" in " ".join(cellar(*arguments).split())


READ = os.preadv


def _truncated(file: int, parts: list[memoryview], offset: int) -> int:
    os.ftruncate(file, 0)
    return READ(file, parts, offset)


def _broken(file: int, parts: list[memoryview], offset: int) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [(_broken, r"\(\[Errno 5\] Input/output error\)"), (_truncated, r"\(it is cut short: 0 of \d+ bytes\)")],
)
def test_a_batch_whose_disk_fails_ends_in_a_sentence_and_goes_on(
    fault: Callable[..., int], sentence: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """What was answered is kept; what was not is no answer, so that the same command does it."""
    arguments, count = batch_of(tmp_path, models(DEEP), 12), [0]

    def read(file: int, parts: list[memoryview], offset: int) -> int:
        count[0] += 1
        return fault(file, parts, offset) if len(answered(tmp_path)) >= 3 else READ(file, parts, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", read)
        ended = CliRunner().invoke(build(), arguments)
    words = " ".join(ended.output.split())
    assert ended.exit_code == 2, words
    kept = "; what is done is kept, so check the disk and run the same command again."
    assert re.search(rf"the weights on the disk of \S+ cannot be read {sentence}{kept}", words), words
    before = answered(tmp_path)
    assert 3 <= len(before) < 12
    words = " ".join(cellar(*arguments).split())
    assert f"{12 - len(before)} succeeded, 0 failed, {len(before)} were done before" in words
    assert sorted(answered(tmp_path), key=int) == [str(k) for k in range(12)]


def test_a_disk_that_fails_at_the_start_is_a_sentence(models: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", _broken)
        refused = CliRunner().invoke(build(), batch_of(tmp_path, models(DEEP), 3))
    assert refused.exit_code == 2
    assert "cannot be read ([Errno 5] Input/output error); check the disk" in " ".join(refused.output.split())
    assert answered(tmp_path) == []


def test_a_slow_disk_is_waited_for(
    models: Callable[[str], Path],
    expected: Callable[[str], list[RequestOutput]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens are the same, and the seconds of the disk are what it took."""

    def slow(file: int, parts: list[memoryview], offset: int) -> int:
        time.sleep(0.005)
        return READ(file, parts, offset)

    monkeypatch.setattr(os, "preadv", slow)
    file = tmp_path / "plan.json"
    spec = spec_of(models("llama"))
    file.write_text(plan_of(spec, random_placement(spec, 3), LIMITS).to_json())
    with LLM(models("llama"), plan=file, disk_path=tmp_path, **OPTIONS) as llm:
        assert llm.offload is not None
        found = llm.generate(*requests(), use_tqdm=False)
        passes = max(len(one) for one in tokens_of(found))
        assert llm.offload.channels.disk.seconds >= 0.005 * passes
        assert llm.offload.failure() is None
    assert tokens_of(found) == tokens_of(expected("llama"))


@pytest.mark.long
def test_passes_run_at_the_disks_rate(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that brings a layer in 0.1 s, and has lost what it could have brought while nobody asked, and a layer that
    takes 0.05 s: decodes read at 85 % of the disk's rate or more.
    """
    compute = forward.run_layer

    def computed(*inputs: Any) -> Any:
        time.sleep(0.05)
        return compute(*inputs)

    lock, free = threading.Lock(), [0.0]
    spec = spec_of(models(DEEP))
    plan = capped_plan(spec, Room(440_000, 20_000, 10**6, 200_000), LIMITS, model="tiny", machine="any")
    file = tmp_path / "plan.json"
    file.write_text(plan_of(spec, plan.placement, LIMITS).to_json())

    def slow(file: int, parts: list[memoryview], offset: int) -> int:
        count = READ(file, parts, offset)
        with lock:
            free[0] = max(free[0], time.perf_counter()) + 0.1
            wait = free[0] - time.perf_counter()
        time.sleep(max(0.0, wait))
        return count

    with LLM(models(DEEP), plan=file, disk_path=tmp_path, **OPTIONS) as llm:
        monkeypatch.setattr(os, "preadv", slow)
        monkeypatch.setattr(forward, "run_layer", computed)
        ends = [time.perf_counter() for _ in llm.stream([5, 6], SamplingParams(max_tokens=7, ignore_eos=True))]
    seconds = median(after - before for before, after in pairwise(ends))  # a busy machine may keep one of them
    assert DEEP_LAYERS * 0.1 / seconds >= 0.85


def _no_room(file: int, offset: int, size: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
