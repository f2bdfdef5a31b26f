"""Norms against transformers' own modules, and the details that definitions and kernels must share."""

from __future__ import annotations

import pytest
import torch
from torch.nn import LayerNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from cellar.ops.norm import add_layer_norm, add_rms_norm, rms_norm
from cellar.ops.norm.triton import add_rms_norm_behind_sum, add_rms_norm_kernel, rms_norm_kernel


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_rms_norm_is_llamas(dtype: torch.dtype, tolerance: float) -> None:
    reference = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    reference.weight.data = random(96, seed=1).to(dtype)
    x = (20 * random(7, 96)).to(dtype)
    torch.testing.assert_close(
        rms_norm(x, reference.weight.data, 1e-5), reference(x).detach(), rtol=tolerance, atol=tolerance
    )


def test_eps_counts_where_the_input_is_tiny() -> None:
    x = torch.full((1, 4), 1e-4)
    expected = x / (1e-8 + 1e-5) ** 0.5
    for norm in (rms_norm, rms_norm_kernel):
        torch.testing.assert_close(norm(x, torch.ones(4), 1e-5), expected)


def test_sum_is_rounded_before_it_is_normalized() -> None:
    """With one rounding only, normed and residual would describe different vectors."""
    residual, delta = torch.full((1, 4), 2048.0, dtype=torch.float16), torch.full((1, 4), 1.0, dtype=torch.float16)
    residual[0, 0] = 0
    weight = torch.ones(4, dtype=torch.float16)
    for add in (add_rms_norm, add_rms_norm_kernel, add_rms_norm_behind_sum):
        normed, total = add(residual, delta, weight, 0.0)
        assert total.equal(residual + delta)
        assert normed.equal(rms_norm(total, weight, 0.0))


def test_nothing_to_add() -> None:
    residual = random(3, 8)
    normed, total = add_rms_norm(residual, None, torch.ones(8), 1e-5)
    assert total is residual
    assert normed.equal(rms_norm(residual, torch.ones(8), 1e-5))


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_is_torchs(bias: bool) -> None:
    reference = LayerNorm(40, bias=bias)
    reference.weight.data = random(40, seed=1)
    if bias:
        reference.bias.data = random(40, seed=2)
    residual, delta = random(5, 40, seed=3), random(5, 40, seed=4)
    normed, total = add_layer_norm(residual, delta, reference.weight.data, reference.bias.data if bias else None, 1e-5)
    torch.testing.assert_close(total, residual + delta)
    torch.testing.assert_close(normed, reference(residual + delta).detach())


def test_no_rows() -> None:
    for norm in (rms_norm, rms_norm_kernel):
        assert norm(torch.empty(0, 2, 8), torch.ones(8), 1e-5).shape == (0, 2, 8)
    assert add_rms_norm_kernel(torch.empty(0, 8), torch.empty(0, 8), torch.ones(8), 1e-5)[0].shape == (0, 8)
