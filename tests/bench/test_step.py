"""The breakdown of a step: a real one on the CPU, its file and figure, and a GPU's launches as Kineto names them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cellar.bench.step import command as step
from cellar.bench.step.breakdown import Breakdown, breakdown_from, by_kind, lines_of
from cellar.bench.step.command import DecodeBench, measure
from cellar.bench.step.kinds import (
    ACTIVATION,
    ATTENTION,
    COMBINE,
    COPIES,
    EMBEDDING,
    IDLE,
    NORM,
    ROTARY,
    SAMPLING,
    Launch,
    Traffic,
    in_order,
    kinds_of,
    linear_kinds,
    times_of,
    traffic,
)
from cellar.cli.bench import bench as verb
from cellar.core.errors import ConfigError
from cellar.core.specs import ModelSpec
from cellar.models.registry import open_model, shipped_config
from cellar.reports.limits import Limits
from tests.limits import run_python
from tests.runtime.steps.steps import CONFIG

LIMITS = Limits("cpu", 1e10, 1e11, "made up")


def spec_of(**changes: object) -> ModelSpec:
    return open_model({**CONFIG, **changes}, "bfloat16").spec


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with the tiny model's config; its weights are made."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 4096}))
    return str(directory)


@pytest.fixture(scope="module")
def found(model: str) -> Breakdown:
    """Two rows whose prompts do not fit one step."""
    before = torch.get_num_threads()
    try:
        with DecodeBench(model, 2, 2500, num_steps=6, device="cpu", num_threads=1) as bench:
            return measure(bench, "tiny", LIMITS)
    finally:
        torch.set_num_threads(before)


def test_a_real_step_has_every_kind_and_its_time_adds_up(found: Breakdown) -> None:
    kinds = {kind.kind: kind for kind in found.kinds}
    for name in ("linear qkv", "linear out", "linear gate/up", "linear down"):
        assert kinds[name].launches == CONFIG["num_hidden_layers"]
        assert kinds[name].nbytes > 0
    assert kinds["linear head"].launches == 1
    # Decodes turn and write their keys within attention.
    assert ROTARY not in kinds
    for name in (NORM, ATTENTION, ACTIVATION, EMBEDDING, IDLE):
        assert kinds[name].seconds > 0
    # What lies before the first launch and behind the last one of the run is nobody's; a busy machine may stretch it.
    whole = sum(kind.seconds for kind in found.kinds)
    assert 0.2 * min(found.profiled_seconds, found.seconds) < whole < 1.05 * found.profiled_seconds
    assert found.limit_seconds > 0
    assert not found.graphs


def test_the_table_and_the_file_say_the_same(found: Breakdown, tmp_path: Path) -> None:
    assert breakdown_from(found.to_json()) == found
    text = "\n".join(lines_of(found))
    for words in ("linear gate/up", "made up", "2 x 2500", "of limit", "under the profiler"):
        assert words in text
    for bad in ("{", "[]", '{"schema": 0}', found.to_json().replace('"batch"', '"bunch"')):
        with pytest.raises(ConfigError, match="no breakdown"):
            breakdown_from(bad)


def test_a_figure_is_drawn_from_the_file_alone(found: Breakdown, tmp_path: Path) -> None:
    file, png = tmp_path / "step.json", tmp_path / "step.png"
    file.write_text(found.to_json())
    done = CliRunner().invoke(verb, ["step", "--from-json", str(file), "--png", str(png)])
    assert done.exit_code == 0, done.output
    assert breakdown_from(done.output.splitlines()[-1]) == found
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.stat().st_size > 5000


def test_what_is_asked_wrongly_is_refused_in_one_sentence(tmp_path: Path) -> None:
    for arguments, message in (
        (["--json", str(tmp_path / "x")], "add --breakdown"),
        (["--from-json", str(tmp_path / "none.json")], "cannot be read"),
        (["--device", "cpu", "--batch", "0"], "must each be at least 1"),
        (["--device", "cpu", "--quantization", "int5"], "quantization is 'int5'; it must be int4 or"),
    ):
        refused = CliRunner().invoke(verb, ["step", *arguments])
        assert refused.exit_code == 2
        assert message in " ".join(refused.output.split())
    with pytest.raises(SystemExit, match="add --breakdown"):
        step.main(["--png", str(tmp_path / "x")])


def test_without_a_breakdown_only_the_time_is_shown(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    step.main(["--model", model, "--device", "cpu", "--batch", "2", "--context", "9", "--steps", "2"])
    assert ", 2 x 9: " in capsys.readouterr().out


def test_a_prompt_and_quantized_weights_from_the_command_line(model: str) -> None:
    before = torch.get_num_threads()
    arguments = ["--model", model, "--batch", "2", "--context", "20", "--steps", "2", "--device", "cpu"]
    try:
        done = CliRunner().invoke(
            verb, ["step", *arguments, "--num-threads", "1", "--prompt", "5", "--quantization", "int8"]
        )
    finally:
        torch.set_num_threads(before)
    assert done.exit_code == 0, done.output
    report = json.loads(done.output.splitlines()[-1])
    assert (report["batch"], report["context"], report["prompt"]) == (2, 20, 5)
    assert report["seconds"] > 0


def test_on_the_gpu_machine_nothing_of_the_command_line_is_needed() -> None:
    """typer, rich and matplotlib are not there."""
    code = (
        "import sys\n"
        "for name in ('typer', 'rich', 'matplotlib', 'fastapi', 'pydantic'): sys.modules[name] = None\n"
        "import cellar.bench.step.command, benchmarks.linear, cellar.runtime.probes.linear"
    )
    run_python(code)


# One layer's launches in a captured step of few rows, and what stands before the first and behind the last layer.
ENTER = [
    ("Memcpy HtoD (Pinned -> Device)", COPIES),
    ("Memcpy HtoD (Pinned -> Device)", COPIES),
    ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)", EMBEDDING),
    ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)", EMBEDDING),
]
LAYER = [
    ("_add_norm_kernel", NORM),
    ("_flat_kernel", "linear qkv"),
    ("_rotary_kv_kernel", ROTARY),
    ("_attention_kernel", ATTENTION),
    ("_attention_combine_kernel", COMBINE),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "linear out"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasSplitKParams<float>)", "linear out"),
    ("_add_norm_kernel", NORM),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x64x64_cublas", "linear gate/up"),
    ("_activation_kernel", ACTIVATION),
    ("void gemvNSP_kernel<__nv_bfloat16, float, 1, 32, 4>", "linear down"),
]
LEAVE = [
    ("_add_norm_kernel", NORM),
    ("_flat_kernel", "linear head"),
    ("_choose_kernel", SAMPLING),
    ("void at::native::index_copy_kernel<long>(long*)", SAMPLING),
    ("Memcpy DtoH (Device -> Pinned)", COPIES),
]


def timeline(names: list[str]) -> list[Launch]:
    return [Launch(name, 10 * i, 10 * i + 8) for i, name in enumerate(names)]


def test_launches_of_a_gpu_are_told_apart() -> None:
    spec = spec_of(num_hidden_layers=3)
    steps = 2 * [*ENTER, *(3 * LAYER), *LEAVE]
    launches = timeline([name for name, _ in steps])
    assert kinds_of(launches, linear_kinds(spec)) == [kind for _, kind in steps]
    table = {kind.kind: kind for kind in by_kind(launches, spec, traffic(spec, 4, 100), 2, LIMITS)}
    assert table["linear out"].launches == 6
    assert table["linear out"].seconds == pytest.approx(6 * 8e-9)
    assert table[COPIES].launches == 3
    assert table[IDLE].seconds == pytest.approx(2e-9 * (len(steps) - 1) / 2)
    assert list(table)[:2] == [EMBEDDING, NORM]
    assert list(table)[-2:] == [COPIES, IDLE]


def test_one_token_has_its_norms_inside_the_products() -> None:
    spec = spec_of(num_hidden_layers=1)
    names = ["_norm_gemv_kernel", "_rotary_kv_kernel", "_attention_kernel", "_gemv_kernel", "_norm_gemv_kernel"]
    names += ["_gemv_kernel", "_add_norm_kernel", "_gemv_kernel", "void at::native::reduce_kernel<512, 1>"]
    kinds = [
        "linear qkv",
        ROTARY,
        ATTENTION,
        "linear out",
        "linear gate/up",
        "linear down",
        NORM,
        "linear head",
        SAMPLING,
    ]
    assert kinds_of(timeline(names), linear_kinds(spec)) == kinds


@pytest.mark.parametrize("name", ["product", "mixed_product", "product_of_bytes", "product_of_nibbles"])
def test_our_own_products_on_hopper_are_products(name: str) -> None:
    """By their names, as a profiler has them: the first of a step is no embedding, and the gated one nothing else."""
    spec = spec_of(num_hidden_layers=1)
    names = [name, "_rotary_kv_kernel", "prompt_attention", "decode_attention", name, "_add_norm_kernel"]
    names += [
        name,
        "written_out",
        "nvjet_tst_192x128_64x4_2x1_v_bz_coopB_TNN",
        "_add_norm_kernel",
        name,
        "_choose_kernel",
    ]
    roles = ["linear qkv", ROTARY, ATTENTION, ATTENTION, "linear out", NORM]
    roles += ["linear gate/up", "linear gate/up", "linear down", NORM, "linear head", SAMPLING]
    assert kinds_of(timeline(names), linear_kinds(spec)) == roles


def test_roles_are_not_guessed() -> None:
    """One product too few: which one it is cannot be known."""
    names = [name for name, _ in [*LAYER, *LEAVE]]
    del names[1]
    kinds = kinds_of(timeline(names), linear_kinds(spec_of(num_hidden_layers=1)))
    assert {kind for kind in kinds if kind.startswith("linear")} == {"linear"}
    assert in_order(["linear", IDLE, NORM]) == [NORM, "linear", IDLE]


def test_overlapping_launches_share_the_time() -> None:
    """A kernel that was launched early waits for the one in front; the whole is what the clock saw."""
    launches = [Launch("a", 100, 200), Launch("b", 150, 260), Launch("c", 270, 300), Launch("d", 280, 290)]
    assert times_of(launches, ["x", "y", "x", "y"]) == {"x": 130, "y": 60, IDLE: 10}
    assert times_of([], []) == {}


def test_bytes_and_flops_by_hand() -> None:
    config = shipped_config("llama-3-8b")
    assert config is not None
    spec = open_model(config, "bfloat16").spec
    needs = traffic(spec, 8, 1000)
    assert needs["linear qkv"] == Traffic(32 * 6144 * 4096 * 2, 2 * 8 * 32 * 6144 * 4096, 32)
    assert needs["linear head"].nbytes == 128256 * 4096 * 2
    assert needs[ATTENTION] == Traffic(8 * 1000 * 131072, 8 * 1000 * 32 * 4 * 32 * 128, 32)
    assert needs[NORM] == Traffic(65 * 8 * 4 * 4096 * 2, 0, 65)
    assert needs[NORM].launched(13) == Traffic(13 * 8 * 4 * 4096 * 2, 0, 13), "the others are inside products"
    assert needs[NORM].launched(500) == needs[NORM]
    assert needs[SAMPLING].nbytes == 8 * 128256 * 2
    weights = sum(need.nbytes for kind, need in needs.items() if kind.startswith("linear"))
    norms = (2 * 32 + 1) * 4096 * 2
    assert weights + needs[ATTENTION].nbytes + norms == spec.step_nbytes(8 * 1000)
    windowed = replace(spec, layers=tuple(replace(layer, window=100) for layer in spec.layers))
    assert traffic(windowed, 8, 1000)[ATTENTION].nbytes == 8 * 100 * 131072


def test_a_prompt_beside_decodes(model: str) -> None:
    before = torch.get_num_threads()
    try:
        with DecodeBench(model, 3, 100, num_steps=4, prompt=40, device="cpu", num_threads=1) as bench:
            found = measure(bench, "tiny", LIMITS)
            needs, position = bench.traffic(), 100 + 8 + 2.5
            spec = bench.spec
    finally:
        torch.set_num_threads(before)
    kinds = {kind.kind: kind for kind in found.kinds}
    assert kinds[ROTARY].launches >= CONFIG["num_hidden_layers"], "decodes turn within attention, prompts before it"
    assert needs[EMBEDDING].nbytes == 2 * 43 * spec.hidden_size * 4
    assert needs[SAMPLING].nbytes == 4 * spec.vocab_size * 4
    seen = 3 * position + 40 * 41 / 2
    assert needs[ATTENTION].nbytes == pytest.approx(seen * spec.kv.nbytes_per_token(), rel=0.03)
    assert bench.least().nbytes == spec.step_nbytes(round(3 * position))
    assert "3 x 100 + 40" in lines_of(found)[0]
    assert breakdown_from(found.to_json()) == found


def test_prompts_that_no_step_has(model: str) -> None:
    with pytest.raises(ConfigError, match=r"prompt is -1; it must be 0 .none. or a number of tokens\."):
        DecodeBench(model, 1, 10, num_steps=1, prompt=-1, device="cpu")
    with pytest.raises(ConfigError, match=r"a step has at most 2048 tokens; ask for a prompt of 2047 or less\."):
        DecodeBench(model, 1, 10, num_steps=1, prompt=2048, device="cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device")
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("batch", "prompt"), [(1, 0), (3, 0), (3, 40)])
def test_kinds_on_the_device(eager: bool, batch: int, prompt: int, tmp_path: Path) -> None:
    model, dtype = str(step.demo.path()), "bfloat16"
    with DecodeBench(
        model, batch, 300, num_steps=6, prompt=prompt, device="cuda", dtype=dtype, enforce_eager=eager
    ) as bench:
        found = measure(bench, "demo", LIMITS)
    kinds = {kind.kind: kind for kind in found.kinds}
    assert found.graphs is not eager
    for name in ("linear qkv", "linear out", "linear gate/up", "linear down"):
        assert kinds[name].launches >= 6
    for name in ("linear head", ATTENTION, SAMPLING):
        assert kinds[name].seconds > 0
    # Decodes turn, write and attend in one launch.
    assert (ROTARY in kinds) == (prompt > 0)
    assert "other" not in kinds or kinds["other"].seconds < 0.2 * found.profiled_seconds
