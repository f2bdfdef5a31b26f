"""Steps of a model in fewer bits on an accelerator are priced by what that was seen to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cellar.core.config import EngineConfig
from cellar.engine.measured_price import measured_price
from cellar.models import registry
from cellar.planner.cost import dimensions
from cellar.planner.machines import H200_LAYER
from cellar.planner.passes import PROMPT_SHARE, between_products
from cellar.planner.work import FEW_TOKENS, StepWork
from cellar.runtime.offload.device_rates import DeviceRates
from tests.tiny_checkpoint import write_checkpoint

FOUND = DeviceRates(device=1e9, flops=5e9, few_flops=1e9, attention=2e8, copies=3e8)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The tokens with which rates were measured."""
    found: list[tuple[int, int]] = []

    def rates(spec: object, device: torch.device, few: int, many: int) -> DeviceRates:
        found.append((few, many))
        return FOUND

    monkeypatch.setattr("cellar.runtime.offload.device_rates.device_rates", rates)
    monkeypatch.setattr("cellar.runtime.device.resolve_device", lambda _: torch.device("cuda"))
    return found


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"kv_cache_dtype": "int4"}], ids=["weights", "K and V"])
def test_a_model_in_fewer_bits_is_measured(
    options: dict[str, str], asked: list[tuple[int, int]], tmp_path: Path
) -> None:
    config = EngineConfig.of(
        model=str(write_checkpoint(tmp_path)), dtype="bfloat16", max_num_batched_tokens=300, **options
    )
    price = measured_price(config)
    assert price is not None
    assert asked == [(FEW_TOKENS, 300)]
    raw, kept = registry.read_config(tmp_path), options.get("kv_cache_dtype", "auto")
    spec = registry.open_model(raw, "bfloat16", 32, None, options.get("quantization"), kept).spec
    d = dimensions(spec)
    products = 2.0 * d.layers * d.layer_elements * 300
    launches = d.layers * H200_LAYER
    between = between_products(spec) * 300 / 3e8
    found = price.seconds(StepWork(300, 0, 0.0, 0.0, True))
    assert found == pytest.approx(products / (PROMPT_SHARE * 5e9) + between + launches)
    each = spec.kv.chunk_nbytes() / spec.kv.chunk_size
    grown = price.seconds(StepWork(4, 4, 4000, 4000)) - price.seconds(StepWork(4, 4, 0, 0))
    assert grown == pytest.approx(4000 * each / 2e8)


def test_plain_models_and_several_devices_are_not(asked: list[tuple[int, int]], tmp_path: Path) -> None:
    model = str(write_checkpoint(tmp_path))
    assert measured_price(EngineConfig.of(model=model, dtype="bfloat16")) is None
    assert measured_price(EngineConfig.of(model=model, quantization="int8", tensor_parallel_size=2)) is None
    assert not asked


def test_without_memory_nothing_is_predicted_and_other_errors_are_raised(
    asked: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig.of(model=str(write_checkpoint(tmp_path)), dtype="bfloat16", quantization="int8")
    raised: list[Exception] = [torch.OutOfMemoryError("CUDA out of memory"), ValueError("what is wrong")]

    def full(*_: object) -> DeviceRates:
        raise raised.pop(0)

    monkeypatch.setattr("cellar.runtime.offload.device_rates.device_rates", full)
    assert measured_price(config) is None
    with pytest.raises(ValueError, match="what is wrong"):
        measured_price(config)


def test_a_processor_is_not(tmp_path: Path) -> None:
    model = str(write_checkpoint(tmp_path))
    assert measured_price(EngineConfig.of(model=model, quantization="int8", device="cpu")) is None
