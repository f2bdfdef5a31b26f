"""The probe of linear layers: what it measures, what it chooses, and that every kernel it may choose is right."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from cellar.core.errors import ConfigError
from cellar.core.hardware import Profile
from cellar.models.registry import open_model, shipped_config
from cellar.ops.linear.choice import (
    Flat,
    Fused,
    FusedTiming,
    Gemv,
    Kernel,
    LinearChoice,
    Shape,
    Timing,
    Wide,
    fused_timings,
    linear_choices,
    tables_with,
    timings_of,
)
from cellar.ops.linear.definition import linear_definition
from cellar.ops.linear.device import DeviceWeight
from cellar.ops.linear.fused import norm_gated_linear_definition, norm_linear_definition
from cellar.ops.linear.triton import multiply, norm_gemv
from cellar.reports.profile import print_profile
from cellar.runtime.probes import linear as module
from cellar.runtime.probes import registry
from cellar.runtime.probes.context import ProbeContext
from cellar.runtime.probes.linear import (
    FLATS,
    FUSEDS,
    GEMVS,
    fused_timings_with,
    matrices_of,
    shapes_of,
    timings_with,
    wide_timings_with,
)
from cellar.runtime.probes.linear_wide import TOKENS as WIDE_TOKENS
from cellar.runtime.probes.linear_wide import wides_for
from cellar.runtime.probes.rotation import Rotation
from cellar.runtime.steps import local
from tests.runtime.steps.steps import tiny_model

interpreter = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


def spec_of(name: str):  # type: ignore[no-untyped-def]
    config = shipped_config(name)
    assert config is not None
    return open_model(config, "bfloat16").spec


def test_the_matrices_of_models_after_fusion() -> None:
    found = [(m.name, m.n, m.k, m.count) for m in matrices_of(spec_of("llama-3-8b"))]
    assert found == [
        ("qkv", 6144, 4096, 32),
        ("out", 4096, 4096, 32),
        ("gate_up", 28672, 4096, 32),
        ("down", 4096, 14336, 32),
        ("lm_head", 128256, 4096, 1),
    ]
    assert [(m.name, m.n, m.k) for m in matrices_of(spec_of("opt-6.7b"))][2] == ("up", 16384, 4096)
    assert matrices_of(spec_of("chatglm2-6b"))[0].n == 4608
    assert shapes_of(matrices_of(spec_of("llama-2-7b")))[Shape(22016, 4096)] is True
    assert shapes_of(matrices_of(spec_of("llama-2-7b")))[Shape(12288, 4096)] is False
    assert shapes_of(matrices_of(spec_of("llama-2-7b")))[Shape(4096, 11008)] is None


class FakeTimer:
    """The GEMV takes 1, the flat product 2 and `flat_slope` more per padded token, the library 4; one way is faster."""

    def __init__(self, flat_slope: float, fused: float | None = 1.5, multiprocessors: int = 132) -> None:
        self.flat_slope = flat_slope
        self._multiprocessors = multiprocessors
        self._fused = fused

    def product(self, m: int, kernels: Sequence[Kernel]) -> list[float | None]:
        return [self._one(m, kernel) for kernel in kernels]

    def _one(self, m: int, kernel: Kernel) -> float | None:
        if kernel is None:
            return 4.0
        if isinstance(kernel, Gemv):
            return 1.0 if kernel == GEMVS[3] else 1.25
        return None if kernel.splits > 1 else 2.0 + self.flat_slope * m + (kernel != FLATS[5])

    def fused(self, sizes: Sequence[Fused], gated: bool) -> list[float | None]:
        return [self._fused if size == FUSEDS[1] else None for size in sizes]

    def wide(self, m: int, sizes: Sequence[Wide], kernel: Kernel, gated: bool) -> list[float | None]:
        assert (kernel == FLATS[5]) == (m < 64), "the best of the others, and beyond 64 tokens the library"
        if m == 8:
            return [1.0, *(None for _ in sizes)]
        return [5.0, None, *(4.0 + (m > 64) + 0.1 * (size != sizes[2]) for size in sizes[1:])]

    def multiprocessors(self) -> int:
        return self._multiprocessors

    def apart(self, kernel: Kernel, gated: bool) -> float:
        return 2.0 if kernel == GEMVS[3] else 100.0


def test_the_fastest_at_each_number_of_tokens_is_found() -> None:
    timings = timings_with(Shape(4096, 8192), FakeTimer(flat_slope=0.05))
    assert [t.m for t in timings] == [1, 2, 4, 8, 16, 32, 64]
    assert timings[0] == Timing(1, GEMVS[3], 1.0, 2.4, 4.0)
    assert [t.kernel for t in timings[1:5]] == [FLATS[5]] * 4
    assert [t.kernel for t in timings[5:]] == [FLATS[5], None]
    assert [t.flat for t in timings] == [2.4, 2.4, 2.4, 2.4, 2.8, 3.6, 5.2]
    assert all(t.gemv is None for t in timings[1:])


def test_kernels_that_are_too_large_for_a_shape_are_not_tried() -> None:
    timings = timings_with(Shape(33, 48), FakeTimer(0.0))
    assert all(t.flat is None and t.kernel is None for t in timings)


def test_the_fused_kernel_is_weighed_against_its_parts_with_the_best_kernel() -> None:
    timer = FakeTimer(0.0)
    found = fused_timings_with(Shape(512, 256), True, GEMVS[3], timer)
    assert found == {Shape(512, 256): FusedTiming(True, FUSEDS[1], 1.5, 2.0)}
    assert fused_timings_with(Shape(512, 256), True, None, FakeTimer(0.0, fused=None)) == {}


def test_the_wide_product_is_weighed_against_the_best_of_the_others() -> None:
    shape, timer = Shape(4096, 8192), FakeTimer(flat_slope=0.05)
    timings = timings_with(shape, timer)
    found = wide_timings_with(shape, False, timings, timer)
    assert [(t.m, t.wide, t.other) for t in found] == [(m, 4.0 + (m > 64), 5.0) for m in WIDE_TOKENS]
    assert all(t.sizes == wides_for(t.m, shape, False, 132)[2] for t in found)
    assert wide_timings_with(shape, False, timings, FakeTimer(0.05, multiprocessors=0)) == []


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(
    "shape", [Shape(*shape) for shape in ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (8192, 1024))]
)
@pytest.mark.parametrize("m", [64, 128, 256, 1024])
def test_sizes_of_the_wide_product_that_are_tried(m: int, shape: tuple[int, int], gate: bool) -> None:
    found = wides_for(m, shape, gate, 132)
    assert 0 < len(found) <= 12
    assert len(set(found)) == len(found)
    for sizes in found:
        assert sizes.tokens >= min(m, 128)
        assert not (gate and sizes.parts > 1)
        blocks = -(-shape[0] // sizes.rows) * sizes.parts * -(-m // sizes.tokens)
        assert blocks > 66
        assert m > 256 or blocks <= 8 * 132
    best = found[0]
    if shape == (28672, 4096) and m in (64, 128):
        assert 112 <= -(-shape[0] // best.rows) <= 132, "as many tiles as one round of the multiprocessors takes"


@interpreter
@pytest.mark.parametrize("kernel", [*GEMVS, *FLATS], ids=str)
def test_every_kernel_that_may_be_chosen_is_right(kernel: Gemv | Flat) -> None:
    n, k = 70, 520
    generator = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(n, k, generator=generator), torch.randn(n, generator=generator)
    for m in (1,) if isinstance(kernel, Gemv) else (1, 5):
        x = torch.randn(m, k, generator=generator)
        torch.testing.assert_close(
            multiply(x, weight, bias, kernel), linear_definition(x, weight, bias), rtol=1e-4, atol=1e-4
        )


@interpreter
@pytest.mark.parametrize("sizes", FUSEDS, ids=str)
@pytest.mark.parametrize("gate", [False, True])
def test_every_fused_kernel_that_may_be_chosen_is_right(sizes: Fused, gate: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    residual, delta = torch.randn(2, 1, 100, generator=generator)
    norm, weight = torch.randn(100, generator=generator), torch.randn(26, 100, generator=generator)
    got = norm_gemv(residual, delta, norm, 1e-5, weight, None, sizes, gate=gate)
    parts = (residual, delta, norm, 1e-5, weight, None)
    wanted = norm_gated_linear_definition(*parts, "silu") if gate else norm_linear_definition(*parts)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_rotation_exceeds_the_caches_and_uses_all_of_its_matrices() -> None:
    rotation = Rotation(64, 32, torch.float32, torch.device("cpu"), nbytes=50_000, change=torch.Tensor.t)
    assert len(rotation.plain) == 7
    seen: list[int] = []
    seconds = rotation.seconds([lambda w: seen.append(id(w)), lambda w: w.sum()], rounds=3)
    assert len(seconds) == 2
    assert all(s >= 0 for s in seconds)
    assert set(seen) == {id(w) for w in rotation.weights}
    assert len(Rotation(64, 32, torch.float32, torch.device("cpu"), nbytes=10, change=torch.Tensor.t).plain) == 1


def test_without_an_accelerator_or_a_model_nothing_is_measured(tmp_path: Path) -> None:
    profile = Profile("m", ())
    assert module.probe(ProbeContext(None, tmp_path, spec=spec_of("llama-2-7b")), profile) is profile
    assert module.probe(ProbeContext(torch.device("cuda"), tmp_path), profile) is profile
    names: list[str] = []
    context = ProbeContext(None, tmp_path, 2**20, 32, 0.005, "llama-2-7b", spec_of("llama-2-7b"))
    assert registry.measure(context, names.append).model == "llama-2-7b"
    assert names[-3:] == ["linear", "quantized", "scores"]


def profile_with(machine: str, **kernels: Kernel) -> Profile:
    timings = {Shape(int(n[1:]), 8): [Timing(1, kernel, 1.0, None, 2.0)] for n, kernel in kernels.items()}
    return Profile(machine, (), tables=tables_with({}, timings, {}, {}))


def test_which_profiles_speak_for_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(registry.Path, "home", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    (h200,) = registry.profiles_of("auto", device)
    assert h200.machine.startswith("nvidia-h200-")
    own = profile_with("own", n16=Gemv(1, 8, 0, 4))
    own.save(registry.default_path(registry.machine_name(device)))
    assert [p.machine for p in registry.profiles_of("auto", device)] == ["own", h200.machine]
    assert registry.profiles_of("none", device) == ()
    assert registry.profiles_of("h200", device) == (h200,)
    own.save(tmp_path / "p.json")
    assert registry.profiles_of(str(tmp_path / "p.json"), device) == (own,)
    with pytest.raises(ConfigError, match="there is h200"):
        registry.profiles_of("abacus", device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H20")
    assert registry.profiles_of("auto", device) == ()


def test_the_machines_own_measurements_come_first_and_reach_the_weights() -> None:
    ours, theirs = Gemv(1, 8, 0, 4), Gemv(2, 8, 0, 4)
    profiles = (profile_with("own", n16=ours), profile_with("shipped", n16=theirs, n32=theirs))
    choices = module.choices_of(profiles)
    assert choices == {
        Shape(16, 8): LinearChoice((1,), (ours,), Fused(2, 4)),
        Shape(32, 8): LinearChoice((1,), (theirs,), Fused(2, 4)),
    }
    change = local._preparing(module.chooser_of(profiles), lambda shape: None)
    spec = tiny_model()[0].spec
    qkv = next(t for t in spec.layers[0].tensors if t.name == "qkv")
    known, other = change(qkv, torch.zeros(32, 8)), change(qkv, torch.zeros(96, 48))
    assert isinstance(known, DeviceWeight)
    assert isinstance(other, DeviceWeight)
    assert known.choice.at(1) == theirs
    assert other.choice.at(1) != theirs
    assert isinstance(other.choice.at(8), Flat), "what nobody measured is not the library's for that"
    table = torch.zeros(32, 8)
    assert change(spec.embedding[0], table) is table


@interpreter
def test_shapes_are_measured_one_by_one_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's timer, with few kernels, on the CPU through the interpreter."""
    monkeypatch.setattr(module, "DTYPE", torch.float32)
    monkeypatch.setattr(module, "Rotation", partial(Rotation, nbytes=1))
    monkeypatch.setattr(module, "GEMVS", (Gemv(2, 64, 0, 4),))
    monkeypatch.setattr(module, "FLATS", (Flat(32, 32, 2, 1), Flat(32, 32, 2, 2), Flat(64, 128, 2, 1)))
    monkeypatch.setattr(module, "FUSEDS", (Fused(2, 4),))
    monkeypatch.setattr(module, "TOKENS", (1, 8))
    monkeypatch.setattr(Rotation.seconds, "__defaults__", (1,))
    matrices = [module.Matrix("gate_up", 48, 64, 2), module.Matrix("down", 40, 72, 2), module.Matrix("out", 48, 64, 1)]
    kept: list[Profile] = []
    lines: list[str] = []
    started = Profile("m", ())
    found = module.with_shapes(started, matrices, torch.device("cpu"), lines.append, kept.append)
    assert [len(linear_choices(profile.tables)) for profile in kept] == [1, 2]
    assert kept[-1] == found
    assert found.to_json() == Profile.from_json(found.to_json()).to_json()
    assert [line.split(":")[0] for line in lines] == ["48 x 64", "40 x 72"]
    monkeypatch.setattr(module, "timings_with", None)
    assert module.with_shapes(found, matrices, torch.device("cpu"), missing=True) == found, "nothing is missing"
    timings = timings_of(found.tables)
    for measured in timings.values():
        assert [t.m for t in measured] == [1, 8]
        assert measured[0].gemv is not None
        assert all(t.flat is not None and t.gemv is None for t in measured[1:])
        assert all(t.library > 0 for t in measured)
    assert fused_timings(found.tables)[Shape(48, 64)].gated
    assert Shape(40, 72) not in fused_timings(found.tables)
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_profile(found, console)
    text = console.export_text()
    assert "48 x 64" in text
    assert "over the library" in text


@interpreter
def test_a_kernel_that_is_wrong_or_refused_is_out_of_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    wrong, refused, right = Flat(32, 32, 2, 1), Flat(64, 64, 2, 1), Flat(32, 64, 2, 1)

    def broken(x: torch.Tensor, weight: torch.Tensor, bias: None, kernel: Kernel, arrivals: object) -> torch.Tensor:
        if kernel == refused:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return linear_definition(x, weight) * (1.1 if kernel == wrong else 1.0)

    monkeypatch.setattr(module, "DTYPE", torch.float32)
    monkeypatch.setattr(module, "Rotation", partial(Rotation, nbytes=1))
    monkeypatch.setattr(module, "multiply", broken)
    seconds = module.DeviceTimer(64, 64, torch.device("cpu")).product(8, [wrong, refused, right, None])
    assert [s is None for s in seconds] == [True, True, False, False]


def test_the_shipped_profiles_tables_can_be_read() -> None:
    choices = linear_choices(registry.shipped("h200").tables)
    assert all(choice.tokens for choice in choices.values())


def test_the_command_needs_an_accelerator_and_known_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--models", "llama-2-7b", "--base", "h200", "--output", str(tmp_path / "p.json")]
    with pytest.raises(SystemExit, match="linear kernels are for accelerators"):
        module.main([*arguments, "--device", "cpu"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device")
def test_a_shape_is_measured_on_the_device(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    kept: list[Profile] = []
    matrices = [module.Matrix("gate_up", 2048, 1024, 2), module.Matrix("down", 1024, 2048, 2)]
    with torch.inference_mode():
        found = module.with_shapes(Profile("m", ()), matrices, device, keep=kept.append)
    assert kept[-1] == found
    choices = linear_choices(found.tables)
    assert set(choices) == {Shape(2048, 1024), Shape(1024, 2048)}
    for timings in (t for t in module.tables_with(found.tables, {}, {}, {})["linear"].rows):
        assert all(s < 1e-3 for s in timings[-3:])
    assert isinstance(choices[Shape(2048, 1024)].at(1), Gemv | Flat)
