"""What an accelerator is measured with, on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from cellar.core.kv_formats import kv_format, row_nbytes
from cellar.models.registry import open_model
from cellar.runtime.offload import device_rates, specimens
from tests.tiny_checkpoint import CONFIG


@pytest.mark.parametrize("kept", ["auto", "fp8", "int4"])
def test_attention_of_decodes_reads_what_it_counts(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many sequences as there is room for, each of up to 512 positions; of a window, what it sees."""
    spec = open_model(CONFIG | {"max_position_embeddings": 2048}, "float32", 16, None, None, kept).spec
    group = spec.kv.groups[0]
    assert kv_format(group.dtype) == ("plain" if kept == "auto" else kept)
    a_row = 2 * spec.num_kv_heads * row_nbytes(group.dtype, spec.head_dim)
    for room, sequences in ((1024 * 512 * a_row, 1024), (3 * 512 * a_row + 100, 3), (1, 1)):
        monkeypatch.setattr(device_rates, "ROTATED", room)
        attend, nbytes = device_rates._decodes(spec, torch.device("cpu"))
        assert nbytes == sequences * 512 * a_row
        found = attend(0)
        assert isinstance(found, torch.Tensor)
        assert found.shape == (sequences, spec.num_heads, spec.head_dim)
        assert bool(found.isfinite().all())
    windowed = open_model(
        CONFIG | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 40},
        "float32",
        16,
        128,
        None,
        kept,
    ).spec
    _, nbytes = device_rates._decodes(windowed, torch.device("cpu"))
    assert nbytes == 40 * a_row


class Moment:
    """An event of a device that computes when it is told."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Moment) -> float:
        return 1e3 * (later.at - self.at)


@pytest.mark.parametrize("kept", ["auto", "fp8", "int4"])
def test_all_is_measured_and_memory_given_back(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the processor in place of an accelerator."""
    given_back: list[bool] = []
    monkeypatch.setattr(device_rates, "_event", Moment)
    monkeypatch.setattr(device_rates, "ROTATED", 2**21)
    monkeypatch.setattr(specimens, "DEVICE_NBYTES", 2**20)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    spec = open_model(CONFIG, "float32", 16, 64, None, kept).spec
    found = device_rates.device_rates(spec, torch.device("cpu"), 2, 64)
    assert all(1e5 < rate < 1e15 for rate in found), found
    assert given_back == [True]


def test_a_layers_rates_are_those_of_all_its_matrices_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that is larger than what is measured counts with all of its rows."""
    monkeypatch.setattr(device_rates, "_event", Moment)
    monkeypatch.setattr(device_rates, "ROTATED", 1)
    monkeypatch.setattr(specimens, "DEVICE_NBYTES", 2**16)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(device_rates, "_attention", lambda *_: 3.0)
    measured = set[int]()

    def seconds(launch: Callable[[int], object], *_: object) -> float:
        product = launch(0)
        assert isinstance(product, torch.Tensor)
        if product.dtype == torch.uint8:
            return 2.0  # a copy
        measured.add(product.shape[1])
        return float(len(product) * product.shape[1])

    monkeypatch.setattr(device_rates, "_seconds", seconds)
    spec = open_model(CONFIG | {"intermediate_size": 2048}, "float32", 16, 64).spec
    matrices = [tensor for tensor in spec.layers[0].tensors if len(tensor.shape) == 2]
    largest = max(matrices, key=lambda tensor: tensor.nbytes)
    found = device_rates.device_rates(spec, torch.device("cpu"), 2, 8)
    rows = sum(tensor.shape[0] for tensor in matrices)
    assert max(measured) < largest.shape[0], "it was to be cut"
    elements = sum(tensor.size for tensor in matrices)
    assert found.device == pytest.approx(sum(tensor.nbytes for tensor in matrices) / rows)
    assert found.few_flops == pytest.approx(2.0 * elements * 2 / (2 * rows))
    assert found.flops == pytest.approx(2.0 * elements * 8 / (8 * rows))
    assert (found.attention, found.copies) == (3.0, device_rates.COPIED)
