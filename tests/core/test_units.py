"""Units: what may be cut, and what never is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellar.core.formats import Format
from cellar.core.specs import LayerSpec, TensorSpec
from cellar.core.units import GROUP_ROWS, Units, row_units


def layer_of(heads: int, kv_heads: int, dim: int, embed: int, mlp: int, gated: bool = True) -> LayerSpec:
    q, kv = heads * dim, kv_heads * dim
    entry = TensorSpec("gate_up", (2 * mlp, embed), "float32", ("gate_up", "embed"), parts=(mlp, mlp))
    tensors = (
        TensorSpec("qkv", (q + 2 * kv, embed), "float32", ("qkv", "embed"), parts=(q, kv, kv)),
        TensorSpec("out", (embed, q), "float32", ("embed", "heads")),
        entry if gated else TensorSpec("up", (mlp, embed), "float32", ("mlp", "embed")),
        TensorSpec("down", (embed, mlp), "float32", ("embed", "mlp")),
    )
    return LayerSpec(0, tensors, heads, kv_heads, dim)


def test_a_kv_head_goes_with_its_queries_and_gates_go_in_pairs() -> None:
    units = row_units(layer_of(8, 2, 16, 200, 100))
    assert units["qkv"] == Units((128, 32, 32), (64, 16, 16))
    assert units["qkv"].ranges(1, 2) == (range(64, 128), range(144, 160), range(176, 192))
    assert units["heads"].ranges(1, 2) == (range(64, 128),)
    assert units["gate_up"].ranges(10, 13) == (range(10, 13), range(110, 113))
    assert units["mlp"].ranges(10, 13) == (range(10, 13),)
    assert units["embed"] == Units((200,), (GROUP_ROWS,))
    assert units["embed"].ranges(3, 4) == (range(192, 200),)


def test_without_a_gate_columns_go_in_groups() -> None:
    units = row_units(layer_of(4, 4, 16, 64, 200, gated=False))
    assert units["mlp"] == Units((200,), (64,))
    assert "gate_up" not in units


@pytest.mark.parametrize("group", [32, 48, 128])
def test_a_quantization_group_is_never_cut(group: int) -> None:
    layer = layer_of(8, 4, 16, 256, 384)
    format = Format("int4", group=group)
    tensors = tuple(
        replace(t, formats=(format,) * len(t.stored_parts())) if t.axes[1] in ("heads", "mlp") else t
        for t in layer.tensors
    )
    units = row_units(replace(layer, tensors=tensors))
    for axis in ("heads", "mlp"):
        for u in range(units[axis].count - 1):
            (part,) = units[axis].ranges(u, u + 1)
            assert part.start % group == 0
            assert part.stop % group == 0
    assert units["qkv"].count == units["heads"].count
    assert units["gate_up"].count == units["mlp"].count


def test_blocks_of_rows_are_not_cut_either() -> None:
    layer = layer_of(8, 4, 16, 256, 384)
    block = Format("int8", group=128, rows=96)
    gate_up = replace(layer.tensors[2], formats=(block, block))
    units = row_units(replace(layer, tensors=(*layer.tensors[:2], gate_up, layer.tensors[3])))
    assert units["gate_up"].sizes == (96, 96)
    assert units["mlp"].sizes == (96,)
    assert units["embed"].sizes == (128,)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9)), min_size=1, max_size=3),
    st.integers(1, 8),
)
def test_shares_cover_every_row_once(shapes: list[tuple[int, int]], size: int) -> None:
    count = shapes[0][0]
    units = Units(tuple(count * width for _, width in shapes), tuple(width for _, width in shapes))
    shares = [units.share(rank, size) for rank in range(size)]
    assert [start for start, _ in shares[1:]] == [stop for _, stop in shares[:-1]]
    assert max(b - a for a, b in shares) - min(b - a for a, b in shares) <= 1
    rows = sorted(row for start, stop in shares for part in units.ranges(start, stop) for row in part)
    assert rows == list(range(sum(units.segments)))
