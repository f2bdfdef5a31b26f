"""LocalRuntime on a GPU: the CPU's results, no synchronisation inside a step, run-ahead, and a true memory plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cellar import LLM, demo
from cellar.core.config import EngineConfig
from cellar.core.errors import CapacityError
from cellar.core.messages import Emit, StepPlan, StepResult
from cellar.core.sampling import SamplingParams
from cellar.models.loader import LoadedWeights, dummy
from cellar.models.registry import open_model
from cellar.runtime.memory import device_total, device_used
from cellar.runtime.pace import Pace
from cellar.runtime.probes.context import ProbeContext
from cellar.runtime.probes.registry import measure
from cellar.runtime.steps import capacity
from cellar.runtime.steps.arena import Arena
from cellar.runtime.steps.local import LocalRuntime, open_local
from cellar.runtime.steps.masks import MaskBox
from cellar.runtime.tiers.arrivals import Arrival, EventMark
from tests.limits import until
from tests.runtime.steps.steps import CONFIG, Step, prompt_of, results, run, runtime_of, story, tiny_model, tokens_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device"),
]

ONE_KV_HEAD = {"hidden_size": 544, "intermediate_size": 512, "num_attention_heads": 34, "num_key_value_heads": 1}
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


def both(dtype: str) -> tuple[LocalRuntime, LocalRuntime]:
    """The same weights on the CPU and on the GPU."""
    model, weights = tiny_model(dtype, **SHAPE)

    def moved(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to("cuda") for name, tensor in values.items()}

    there = LoadedWeights(moved(weights.embedding), [moved(layer) for layer in weights.layers], moved(weights.head))
    return runtime_of(model, weights), runtime_of(model, there, device="cuda:0")


def wait_for_graphs(runtime: LocalRuntime) -> None:
    """The worker captures in its idle moments what a start leaves."""
    executor = runtime.executor
    assert executor is not None
    until(lambda: not executor.missing().missing)


def test_float32_gives_the_tokens_of_the_cpu() -> None:
    here, there = both("float32")
    ours, theirs = run(here, *story()), run(there, *story())
    for a, b in zip(ours, theirs, strict=True):
        assert b.error is None, b.error
        assert tokens_of(b) == tokens_of(a)
        assert b.flags.tolist() == a.flags.tolist()
        assert b.seconds > 0
        assert (a.logprobs is None) == (b.logprobs is None)
        pairs = [(a.prompt_logprobs[row], b.prompt_logprobs[row]) for row in a.prompt_logprobs]
        if a.logprobs is not None and b.logprobs is not None:
            pairs.append((a.logprobs, b.logprobs))
        for one, other in pairs:
            np.testing.assert_array_equal(one.index, other.index)
            np.testing.assert_array_equal(one.rank, other.rank)
            np.testing.assert_allclose(one.logprob, other.logprob, atol=2e-3)
            np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, atol=2e-3)
    here.close()
    there.close()


PROMPTS = ((1,), (5, 2), (16,), (60, 1, 5), (60, 60), (40, 40, 40, 5, 1, 1), (60, 60, 60, 60, 2, 2))


@pytest.mark.parametrize("shape", [SHAPE, ONE_KV_HEAD])
def test_graphs_give_the_tokens_of_launches(shape: dict[str, int]) -> None:
    """Prompts of every size class beside a decode, and a step beyond all graphs; greedy, float32. With one KV head for
    34 heads decodes take wide tiles. Steps that come at once are launched, the same again recorded and replayed; then
    all is captured."""
    model, weights = tiny_model("float32", **shape)

    def moved(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to("cuda") for name, tensor in values.items()}

    there = LoadedWeights(moved(weights.embedding), [moved(layer) for layer in weights.layers], moved(weights.head))
    found = []
    for eager in (True, False):
        runtime = runtime_of(model, there, num_slots=64, device="cuda:0", enforce_eager=eager)
        executor = runtime.executor
        assert executor is not None
        assert (executor._graphs is None) == eager
        steps = [Step(0).open(0).place(0, list(range(8))).prompt(0, prompt_of(3, 1))]
        for k, lengths in enumerate(PROMPTS):
            steps.append(step := Step(1 + k).decode(0, 3 + k))
            for row, length in enumerate(lengths, 1):
                step.open(row).place(row, range(8 * row, 8 * row + 8)).prompt(row, prompt_of(length, 10 * k + row))
            step.closes = tuple(range(1, len(lengths) + 1))
        steps[-1].closes = (0, *steps[-1].closes)
        found += [[tokens_of(result) for result in run(runtime, *steps)] for _ in range(1 if eager else 2)]
        if not eager:
            wait_for_graphs(runtime)
            found.append([tokens_of(result) for result in run(runtime, *steps)])
        runtime.close()
    assert found[1:] == found[:1] * 3
    assert sum(map(len, found[0])) == 1 + sum(1 + len(lengths) for lengths in PROMPTS)


def test_steps_and_recording_take_turns() -> None:
    """Steps from this thread while the worker records in its own, again and again, give the tokens of steps alone."""
    model, weights = tiny_model("float32", **SHAPE)

    def moved(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to("cuda") for name, tensor in values.items()}

    there = LoadedWeights(moved(weights.embedding), [moved(layer) for layer in weights.layers], moved(weights.head))

    def story_of(rows: int) -> list[Step]:
        first = Step(0)
        for row in range(rows):
            first.open(row).place(row, range(8 * row, 8 * row + 8)).prompt(row, prompt_of(5 + row % 7, row))
        steps = [first]
        for k in range(12):
            steps.append(step := Step(1 + k))
            for row in range(rows):
                step.decode(row, 5 + row % 7 + k)
        steps[-1].closes = tuple(range(rows))
        return steps

    alone = runtime_of(model, there, num_slots=512, num_rows=40, device="cuda:0", enforce_eager=True)
    expected = [[tokens_of(result) for result in run(alone, *story_of(rows))] for rows in (1, 3, 19, 33)]
    alone.close()
    beside = runtime_of(model, there, num_slots=512, num_rows=40, device="cuda:0")
    executor, masks = beside.executor, MaskBox()
    assert executor is not None
    missing = [executor.missing().missing]
    found = []
    with torch.inference_mode():
        for rows in (1, 3, 19, 33):
            found.append([tokens_of(executor.launch(step.plan(), masks)()) for step in story_of(rows)])
            missing.append(executor.missing().missing)
    assert missing[0] > missing[-1], "nothing was recorded meanwhile"
    wait_for_graphs(beside)
    beside.close()
    assert found == expected


def coming(arena: Arena, slots: int) -> Arrival:
    """The first slots' keys and values, taken away, and brought back layer by layer by a queue that takes its time."""
    kept = [(k[:slots].clone(), v[:slots].clone()) for k, v in zip(arena.k, arena.v, strict=True)]
    for cache in (*arena.k, *arena.v):
        cache[:slots].fill_(torch.nan)
    torch.cuda.synchronize()
    marks = [EventMark() for _ in kept]
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for k, v, (keys, values), mark in zip(arena.k, arena.v, kept, marks, strict=True):
            torch.cuda._sleep(5_000_000)  # type: ignore[no-untyped-call]
            k[:slots].copy_(keys)
            v[:slots].copy_(values)
            for tensor in (keys, values):
                tensor.record_stream(stream)
            mark.record()
    return Arrival(np.arange(slots, dtype=np.int32), marks, range(len(marks)))


@pytest.mark.parametrize("shape", [SHAPE, ONE_KV_HEAD])
def test_pieces_give_the_tokens_of_whole_graphs(shape: dict[str, int]) -> None:
    """Prompts of several sizes behind two chunks, which are there, or on their way and no numbers until they come."""
    model, weights = tiny_model("float32", **shape)

    def moved(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to("cuda") for name, tensor in values.items()}

    there = LoadedWeights(moved(weights.embedding), [moved(layer) for layer in weights.layers], moved(weights.head))
    runtime = runtime_of(model, there, num_slots=64, device="cuda:0")
    executor = runtime.executor
    assert executor is not None
    params = SamplingParams(temperature=0.0, logprobs=3)
    found = []
    pieces: list[Sequence[int]] = [(), (0, 0, 1), (0, 1, 2)]
    for parts in pieces:
        executor.release()
        executor.capture(8, 200, parts=parts)
        torch.cuda.synchronize()
        assert executor._graphs is not None
        assert {len(captured.layers) for captured in executor._graphs._prompts.recorded.values()} == {
            max(1, len(set(parts)))
        }
        first = Step(0).open(0).place(0, [0, 1]).prompt(0, prompt_of(32, 9))
        first.closes = (0,)
        run(runtime, first)
        for away in (False, True):
            answers = []
            for k, length in enumerate((1, 16, 33, 90)):
                step = Step(1 + k).open(1, params).place(1, range(8)).prompt(1, prompt_of(length, k), 32)
                step.closes = (1,)
                arrival = coming(executor.arena, 2) if away else None
                if arrival is not None:
                    executor._arrivals.add(arrival)
                (result,) = run(runtime, step)
                if arrival is not None:
                    assert (result.seconds == 0) == bool(parts), "what such a step takes says nothing of computing"
                    executor._arrivals.remove(arrival)
                assert result.logprobs is not None
                answers.append((tokens_of(result), result.logprobs.logprob))
            found.append(answers)
    runtime.close()
    for answers in found[1:]:
        for (tokens, logprob), (same, like) in zip(answers, found[0], strict=True):
            assert tokens == same
            np.testing.assert_allclose(logprob, like, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("dtype", "median", "most"), [("bfloat16", 0.5, 2.0), ("float16", 0.1, 1.0)])
def test_halves_stay_close_to_the_cpu(dtype: str, median: float, most: float) -> None:
    """Log-probabilities here deviate by 15; bfloat16 on the CPU alone is 0.15 from float32 in the median."""
    here, there = both(dtype)
    prompt = prompt_of(60, 5)
    params = SamplingParams(temperature=0.0, prompt_logprobs=1, logprobs=1)
    step = Step(0).open(0, params).place(0, [9, 3, 5, 1])
    step.prompt(0, prompt, emit=Emit.ALL, targets=[*prompt[1:], -1])
    ours, theirs = run(here, step)[0], run(there, step)[0]
    here.close()
    there.close()
    assert theirs.error is None, theirs.error
    difference = np.abs(ours.prompt_logprobs[0].logprob - theirs.prompt_logprobs[0].logprob)
    assert float(np.median(difference)) < median
    assert float(difference.max()) < most


def test_a_step_waits_for_nothing() -> None:
    """Whatever would make the host wait raises; the story is run once before, to compile and to allocate."""
    _, there = both("float32")
    first = [tokens_of(result) for result in run(there, *story())]
    wait_for_graphs(there)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run(there, *story())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [result.error for result in found] == [None] * len(found)
    assert [tokens_of(result) for result in found] == first
    there.close()


def test_the_next_plan_is_launched_while_the_first_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    _, there = both("float32")
    prompt = prompt_of(9)
    warm = [Step(0).open(0).place(0, [0]).prompt(0, prompt), Step(1).decode(0, 9)]
    want = [tokens_of(result) for result in run(there, *warm)]
    executor = there.executor
    assert executor is not None
    launch = executor.launch
    launched: list[float] = []

    def slow(plan: StepPlan, masks: MaskBox, pace: Pace | None = None) -> Callable[[], StepResult]:
        if not launched:
            torch.cuda._sleep(2_000_000_000)  # about a second
        finish = launch(plan, masks, pace)
        launched.append(time.monotonic())
        return finish

    monkeypatch.setattr(executor, "launch", slow)
    for step in warm:
        there.workers[0].submit(step.plan())
    first = results(there, 1)
    arrived = time.monotonic()
    found = first + (results(there, 1) if len(first) < 2 else [])
    assert len(launched) == 2
    assert launched[1] < arrived - 0.2, "the second plan was launched only after the first had ended"
    assert [tokens_of(result) for result in found] == want
    there.close()


def test_a_broken_row_on_the_device() -> None:
    model, weights = tiny_model(**SHAPE)
    weights.embedding["embed"][7] = torch.nan
    there = runtime_of(
        model,
        LoadedWeights(
            {k: v.cuda() for k, v in weights.embedding.items()},
            [{k: v.cuda() for k, v in layer.items()} for layer in weights.layers],
            {k: v.cuda() for k, v in weights.head.items()},
        ),
        device="cuda:0",
    )
    good = [t for t in prompt_of(20) if t != 7]
    alone = tokens_of(run(there, Step(0).open(3).place(3, [4, 5]).prompt(3, good))[0])
    step = Step(1).open(0).open(1).place(0, [0, 1]).place(1, [2]).prompt(1, [1, 7, 2]).prompt(0, good)
    found = run(there, step, Step(2).open(1).place(1, [2]).prompt(1, good[:2]))
    assert found[0].flags.tolist() == [1, 0]
    assert found[0].tokens[1:, 0].tolist() == alone
    assert found[1].flags.tolist() == [0]
    there.close()


def test_masks_on_the_device() -> None:
    _, there = both("float32")
    step = Step(0).open(0).open(1).place(0, [0]).place(1, [1]).prompt(0, [1, 2]).prompt(1, [3, 4])
    step.masked = (1,)
    there.workers[0].submit(step.plan())
    mask = np.zeros(-(-CONFIG["vocab_size"] // 32), np.int32)
    mask[2] = 1 << 5
    assert there.poll(0.2) == []
    there.supply(0, {1: mask})
    assert tokens_of(results(there, 1)[0])[1] == 69
    there.close()


LLAMA_1B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("host", [None, 1.0], ids=["alone", "with a host below it"])
def test_the_memory_plan_is_true(host: float | None, tmp_path: Any) -> None:
    """With half of the device asked for, the largest steps stay within half of it, and the cache uses what is left.
    With a host below it prompts are captured in pieces.
    """
    import json

    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **LLAMA_1B}))
    options = {"device": "cuda:0", "dtype": "bfloat16", "load_format": "dummy", "gpu_memory_utilization": 0.5}
    config = EngineConfig.of(
        model=str(tmp_path), max_num_batched_tokens=8192, max_num_seqs=256, kv_offloading_size=host, **options
    )
    opened = open_local(config)
    device = torch.device("cuda", 0)
    limit = 0.5 * device_total(device)
    chunk = opened.spec.kv.chunk_nbytes()
    assert device_used(device) <= 1.005 * limit
    wait_for_graphs(opened.runtime)
    assert device_used(device) <= 1.005 * limit
    plans = [
        capacity._rehearsal(k, lengths, 32)
        for k, lengths in enumerate((capacity._shares(8192, 256, 8192), [8192], [32] * 256, [5000, 3192]))
    ]
    worker = opened.runtime.workers[0]
    for plan in plans:
        worker.submit(plan)
    assert [result.error for result in results(opened.runtime, len(plans), 300)] == [None] * len(plans)
    assert limit - chunk - 0.005 * limit <= device_used(device) <= 1.005 * limit
    opened.runtime.close()
    del opened, worker
    torch.cuda.empty_cache()
    with pytest.raises(CapacityError, match="max_model_len"):
        open_local(EngineConfig.of(model=str(tmp_path), kv_cache_memory_bytes=3 * chunk, **options))


def test_a_closed_model_gives_its_memory_back() -> None:
    """By default one model takes nine tenths of the device: a second one finds room only if nothing of it is left."""
    device, params = torch.device("cuda", 0), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [[0, *range(300, 300 + 40 * n)] for n in range(1, 4)]
    torch.cuda.empty_cache()
    before = device_used(device)
    for _ in range(2):
        with LLM(str(demo.path()), device="cuda:0", dtype="bfloat16", max_num_seqs=8) as llm:
            assert device_used(device) - before > 0.5 * device_total(device)
            llm.generate(prompts, params, use_tqdm=False)
        assert device_used(device) - before < 2**30


def test_probes_of_the_device(tmp_path: Any) -> None:
    found = measure(ProbeContext(torch.device("cuda", 0), tmp_path, nbytes=2**26, seconds=0.1))
    gpu = found.device("gpu")
    assert gpu is not None
    assert gpu.launch is not None
    assert gpu.bandwidth.value > 1e11
    assert gpu.flops["bfloat16"].value > gpu.flops["float32"].value
    link = next(link for link in found.links if link.source == "cpu" and link.target == "gpu")
    assert link.duplex is not None
    assert 1e9 < link.bandwidth.value < 1e12
    assert 0.3 < link.duplex.value < 1.1
    assert found.curves["link.cpu.gpu"].at(2**24) > found.curves["link.cpu.gpu"].at(2**14)


def test_decode_step_times(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints what an eager step costs; the assertion only catches a runtime that stalls."""
    model = open_model({**CONFIG, **LLAMA_1B}, "bfloat16", 32)
    there = LocalRuntime(
        model, dummy(model.spec, "cuda:0"), num_slots=2048, num_rows=64, device=torch.device("cuda", 0)
    )
    for rows in (1, 64):
        step = Step(0)
        for row in range(rows):
            step.open(row).place(row, range(row * 8, row * 8 + 8)).prompt(row, [1] * 100)
        run(there, step, *[_decodes(k, rows) for k in range(1, 4)])
        begin = time.perf_counter()
        found = run(there, *[_decodes(k, rows) for k in range(4, 24)])
        seconds = (time.perf_counter() - begin) / 20
        on_device = np.median([result.seconds for result in found])
        with capsys.disabled():
            print(f"\n1B bf16, {rows} rows: {1e3 * seconds:.2f} ms a step, {1e3 * on_device:.2f} ms on the device")
        assert seconds < 0.2
    there.close()


def _decodes(step: int, rows: int) -> Step:
    made = Step(step)
    for row in range(rows):
        made.decode(row, 99 + step)
    return made
