"""What the rates of the channels make of a plan for a GPU."""

from __future__ import annotations

import pytest

from cellar.core.messages import BlockSchedule, Placement
from cellar.core.specs import ModelSpec
from cellar.models.registry import open_model, shipped_config
from cellar.planner.capped import Room, capped_plan, fits
from cellar.planner.moves import RECORDED_LAUNCHES, Away, Few, few_tokens, pass_moves
from cellar.planner.passes import decode_seconds, pass_cost, predicted_pass
from cellar.planner.rates import Rates
from cellar.planner.saved import Limits, SavedPlan
from tests.tiny_checkpoint import CONFIG

BIG = CONFIG | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 64, "vocab_size": 500}
SPEC = open_model(BIG, "float32", 16, 256).spec
LIMITS = Limits(64, 64, 256)
LIBRARIES = 416 * 2**20


@pytest.mark.long
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
    # The device may attend to a part of it over the link: both end together, and the pass is shorter.
    alone = capped_plan(SPEC, asked, LIMITS, model="m", machine="any", rates=Rates(50e9, 80e9, 6e9))
    both = capped_plan(SPEC, asked, LIMITS, model="m", machine="any", rates=Rates(50e9, 80e9, 6e9, reads=6e9))
    assert {(part.device, part.compute) for part in both.placement.kv} == {("host", "host"), ("host", "device")}
    cpu, device = (part.units for part in both.placement.kv)
    assert cpu + device == alone.placement.num_chunks
    assert 0.3 < device / (cpu + device) < 0.5, "weights cross the link, too"
    seconds = [plan.figures["decode_pass"]["seconds"]["cpu"] for plan in (alone, both)]
    assert seconds[1] / seconds[0] == pytest.approx(cpu / (cpu + device), abs=0.01)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_pass_of_few_tokens_uses_both_memories(ahead: bool) -> None:
    """The link takes as long as the CPU with its exchanges; the plan leaves as many rows to the CPU as that says, all
    of one matrix of a layer, so that there is one exchange. It waits for launches only where they do not run ahead.
    """
    spec = open_model(shipped_config("llama-3-8b"), "bfloat16", 16, 256).spec
    one, few_of_one, few_of_many = Limits(1, 128, 256), few_tokens(spec, 1), few_tokens(spec, 64)
    room, shares = Room(6 * 2**30, 100 * 2**30, 0, None, "gpu"), []
    for exchange in (0.0, 1e-3):
        rates = Rates(50e9, 84e9, 60e9, exchange=exchange, runs_ahead=ahead)
        away = Away(10**10, 0, "device", "gpu")
        between = exchange if ahead else exchange + RECORDED_LAUNCHES
        waits = 32 * between + sum(layer.nbytes for layer in spec.layers) / rates.device
        few = predicted_pass(spec, rates, away, few_of_one, 1, 256)
        assert few["link"] == pytest.approx(few["cpu"] + waits)
        assert few["link"] * rates.link + few["cpu"] * rates.multiply == pytest.approx(10**10)
        cost = pass_cost(spec, rates, away, Few(16))
        assert decode_seconds(cost, 1, 128) == pytest.approx(few["link"])
        sent = pass_moves(spec, rates, away, Few(16)).few_sent
        assert decode_seconds(cost, 16, 128) == pytest.approx(few["link"] + 15 * sent), "planned for one"
        assert decode_seconds(cost, 17, 128) == pytest.approx(10**10 / 50e9)
        moved = predicted_pass(spec, rates, away, few_of_many, 64, 256)
        assert moved["link"] == pytest.approx(10**10 / 50e9)
        assert moved["cpu"] == 0
        plan = capped_plan(spec, room, one, model="m", machine="any", rates=rates)
        tensors = dict(spec.named_tensors())
        nbytes = {"device": 0, "host": 0}
        for part in plan.placement.weights:
            if part.device == "host":
                nbytes[part.compute] += (
                    (part.stop - part.start) * tensors[part.tensor].nbytes // tensors[part.tensor].shape[0]
                )
        shares.append(nbytes["host"] / sum(nbytes.values()))
        found = plan.figures["decode_pass"]["seconds"]
        assert shares[-1] == pytest.approx(found["cpu"] * 84e9 / sum(nbytes.values()), abs=0.01)
        by_cpu = {part.tensor for part in plan.placement.weights if part.compute == "host"}
        assert by_cpu == {f"layers.{j}.gate_up" for j in range(32)}
    assert shares[0] > shares[1] + 0.05
    slow = Rates(50e9, 84e9, 60e9, exchange=1.0, runs_ahead=ahead)
    assert predicted_pass(spec, slow, Away(10**10, 0, "device", "gpu"), few_of_one, 1, 256)["cpu"] == 0


@pytest.mark.parametrize(("sequences", "least"), [(1, 0.5), (12, 0.35), (64, 0.5)])
def test_a_plan_places_the_rows_that_its_price_leaves_to_the_cpu(sequences: int, least: float) -> None:
    """Fewer for twelve sequences, of which the CPU multiplies more slowly than it reads, than for one that is alone."""
    spec = open_model(shipped_config("llama-3-8b"), "bfloat16", 16, 256).spec
    rates = Rates(50e9, 84e9, 60e9, few_multiply=40e9, few_measured=12)
    room, limits = Room(6 * 2**30, 100 * 2**30, 0, None, "gpu"), Limits(sequences, 512, 256)
    plan = capped_plan(spec, room, limits, model="m", machine="any", rates=rates)
    placed, tensors = {"device": 0, "host": 0}, dict(spec.named_tensors())
    for part in plan.placement.weights:
        if part.device == "host":
            tensor = tensors[part.tensor]
            placed[part.compute] += (part.stop - part.start) * tensor.nbytes // tensor.shape[0]
    assert placed["host"] == pytest.approx(plan.figures["moves"]["few_rows"] * rates.multiply, rel=0.01)
    assert least < placed["host"] / sum(placed.values()) < least + 0.13


def test_a_stage_leaves_rows_to_the_cpu_for_the_sequences_of_one_of_its_passes() -> None:
    """24 sequences in two passes are twelve at a time: link and CPU end together with these, which it attends to, too,
    half way through their answers.
    """
    spec = open_model(shipped_config("llama-3-8b"), "bfloat16", 16, 256).spec
    rates = Rates(50e9, 84e9, 60e9, few_multiply=40e9, few_measured=16)
    room, limits = Room(6 * 2**30, 100 * 2**30, 0, None, "gpu"), Limits(24, 512, 256)
    plan = capped_plan(spec, room, limits, model="m", machine="any", rates=rates, passes=2)
    moves = plan.figures["moves"]
    more = 11 * (moves["few_each"] + moves["few_sent"])
    attention = 12 * (1 + 255 / 2) * spec.kv.chunk_nbytes() / 16 / rates.attention
    assert moves["attends"]
    assert moves["few_link"] == pytest.approx(moves["few_rows"] + more + moves["few_waits"] + attention)


def by_cpu(plan: SavedPlan) -> dict[str, int]:
    """Rows of the first layer's matrices that are left to the CPU."""
    found = (part for part in plan.placement.weights if part.compute == "host" and part.tensor.startswith("layers.0."))
    return {part.tensor.removeprefix("layers.0."): part.stop - part.start for part in found}


def test_few_rows_of_a_further_matrix_are_not_worth_their_exchange() -> None:
    """As the link gets slower the CPU gets more rows of the largest matrix, then all of it for a while, then at least
    a thousand of the next one, with one more exchange a layer in the price: as soon as that is quicker.
    """
    spec = open_model(shipped_config("llama-3-8b"), "bfloat16", 16, 256).spec
    room, limits, whole = Room(6 * 2**30, 100 * 2**30, 0, None, "gpu"), Limits(1, 128, 256), 28672
    found = []
    for link in range(60, 0, -2):
        rates = Rates(link * 1e9, 84e9, 60e9, exchange=1.2e-4)
        plan = capped_plan(spec, room, limits, model="m", machine="any", rates=rates)
        moves, rows = plan.figures["moves"], by_cpu(plan)
        found.append((rows["gate_up"], rows.get("down", 0)))
        assert len(rows) == (1 if moves["few_waits"] < 64 * rates.exchange else 2), "as many as are priced"
        cpu = moves["few_rows"] + moves["few_waits"]
        if found[-1] == (whole, 0):
            further = 32 * (1024 * 14336 * 2 / rates.multiply + rates.exchange)
            assert cpu <= moves["few_link"] <= cpu + further
        elif found[-1] == (whole, 1024):
            assert cpu >= moves["few_link"] * 0.999
        else:
            assert moves["few_link"] == pytest.approx(cpu, rel=1e-3)
    assert found == sorted(found)
    assert found[0][0] < whole
    assert (whole, 0) in found
    assert (whole, 1024) in found
    assert found[-1][1] > 1024
    assert not any(0 < down < 1024 for _, down in found)


def test_rows_leave_the_cpu_time_to_attend() -> None:
    """With K and V in host memory: attention, rows and what both wait for end with the link."""
    spec = open_model(shipped_config("llama-3-8b"), "bfloat16", 16, 256).spec
    rates = Rates(45e9, 80e9, 60e9, few_multiply=60e9, few_measured=64, exchange=1.2e-4, units=True)
    away, few = Away(12 * 10**9, 0, "host", "gpu"), few_tokens(spec, 64, units=True, context=140.0)
    moves = pass_moves(spec, rates, away, few)
    attention = 64 * 140 * spec.kv.chunk_nbytes() / 16 / rates.attention
    more = 63 * (moves.few_each + moves.few_sent)
    assert moves.few_link == pytest.approx(moves.few_rows + more + moves.few_waits + attention)
    idle = pass_moves(spec, rates, away, few_tokens(spec, 64, units=True))
    assert idle.few_rows > moves.few_rows
    assert decode_seconds(pass_cost(spec, rates, away, few), 64, 140) == pytest.approx(moves.few_link)


def test_tokens_and_products_take_the_link_for_a_while() -> None:
    """x of each matrix that has rows, the products of those rows, and where the CPU attends q, k, v and what it
    answers; all but those of one token, which the exchange has.
    """
    spec = open_model(shipped_config("llama-3-8b"), "bfloat16", 16, 256).spec
    rates = Rates(50e9, 80e9, 60e9)
    for place, sent in (("device", 0), ("host", 32 * 128 * (32 + 2 * 8) * 2 + 32 * 4096 * 2 / 0.8)):
        moves = pass_moves(spec, rates, Away(10**10, 0, place, "gpu"), Few(64, 32))
        rows = moves.few_rows * 80e9
        back = rows / (4096 * 2) * 2
        assert moves.few_sent == pytest.approx((sent + 32 * 4096 * 2 + back / 0.8) / 50e9)


def test_rows_on_disk_are_none_of_the_cpus() -> None:
    """The end of each layer lies there: what the CPU may have of the largest matrix is what is before."""
    spec = open_model(shipped_config("llama-3-8b"), "bfloat16", 16, 256).spec
    largest = 32 * 28672 * 4096 * 2
    rates = Rates(20e9, 84e9, 60e9, exchange=1e-3)
    for disk, matrices in ((0, 1), (largest // 4, 1), (largest * 7 // 8, 2), (largest, 1)):
        moves = pass_moves(spec, rates, Away(6 * 10**9, disk, "device", "gpu"), Few(16))
        assert round(moves.few_waits / (32 * rates.exchange)) == matrices


def test_one_request_keeps_its_kv_where_it_costs_no_exchange() -> None:
    """Of Llama-3-70B in 4 bits 47 MB of KV are as many rows that cross the link, but 80 more waits for the CPU."""
    spec = open_model(shipped_config("llama-3-70b"), "bfloat16", 16, 144, "int4").spec
    rates = Rates(52.7e9, 63e9, 60e9, exchange=7e-4)
    plan = capped_plan(
        spec, Room(2**34, 10**11, 0, None, "gpu"), Limits(1, 128, 144), model="m", machine="any", rates=rates
    )
    assert {(part.device, part.compute) for part in plan.placement.kv} == {("device", "device")}
    there, here = (
        pass_moves(spec, rates, Away(26 * 10**9, 0, place, "gpu"), Few(4)).few_waits for place in ("device", "host")
    )
    assert here == pytest.approx(there + 80 * rates.exchange)


@pytest.mark.long
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


def test_sequences_share_the_device_in_equal_parts() -> None:
    """All of them at once where steps are small enough, else halves: none is left over, for a pass of a few moves as
    many weights as one of many.
    """
    spec = open_model(shipped_config("llama-3-70b"), "bfloat16", 16, 640, "int4", "int4").spec
    rates = Rates(52e9, 64e9, 5e9)
    for gib, tokens, together in ((16, 4096, 128), (14, 8192, 64)):
        room = Room(gib * 2**30, 110 * 2**30, 0, None, "gpu")
        plan = capped_plan(spec, room, Limits(128, tokens, 640), model="m", machine="any", rates=rates)
        assert plan.figures["decode_pass"]["sequences"] == together
        assert [part.device for part in plan.placement.kv] == ["device"]


def test_tables_lie_in_host_memory_where_it_has_room() -> None:
    """Beside an accelerator, which gets as many more rows of the layers; no pass moves them. A head that is the table,
    too, stays, as all of it does on a processor, or where the host is too small.
    """
    spec = open_model(shipped_config("llama-3-8b"), "bfloat16", 32, 152).spec
    table, limits = 128256 * 4096 * 2, Limits(1, 128, 152)
    assert [t.nbytes for t in spec.tables] == [table]

    def planned(spec: ModelSpec, kind: str, host: int, disk: int = 0) -> tuple[dict[str, str], dict[str, int], float]:
        room = Room(6 * 2**30, host, disk, 2**27, kind)
        plan = capped_plan(spec, room, limits, model="m", machine="any", rates=Rates(multiply=70e9))
        tensors, nbytes, ends = dict(spec.named_tensors()), {"device": 0, "host": 0, "disk": 0}, {}
        for part in plan.placement.weights:
            tensor = tensors[part.tensor]
            if part.tensor.startswith("layers."):
                nbytes[part.device] += (part.stop - part.start) * tensor.nbytes // tensor.shape[0]
            else:
                ends[part.tensor] = part.device
        return ends, nbytes, plan.figures["moves"]["link"]

    ends, with_it, link = planned(spec, "gpu", 2**36)
    assert ends == {"embed": "host", "norm": "device", "lm_head": "device"}
    assert link * Rates().link == pytest.approx(with_it["host"], rel=1e-3), "of layers alone"
    ends, without, _ = planned(spec, "gpu", table - 1, 2**36)
    assert ends["embed"] == "device"
    assert with_it["device"] - without["device"] == pytest.approx(table, rel=0.1), "and a smaller ring"
    ends, narrow, _ = planned(spec, "gpu", 2 * table, 2**36)
    assert ends["embed"] == "host"
    assert narrow["host"] <= table
    assert planned(spec, "cpu", 2**36)[0]["embed"] == "device"
    tied = open_model(shipped_config("opt-6.7b"), "bfloat16", 32, 152).spec
    assert planned(tied, "gpu", 2**36)[0] == {
        "embed": "device", "positions": "host", "norm": "device", "norm_bias": "device",
    }  # fmt: skip


def test_a_model_that_fits_leaves_room_for_captured_steps() -> None:
    """Three quarters of a GiB in all beside activations, half of which a plan of few tokens leaves."""
    spec, limits = open_model(shipped_config("llama-3-8b"), "bfloat16", 32, 152).spec, Limits(1, 128, 152)
    kv = 5 * spec.kv.chunk_nbytes()
    activations = 2**26
    least = spec.nbytes() + kv + 3 * 2**28
    assert not fits(spec, Room(least, None, 0, None, "gpu"), limits)
    assert fits(spec, Room(least + activations, None, 0, None, "gpu"), limits)
    plan = capped_plan(spec, Room(least, 2**36, 0, None, "gpu"), limits, model="m", machine="any")
    assert {part.tensor for part in plan.placement.weights if part.device != "device"} == {"embed"}
