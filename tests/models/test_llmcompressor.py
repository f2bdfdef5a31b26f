"""Checkpoints that llmcompressor wrote, against the logits of transformers (`tests/data/llmcompressor/README.md`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cellar.models.loader import LoadedWeights
from cellar.ops.linear.weight import LinearWeight, Weight
from tests.models.dense_context import logits_of
from tests.models.test_quantized import opened

DATA = Path(__file__).parents[1] / "data" / "llmcompressor"
SCHEMES = ("w4a16", "w4a16_asym", "w8a16", "w8a8", "fp8_dynamic", "fp8_block")
ROUNDS = {"w8a8": 5e-3, "fp8_dynamic": 4e-2, "fp8_block": 4e-2}
"""Whose activations are rounded, and by how much logits may differ (norm) if a number lay between two codes."""


def dense(weights: LoadedWeights) -> LoadedWeights:
    """The same, every quantized matrix as float32."""

    def plain(weight: Weight) -> Weight:
        return weight.dense() if isinstance(weight, LinearWeight) else weight

    layers = tuple({name: plain(weight) for name, weight in layer.items()} for layer in weights.layers)
    return replace(weights, layers=layers)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_matrices_are_those_that_transformers_reads(scheme: str) -> None:
    model, weights = opened(DATA / scheme)
    theirs = load_file(DATA / scheme / "logits.safetensors")
    assert all(tensor.formats for tensor in model.spec.layers[0].tensors if len(tensor.shape) == 2)
    assert theirs["dequantized"].std() > 0.3, "logits this flat would hide errors"
    found = logits_of(model, dense(weights), theirs["tokens"], [12])
    torch.testing.assert_close(found, theirs["dequantized"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_runs_as_theirs_does(scheme: str) -> None:
    model, weights = opened(DATA / scheme)
    theirs = load_file(DATA / scheme / "logits.safetensors")
    found, wanted = logits_of(model, weights, theirs["tokens"], [7, 1, 4]), theirs["as_theirs_runs"]
    if scheme not in ROUNDS:
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        return
    error = (found - wanted).norm() / wanted.norm()
    without = (theirs["dequantized"] - wanted).norm() / wanted.norm()
    assert float(error) < ROUNDS[scheme] < float(without)
