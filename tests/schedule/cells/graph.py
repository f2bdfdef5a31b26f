"""GraphMaker: the graph builder of `cells/` over bare specs, for tests that need no torch module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cellar.cells.compiler import compile_graph
from cellar.cells.graph import Graph
from cellar.cells.response import Layout, emits_of, flatten, layout_of
from cellar.core.cell_graphs import CellGraph, CellRequest
from cellar.core.tasks import CellModelSpec


class GraphMaker(Graph):
    """`request` compiles what was built."""

    def __init__(self, spec: CellModelSpec) -> None:
        self.spec = spec
        cells: Any = [SimpleNamespace(name=c.name, inputs=tuple(p.name for p in c.inputs)) for c in spec.cells]
        names = tuple({p.name: o for o, p in enumerate(c.outputs)} for c in spec.cells)
        super().__init__(cells, spec.cells, names, {c.name: k for k, c in enumerate(cells)}, 10_000)

    def compiled(self, returned: Any) -> tuple[CellGraph, Layout, tuple[Any, ...]]:
        """-> graph, layout, values per bank."""
        leaves: list[Any] = []
        labels: list[str] = []
        structure = flatten(returned, leaves, labels)
        compiled = compile_graph(self.spec, self.blocks, self.num_numbers, self.num_nodes, emits_of(leaves))
        found: list[list[Any]] = [[] for _ in self.spec.banks]
        for block in self.blocks:
            for value, port in zip(block.values, self.spec.cells[block.cell].inputs, strict=True):
                if value is not None:
                    found[port.bank or 0].append(value)
        values = tuple(np.concatenate(parts) if parts else None for parts in found)
        return compiled.graph, layout_of(structure, leaves, labels, compiled), values

    def request(self, id: str, returned: Any, model: int = 0, *, stream: bool = False) -> CellRequest:
        """What a scheduler takes."""
        graph, _, values = self.compiled(returned)
        return CellRequest(id, model, graph, values, stream)
