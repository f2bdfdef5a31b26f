"""Rates that a plan is made with, measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cellar.models.registry import open_model
from cellar.runtime.offload.rates import measured_disk, measured_rates
from tests.tiny_checkpoint import CONFIG

BIG = CONFIG | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 64, "vocab_size": 500}


@pytest.mark.parametrize("config", [BIG, BIG | {"num_key_value_heads": 4}, BIG | {"intermediate_size": 40_000}])
def test_rates_are_measured_with_the_models_own_shapes(config: dict[str, object]) -> None:
    found = measured_rates(open_model(config, "float32", 16, 256).spec, torch.device("cpu"), 2**24, 0.02)
    for rate in (found.alone, found.link, found.multiply, found.attention, found.flops):
        assert rate > 1e6


def test_the_disks_rate_is_that_of_reading_back(tmp_path: Path) -> None:
    assert measured_disk(tmp_path, 2**20 + 1) > 1e5
    assert not list(tmp_path.iterdir())
