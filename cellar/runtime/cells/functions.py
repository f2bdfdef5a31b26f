"""From a cell's module to a function of rows: its own where it has one, else gather, call, scatter."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cellar.core.errors import CellarError, is_interrupt
from cellar.core.tasks import CellSpec
from cellar.ops.recurrent.rows import Rows, RowsFunction, RowsModule, RowsOutput, finite_rows, number_rows, put
from cellar.runtime.cells.banks import torch_dtype

# No cell's fault, and no other batch would do better.
_OF_THE_DEVICE = (torch.OutOfMemoryError, torch.AcceleratorError)


def is_of_the_cell(error: BaseException) -> bool:
    """Whether the cell is to blame: not the device, nor Ctrl-C. A cell may raise anything, `sys.exit()` too."""
    return not isinstance(error, _OF_THE_DEVICE) and not is_interrupt(error)


class CellError(CellarError):
    """A cell returned what it did not declare."""


def placed_modules(modules: Sequence[Sequence[nn.Module]], device: torch.device) -> list[list[nn.Module]]:
    """The modules with their weights on `device`, copies where these lie elsewhere.

    What several cells share, whole or as equal views of one storage, is shared there, too: one copy for all.
    """
    moved: dict[tuple[Any, ...], Tensor] = {}
    memo: dict[int, Any] = {}

    def move(tensor: Tensor) -> None:
        view = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        there = moved.get(view)
        if there is None:
            there = moved[view] = tensor.detach().to(device)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(there, requires_grad=False) if is_parameter else there

    def placed(module: nn.Module) -> nn.Module:
        tensors = [*module.parameters(), *module.buffers()]
        if all(tensor.device == device for tensor in tensors):
            return module
        for tensor in tensors:
            if id(tensor) not in memo:
                move(tensor)
        return copy.deepcopy(module, memo)

    return [[placed(module) for module in own] for own in modules]


def rows_function(module: nn.Module, spec: CellSpec, device: torch.device) -> RowsFunction:
    """The cell on `device`, where its weights lie (`placed_modules`)."""
    # A function of the module's own refuses all that is not finite.
    if isinstance(module, RowsModule) and not any(port.infinite for port in spec.outputs):
        return module.on_rows(device)
    return _plain(module, spec)


def guarded(
    function: RowsFunction, spec: CellSpec, inputs: Sequence[Rows], targets: Sequence[Rows | None], batch: int
) -> tuple[RowsOutput, dict[int, str]]:
    """One batch -> its output, and per failed node why.

    If the batch raises it is run again node by node, so that only those that fail alone have failed; they leave zeros
    in the place of values. What the device itself cannot do is raised.
    """
    try:
        return function(inputs, targets), {}
    except BaseException as error:
        if not is_of_the_cell(error):
            raise
        if batch == 1:
            return _void(spec, inputs), {0: _sentence(error)}
    errors: dict[int, str] = {}
    alone: list[RowsOutput] = []
    for n in range(batch):
        own = [Rows(rows.table, rows.index[n : n + 1]) for rows in inputs]
        kept = [None if rows is None else Rows(rows.table, rows.index[n : n + 1]) for rows in targets]
        try:
            alone.append(function(own, kept))
        except BaseException as error:
            if not is_of_the_cell(error):
                raise
            errors[n] = _sentence(error)
            alone.append(_void(spec, own))
    columns = [
        [value for value in column if value is not None] for column in zip(*(o.values for o in alone), strict=True)
    ]
    values = tuple(torch.cat(column) if column else None for column in columns)
    return RowsOutput(torch.cat([output.finite for output in alone]), values), errors


def _void(spec: CellSpec, inputs: Sequence[Rows]) -> RowsOutput:
    """What one node that failed leaves: zeros where an output is returned."""
    device = inputs[0].index.device if inputs else torch.device("cpu")
    values: list[Tensor | None] = []
    for port in spec.outputs:
        zeros = torch.zeros((1, *port.shape), dtype=torch_dtype(port.dtype), device=device)
        values.append(zeros if port.bank is None else None)
    return RowsOutput(torch.ones(1, dtype=torch.bool, device=device), tuple(values))


def _sentence(error: BaseException) -> str:
    if isinstance(error, CellarError):
        return str(error)
    return f"the cell raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _plain(module: nn.Module, spec: CellSpec) -> RowsFunction:
    def step(sources: Sequence[Rows], targets: Sequence[Rows | None]) -> RowsOutput:
        inputs = [rows.gather() for rows in sources]
        outputs = _outputs(module(*inputs), spec)
        batch = len(inputs[0]) if inputs else len(outputs[0])
        finite: Tensor | None = None
        for port, output in zip(spec.outputs, outputs, strict=True):
            if output.shape != (batch, *port.shape) or output.dtype != torch_dtype(port.dtype):
                raise CellError(
                    f"cell {spec.name} returned {port.name} as {str(output.dtype).removeprefix('torch.')} "
                    f"{list(output.shape)}; it must be {port.dtype} {[batch, *port.shape]}, as for the example request."
                )
            if output.is_floating_point() and output.numel():
                good = number_rows(output) if port.infinite else finite_rows(output)
                finite = good if finite is None else finite & good
        if finite is None:
            finite = outputs[0].new_ones(batch, dtype=torch.bool)
        return RowsOutput(finite, tuple(put(t, output) for t, output in zip(targets, outputs, strict=True)))

    return step


def _outputs(returned: object, spec: CellSpec) -> Sequence[Tensor]:
    """What a module returned, one tensor per output."""
    if isinstance(returned, Tensor):
        found: Sequence[object] = (returned,)
    elif isinstance(returned, Mapping):
        found = tuple(returned.get(port.name) for port in spec.outputs)
    else:
        found = tuple(returned) if isinstance(returned, Sequence) else (returned,)
    tensors = [value for value in found if isinstance(value, Tensor)]
    if len(tensors) != len(found) or len(found) != len(spec.outputs):
        raise CellError(
            f"cell {spec.name} returned {len(tensors)} tensors; it must return "
            f"{', '.join(port.name for port in spec.outputs)}."
        )
    return tensors
