"""Every layout on a simulated mesh equals the unsharded function, and sends exactly the elements that it says."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from cellar.core.errors import ConfigError
from cellar.core.layouts import GATHERS, Layout, Mesh
from cellar.planner.layouts import block_program, communication, mlp_program
from cellar.planner.sharding import Kind, Sharded, contract, volume
from tests.planner.mesh import Array, Machine, activate, attend, norm

RNG = np.random.default_rng(0)
MESH = Mesh(2, 2, 2)
SIZES = {"B": 8, "L": 4, "E": 16, "F": 32, "G": 2, "H": 8, "K": 8, "D": 2, "S": 0, "N": 1}


def integers(dims: str, sizes: dict[str, int]) -> Array:
    return RNG.integers(-2, 3, size=[sizes[d] for d in dims])


def sent_by_each(machine: Machine) -> list[int]:
    found = Counter(dict.fromkeys(machine.chips, 0))
    for (source, _), count in machine.sent.items():
        found[source] += count
    return list(found.values())


def layouts(mesh: Mesh) -> list[Layout]:
    found = []
    for gather in GATHERS:
        spread = Layout(mesh, gather).spread
        found += [Layout(mesh, gather, spread[:stop]) for stop in range(len(spread) + 1)]
    return found


def name(value: object) -> str:
    return f"{value.name}-{value.gather}-{value.head_axes}" if isinstance(value, Layout) else str(value)


@pytest.mark.parametrize("gated", [1, 2])
@pytest.mark.parametrize("mesh", [MESH, Mesh(1, 2, 4), Mesh(4, 2, 1)], ids=str)
@pytest.mark.parametrize("gather", GATHERS)
def test_mlp(gather: str, mesh: Mesh, gated: int) -> None:
    sizes = SIZES | {"G": gated}
    layout = Layout(mesh, gather)
    program = mlp_program(layout)
    machine = Machine(mesh)
    whole = {key: integers(state.dims, sizes) for key, state in program.inputs.items()}
    for key, state in program.inputs.items():
        machine.put(key, state, whole[key])
    machine.run(program)
    expected = np.einsum("blf,fe->ble", activate(np.einsum("ble,egf->blgf", whole["x"], whole["w_in"])), whole["w_out"])
    np.testing.assert_array_equal(machine.get("y", program.inputs["x"], expected.shape), expected)
    each = sum(communication(program, {k: float(v) for k, v in sizes.items()}, mesh))
    assert sent_by_each(machine) == [each] * mesh.size


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "serial"])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("layout", layouts(MESH), ids=name)
def test_block(layout: Layout, kv_heads: int, parallel: bool, phase: str) -> None:
    sizes = SIZES | {"K": kv_heads} | ({"L": 1, "S": 3} if phase == "decode" else {})
    program = block_program(layout, kv_heads, parallel)
    machine = Machine(layout.mesh)
    machine.kv_axes, machine.group = layout.kv_axes(kv_heads), sizes["H"] // kv_heads  # type: ignore[attr-defined]
    whole = {key: integers(state.dims, sizes) for key, state in program.inputs.items()}
    for key, state in program.inputs.items():
        machine.put(key, state, whole[key])
    machine.run(program)

    def attention(n: Array) -> Array:
        q, k, v = (np.einsum("ble,ehd->blhd", n, whole[w]) for w in ("w_q", "w_k", "w_v"))
        k, v = np.concatenate([whole["k_cache"], k], 1), np.concatenate([whole["v_cache"], v], 1)
        return np.einsum("blhd,hde->ble", attend(q, k, v, 0, 0, sizes["H"] // kv_heads), whole["w_o"])

    def mlp(n: Array) -> Array:
        return np.einsum("blf,fe->ble", activate(np.einsum("ble,egf->blgf", n, whole["w_in"])), whole["w_out"])

    def normed(x: Array) -> Array:
        return norm(x, (x * x).sum(axis=2))

    x = whole["x"]
    if parallel:
        expected = x + attention(normed(x)) + mlp(normed(x))
    else:
        x = x + attention(normed(x))
        expected = x + mlp(normed(x))
    np.testing.assert_array_equal(machine.get("x2", program.inputs["x"], expected.shape), expected)
    each = sum(communication(program, {k: float(v) for k, v in sizes.items()}, layout.mesh))
    assert sent_by_each(machine) == [each] * layout.mesh.size


def test_a_wrong_program_is_caught() -> None:
    """The mesh must be able to fail: leaving one collective out changes the result."""
    program = mlp_program(Layout(MESH))
    kept = tuple(s for s in program.statements if getattr(s, "kind", None) is not Kind.REDUCE_SCATTER)
    machine = Machine(MESH)
    for key, state in program.inputs.items():
        machine.put(key, state, integers(state.dims, SIZES))
    broken = type(program)(kept, program.inputs, program.weights, "y")

    def attempt() -> None:
        machine.run(broken)
        machine.get("y", program.inputs["x"], (8, 4, 16))

    with pytest.raises((AssertionError, ValueError)):
        attempt()


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("k", [2, 3, 4, 8])
def test_ring_volumes(kind: str, k: int) -> None:
    machine = Machine(Mesh(k))
    group = next(machine.groups("x"))
    arrays = [np.arange(k * k * 2).reshape(k, 2 * k) for _ in group]
    if kind == "all_gather":
        machine.all_gather(group, [a[:1] for a in arrays], 0)
        before, after = Sharded.parse("B_xE"), Sharded.parse("BE")
    elif kind == "reduce_scatter":
        machine.reduce_scatter(group, arrays, 0)
        before, after = Sharded.parse("BE +x"), Sharded.parse("B_xE")
    else:
        machine.all_to_all(group, arrays, 0, 1)
        before, after = Sharded.parse("BE_x"), Sharded.parse("B_xE")
        before, after = before, after
    sizes = {"B": k * (k if kind == "all_to_all" else 1), "E": 2 * k}
    expected = volume(Kind(kind.replace("_", "-")), before, after, "x", sizes, Mesh(k))
    assert sent_by_each(machine) == [expected] * k


def test_notation() -> None:
    assert str(Sharded.parse("B_xyLE_z +x".replace(" +x", ""))) == "B_xyLE_z"
    found = contract(Sharded.parse("BLE_x"), Sharded.parse("E_xF_zy"), "BLF")
    assert str(found) == "BLF_zy +x"
    for bad in ("BLE_xF_x", "ble", "BB", "BE +q"):
        with pytest.raises(ConfigError):
            Sharded.parse(bad)
    with pytest.raises(ConfigError, match="differently"):
        contract(Sharded.parse("BLE_x"), Sharded.parse("E_yF"), "BLF")


# -- closed forms ----------------------------------------------------------------------------------


def sent(mesh: Mesh, gather: str, tokens: float, e: float, f: float) -> float:
    sizes = {"B": tokens, "L": 1.0, "E": e, "F": f, "G": 1.0}
    return sum(communication(mlp_program(Layout(mesh, gather)), sizes, mesh))


def without_factors(mesh: Mesh, gather: str, tokens: float, e: float, f: float) -> float:
    """The same with (k - 1)/k taken as 1."""
    sizes = {"B": tokens, "L": 1.0, "E": e, "F": f, "G": 1.0}
    total = 0.0
    for move in mlp_program(Layout(mesh, gather)).moves():
        k = mesh.count(move.axes)
        if k > 1:
            total += volume(move.kind, move.before, move.after, move.axes, sizes, mesh) * k / (k - 1)
    return total


@pytest.mark.parametrize("n", [4, 16, 64, 256])
def test_closed_forms_of_the_stationary_layouts(n: int) -> None:
    tokens, e = 32.0, 4096.0
    assert without_factors(Mesh(1, 1, n), "", tokens, e, 4 * e) == 2 * tokens * e
    root = int(n**0.5)
    two = without_factors(Mesh(root // 2, 1, 2 * root), "", tokens, e, 4 * e)
    if root // 2 > 1:
        assert two == pytest.approx(8 * tokens * e / root)
    assert (8 / root < 2) == (n > 16)


def test_closed_form_of_the_gathered_layouts() -> None:
    """Gathered over N of n chips: 2 BLE/N + 2 EF N/n, least at N = sqrt(BLn/F)."""
    tokens, e, f, n = 65536.0, 4096.0, 16384.0, 64

    def cost(gathered: int) -> float:
        return without_factors(Mesh(gathered, 1, n // gathered), "x", tokens, e, f)

    for gathered in (2, 4, 8, 16, 32):
        assert cost(gathered) == pytest.approx(2 * tokens * e / gathered + 2 * e * f * gathered / n)
    best = (tokens * n / f) ** 0.5
    assert best == 16
    assert min((2, 4, 8, 16, 32), key=cost) == best


def test_crossings_with_exact_factors() -> None:
    mesh, e, f = Mesh(4, 4, 4), 16384.0, 65536.0
    for (before, after), tokens in zip(itertools.pairwise(GATHERS), (16_384.0, 65_536.0, 1_048_576.0), strict=True):
        assert sent(mesh, before, tokens, e, f) == sent(mesh, after, tokens, e, f)
        assert sent(mesh, before, tokens / 2, e, f) < sent(mesh, after, tokens / 2, e, f)
        assert sent(mesh, before, tokens * 2, e, f) > sent(mesh, after, tokens * 2, e, f)
