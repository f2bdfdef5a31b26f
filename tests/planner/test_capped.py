"""What the rates of the channels make of a plan for a GPU."""

from __future__ import annotations

import pytest

from cellar.core.messages import BlockSchedule, Placement
from cellar.models.registry import open_model, shipped_config
from cellar.planner.capped import Room, capped_plan
from cellar.planner.passes import Away, Rates, predicted_pass
from cellar.planner.saved import Limits
from tests.tiny_checkpoint import CONFIG

BIG = CONFIG | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 64, "vocab_size": 500}
SPEC = open_model(BIG, "float32", 16, 256).spec
LIMITS = Limits(64, 64, 256)
LIBRARIES = 800 * 2**20


def test_kv_goes_where_more_tokens_a_second_come_from() -> None:
    """A fast CPU has it, a slow one leaves it on the device; what is asked for beyond the device lies in the host."""
    room = Room(LIBRARIES + 2**26, 2**30, 0, None, "gpu")
    for attention, place in ((60e9, "host"), (1e6, "device")):
        rates = Rates(50e9, 80e9, attention, 4e12)
        plan = capped_plan(SPEC, room, LIMITS, model="m", machine="any", rates=rates)
        (kv,) = plan.placement.kv
        assert (kv.device, kv.compute) == (place, place)
        said = plan.figures["decode_pass"]
        assert 0 < said["sequences"] <= 64
        away = sum(p.stop - p.start for p in plan.placement.weights if p.device == "host")
        assert away > 0
    asked = Room(LIBRARIES + 2**26, 2**30, 0, 2**27, "gpu")
    (kv,) = capped_plan(SPEC, asked, LIMITS, model="m", machine="any").placement.kv
    assert (kv.device, kv.units) == ("host", 2**27 // SPEC.kv.chunk_nbytes())


def test_a_pass_of_few_tokens_uses_both_memories() -> None:
    """The link and the CPU take equally long; the plan leaves as many rows to the CPU as that says."""
    rates = Rates(50e9, 84e9, 60e9, 4e12)
    one, many = Limits(1, 64, 256), Limits(64, 64, 256)
    away = Away(10**10, 0, "device", "gpu")
    few = predicted_pass(SPEC, one, rates, away, 1)
    assert few["link"] == pytest.approx(few["cpu"])
    assert few["link"] == pytest.approx(10**10 / 134e9)
    moved = predicted_pass(SPEC, many, rates, away, 64)
    assert moved["link"] == pytest.approx(10**10 / 50e9)
    assert moved["cpu"] == 0
    room = Room(LIBRARIES + 2**26, 2**30, 0, 2**25, "gpu")
    plan = capped_plan(SPEC, room, LIMITS, model="m", machine="any", rates=rates)
    tensors = dict(SPEC.named_tensors())
    nbytes = {"device": 0, "host": 0}
    for part in plan.placement.weights:
        if part.device == "host":
            nbytes[part.compute] += (
                (part.stop - part.start) * tensors[part.tensor].nbytes // tensors[part.tensor].shape[0]
            )
    assert nbytes["host"] / sum(nbytes.values()) == pytest.approx(84 / 134, abs=0.03)


def test_a_pass_of_many_tokens_goes_in_gpu_batches() -> None:
    """OPT-30B in 16 GiB with 78 prompts of 512 tokens at once (FlexGen's setting): activations of a few prompts."""
    spec = open_model(shipped_config("opt-30b"), "float16", 32, 544).spec
    room = Room(16 * 2**30, 110 * 2**30, 0, None, "gpu")
    whole = capped_plan(spec, room, Limits(78, 8192, 544), model="m", machine="any").placement
    cut = capped_plan(spec, room, Limits(78, 78 * 512, 544), model="m", machine="any").placement
    assert whole.block == BlockSchedule(78, 1, "zigzag")
    assert cut.block == BlockSchedule(15, 6, "zigzag")

    def on_device(placement: Placement) -> int:
        return sum(part.stop - part.start for part in placement.weights if part.device == "device")

    assert on_device(cut) > 0.6 * on_device(whole)
