"""Evaluates a graph eagerly, one node at a time: what a request computes by definition, and how shapes are learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cellar.cells.cell import Cell
from cellar.cells.compiler import lookups, walk
from cellar.cells.graph import Block
from cellar.cells.refs import GrownOutput, Output, Outputs
from cellar.cells.response import Leaf
from cellar.core.cell_graphs import NO_STOP
from cellar.core.errors import ConfigError

Kind = tuple[tuple[int, ...], torch.dtype]


class Evaluator:
    """Computes nodes with batches of one.

    `inputs[cell][i]` and `outputs[cell][o]` are the shapes (without the batch) and dtypes seen so far, `seen[cell]` the
    inputs of its first node and of the first that differs from it. Raises
    ConfigError if an input is left at zero before its shape is known, or two nodes disagree.
    """

    def __init__(self, cells: Sequence[Cell], inputs: Sequence[Sequence[Kind | None]] | None = None) -> None:
        self.cells = cells
        self.inputs: list[list[Kind | None]] = (
            [[self._declared(cell, name) for name in cell.inputs] for cell in cells]
            if inputs is None
            else [list(kinds) for kinds in inputs]
        )
        self.outputs: list[list[Kind | None]] = [[None] * len(cell.outputs) for cell in cells]
        self.seen: list[list[tuple[Tensor, ...]]] = [[] for _ in cells]
        self._width = max(len(cell.outputs) for cell in cells)

    def run(self, blocks: Sequence[Block]) -> Evaluated:
        """Compute every node of a graph."""
        values: list[Any] = [row for block in blocks for given in block.values if given is not None for row in given]
        computed: dict[int, Tensor] = {}
        grown: list[list[tuple[Tensor, ...]]] = []
        for block, reads in zip(blocks, lookups(blocks, self._width), strict=True):
            table = np.stack(reads, axis=1) if reads else np.zeros((block.count, 0), np.int64)
            if block.kind == "grow":
                grown.append(self._grow(block, table, values, computed))
                continue
            for k in self._order(block, table):
                outputs = self._node(block.cell, table[k], values, computed)
                for o, tensor in enumerate(outputs):
                    computed[(block.start + k) * self._width + o] = tensor
        return Evaluated(self._width, computed, grown)

    def _order(self, block: Block, table: np.ndarray[Any, Any]) -> Sequence[int]:
        if block.kind != "inner":
            return range(block.count)
        parents = table // self._width - block.start
        pairs = [(int(p), k) for k in range(block.count) for p in parents[k] if 0 <= p < block.count]
        return walk(block.count, pairs)[0]

    def _grow(
        self, block: Block, table: np.ndarray[Any, Any], values: list[Any], computed: dict[int, Tensor]
    ) -> list[tuple[Tensor, ...]]:
        limit, output, symbol = block.detail
        steps: list[tuple[Tensor, ...]] = []
        reads = table[0]
        for _ in range(limit):
            outputs = self._node(block.cell, reads, values, computed)
            if symbol != NO_STOP and int(outputs[output].item()) == symbol:
                break
            steps.append(outputs)
            for o, tensor in enumerate(outputs):
                computed[block.start * self._width + o] = tensor
            reads = table[1]
        return steps

    def _node(
        self, cell: int, reads: np.ndarray[Any, Any], values: list[Any], computed: dict[int, Tensor]
    ) -> tuple[Tensor, ...]:
        inputs = [self._input(cell, i, int(read), values, computed) for i, read in enumerate(reads)]
        outputs = self.cells[cell].run(inputs)
        seen = self.seen[cell]
        if not seen or (len(seen) == 1 and not all(map(torch.equal, seen[0], inputs))):
            seen.append(tuple(inputs))
        for o, tensor in enumerate(outputs):
            self._learn(
                self.outputs[cell],
                o,
                tensor,
                f"output {self.cells[cell].outputs[o]!r} of cell {self.cells[cell].name!r}",
            )
        return outputs

    def _input(self, cell: int, i: int, read: int, values: list[Any], computed: dict[int, Tensor]) -> Tensor:
        one, known = self.cells[cell], self.inputs[cell][i]
        label = f"input {one.inputs[i]!r} of cell {one.name!r}"
        if read >= 0:
            tensor = computed[read].to(one.device)
        elif read == -1:
            if known is None:
                raise ConfigError(
                    f"{label} is left at zero before its shape is known; declare shapes={{{one.inputs[i]!r}: (...)}}."
                )
            return torch.zeros((1, *known[0]), dtype=known[1], device=one.device)
        else:
            tensor = torch.as_tensor(np.asarray(values[-2 - read])[None], device=one.device)
            if tensor.is_floating_point():
                tensor = tensor.to(known[1] if known is not None else one.float_dtype)
        self._learn(self.inputs[cell], i, tensor, label)
        return tensor

    def _learn(self, kinds: list[Kind | None], k: int, tensor: Tensor, label: str) -> None:
        kind: Kind = (tuple(tensor.shape[1:]), tensor.dtype)
        if kinds[k] is None:
            kinds[k] = kind
        elif kinds[k] != kind:
            raise ConfigError(f"{label} is {kinds[k]} at one node and {kind} at another; make them equal.")

    @staticmethod
    def _declared(cell: Cell, name: str) -> Kind | None:
        shape = cell.shapes.get(name)
        return None if shape is None else (tuple(shape), torch.int64 if name in cell.high else cell.float_dtype)


class Evaluated:
    """The outputs of all nodes of a graph."""

    def __init__(self, width: int, computed: dict[int, Tensor], grown: list[list[tuple[Tensor, ...]]]) -> None:
        self._width = width
        self._computed = computed
        self._grown = grown

    def value(self, leaf: Leaf) -> Any:
        """What `Layout.assemble` gives for this leaf."""
        if isinstance(leaf, Output):
            value = self._one(leaf)
            return value.item() if value.ndim == 0 else value
        if isinstance(leaf, Outputs):
            found = [self._one(output) for output in leaf]
            return np.stack(found) if found else np.zeros(0, np.float32)
        assert isinstance(leaf, GrownOutput)
        steps = [_numpy(step[leaf.output][0]) for step in self._grown[leaf.ordinal]]
        return np.stack(steps) if steps else np.zeros(0, np.float32)

    def _one(self, output: Output) -> np.ndarray[Any, Any]:
        return _numpy(self._computed[output.node * self._width + output.output][0])


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy(force=True)
    return array
