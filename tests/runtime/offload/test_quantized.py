"""Quantized weights, and K and V in fewer bits, of models larger than their device: the resident engine's tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cellar import LLM
from cellar.core.errors import CapacityError, ConfigError
from cellar.core.formats import Format
from cellar.core.messages import Placed, RequestOutput
from cellar.core.pieces import arrays, cut_at_most, format_name, rows_nbytes
from cellar.core.specs import ModelSpec, TensorSpec
from cellar.models.loader import dummy_reader
from cellar.models.registry import open_model, read_config
from cellar.planner.capped import LIBRARIES, Room, capped_plan, fits
from cellar.planner.saved import Limits
from cellar.quant.expanded import ExpandedWeight
from cellar.quant.matrix import dequantized, quantized
from cellar.quant.pieces import piece_of, weight_of
from cellar.quant.weight import QuantizedWeight, StackedWeight
from cellar.runtime.offload.held import HOST, HeldMemory
from cellar.runtime.offload.homes import opened_homes
from cellar.runtime.offload.layout import placed_rows, planned_nbytes
from cellar.runtime.offload.opened import check_offloaded, device_nbytes
from tests.conformance.chatglm import config_of
from tests.models.test_quantized import CASES, CONFIG, written
from tests.runtime.offload.placements import plan_of, random_placement
from tests.runtime.offload.test_offloaded import LIMITS, OPTIONS, requests, tokens_of
from tests.tiny_checkpoint import write_checkpoint

KINDS = ("int4", "int8", "fp8", "w8a8")
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_layers": 3, "n_layer": 3}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "tie_word_embeddings": True},
    "opt": {"architectures": ["OPTForCausalLM"], "ffn_dim": 96, "word_embed_proj_dim": 32},
    "chatglm": config_of(4, 2, 64, 96),
    "falcon": {"architectures": ["FalconForCausalLM"], "multi_query": True},
    "gpt_bigcode": {"architectures": ["GPTBigCodeForCausalLM"], "n_embd": 64, "n_head": 4, "n_positions": 256},
}


def spec_of(model: Path, quantization: str | None = None, kept: str = "auto") -> ModelSpec:
    return open_model(read_config(model), "float32", 16, LIMITS.max_model_len, quantization, kept).spec


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def model(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp("model") / "model"
            if kind in FAMILIES:
                made[kind] = write_checkpoint(folder, **({"model_type": kind} | FAMILIES[kind] | SHAPE))
            else:
                folder.mkdir()
                written(folder, *CASES[kind], max_position_embeddings=256)
                made[kind] = folder
        return made[kind]

    return model


def resident(model: Path, **options: Any) -> list[RequestOutput]:
    rest = OPTIONS | {"dtype": "float32", "block_size": 16, "kv_cache_memory_bytes": 10**6}
    with LLM(model, **rest, max_model_len=LIMITS.max_model_len, **options) as llm:
        return llm.generate(*requests(), use_tqdm=False)


def offloaded(
    model: Path, folder: Path, seed: int, kv: tuple[str, str] = ("device", "device"), **options: Any
) -> list[RequestOutput]:
    spec = spec_of(model, options.get("quantization"), options.get("kv_cache_dtype", "auto"))
    file = folder / "plan.json"
    plan = plan_of(spec, random_placement(spec, seed, batch=1 + seed % 3, kv=kv), LIMITS)
    file.write_text(replace(plan, kv_cache_dtype=options.pop("kv_cache_dtype", "auto")).to_json())
    with LLM(model, plan=file, disk_path=folder / "disk", **OPTIONS, **options) as llm:
        assert llm.offload is not None
        assert llm.offload.weights["disk"] > 0
        return llm.generate(*requests(), use_tqdm=False)


def same(found: list[RequestOutput], wanted: list[RequestOutput], within: float = 1e-4) -> None:
    assert tokens_of(found) == tokens_of(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=within)


@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(kind, marks=pytest.mark.long) for kind in list(FAMILIES)[1:])]
)
def test_tokens_are_those_of_the_resident_quantized_engine(
    kind: str, form: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """Rows of each tensor anywhere, in its bits; the disk included."""
    if (kind, form) == ("chatglm", "int4"):
        with pytest.raises(ConfigError, match="int4 wants rows in groups of 32, but those of down have 52"):
            resident(models(kind), quantization=form)
        return
    wanted = resident(models(kind), quantization=form)
    # Which code an activation in 8 bits is rounded to may be decided by a last bit, and the library's order of sums of
    # what is not quantized differs on some processors between packed matrices and those as they lie.
    same(offloaded(models(kind), tmp_path, 3, quantization=form), wanted, within=0.1 if form == "w8a8" else 1e-4)


QUICK = ("gptq act-order", "compressed 4 bits", "fp8, blocks", "mxfp4")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in CASES])
def test_quantized_checkpoints_are_streamed_in_their_bits(
    name: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    wanted = resident(models(name))
    for seed in range(2):
        same(offloaded(models(name), tmp_path, seed), wanted)


@pytest.mark.parametrize("kept", ["fp8", "int4"])
@pytest.mark.parametrize("kv", [("device", "device"), ("host", "host"), ("host", "device")])
def test_k_and_v_in_fewer_bits_on_the_device_and_in_host_memory(
    kept: str, kv: tuple[str, str], models: Callable[[str], Path], tmp_path: Path
) -> None:
    """Beside weights in 4 bits; the CPU attends to decodes, or the device does."""
    options = {"quantization": "int4", "kv_cache_dtype": kept}
    same(offloaded(models("opt"), tmp_path, 4, kv=kv, **options), resident(models("opt"), **options))


@pytest.mark.long
@pytest.mark.parametrize(("form", "kept", "device"), [("int4", "int4", 380_000), ("int8", "fp8", 480_000)])
def test_a_quantized_model_larger_than_its_device_plans_by_itself(
    form: str, kept: str, device: int, tmp_path: Path
) -> None:
    """What is placed takes no more than the places have; the disk gets the rest."""
    deep = write_checkpoint(tmp_path / "deep", **(SHAPE | {"num_hidden_layers": 10}))
    options = {"quantization": form, "kv_cache_dtype": kept, "max_num_seqs": 3, "max_num_batched_tokens": 40}
    rest = {"max_model_len": 128, "dtype": "float32", "block_size": 16, "kv_cache_memory_bytes": 100_000}
    sizes = {"device_memory": device / 2**30, "host_memory": 60_000 / 2**30, "disk": 1.0, "disk_path": tmp_path}
    with LLM(deep, **OPTIONS, **options, **rest, **sizes) as llm:
        report, plan = llm.offload, llm.plan
        found = tokens_of(llm.generate(*requests(), use_tqdm=False))
    assert report is not None
    assert plan is not None
    assert plan.kv_cache_dtype == kept
    assert report.weights["disk"] > 10_000
    assert 40_000 < report.weights["host"] <= 60_000
    assert report.weights["device"] + report.kv + report.ring <= report.device == device
    assert {part.format for part in plan.placement.weights} == {"float32", form, "int8"}
    assert found == tokens_of(resident(deep, **options))


# -- pieces of bytes -----------------------------------------------------------------------------------

FORMATS = {
    "int4/32": Format("int4", 32),
    "int4/64 zeros": Format("int4", 64, zero_points=True),
    "int4 rows": Format("int4"),
    "int8": Format("int8"),
    "int8/32": Format("int8", 32),
    "fp8": Format("fp8", activations="fp8"),
    "fp8 blocks": Format("fp8", 128, rows=128, activations="fp8"),
    "fp8 blocks, plain activations": Format("fp8", 128, rows=128),
    "mxfp4": Format("mxfp4", 32),
}


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_over_a_piece_is_the_rows_it_was_made_of(name: str, kind: str) -> None:
    """In the order of a processor, and in that of a GPU's kernels; another piece in the same memory is another one."""
    format, generator = FORMATS[name], torch.Generator().manual_seed(5)
    first, second = (quantized(torch.randn(300, 384, generator=generator), format) for _ in range(2))
    rows = range(128, 256)
    piece, scales = piece_of(QuantizedWeight(first), rows, format, kind, HOST)
    tensor = TensorSpec("m", (300, 384), "float32", ("mlp", "embed"), formats=(format,))
    assert rows_nbytes(tensor, 128, 256, kind) == len(piece)
    weight = weight_of(piece, (128, 384), format, kind, scales)
    assert torch.equal(weight.dense(), dequantized(first.rows(128, 256)))
    piece.copy_(piece_of(QuantizedWeight(second), rows, format, kind, HOST)[0])
    assert torch.equal(weight.dense(), dequantized(second.rows(128, 256)))
    x = torch.randn(3, 384, generator=generator)
    if kind == "cpu":
        whole = QuantizedWeight(second).multiply(x)[:, 128:256]
        assert torch.equal(weight.multiply(x), whole)


def test_what_is_written_out_on_arrival_equals_the_resident_product() -> None:
    """Rows that the CPU multiplies in short passes come to a GPU in its order, and are written out there."""
    matrix = quantized(torch.randn(300, 384, generator=torch.Generator().manual_seed(1)), Format("int4", 64, 1, True))
    order = torch.randperm(384, generator=torch.Generator().manual_seed(2))
    x = torch.randn(5, 384, generator=torch.Generator().manual_seed(3))
    bias = torch.ones(300)
    found = ExpandedWeight(matrix, order).multiply(x, bias)
    torch.testing.assert_close(found, QuantizedWeight(matrix, order).multiply(x, bias), atol=1e-4, rtol=1e-4)


def test_what_has_no_such_form_is_refused() -> None:
    matrix = quantized(torch.randn(8, 64), Format("int4", 32))
    uneven = replace(matrix, groups=torch.tensor([0] * 20 + [1] * 44))
    format = Format("int4", 32)
    with pytest.raises(ConfigError, match="columns in groups of unequal sizes, which are not offloaded"):
        piece_of(QuantizedWeight(uneven), range(8), format, "cpu", HOST)
    ordered = QuantizedWeight(replace(matrix, groups=torch.arange(64) % 2))
    with pytest.raises(ConfigError, match=r"does not promise \(desc_act\), which is not offloaded"):
        piece_of(ordered, range(8), format, "cpu", HOST)
    wide = replace(matrix, scales=matrix.scales.float() * 1.0001)
    with pytest.raises(ConfigError, match="scales of 32 bits, which 16 bits do not hold"):
        piece_of(QuantizedWeight(wide), range(8), format, "cpu", HOST)
    exact = replace(matrix, scales=matrix.scales.float())
    assert piece_of(QuantizedWeight(exact), range(8), format, "cpu", HOST)[1] == torch.float16
    both = StackedWeight([QuantizedWeight(matrix), QuantizedWeight(replace(matrix, scales=matrix.scales.bfloat16()))])
    with pytest.raises(ConfigError, match="scales of unequal types"):
        piece_of(both, range(4, 12), format, "cpu", HOST)


SPECS = [open_model(CONFIG, "float32", 16, quantization=form).spec for form in KINDS]


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.long)])
def test_random_plans_are_placed_to_the_byte(tmp_path: Path, count: int) -> None:
    """Bytes by place as planned, and each piece's content where it was planned, read back from there."""
    for seed in range(count):
        spec = SPECS[seed % len(SPECS)]
        placement = random_placement(spec, seed)
        rows = placed_rows(placement, spec)
        memory = HeldMemory("device", device_nbytes(spec, rows, 0))
        homes, found = opened_homes(spec, rows, memory, tmp_path, dummy_reader(HOST, seed))
        homes.close()
        tensors = dict(spec.named_tensors())
        planned = dict.fromkeys(("device", "host", "disk"), 0)
        for part in placement.weights:
            planned[part.device] += rows_nbytes(tensors[part.tensor], part.start, part.stop, "cpu")
        assert dict(found.nbytes) == planned == planned_nbytes(rows)
        # Beside the bits of all matrices no more than alignment.
        assert spec.nbytes() <= sum(planned.values()) < spec.nbytes() + 64 * 4 * len(placement.weights)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("name", ["int4", "w8a8", "gptq act-order", "fp8, blocks"])
def test_plans_take_no_more_than_there_is(name: str, kind: str) -> None:
    """Whatever the format: what the runtime carves of the device, and what lies in host memory, is within the limits;
    more of the device, less elsewhere; groups of rows are whole.
    """
    config = CONFIG | {"hidden_size": 512, "intermediate_size": 5120, "num_hidden_layers": 6}
    if name in KINDS:
        spec = open_model(config, "float32", 16, 64, name).spec
    else:
        spec = open_model(config | {"quantization_config": CASES[name][0]}, "float32", 16, 64).spec
    limits, tensors = Limits(2, 16, 64), dict(spec.named_tensors())
    kv = 1_000_000
    room = Room(0, 0, 10**10, kv, kind)
    first = 0 if kind == "cpu" else LIBRARIES
    buffers = next(n for n in range(first, first + 10**9, 10**6) if _plans(spec, replace(room, device=n), limits))
    last, seen = 0, 0
    for device in range(buffers, buffers + spec.nbytes(), spec.nbytes() // 5):
        for host in (0, spec.nbytes() // 5, None):
            here = replace(room, device=device, host=host)
            if fits(spec, here, limits):
                continue
            plan = capped_plan(spec, here, limits, model="m", machine="any")
            rows = placed_rows(plan.placement, spec, kind)
            found = planned_nbytes(rows)
            assert device_nbytes(spec, rows, plan.placement.num_chunks) <= device
            assert host is None or found["host"] <= host
            assert {part.format for part in plan.placement.weights} == {format_name(t) for t in spec.tensors()}
            assert all(cut_at_most(tensors[part.tensor], part.start) == part.start for part in plan.placement.weights)
            if host == 0:
                assert found["device"] >= last
                last = found["device"]
            seen += 1
    assert seen > 3


def _plans(spec: ModelSpec, room: Room, limits: Limits) -> bool:
    try:
        capped_plan(spec, room, limits, model="m", machine="any")
    except CapacityError:
        return False
    return True


def test_a_cut_that_parts_rows_of_one_scale_is_refused() -> None:
    spec = open_model(CONFIG | {"quantization_config": CASES["fp8, blocks"][0]}, "float32", 16).spec
    placement = random_placement(spec, 0, whole=True)
    name = "layers.0.gate_up"
    rest = tuple(part for part in placement.weights if part.tensor != name)
    halves = Placed(name, "device", 0, 100, "fp8"), Placed(name, "host", 100, 512, "fp8")
    with pytest.raises(ConfigError, match=r"cuts layers\.0.gate_up at rows 0 and 100, but 128 rows from 0 on share"):
        check_offloaded(replace(placement, weights=(*rest, *halves)), spec, HOST)
    other = tuple(replace(part, format="int4") if part.tensor == name else part for part in placement.weights)
    with pytest.raises(ConfigError, match=r"has layers\.0.gate_up in int4, but the model has it in fp8; plan again"):
        check_offloaded(replace(placement, weights=other), spec, HOST)


def test_arrays_of_a_piece_begin_at_lines_of_the_cache() -> None:
    for format in FORMATS.values():
        for kind in ("cpu", "gpu"):
            found = arrays(format, (384, 384), kind)
            assert all(array.offset % 64 == 0 for array in found)
            assert all(a.offset + a.nbytes <= b.offset for a, b in itertools.pairwise(found))
