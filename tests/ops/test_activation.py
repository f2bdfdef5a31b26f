"""Activations against transformers' table of them."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from cellar.core.errors import ConfigError
from cellar.ops.activation import activate, gated
from cellar.ops.activation.triton import activate_kernel, gated_kernel

NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}


@pytest.mark.parametrize("kind", NAMES)
def test_activations_are_those_of_transformers(kind: str) -> None:
    x = torch.linspace(-8, 8, 402).view(3, 134)
    reference = ACT2FN[NAMES[kind]]
    torch.testing.assert_close(activate(x, kind), reference(x))
    torch.testing.assert_close(gated(x, kind), reference(x[:, :67]) * x[:, 67:])


@pytest.mark.parametrize("kind", NAMES)
def test_far_values_stay_finite(kind: str) -> None:
    x = torch.tensor([[-1e4, -300.0, -100.0, 100.0, 1e4]])
    wanted = torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]])
    for function in (activate, activate_kernel):
        torch.testing.assert_close(function(x, kind), wanted, atol=1e-6, rtol=1e-6)
    for function in (gated, gated_kernel):
        torch.testing.assert_close(
            function(torch.cat([x, torch.ones_like(x)], dim=1), kind), wanted, atol=1e-6, rtol=1e-6
        )


def test_input_is_not_changed() -> None:
    x = torch.randn(2, 6)
    before = x.clone()
    for kind in NAMES:
        gated(x, kind)
        activate(x, kind)
    assert x.equal(before)


def test_unknown_activation_is_refused() -> None:
    for function in (activate, activate_kernel, gated, gated_kernel):
        with pytest.raises(ConfigError, match="mish"):
            function(torch.ones(1, 2), "mish")
