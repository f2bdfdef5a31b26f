"""A mesh of chips simulated with NumPy: runs a layout's program, counts the elements that cross each link.

Chips are coordinates (x, y, z). Collectives are rings over the group's chips, all-to-all is direct. Integers, so that
sums are exact in any order.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np

from cellar.core.layouts import Mesh
from cellar.planner.layouts import Local, Move, Product, Program
from cellar.planner.sharding import Kind, Sharded

Chip = tuple[int, int, int]
Array = np.ndarray


class Machine:
    """Registers of every chip, and `sent[source, target]` elements."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.chips: list[Chip] = list(itertools.product(range(mesh.x), range(mesh.y), range(mesh.z)))
        self.memory: dict[Chip, dict[str, Array]] = {chip: {} for chip in self.chips}
        self.sent: Counter[tuple[Chip, Chip]] = Counter()

    # -- where things lie ------------------------------------------------------------------------

    def index(self, chip: Chip, axes: str) -> int:
        found = 0
        for axis in axes:
            found = found * getattr(self.mesh, axis) + chip["xyz".index(axis)]
        return found

    def part(self, array: Array, state: Sharded, chip: Chip) -> Array:
        for at, axes in enumerate(state.axes):
            count = self.mesh.count(axes)
            assert array.shape[at] % count == 0, (state, array.shape)
            step = array.shape[at] // count
            start = self.index(chip, axes) * step
            array = array.take(range(start, start + step), axis=at)
        return array

    def put(self, name: str, state: Sharded, array: Array) -> None:
        for chip in self.chips:
            self.memory[chip][name] = self.part(array, state, chip)

    def get(self, name: str, state: Sharded, shape: tuple[int, ...]) -> Array:
        """The whole tensor; every copy must agree."""
        assert not state.partial
        whole = np.zeros(shape, dtype=self.memory[self.chips[0]][name].dtype)
        seen = np.zeros(shape, dtype=bool)
        place = np.arange(whole.size).reshape(shape)
        for chip in self.chips:
            at = self.part(place, state, chip)
            mine = self.memory[chip][name]
            assert at.shape == mine.shape, (name, state, at.shape, mine.shape)
            again = seen.flat[at]
            np.testing.assert_array_equal(whole.flat[at][again], mine[again])
            whole.flat[at.ravel()] = mine.ravel()
            seen.flat[at.ravel()] = True
        assert seen.all()
        return whole

    def groups(self, axes: str) -> Iterator[list[Chip]]:
        """Chips that differ only along `axes`, in the order of the axes."""
        found: dict[tuple[int, ...], list[Chip]] = {}
        for chip in self.chips:
            found.setdefault(tuple(c for c, a in zip(chip, "xyz", strict=True) if a not in axes), []).append(chip)
        for group in found.values():
            yield sorted(group, key=lambda chip: self.index(chip, axes))

    # -- collectives -----------------------------------------------------------------------------

    def send(self, source: Chip, target: Chip, array: Array) -> Array:
        if source != target:
            self.sent[source, target] += array.size
        return array

    def all_gather(self, group: list[Chip], parts: list[Array], axis: int) -> list[Array]:
        k = len(group)
        have = [{i: parts[i]} for i in range(k)]
        for step in range(k - 1):
            moving = [(i, (i - step) % k) for i in range(k)]
            for i, piece in moving:
                have[(i + 1) % k][piece] = self.send(group[i], group[(i + 1) % k], have[i][piece])
        return [np.concatenate([h[i] for i in range(k)], axis=axis) for h in have]

    def reduce_scatter(self, group: list[Chip], wholes: list[Array], axis: int) -> list[Array]:
        k = len(group)
        pieces = [np.array_split(whole, k, axis=axis) for whole in wholes]
        for step in range(k - 1):
            moved = []
            for i in range(k):
                piece = (i - step - 1) % k
                moved.append((i, piece, self.send(group[i], group[(i + 1) % k], pieces[i][piece])))
            for i, piece, array in moved:
                pieces[(i + 1) % k][piece] = pieces[(i + 1) % k][piece] + array
        return [pieces[i][i] for i in range(k)]

    def all_to_all(self, group: list[Chip], wholes: list[Array], split: int, join: int) -> list[Array]:
        k = len(group)
        pieces = [np.array_split(whole, k, axis=split) for whole in wholes]
        return [
            np.concatenate([self.send(group[i], group[j], pieces[i][j]) for i in range(k)], axis=join) for j in range(k)
        ]

    # -- programs --------------------------------------------------------------------------------

    def run(self, program: Program) -> None:
        for statement in program.statements:
            match statement:
                case Move():
                    self.move(statement)
                case Product():
                    for chip in self.chips:
                        r = self.memory[chip]
                        equation = f"{statement.left.dims},{statement.right.dims}->{statement.result.dims}"
                        r[statement.out] = np.einsum(equation, r[statement.a], r[statement.b])
                case Local():
                    for chip in self.chips:
                        r = self.memory[chip]
                        inputs = [r[name] for name in statement.inputs]
                        r[statement.out] = LOCAL[statement.what](self, chip, statement, *inputs)

    def move(self, move: Move) -> None:
        dims = move.before.dims
        for group in self.groups(move.axes):
            arrays = [self.memory[chip][move.name] for chip in group]
            match move.kind:
                case Kind.ALL_GATHER:
                    arrays = self.all_gather(group, arrays, dims.index(move.dim))
                case Kind.REDUCE_SCATTER:
                    arrays = self.reduce_scatter(group, arrays, dims.index(move.dim))
                case Kind.ALL_TO_ALL:
                    arrays = self.all_to_all(group, arrays, dims.index(move.target), dims.index(move.dim))
                case Kind.ALL_REDUCE:
                    flat = [a.ravel() for a in arrays]
                    pad = -flat[0].size % len(group)
                    flat = [np.pad(f, (0, pad)) for f in flat]
                    whole = self.all_gather(group, self.reduce_scatter(group, flat, 0), 0)
                    arrays = [w[: w.size - pad].reshape(a.shape) for w, a in zip(whole, arrays, strict=True)]
                case Kind.SLICE:
                    k, at = len(group), dims.index(move.dim)
                    arrays = [np.array_split(a, k, axis=at)[i] for i, a in enumerate(arrays)]
            for chip, array in zip(group, arrays, strict=True):
                self.memory[chip][move.name] = array


# Integer stand-ins of the block's functions: what matters is which data meet on which chip.


def norm(whole: Array, sums: Array) -> Array:
    return whole * (1 + sums % 3)[..., None]


def activate(h: Array) -> Array:
    """[B, L, G, F] -> [B, L, F]: relu of the first, times the second if there is one."""
    return np.maximum(h[:, :, 0], 0) % 7 * (h[:, :, -1] % 5 if h.shape[2] == 2 else 1)


def attend(q: Array, k: Array, v: Array, first_head: int, first_kv: int, group: int) -> Array:
    """Causal, with a score that is not linear: relu(q k) instead of a softmax. q [B, L, H, D], k, v [B, S, K, D]."""
    out = np.zeros_like(q)
    past = k.shape[1] - q.shape[1]
    for h in range(q.shape[2]):
        at = (first_head + h) // group - first_kv
        for i in range(q.shape[1]):
            scores = np.maximum(np.einsum("bd,bsd->bs", q[:, i, h], k[:, : past + i + 1, at]), 0) % 11
            out[:, i, h] = np.einsum("bs,bsd->bd", scores, v[:, : past + i + 1, at]) % 13
    return out


def _attend(m: Machine, chip: Chip, s: Local, q: Array, k: Array, v: Array, kc: Array, vc: Array) -> Array:
    heads, kv = s.result.of("H"), m.kv_axes  # type: ignore[attr-defined]
    first = m.index(chip, heads) * q.shape[2]
    return attend(
        q,
        np.concatenate([kc, k], axis=1),
        np.concatenate([vc, v], axis=1),
        first,
        m.index(chip, kv) * k.shape[2],
        m.group,  # type: ignore[attr-defined]
    )


LOCAL = {
    "copy": lambda m, c, s, x: x.copy(),
    "norm_sums": lambda m, c, s, x: (x * x).sum(axis=2, keepdims=True),
    "norm": lambda m, c, s, x, sums: norm(x, sums[..., 0]),
    "activate": lambda m, c, s, h: activate(h),
    "add": lambda m, c, s, a, b: a + b,
    "attend": _attend,
}
