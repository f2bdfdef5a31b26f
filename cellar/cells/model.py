"""CellModel: a set of cells, and a function that unfolds a request into a graph of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from cellar.cells.batching import check_rows, check_shapes, stop_training
from cellar.cells.cell import Cell
from cellar.cells.compiler import Compiled, compile_graph
from cellar.cells.evaluate import Evaluator, Kind
from cellar.cells.fields import RequestField, check_fields, fields_of
from cellar.cells.graph import Graph, host_dtype
from cellar.cells.refs import GrownOutput, Output
from cellar.cells.response import Layout, Leaf, ResponsePort, describe, emits_of, flatten, layout_of
from cellar.cells.watchdog import TookTooLongError, Watchdog
from cellar.core.cell_graphs import CellGraph, CellRequest
from cellar.core.errors import CellarError, ConfigError, RequestError, is_interrupt
from cellar.core.tasks import BankSpec, CellModelSpec, CellSpec, Port, Values

_CACHED_NODES = 1 << 18
"""Nodes in compiled graphs that a model keeps."""


@dataclass(frozen=True, slots=True, eq=False)
class UnfoldedRequest:
    """A request as a compiled graph, its values per bank, and the way back from results to a response."""

    graph: CellGraph
    values: tuple[Values | None, ...]
    layout: Layout

    def request(self, id: str, model: int, *, stream: bool = False) -> CellRequest:
        """What a scheduler takes."""
        return CellRequest(id, model, self.graph, self.values, stream)


class CellModel:
    """A model of cells, ready to be served.

    name      unique in its engine
    cells     the cell types; each must be used by the example
    unfold    unfold(graph, **fields) writes the graph of one request and returns the outputs that are the response;
              its parameters after the graph, with their annotations, are the fields of a request
    example   fields of a request from which shapes are learned
    max_nodes, unfold_seconds: limits of one request, growing chains counted at their limit

    Raises ConfigError for what cannot work, before any request: also for a cell of which two different rows come out of
    one batch otherwise than alone (`batching.check_rows`). Modules are set to evaluation (`.eval()`).
    """

    def __init__(
        self,
        name: str,
        cells: Sequence[Cell],
        unfold: Callable[..., Any],
        example: Mapping[str, Any],
        *,
        max_nodes: int = 100_000,
        unfold_seconds: float = 2.0,
    ) -> None:
        if not cells or len({cell.name for cell in cells}) != len(cells):
            raise ConfigError(
                f"model {name!r} has cells {[cell.name for cell in cells]}; give one or more, with different names."
            )
        self.name = name
        self.cells = tuple(cells)
        stop_training(name, self.cells)
        self.fields: tuple[RequestField, ...] = fields_of(unfold)
        self.max_nodes = max_nodes
        self._unfold = unfold
        self._watchdog = Watchdog(unfold_seconds)
        self._index = {cell.name: c for c, cell in enumerate(cells)}
        self._names = tuple({output: o for o, output in enumerate(cell.outputs)} for cell in cells)
        self._compiled: OrderedDict[Any, tuple[Compiled, Layout]] = OrderedDict()
        self._cached_nodes = 0
        self._specs: tuple[CellSpec, ...] | None = None
        self.spec: CellModelSpec = self._learn(example)
        self._specs = self.spec.cells
        self._dtypes = [host_dtype(bank.dtype) for bank in self.spec.banks]
        self.response: Any = self._describe(example)
        self.unfold(example)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """As `spec.cells`."""
        return tuple(cell.module for cell in self.cells)

    def unfold(self, fields: Mapping[str, Any]) -> UnfoldedRequest:
        """Run the unfold function on a request. Raises RequestError for whatever is wrong with it."""
        graph, structure, leaves, names = self._run(fields)
        key = (tuple([block.key for block in graph.blocks]), tuple(leaves), structure)
        found = self._compiled.get(key)
        if found is None:
            if not graph.blocks or not graph.num_nodes:
                raise RequestError("the graph has no nodes; unfold must call a cell.")
            compiled = compile_graph(self.spec, graph.blocks, graph.num_numbers, graph.num_nodes, emits_of(leaves))
            found = (compiled, layout_of(structure, leaves, names, compiled))
            self._keep(key, found, graph.num_numbers)
        return UnfoldedRequest(found[0].graph, self._pack(graph), found[1])

    def evaluate(self, fields: Mapping[str, Any]) -> Any:
        """The response, computed eagerly, one node at a time: what any engine must return."""
        graph, structure, leaves, _ = self._run(fields)
        kinds: list[list[Kind | None]] = [
            [(p.shape, getattr(torch, p.dtype)) for p in cell.inputs] for cell in self.spec.cells
        ]
        evaluated = Evaluator(self.cells, kinds).run(graph.blocks)
        values = iter([evaluated.value(leaf) for leaf in leaves])
        return _fill(structure, values)

    # -- unfolding --------------------------------------------------------------------------------

    def _run(self, fields: Mapping[str, Any]) -> tuple[Graph, Any, list[Leaf], list[str]]:
        check_fields(self.fields, fields)
        graph = Graph(self.cells, self._specs, self._names, self._index, self.max_nodes)
        try:
            returned = self._watchdog.run(lambda: self._unfold(graph, **fields))
        except TookTooLongError:
            raise RequestError(f"unfold took more than {self._watchdog.seconds:g} s; send a smaller request.") from None
        except CellarError:
            raise
        except RecursionError:
            raise RequestError("unfold recursed too deeply; send a smaller request.") from None
        except BaseException as error:  # `sys.exit` too: it must not end the thread that serves other requests
            if is_interrupt(error):
                raise
            raise RequestError(f"unfold raised {type(error).__name__}: {error}.") from error
        leaves: list[Leaf] = []
        names: list[str] = []
        structure = flatten(returned, leaves, names)
        return graph, structure, leaves, names

    def _keep(self, key: Any, found: tuple[Compiled, Layout], nodes: int) -> None:
        """Graphs of requests of equal form are compiled once; the oldest are forgotten."""
        self._compiled[key] = found
        self._cached_nodes += nodes
        while self._cached_nodes > _CACHED_NODES and self._compiled:
            try:
                _, (old, _) = self._compiled.popitem(last=False)
            except KeyError:
                return
            self._cached_nodes -= sum(len(part.table) for part in old.graph.parts)

    def _pack(self, graph: Graph) -> tuple[Values | None, ...]:
        """The values of a request per bank, in the order of the compiler's slots."""
        found: list[list[Values]] = [[] for _ in self.spec.banks]
        for block in graph.blocks:
            for given, port in zip(block.values, self.spec.cells[block.cell].inputs, strict=True):
                if given is not None and port.bank is not None:
                    found[port.bank].append(given)
        return tuple([None if not parts else parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in found])

    # -- learning ---------------------------------------------------------------------------------

    def _learn(self, example: Mapping[str, Any]) -> CellModelSpec:
        """Run the example one node at a time; from its shapes follow ports and banks."""
        try:
            graph, _, _, _ = self._run(example)
        except RequestError as error:
            raise ConfigError(f"the example request of model {self.name!r} fails: {error}") from error
        evaluator = Evaluator(self.cells)
        try:
            evaluator.run(graph.blocks)
        except BaseException as error:
            if isinstance(error, ConfigError) or is_interrupt(error):
                raise
            reason = str(error) or type(error).__name__
            raise ConfigError(f"the example request of model {self.name!r} fails: {reason}") from error
        banks: list[BankSpec] = []
        index: dict[tuple[tuple[int, ...], str], int] = {}
        inputs = []
        for cell, kinds in zip(self.cells, evaluator.inputs, strict=True):
            ports = []
            for name, kind in zip(cell.inputs, kinds, strict=True):
                if kind is None:
                    raise ConfigError(
                        f"the example of model {self.name!r} never feeds input {name!r} of cell {cell.name!r}."
                    )
                shape, dtype = kind[0], str(kind[1]).removeprefix("torch.")
                bank = index.setdefault((shape, dtype), len(index))
                if bank == len(banks):
                    banks.append(BankSpec(f"{dtype}{list(shape)}", shape, dtype))
                if name in cell.high and not dtype.startswith(("int", "uint")):
                    raise ConfigError(f"input {name!r} of cell {cell.name!r} is {dtype}; `high` is for integers.")
                ports.append(Port(name, shape, dtype, bank, cell.high.get(name)))
            inputs.append(tuple(ports))
        cells = []
        for c, cell in enumerate(self.cells):
            ports = []
            for name, kind in zip(cell.outputs, evaluator.outputs[c], strict=True):
                if kind is None:
                    raise ConfigError(f"the example of model {self.name!r} never uses cell {cell.name!r}; extend it.")
                shape, dtype = kind[0], str(kind[1]).removeprefix("torch.")
                ports.append(Port(name, shape, dtype, index.get((shape, dtype)), infinite=name in cell.infinite))
            check_shapes(cell, inputs[c], tuple(ports))
            check_rows(cell, inputs[c], evaluator.seen[c])
            cells.append(CellSpec(cell.name, inputs[c], tuple(ports), cell.batch_sizes, cell.priority))
        sized = tuple(BankSpec(bank.name, bank.shape, bank.dtype, _width(cells, b)) for b, bank in enumerate(banks))
        return CellModelSpec(self.name, tuple(cells), sized)

    def _describe(self, example: Mapping[str, Any]) -> Any:
        _, structure, leaves, _ = self._run(example)
        ports = []
        for leaf in leaves:
            if isinstance(leaf, Output):
                ports.append(ResponsePort("one", self.spec.cells[leaf.cell].outputs[leaf.output]))
            elif isinstance(leaf, GrownOutput):
                ports.append(ResponsePort("growing", self.spec.cells[leaf.cell].outputs[leaf.output]))
            else:
                first = leaf.ranges[0]
                ports.append(ResponsePort("many", self.spec.cells[first.cell].outputs[first.output]))
        return describe(structure, ports)


def _width(cells: Sequence[CellSpec], bank: int) -> int:
    """Rows that a node of any cell needs side by side, as a power of two."""
    most = max(sum(port.bank == bank for port in cell.outputs) for cell in cells)
    return 1 << max(most - 1, 0).bit_length()


def _fill(structure: Any, values: Any) -> Any:
    return describe(structure, list(values))
