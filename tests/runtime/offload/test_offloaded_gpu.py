"""Weights streamed to a GPU: the resident engine's tokens, nothing waited for in a step, memory held to a budget."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cellar import LLM, CompletionOutput, SamplingParams
from cellar.core.cpu_rows import most_tokens
from cellar.core.errors import DeviceError
from cellar.core.messages import RequestOutput, StepPlan
from cellar.models.registry import open_model, read_config
from cellar.ops.linear.dense import DenseWeight
from cellar.planner.saved import Limits
from cellar.runtime.offload import host_kv
from cellar.runtime.offload.channels import Channel
from cellar.runtime.offload.cpu_jobs import CpuJobs
from cellar.runtime.offload.host_rows import Exchange, HostRows, have_units
from cellar.runtime.offload.signal import signal_for
from cellar.runtime.recorder import Recorded
from cellar.runtime.steps.recorded_layers import ROOM
from cellar.runtime.steps.worker import StepWorker
from tests.conformance.chatglm import config_of
from tests.runtime.offload.placements import plan_of, random_placement
from tests.tiny_checkpoint import write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device"),
]

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_layers": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 9},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "tie_word_embeddings": True},
    "opt": {"architectures": ["OPTForCausalLM"], "ffn_dim": 512, "word_embed_proj_dim": 128},
    "chatglm": config_of(4, 2, 64, 256),
}
LIMITS = Limits(max_num_seqs=3, max_num_batched_tokens=40, max_model_len=128)
OPTIONS: dict[str, Any] = {"device": "cuda", "skip_tokenizer_init": True}
GIB = 2**30
Steps = tuple[Any, ...]
CHAOS = 0.6
"""FP8 rounds tokens: what differs in the last bit may become another code, a sixteenth away. Embeddings of this model
that differ by a millionth move log-probabilities by up to 0.2 in float32; in bfloat16 0.43 was seen.
"""


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Nine prompts of 1 to 60 tokens, which end at different times."""
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 60, int(n)).tolist() for n in random.integers(1, 60, 8)]
    prompts.append([*prompts[0], 7])
    lengths = random.integers(2, 14, 9).tolist()
    return prompts, [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=5) for n in lengths]


def tokens_of(found: list[RequestOutput]) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in found]


def equal_but_for_ties(found: CompletionOutput, wanted: CompletionOutput, near: float = 0.1) -> bool:
    """Whether all tokens are equal. The first one that is not must have been about as likely."""
    assert wanted.logprobs is not None
    for token, other, likely in zip(found.token_ids, wanted.token_ids, wanted.logprobs, strict=True):
        if token != other:
            assert token in likely
            assert likely[other].logprob - likely[token].logprob < near
            return False
    return True


def gap_of_first_tokens(found: list[RequestOutput], wanted: list[RequestOutput]) -> float:
    """By how much the log-probabilities of the first tokens differ at most, of those that both found likely."""
    gaps: list[float] = []
    for one, other in zip(found, wanted, strict=True):
        here, there = one.outputs[0].logprobs, other.outputs[0].logprobs
        assert here is not None
        assert there is not None
        both = here[0].keys() & there[0].keys()
        assert len(both) >= 2, "of five"
        gaps.extend(abs(here[0][token].logprob - there[0][token].logprob) for token in both)
    return max(gaps)


def resident(model: Path, dtype: str, quantization: str | None = None, kept: str = "auto") -> list[RequestOutput]:
    options = OPTIONS | {"dtype": dtype, "block_size": 16, "kv_cache_memory_bytes": 10**7, "enforce_eager": True}
    options["kv_cache_dtype"] = kept
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 40, "max_model_len": 128}
    with LLM(model, **options, **limits, quantization=quantization) as llm:
        return llm.generate(*requests(), use_tqdm=False)


def offloaded(
    model: Path,
    folder: Path,
    dtype: str,
    seed: int,
    quantization: str | None = None,
    kept: str = "auto",
    limits: Limits = LIMITS,
    **how: Any,
) -> LLM:
    spec = open_model(read_config(model), dtype, 16, limits.max_model_len, quantization, kept).spec
    file = folder / f"plan-{dtype}-{seed}.json"
    plan = plan_of(spec, random_placement(spec, seed, **how), limits, "gpu")
    file.write_text(replace(plan, kv_cache_dtype=kept).to_json())
    return LLM(model, plan=file, disk_path=folder / "disk", **OPTIONS, quantization=quantization)


def test_a_stream_waits_for_the_cpu_and_nobody_else_does() -> None:
    """Counters go past 32 bits; what a job writes late is there for the kernel behind `hold`."""
    device = torch.device("cuda")
    signal = signal_for(device)
    assert signal.runs_ahead
    signal.hold(2**32 + 5)
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    time.sleep(0.05)
    assert not event.query()
    signal.set(2**32 + 5)
    event.synchronize()

    jobs, go_on = CpuJobs(signal_for(device), 1), threading.Event()
    matrix = torch.randint(-4, 5, (3, 4), dtype=torch.float32)

    class Late(DenseWeight):
        """Multiplies when it may."""

        __slots__ = ()

        def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
            assert go_on.wait(60)
            return super().multiply(x, bias)

    try:
        weight = HostRows(Late(matrix), Exchange(device, Channel(), jobs))

        def launched() -> list[tuple[int, Tensor, Tensor]]:
            found = []
            for number in range(6):
                x = torch.full((2, 4), number, dtype=torch.float32, device=device)
                found.append((number, weight.multiply(x), weight.multiply(x + 1)))
                x.zero_()
            event.record()
            return found

        go_on.set()
        launched()  # to load a kernel, the driver may wait for the stream
        event.synchronize()
        go_on.clear()
        found = launched()
        time.sleep(0.05)
        assert not event.query(), "six passes are launched, and the first product is not there"
        go_on.set()
        for number, first, second in found:
            assert torch.equal(first.cpu(), torch.full((2, 4), number, dtype=torch.float32) @ matrix.T)
            assert torch.equal(second.cpu(), torch.full((2, 4), number + 1, dtype=torch.float32) @ matrix.T)
    finally:
        go_on.set()
        jobs.close()


@pytest.mark.parametrize("where", ["rows", "attention"])
def test_a_job_of_the_cpu_that_fails_ends_its_step_and_the_engine_goes_on(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, bad, done = write_checkpoint(tmp_path / "model", **SHAPE), [False], list[str]()
    multiply, attend = DenseWeight.multiply, host_kv.decode_attention

    def attended(*arguments: Any) -> Tensor:
        done.append("attention")
        if bad[0] and where == "attention":
            raise DeviceError("the CPU gives up")
        return attend(*arguments)

    def multiplied(self: DenseWeight, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if not x.is_cpu:
            return multiply(self, x, bias)
        done.append("rows")
        if bad[0] and where == "rows":
            raise DeviceError("the CPU gives up")
        return multiply(self, x, bias)

    monkeypatch.setattr(DenseWeight, "multiply", multiplied)
    monkeypatch.setattr(host_kv, "decode_attention", attended)
    kv = ("host", "host") if where == "attention" else ("device", "device")
    prompts, params = [[5, 6, 7], [8, 9]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with offloaded(model, tmp_path, "float32", 0, kv=kv, places=("device", "host")) as llm:
        before = tokens_of(llm.generate(prompts, params, use_tqdm=False))
        assert where in done
        bad[0] = True
        for one in llm.generate(prompts, params, use_tqdm=False):
            assert one.outputs[0].finish_reason == "error"
            assert "the CPU gives up" in str(one.outputs[0].stop_reason)
        bad[0] = False
        assert tokens_of(llm.generate(prompts, params, use_tqdm=False)) == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_long_prompt_after_a_short_step_leaves_nothing_to_the_cpu(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layers of a pass are on their way while the pass before is computed, which may have few tokens."""
    model, multiply, seen = write_checkpoint(tmp_path / "model", **SHAPE), DenseWeight.multiply_into, list[int]()

    def multiplied(self: DenseWeight, out: Tensor, x: Tensor) -> None:
        seen.append(len(x))
        multiply(self, out, x)

    monkeypatch.setattr(DenseWeight, "multiply_into", multiplied)
    short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    most = most_tokens(codes=False, units=have_units(dtype))
    limits = replace(LIMITS, max_num_batched_tokens=128)
    with offloaded(model, tmp_path, dtype, 0, limits=limits, places=("device", "host")) as llm:
        for tokens in (5, 38, most, most + 1, 5, most + 3):
            prompt = [[3 + (k + tokens) % 50 for k in range(tokens)]]
            first = tokens_of(llm.generate(prompt, short, use_tqdm=False))
            again = tokens_of(llm.generate([[*prompt[0], *first[0][:1]]], short, use_tqdm=False))
            if dtype == "float32":  # another number of tokens has other sums, which matter in fewer bits
                assert again[0][:1] == first[0][1:2]
    assert max(seen) == most


@pytest.mark.parametrize("kind", FAMILIES)
def test_float32_gives_the_resident_engines_tokens(kind: str, tmp_path: Path) -> None:
    """Rows of each tensor anywhere, GPU batches of one and three sequences; log-probabilities to the last digits."""
    model = write_checkpoint(tmp_path / "model", **({"model_type": kind} | FAMILIES[kind] | SHAPE))
    wanted = resident(model, "float32")
    for seed in range(3):
        with offloaded(model, tmp_path, "float32", seed, batch=1 + 2 * (seed % 2)) as llm:
            found = llm.generate(*requests(), use_tqdm=False)
        assert tokens_of(found) == tokens_of(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=2e-3)


@pytest.mark.parametrize("by", ["host", "device", "both"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_kv_in_host_memory(kind: str, by: str, tmp_path: Path) -> None:
    """The CPU attends to decodes, or the device does over the link, or each to some; prompts in pieces, and beside
    decodes.
    """
    model = write_checkpoint(tmp_path / "model", **({"model_type": kind} | FAMILIES[kind] | SHAPE))
    wanted = resident(model, "float32")
    with offloaded(model, tmp_path, "float32", 4, batch=2, kv=("host", by)) as llm:
        found = llm.generate(*requests(), use_tqdm=False)
    assert tokens_of(found) == tokens_of(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=2e-3)


@pytest.mark.parametrize("by", ["host", "device", "both"])
@pytest.mark.parametrize(("kind", "kept"), [("llama", "int4"), ("llama", "fp8"), ("opt", "int4")])
def test_k_and_v_in_fewer_bits_in_host_memory(kind: str, kept: str, by: str, tmp_path: Path) -> None:
    """The CPU writes the codes of decodes and the device those of prompts, each by its own rounding of K and V."""
    model = write_checkpoint(tmp_path / "model", **({"model_type": kind} | FAMILIES[kind] | SHAPE))
    wanted, equal = resident(model, "float32", kept=kept), 0
    with offloaded(model, tmp_path, "float32", 4, batch=2, kv=("host", by), kept=kept) as llm:
        for one, other in zip(llm.generate(*requests(), use_tqdm=False), wanted, strict=True):
            equal += equal_but_for_ties(one.outputs[0], other.outputs[0])
    assert equal >= 7, "of 9"


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_bfloat16_gives_the_resident_engines_tokens(kind: str, tmp_path: Path) -> None:
    """Whole tensors anywhere; those that the CPU multiplies are rounded differently, so ties may go the other way."""
    model = write_checkpoint(tmp_path / "model", **({"model_type": kind} | FAMILIES[kind] | SHAPE))
    wanted = resident(model, "bfloat16")
    equal = 0
    for seed in range(3):
        with offloaded(model, tmp_path, "bfloat16", seed, batch=3, whole=True) as llm:
            for one, other in zip(llm.generate(*requests(), use_tqdm=False), wanted, strict=True):
                equal += equal_but_for_ties(one.outputs[0], other.outputs[0])
    assert equal >= 20, "of 27"


@pytest.mark.parametrize("form", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_quantized_weights_come_in_their_bits(kind: str, form: str, tmp_path: Path) -> None:
    """Rows of each tensor anywhere, some multiplied by the CPU; in float32 the resident engine's tokens."""
    model = write_checkpoint(tmp_path / "model", **({"model_type": kind} | FAMILIES[kind] | SHAPE))
    wanted = resident(model, "float32", form)
    for seed in range(3):
        with offloaded(model, tmp_path, "float32", seed, form, batch=1 + 2 * (seed % 2)) as llm:
            found = llm.generate(*requests(), use_tqdm=False)
        if form == "fp8":
            assert gap_of_first_tokens(found, wanted) < CHAOS
        else:
            assert tokens_of(found) == tokens_of(wanted)


@pytest.mark.parametrize("form", ["int4", "int8", "fp8"])
def test_quantized_weights_in_bfloat16(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels of weights that stay: wherever whole tensors come from, the same loop says exactly what
    it says with all of them on the device; where the CPU multiplies some, that but for ties. On a busy machine a
    result may be late and a row join a step later: then a product has other tokens beside it, and other last bits.
    """
    model = write_checkpoint(tmp_path / "model", **SHAPE)
    steps: list[Any] = []
    submit = StepWorker.submit

    def noted(worker: StepWorker, plan: StepPlan) -> None:
        steps.append(tuple(map(tuple, (plan.spans.row, plan.spans.start, plan.spans.stop))))
        submit(worker, plan)

    monkeypatch.setattr(StepWorker, "submit", noted)

    def said(seed: int, *places: str) -> tuple[Steps, list[RequestOutput]]:
        steps.clear()
        with offloaded(model, tmp_path, "bfloat16", seed, form, batch=3, whole=True, places=places) as llm:
            found = llm.generate(*requests(), use_tqdm=False)
        return tuple(steps), found

    known = dict([said(0, "device")])
    for seed, places in ((0, ("device", "disk")), (1, ("device", "host", "disk")), (3, ("host",))):
        for _ in range(10):  # of 744 runs on a machine that had too much to do, 39 had other steps than the rest
            of, found = said(seed, *places)
            if of in known:
                break
            known |= [said(0, "device")]
        wanted = known[of]
        assert tokens_of(found) == tokens_of(wanted)
        assert gap_of_first_tokens(found, wanted) == 0
    _, by_cpu = said(2, "device", "host", "disk")
    if form == "fp8":
        assert gap_of_first_tokens(by_cpu, wanted) < CHAOS
    else:
        equal = [equal_but_for_ties(a.outputs[0], b.outputs[0]) for a, b in zip(by_cpu, wanted, strict=True)]
        assert sum(equal) >= 6, "of 9"


@pytest.mark.parametrize("kv", [("device", "device"), ("host", "host"), ("host", "both")])
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_passes_are_replayed_and_say_what_launches_say(
    kind: str, kv: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows by the CPU and in the ring's slots among them. What is launched one by one is padded alike."""
    model = write_checkpoint(tmp_path / "model", **({"model_type": kind} | FAMILIES[kind] | SHAPE))
    replay, replayed = Recorded.replay, [0]

    def counted(self: Recorded) -> None:
        replayed[0] += 1
        replay(self)

    monkeypatch.setattr(Recorded, "replay", counted)
    wanted = resident(model, "float32")
    with offloaded(model, tmp_path, "float32", 4, places=("device", "host"), batch=3, kv=kv) as llm:
        for turn in range(2):
            before, replayed[0] = replayed[0], 0
            found = llm.generate(*requests(), use_tqdm=False)
            assert tokens_of(found) == tokens_of(wanted)
            for one, other in zip(found, wanted, strict=True):
                assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=2e-3)
            assert replayed[0] > before, f"turn {turn}: what was met before is replayed"
        assert replayed[0] >= 4 * 10, "four layers, in most passes"


@pytest.mark.parametrize("kv", [("device", "device"), ("host", "both")])
def test_passes_of_many_sequences_are_padded(kv: tuple[str, str], tmp_path: Path) -> None:
    """Thirty requests, of which 25 run at once, beside short prompts: sizes between those that have graphs."""
    model, most = write_checkpoint(tmp_path / "model", **SHAPE), {"max_num_seqs": 25, "max_num_batched_tokens": 90}
    random, limits = np.random.default_rng(1), Limits(25, 90, 128)
    prompts = [random.integers(3, 60, int(n)).tolist() for n in random.integers(1, 30, 30)]
    params = [SamplingParams(temperature=0, max_tokens=int(n), ignore_eos=True) for n in random.integers(2, 14, 30)]
    options = OPTIONS | {"dtype": "float32", "block_size": 16, "kv_cache_memory_bytes": 10**7, "enforce_eager": True}
    with LLM(model, **options, **most, max_model_len=128) as llm:
        wanted = tokens_of(llm.generate(prompts, params, use_tqdm=False))
    spec, file = open_model(read_config(model), "float32", 16, 128).spec, tmp_path / "plan.json"
    placement = random_placement(spec, 5, 160, 25, places=("device", "host"), kv=kv)
    file.write_text(plan_of(spec, placement, limits, "gpu").to_json())
    with LLM(model, plan=file, **OPTIONS) as llm:
        for _ in range(3):
            assert tokens_of(llm.generate(prompts, params, use_tqdm=False)) == wanted


def test_a_step_waits_for_nothing(tmp_path: Path) -> None:
    """Whatever would make the host wait for the device raises; it was run once before, to compile and allocate."""
    model = write_checkpoint(tmp_path / "model", **SHAPE)
    with offloaded(model, tmp_path, "float32", 0, places=("device", "host")) as llm:
        first = tokens_of(llm.generate(*requests(), use_tqdm=False))
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = llm.generate(*requests(), use_tqdm=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [one.outputs[0].finish_reason for one in again] == ["length"] * 9
    assert tokens_of(again) == first


@pytest.mark.parametrize("gib", [2.0, 4.0])
def test_device_memory_is_held(gib: float) -> None:
    """A model of 2.3 GiB on a device held to less, which streams it, and to more, which holds it."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    options = OPTIONS | {"dtype": "bfloat16", "load_format": "dummy", "max_model_len": 256, "max_num_seqs": 8}
    prompts = [[5 + k, 9, 100 + k] * 20 for k in range(8)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM("llama-3.2-1b", **options, max_num_batched_tokens=512, device_memory=gib) as llm:
        report = llm.offload
        held = torch.cuda.memory_reserved()
        found = llm.generate(prompts, params, use_tqdm=False)
        assert [len(tokens) for tokens in tokens_of(found)] == [8] * 8
        assert torch.cuda.memory_reserved() <= held + ROOM, "a step takes nothing more, but for its graphs"
        assert torch.cuda.memory_reserved() - before <= gib * GIB
        assert held - before > 0.6 * gib * GIB
    assert (report is None) == (gib > 3.5)
    if report is not None:
        assert report.weights["host"] > 0.3 * GIB
        assert report.rates["host"] > 5e9
        assert torch.cuda.memory_reserved() - before < 0.1 * GIB, "all is given back"
