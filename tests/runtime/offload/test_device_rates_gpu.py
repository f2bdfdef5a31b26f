"""What an accelerator's own rates are measured to be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cellar.core.specs import ModelSpec
from cellar.models.registry import open_model, shipped_config
from cellar.runtime.offload.device_rates import device_rates
from cellar.runtime.offload.rates import COPIED_NBYTES, measured_rates
from cellar.runtime.offload.specimens import DEVICE_NBYTES, DEVICE_QUANTIZED_NBYTES, device_matrices, largest_matrix
from cellar.runtime.probes.context import best_seconds
from tests.tiny_checkpoint import CONFIG

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: this machine has no CUDA device"),
]

DEVICE = torch.device("cuda")
FORMATS = [None, "int8", "fp8", "int4"]


def spec_of(model: str, format: str | None, kept: str = "auto") -> ModelSpec:
    raw = shipped_config(model)
    assert raw is not None
    return open_model(raw, "bfloat16", 32, 512, format, kept).spec


@pytest.mark.parametrize("format", FORMATS)
def test_rates_are_those_of_the_machine(format: str | None) -> None:
    """Neither more than its memory and its products have, nor a small part of them."""
    size = 8192
    plain = torch.randn((size, size), device=DEVICE, dtype=torch.bfloat16)
    products = 2.0 * size**3 / best_seconds(lambda: torch.mm(plain, plain), 0.1, DEVICE)
    memory = torch.zeros(2**30, dtype=torch.uint8, device=DEVICE)
    reads = memory.nbytes / best_seconds(lambda: memory.view(torch.int64).sum(), 0.1, DEVICE)
    found = device_rates(spec_of("llama-3-8b", format), DEVICE, 192, 4096)
    said = f"{found.device:.3g} of {reads:.3g} bytes/s, {found.flops:.3g} of {products:.3g} FLOP/s"
    assert 0.25 < found.device / reads < 1.15, said
    most = 2.6 if format == "fp8" else 1.3  # numbers of eight bits are multiplied twice as fast; a clock falls slowly
    assert 0.4 < found.flops / products < most, said
    assert 0.5 < found.copies / reads < 1.15, f"{found.copies:.3g} of {reads:.3g}"
    assert 0.05 < found.few_flops / found.flops < 1.3
    assert 0.25 < found.attention / reads < 1.15, f"{found.attention:.3g} of {reads:.3g}"


@pytest.mark.parametrize("kept", ["fp8", "int4"])
@pytest.mark.parametrize("model", ["llama-3-8b", "opt-6.7b"])
def test_attention_in_fewer_bits_reads_less_in_less_time(model: str, kept: str) -> None:
    plain, fewer = (spec_of(model, None, one) for one in ("auto", kept))
    took = [spec.kv.chunk_nbytes() / device_rates(spec, DEVICE, 16, 64).attention for spec in (plain, fewer)]
    assert took[1] < took[0], took


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("model", ["llama-3-8b", "opt-175b"])
def test_what_is_multiplied_are_numbers(model: str, format: str | None) -> None:
    (weight, *_) = device_matrices(largest_matrix(spec_of(model, format)), DEVICE, 1)
    wanted = DEVICE_QUANTIZED_NBYTES if format else DEVICE_NBYTES
    assert 0.8 * wanted < weight.nbytes < 1.1 * wanted
    for tokens in (1, 48):
        x = torch.randn((tokens, weight.in_features), dtype=torch.bfloat16, device=DEVICE)
        product = weight.multiply(x)
        assert bool(product.isfinite().all())
        assert bool((product.abs().mean() > 0).all())


def test_a_small_model_is_measured_with_its_own_matrices() -> None:
    """Which are read in less time than they are launched in."""
    found = device_rates(open_model(CONFIG, "float32", 16, 64).spec, DEVICE, 16, 64)
    assert all(1e7 < rate < 1e16 for rate in found), found


def test_a_layers_rates_lie_between_those_of_its_matrices() -> None:
    """The largest matrix does not stand for all."""
    spec = spec_of("opt-6.7b", "int4")
    matrices = [tensor for tensor in spec.layers[0].tensors if len(tensor.shape) == 2]
    alone = [
        device_rates(replace(spec, layers=(replace(spec.layers[0], tensors=(tensor,)),)), DEVICE, 128, 4096)
        for tensor in matrices
    ]
    whole = device_rates(spec, DEVICE, 128, 4096)
    for name in ("device", "flops", "few_flops"):
        rates = [getattr(one, name) for one in alone]
        assert 0.85 * min(rates) < getattr(whole, name) < 1.15 * max(rates), (name, rates, whole)


def test_copies_of_much_go_to_a_small_piece_of_the_device() -> None:
    """A device may be held to less than the host has caches, and weights would keep what they use of a large piece."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    found = measured_rates(spec_of("llama-3.2-1b", None), DEVICE, 2**31 + 2**24, 0.05)
    assert found.alone > found.link / 2 > 1e9
    assert torch.cuda.max_memory_reserved() - before <= 2 * COPIED_NBYTES
    assert torch.cuda.memory_reserved() - before < COPIED_NBYTES // 2
