"""A resident placement is checked before anything is read, and what lies in memory is compared with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cellar.core.errors import ConfigError, IntegrityError
from cellar.core.messages import Placed, PlacedUnits, Placement
from cellar.models.loader import dummy
from cellar.models.quantization import is_linear
from cellar.models.registry import open_model
from cellar.ops.linear.pack import pack
from cellar.runtime.steps.arena import Arena
from cellar.runtime.steps.placed import check_resident, read_back
from tests.tiny_checkpoint import CONFIG

MODEL = open_model(CONFIG, "float32", 16)
SPEC = MODEL.spec
CPU = torch.device("cpu")


def placement(chunks: int = 5) -> Placement:
    weights = tuple(Placed(name, "device", 0, t.shape[0], "float32") for name, t in SPEC.named_tensors())
    return Placement(weights, "device", "device", kv=(PlacedUnits("device", chunks, "device"),))


def test_the_whole_model_on_the_device_is_taken() -> None:
    check_resident(placement(), SPEC)


def moved(name: str, **changes: object) -> Placement:
    whole = placement()
    return replace(
        whole,
        weights=tuple(replace(p, **changes) if p.tensor == name else p for p in whole.weights),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (moved("layers.1.qkv", device="disk"), "also names disk"),
        (moved("layers.1.qkv", device="cpu"), "also names cpu"),
        (replace(placement(), kv_device="host"), "also names host"),
        (replace(placement(), kv=(PlacedUnits("host", 5, "host"),)), "also names host"),
        (replace(placement(), kind="offload"), "of kind offload, but this runtime runs only resident ones yet"),
        (moved("layers.1.qkv", start=1), "rows 1 to 64 in float32 of layers.1.qkv, but the model has rows 0 to 64"),
        (moved("embed", stop=419), "rows 0 to 419 in float32 of embed, but the model has rows 0 to 420"),
        (moved("layers.0.down", format="int4"), "rows 0 to 32 in int4 of layers.0.down, but the model .* in float32"),
        (replace(placement(), weights=placement().weights[1:]), "nothing of embed, but the model has rows 0 to 420"),
        (
            replace(placement(), weights=(*placement().weights, Placed("layers.2.qkv", "device", 0, 64, "float32"))),
            "rows 0 to 64 in float32 of layers.2.qkv, but the model has nothing",
        ),
    ],
)
def test_what_is_not_resident_or_not_this_model_is_refused(wrong: Placement, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_resident(wrong, SPEC)


def test_what_is_placed_is_read_back() -> None:
    weights, arena = dummy(SPEC), Arena(SPEC.kv, 5, CPU)
    found = read_back(placement(), SPEC, weights, arena)
    assert found.weights == found.planned_weights == SPEC.nbytes()
    assert found.kv == found.planned_kv == 5 * SPEC.kv.chunk_nbytes()
    packed = dummy(SPEC, transform=lambda s, t: pack(t) if is_linear(s) else t)
    assert read_back(placement(), SPEC, packed, arena).weights <= SPEC.nbytes()


def test_what_lies_elsewhere_than_planned_is_found() -> None:
    weights = dummy(SPEC)
    with pytest.raises(IntegrityError, match="there are 5 slots of KV, but 6 were planned"):
        read_back(placement(6), SPEC, weights, Arena(SPEC.kv, 5, CPU))
    arena = Arena(SPEC.kv, 5, CPU)
    qkv = weights.layers[1]["qkv"]
    assert isinstance(qkv, torch.Tensor)
    weights.layers[1]["qkv"] = qkv.double()
    with pytest.raises(IntegrityError, match=r"layers.1.qkv is \[64, 32\] in 16384 bytes, but the placement says"):
        read_back(placement(), SPEC, weights, arena)
    weights.layers[1]["qkv"] = qkv[:-1]
    with pytest.raises(IntegrityError, match=r"layers.1.qkv is \[63, 32\]"):
        read_back(placement(), SPEC, weights, arena)
    del weights.layers[1]["qkv"]
    with pytest.raises(IntegrityError, match=r"layers.1.qkv is nothing"):
        read_back(placement(), SPEC, weights, arena)
