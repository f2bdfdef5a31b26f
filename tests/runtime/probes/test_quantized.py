"""The probe of quantized matrices: what it measures and what it chooses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from cellar.core.formats import Format
from cellar.core.hardware import Profile
from cellar.core.specs import ModelSpec
from cellar.models.registry import open_model, shipped_config
from cellar.ops.linear.bytes import tokens_of
from cellar.ops.linear.choice import Shape
from cellar.ops.linear.mixed import Kind
from cellar.ops.linear.nibbles import Nibbles
from cellar.quant.choice import Kernel, QuantizedTiming, Tiles, tables_with
from cellar.quant.packed import parts_of, span_of
from cellar.runtime.probes import quantized as module
from cellar.runtime.probes.context import ProbeContext
from cellar.runtime.probes.quantized import (
    TOKENS,
    DeviceTimer,
    kernels_for,
    mixed_for,
    nibbles_for,
    quantized_chooser_of,
    quantized_shapes_of,
    timings_with,
)

FOUR = Format("int4", 64, zero_points=True)


def spec_of(quantization: str | None) -> ModelSpec:
    config = shipped_config("llama-3-8b")
    assert config is not None
    return open_model(config, "bfloat16", quantization=quantization).spec


def test_the_quantized_matrices_of_a_model_with_format_and_group() -> None:
    assert quantized_shapes_of(spec_of(None)) == {}
    assert quantized_shapes_of(spec_of("int4")) == {
        Shape(6144, 4096, "int4", 64): FOUR,
        Shape(4096, 4096, "int4", 64): FOUR,
        Shape(28672, 4096, "int4", 64): FOUR,
        Shape(4096, 14336, "int4", 64): FOUR,
        Shape(128256, 4096, "int8", 0): Format("int8"),
    }


def test_there_are_kernels_for_every_shape_and_number_of_tokens() -> None:
    for format in (FOUR, Format("int8"), Format("fp8", 128, rows=128), Format("mxfp4", 32)):
        for n, k in ((4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (320, 256)):
            for m in TOKENS:
                kernels = kernels_for(m, n, k, format)
                assert len(set(kernels)) == len(kernels) > 0
                for kernel in filter(None, kernels):
                    assert kernel.splits == 1 or kernel.splits * parts_of(format) * span_of(format) < k
    assert kernels_for(4096, 4096, 4096, FOUR) == [None]


def test_for_nibbles_there_are_some_that_fit_at_every_number_of_tokens() -> None:
    for m in TOKENS:
        kernels = nibbles_for(m)
        assert len(set(kernels)) == len(kernels) > 0
        assert (None in kernels) == (m >= 64)
        assert all(kernel.fits(tokens_of(min(m, 64))) for kernel in kernels if isinstance(kernel, Nibbles))


def test_for_many_tokens_there_are_wide_kernels_that_fit() -> None:
    for kind in (Kind(4, 64, torch.float16, True), Kind(8, 0, torch.float32, False)):
        for n, k in ((4096, 4096), (28672, 4096), (4096, 14336), (72, 256)):
            assert mixed_for(8, n, k, kind) == []
            for m in (16, 32, 64, 100, 128, 256, 512):
                found = mixed_for(m, n, k, kind)
                assert len(set(found)) == len(found) > 0
                assert all(sizes.fits(kind) and sizes.parts <= -(-k // 128) for sizes in found)


class FakeTimer:
    """Narrow tiles are fast up to 64 tokens, the library beyond; one kernel is refused."""

    def __init__(self, refused: Kernel) -> None:
        self.refused = refused

    def kernels(self, m: int) -> list[Kernel]:
        return kernels_for(m, 4096, 4096, FOUR)

    def seconds(self, m: int, kernels: Sequence[Kernel]) -> list[float | None]:
        return [None if k == self.refused else 5.0 if k is None else m / 16 + k.rows / 128 + k.splits for k in kernels]


def test_the_fastest_of_those_that_run_is_chosen() -> None:
    refused = kernels_for(1, 4096, 4096, FOUR)[0]
    found = timings_with(FakeTimer(refused), (1, 128))
    assert [t.m for t in found] == [1, 128]
    assert isinstance(found[0].kernel, Tiles)
    assert found[0].kernel != refused
    assert found[0].seconds < found[0].library == 5.0
    assert found[1].kernel is None


def test_the_first_profile_that_has_measured_a_shape_decides() -> None:
    def profile(kernel: Kernel, *rows: int) -> Profile:
        timings = {Shape(n, 64, "int8"): [QuantizedTiming(8, kernel, 1.0, 1.0)] for n in rows}
        return Profile("m", (), tables=tables_with({}, timings))

    own, shipped = Tiles(32, 8, 2, 1), Tiles(64, 8, 2, 1)
    choose = quantized_chooser_of([profile(own, 1), profile(shipped, 1, 2), Profile("old", ())])
    found = [choose(Shape(n, 64, "int8")) for n in (1, 2)]
    assert [choice and choice.at(1) for choice in found] == [own, shipped]
    assert choose(Shape(3, 64, "int8")) is None
    assert choose(Shape(1, 64)) is None


def test_without_an_accelerator_or_a_model_nothing_is_measured(tmp_path: Path) -> None:
    profile = Profile("m", ())
    assert module.probe(ProbeContext(None, tmp_path, spec=spec_of("int8")), profile) is profile
    assert module.probe(ProbeContext(torch.device("cuda"), tmp_path), profile) is profile


def test_a_timer_takes_what_is_right_only(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    timer = DeviceTimer(64, 128, Format("int8"), torch.device("cpu"), nbytes=1)

    def product(x: torch.Tensor, kernel: Kernel, weight: object) -> torch.Tensor:
        right = x.float() @ timer.exact.T
        return right if kernel is None else right + 1

    monkeypatch.setattr(module, "product", product)
    library, wrong = timer.seconds(4, [None, Tiles(32, 8, 2, 1)])
    assert library is not None
    assert wrong is None
