"""The probe of attention scores: what it measures, what follows for a layer, and that a step does so."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from cellar import LLM, demo
from cellar.core.hardware import Profile, Table
from cellar.core.sampling import SamplingParams
from cellar.models.loader import LoadedWeights
from cellar.ops.attention.triton import attention_kernel
from cellar.reports.models import model_spec
from cellar.reports.profile import print_profile
from cellar.runtime.probes import scores
from cellar.runtime.probes.context import ProbeContext
from cellar.runtime.probes.scores import (
    COLUMNS,
    MOST_AGAIN,
    TABLE,
    GrowingContext,
    ScoreWatch,
    measure_scores,
    sampled_text,
    weights_digest,
    wide_layers,
    with_scores,
)
from cellar.runtime.steps import forward as forward_module
from cellar.runtime.steps.arena import Arena
from cellar.runtime.steps.forward import Forward
from cellar.runtime.steps.local import LocalRuntime
from tests.models.dense_context import logits_of
from tests.ops.attention_example import example
from tests.runtime.steps.steps import tiny_model

CPU = torch.device("cpu")


def seen(*scores_: torch.Tensor) -> scores.LayerScores:
    watch = ScoreWatch(CPU)
    for x in scores_:
        watch.see(x)
    return watch.found()


def test_bounds_hold_all_but_one_score_in_ten_thousand() -> None:
    noise = torch.randn(40, 2, 3, 200, generator=torch.Generator().manual_seed(0))
    noise[0, 0, 0, 0], noise[0, 0, 0, 1] = 30.0, -50.0
    found = seen(noise[:20], noise[20:])
    assert (found.least, found.most) == (-50.0, 30.0)
    flat = noise.flatten().double().numpy()
    low, high = np.quantile(flat, [5e-5, 1 - 5e-5])
    assert low - 0.126 <= found.low <= low
    assert high <= found.high <= high + 0.126
    assert found.again == 0
    assert not found.is_wide


def test_a_tile_is_a_group_and_a_piece_of_positions() -> None:
    scores_ = torch.zeros(2, 2, 3, 300)
    # The sum of 128 times e^0 is safe, and so is one large score beside it until it leaves the range.
    edge = scores.UNIFIED_RANGE * math.log(2.0)
    scores_[0, 1, 2, 290] = edge + 0.1
    assert seen(scores_).again == pytest.approx(1 / 12)
    scores_[0, 1, 0, 280] = edge + 0.1
    assert seen(scores_).again == pytest.approx(1 / 12), "both are in one tile"
    scores_[1, 0, 1, 128:256] = -edge - 6
    assert seen(scores_).again == pytest.approx(2 / 12)
    scores_[1, 0, 1, 200] = 0.0
    assert seen(scores_).again == pytest.approx(1 / 12), "scores far below the others are no failure"
    assert seen(scores_).is_wide


def test_the_context_computes_what_the_model_does() -> None:
    model, weights = tiny_model()
    tokens = torch.randint(model.spec.vocab_size, (2, 20), generator=torch.Generator().manual_seed(1))
    context = GrowingContext(model.spec, CPU, 2, 20, watch=True)
    found = []
    for position in range(20):
        context.positions.fill_(position)
        found.append(model.head(weights.head, scores.forward(model, weights, tokens[:, position], context)))
    for row in range(2):
        wanted = logits_of(model, weights, tokens[row], [20])
        torch.testing.assert_close(torch.stack(found, 1)[row], wanted, atol=2e-4, rtol=2e-4)
    assert [watch.found().again for watch in context.watches] == [0.0] * 3


def test_texts_are_the_models_own_and_differ_by_row_and_seed() -> None:
    model, weights = tiny_model()
    first, again, other = (sampled_text(model, weights, CPU, 3, 12, seed) for seed in (1, 1, 2))
    assert first.shape == (3, 12)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0, 1:], first[1, 1:])


def test_loud_layers_are_found_wide() -> None:
    """The queries and keys of one layer made so large that its scores leave the range."""
    model, weights = tiny_model()
    loud = dict(weights.layers[1])
    loud["qkv"] = loud["qkv"] * 30
    changed = LoadedWeights(weights.embedding, [weights.layers[0], loud, weights.layers[2]], weights.head)
    found = measure_scores(model, changed, CPU, 2, 40)
    assert [one.is_wide for one in found] == [False, True, False]
    assert found[1].most > 66 > found[0].most
    assert all(one.least - 0.126 <= one.low < one.high <= one.most + 0.126 for one in found)


def profile_of(checkpoint: Path, *again: float) -> Profile:
    digest = weights_digest(checkpoint)
    rows = tuple((digest, "m", j, -1.0, 1.0, -2.0, 2.0, share) for j, share in enumerate(again))
    return Profile("machine", (), tables={TABLE: Table(COLUMNS, rows)})


def test_the_first_profile_that_knows_the_weights_decides(tmp_path: Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    for folder, content in ((here, b"weights"), (there, b"others!")):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(content)
    assert weights_digest(here) != weights_digest(there)
    known, other = profile_of(here, 0.0, MOST_AGAIN * 1.01, MOST_AGAIN), profile_of(there, 1.0)
    assert wide_layers([], here) == frozenset()
    assert wide_layers([Profile("m", ()), other, known], here) == {1}
    assert wide_layers([known, profile_of(here, 1.0)], here) == {1}
    moved = tmp_path / "moved"
    shutil.copytree(here, moved)
    assert wide_layers([known], moved) == {1}


def test_a_checkpoint_is_added_to_a_profile_and_replaced(tmp_path: Path) -> None:
    base = Profile("machine", (), tables={TABLE: Table(COLUMNS, (("other", "o", 0, 0.0, 0.0, 0.0, 0.0, 0.5),))})
    profile = with_scores(base, demo.path(), "float32", CPU, rows=2, length=6, name="demo")
    again = with_scores(profile, demo.path(), "float32", CPU, rows=2, length=6, name="demo")
    again.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == again == profile
    assert [row[:3] for row in again.tables[TABLE].rows] == [
        ("other", "o", 0),
        *((weights_digest(demo.path()), "demo", j) for j in range(6)),
    ]
    assert wide_layers([again], demo.path()) == frozenset()
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_profile(again, console)
    text = console.export_text()
    assert "running maximum" in text
    assert "unified" in text


def test_the_command_writes_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.json"
    options = ["--model", str(demo.path()), "--output", str(file), "--device", "cpu", "--rows", "1", "--length", "4"]
    scores.main(options)
    assert capsys.readouterr().out.count("unified") == 6
    assert len(Profile.load(file).tables[TABLE].rows) == 6
    with pytest.raises(SystemExit, match="at least 1"):
        scores.main([*options[:-1], "0"])


def test_only_an_accelerator_and_a_checkpoint_are_probed(tmp_path: Path) -> None:
    profile, spec = Profile("m", ()), tiny_model()[0].spec
    assert scores.probe(ProbeContext(None, tmp_path, spec=spec, checkpoint=demo.path()), profile) is profile
    assert scores.probe(ProbeContext(torch.device("cuda"), tmp_path, spec=spec), profile) is profile


def works_of(forward: Forward, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The attention work that each layer of a step gets."""
    found: list[Any] = []

    class Watched(forward_module.StepContext):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            found.extend(self._works)

    class Inputs:
        row, start, stop = (np.array([n], np.int32) for n in (0, 0, 5))

    monkeypatch.setattr(forward_module, "StepContext", Watched)
    positions = torch.arange(5)
    table = torch.arange(8, dtype=torch.int32).view(1, 8)
    forward.run(forward.plan(Inputs()), positions + 7, positions, positions, table)  # type: ignore[arg-type]
    return found


def test_a_step_keeps_the_maximum_where_it_was_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    model, weights = tiny_model()
    forward = Forward(model, weights, Arena(model.spec.kv, 10, CPU), CPU)
    assert [work.softmax for work in works_of(forward, monkeypatch)] == ["auto", "auto", "auto"]
    forward.keep_maximum({1})
    works = works_of(forward, monkeypatch)
    assert [work.softmax for work in works] == ["auto", "maximum", "auto"]
    assert works[0] is works[2]
    assert works[1].prepared is works[0].prepared


def test_the_runtime_tells_it_before_the_first_step() -> None:
    model, weights = tiny_model()
    runtime = LocalRuntime(model, weights, num_slots=10, num_rows=2, device=CPU, wide_layers=[0, 2])
    try:
        assert runtime.executor is not None
        assert runtime.executor.forward._wide_layers == {0, 2}
    finally:
        runtime.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_both_plans_share_list_and_scratch() -> None:
    e = example([(0, 200, 201), (1, 30, 31)], garbage=0.0)
    work = e.work(programs=64)
    first = work.resident
    work.softmax = "unified"
    other = work.with_maximum
    assert (work.softmax, other.softmax) == ("unified", "maximum")
    assert other.resident is first
    assert other is work.with_maximum
    results = [attention_kernel(e.q, e.k_cache, e.v_cache, e.table, w, e.scale) for w in (work, other)]
    for result in results:
        np.testing.assert_allclose(result.double().numpy(), e.oracle(), atol=5e-6)
    assert not torch.equal(*results), "the maximum changes the rounding"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device")
def test_on_a_device_the_profile_decides_and_says_the_same_in_captured_steps(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    context = ProbeContext(device, tmp_path, spec=model_spec(str(demo.path()), "gpu"), checkpoint=demo.path())
    found = scores.probe(context, Profile("m", ()))
    assert len(found.tables[TABLE].rows) == 6
    assert wide_layers([found], demo.path()) == frozenset()
    prompts = [[0, *range(300, 300 + 40 * n)] for n in range(1, 4)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    said = []
    for k, profile in enumerate((found, profile_of(demo.path(), 1.0, 0.0, 1.0, 0.0, 0.0, 1.0))):
        profile.save(tmp_path / f"{k}.json")
        options: dict[str, Any] = {"machine_profile": str(tmp_path / f"{k}.json"), "device": "cuda", "dtype": "float32"}
        options["kv_cache_memory_bytes"] = 2**28
        with LLM(str(demo.path()), max_model_len=512, max_num_seqs=8, **options) as llm:
            said.append([result.outputs[0].token_ids for result in llm.generate(prompts, params, use_tqdm=False)])
    assert said[0] == said[1]
