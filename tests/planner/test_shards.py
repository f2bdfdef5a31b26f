"""What a chip stores of each tensor: as the layouts say, as ranks load it, and as a Placement names it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from cellar.core.layouts import STORED, Layout, Mesh
from cellar.core.messages import Placement
from cellar.core.specs import ModelSpec, TensorSpec
from cellar.models.registry import shipped_names
from cellar.models.sharding import shard
from cellar.models.stored import padded_heads, stored
from cellar.planner import models
from cellar.planner.cost import dimensions
from cellar.planner.layouts import block_program
from cellar.planner.machines import machine
from cellar.planner.offload import Job
from cellar.planner.partition import Work, block_work, meshes, sizes_of
from cellar.planner.saving import saved_plan
from cellar.planner.search import find
from cellar.planner.shards import stored_shape
from cellar.reports.models import model_spec

NAMES = (*shipped_names(), *models.NAMES)


def test_specs_and_planner_name_the_same_axes() -> None:
    named = {axis for name in NAMES for tensor in model_spec(name).tensors() for axis in tensor.axes}
    assert named <= STORED.keys()
    assert STORED.keys() - named <= {"words"}  # a projection that few of the OPT models have


@pytest.mark.parametrize("chips", [1, 8, 16])
@pytest.mark.parametrize("name", ["llama-3-70b", "palm-62b", "opt-30b"])
def test_a_chip_stores_what_the_layouts_multiply(name: str, chips: int) -> None:
    """All matrices of a layer on one chip are the weights that the block's program starts from."""
    spec = model_spec(name)
    d = dimensions(spec)
    sizes = sizes_of(d, Work(1, 1, 1))
    for mesh, _ in meshes(chips):
        if d.embed % mesh.x or d.heads % (mesh.z * mesh.y):
            continue
        program = block_program(Layout(mesh), d.kv_heads, d.parallel)
        multiplied = sum(program.inputs[name].local(sizes, mesh) for name in program.weights)
        matrices = (tensor for tensor in spec.layers[0].tensors if len(tensor.shape) == 2)
        assert sum(math.prod(stored_shape(tensor, d, mesh)) for tensor in matrices) == multiplied


@pytest.mark.parametrize("name", NAMES)
def test_the_planner_counts_what_the_spec_says(name: str) -> None:
    """One account of a model's work: what layouts multiply on one chip is the spec's own products and attention."""
    spec = model_spec(name)
    d, one = dimensions(spec), block_work(dimensions(spec), Layout(Mesh()), "", "switch")
    layer = list(spec.layers[0].operations(1, 100))
    products = [operation for operation in layer if operation.flops and operation.name != "attention"]
    (attention,) = (operation for operation in layer if operation.name == "attention")
    assert one.flops == sum(operation.flops for operation in products) == 2 * d.layer_elements
    assert 2 * one.weight_elements == one.flops
    assert 4 * one.query_elements * 100 == attention.flops
    assert d.kv_elements() * 100 == attention.kv_elements
    assert d.layers * d.kv_elements() * 2 == spec.kv.nbytes_per_token()
    (head,) = (operation for operation in spec.operations(1, 0, 1) if operation.name == "lm_head")
    assert head.flops == 2 * d.head_elements


@pytest.mark.parametrize(("name", "size"), [("llama-3-8b", 4), ("llama-3-8b", 8), ("opt-6.7b", 2), ("qwen3-8b", 8)])
def test_one_dimension_is_what_ranks_load(name: str, size: int) -> None:
    """Tensor parallelism cuts matrices as a box of one dimension does; its vectors are cut, too."""
    spec = model_spec(name)
    matrices = [t for t in spec.layers[0].tensors if len(t.shape) == 2]
    mine = {tensor.name: tensor.shape for tensor in shard(spec, 0, size).layers[0].tensors}
    for tensor in matrices:
        assert stored_shape(tensor, dimensions(spec), Mesh(1, 1, size)) == mine[tensor.name]


@pytest.mark.parametrize("mesh", [Mesh(1, 1, 4), Mesh(2, 2, 2), Mesh(4, 1, 2), Mesh(8, 1, 1)], ids=str)
@pytest.mark.parametrize("name", ["llama-3.2-1b", "opt-6.7b", "qwen3-8b"])
def test_a_rank_stores_what_the_planner_says(name: str, mesh: Mesh) -> None:
    """Every tensor, the vocabulary too, on every rank; and the ranks have all of every matrix between them."""
    spec = model_spec(name)
    heads, kv_heads = padded_heads(spec.num_heads, spec.num_kv_heads, mesh.size)
    d = replace(dimensions(spec), heads=heads, kv_heads=kv_heads)
    ranks = [dict(stored(spec, mesh, rank).named_tensors()) for rank in range(mesh.size)]
    for key, tensor in spec.named_tensors():
        for mine in ranks:
            assert mine[key].shape == stored_shape(tensor, d, mesh), key
        if len(tensor.shape) == 2 and tensor.size < 1e8:
            assert _covered(tensor, [mine[key] for mine in ranks]), key


def _covered(tensor: TensorSpec, pieces: list[TensorSpec]) -> bool:
    """Whether every element of every stored part is in some piece."""
    for p, part in enumerate(tensor.stored_parts()):
        seen = np.zeros(part.shape, bool)
        for piece in pieces:
            for region in piece.regions():
                if region.part == p:
                    columns = region.columns or range(part.shape[1])
                    seen[region.rows.start : region.rows.stop, columns.start : columns.stop] = True
        if not seen.all():
            return False
    return True


def rows(found: Placement, name: str) -> int:
    return sum(part.stop - part.start for part in found.weights if part.tensor == name)


def test_columns_that_are_cut_leave_all_rows() -> None:
    """Of an offloaded model over 8 devices, each with a shard: a product's inputs are cut, not its outputs."""
    spec: ModelSpec = model_spec("llama-3-70b")
    plans = find(dimensions(spec), machine("8xt4"), Job(512, 32)).plans
    cut = next(p for p in plans if p.offload is not None and p.offload.problem.part.cut == 8)
    found = saved_plan(cut, spec, "x").placement
    assert found.partition is not None
    assert found.partition.mesh == (1, 1, 8)
    assert rows(found, "layers.3.down") == rows(found, "layers.3.out") == 8192
    assert rows(found, "layers.3.gate_up") == 2 * 28672 // 8
    assert rows(found, "layers.3.qkv") == (64 + 8 + 8) * 128 // 8
    gathered = next(p for p in plans if p.offload is not None and p.offload.problem.part.gathered == 8)
    found = saved_plan(gathered, spec, "x").placement
    assert found.partition is not None
    assert found.partition.mesh == (8, 1, 1)
    assert rows(found, "layers.3.down") == rows(found, "layers.3.out") == 8192 // 8
    assert rows(found, "layers.3.gate_up") == 2 * 28672


def test_a_partition_names_rows_of_the_shard() -> None:
    spec = model_spec("llama-3-70b")
    plans = find(dimensions(spec), machine("4xh200"), Job(512, 32)).plans
    plan = next(p for p in plans if p.decode is not None and p.decode.layout.mesh == Mesh(1, 1, 4))
    found = saved_plan(plan, spec, "x").placement
    assert (rows(found, "layers.3.qkv"), rows(found, "layers.3.out")) == (80 * 128 // 4, 8192)
    assert rows(found, "embed") == -(-128_256 // 4)
