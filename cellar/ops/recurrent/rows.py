"""Cells over rows: how a module that can do more than `forward` takes its inputs and leaves its outputs.

Values lie in tables, and a cell is told which row each node of a batch reads or writes. A plain `torch.nn.Module` is
given gathered inputs and its outputs are scattered. A module that has `on_rows` does both in its own kernels: its
first kernel gathers, its last one scatters, and nothing is copied in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from cellar.ops.linear.blocked import BlockedWeight
from cellar.ops.linear.dense import DenseWeight
from cellar.ops.linear.device import prepare
from cellar.ops.linear.pack import pack
from cellar.ops.linear.weight import LinearWeight


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a table: table [rows, *shape], index int64 [b], on one device."""

    table: Tensor
    index: Tensor

    def gather(self) -> Tensor:
        """[b, *shape], a copy."""
        return self.table.index_select(0, self.index)

    def scatter(self, values: Tensor) -> None:
        """table[index] = values [b, *shape]."""
        self.table.index_copy_(0, self.index, values)

    def at(self, layer: int) -> Rows:
        """The same rows of a table of layers: [rows, layers, ...] -> [rows, ...], a view."""
        return Rows(self.table[:, layer], self.index)


@dataclass(frozen=True, slots=True)
class RowsOutput:
    """What a batch left besides the rows it wrote.

    finite: [b] bool, False where any floating output has NaN or infinity. values: one per output, [b, *shape] for
    those that were given no rows to write, else None.
    """

    finite: Tensor
    values: tuple[Tensor | None, ...]


# sources: one per input; targets: one per output, None for an output that is returned and not written.
RowsFunction = Callable[[Sequence[Rows], Sequence[Rows | None]], RowsOutput]


@runtime_checkable
class RowsModule(Protocol):
    """A module that makes its own function of rows."""

    def on_rows(self, device: torch.device) -> RowsFunction:
        """The cell with its weights on `device`, packed as its operations want them; the module stays as it is."""


@dataclass(frozen=True, slots=True)
class StepsFunction:
    """A `RowsFunction` that can also take several steps of the same nodes in one call, as fast as one long sequence.

    carried  input -> output: from the second step on the input is what the step before put out
    run      run(sources, num_steps, targets): `sources` of carried inputs name rows [b], of the others rows
             [num_steps * b], step after step; `targets` are the last step's, and only that one's outputs are written
    every    outputs that `run` returns for every step, [num_steps * b, *shape], whether they are written or not
    most     the largest batch for which this is worth the waiting for all steps; None: any

    Of what `run` returns, `finite` is [b], where a node of which some step is not finite is not finite in the end; but
    if there are outputs of every step it is theirs, [num_steps * b].
    """

    step: RowsFunction
    carried: Mapping[int, int]
    run: Callable[[Sequence[Rows], int, Sequence[Rows | None]], RowsOutput]
    every: frozenset[int] = frozenset()
    most: int | None = None

    def __call__(self, sources: Sequence[Rows], targets: Sequence[Rows | None]) -> RowsOutput:
        """One step."""
        return self.step(sources, targets)


def placed(weight: Tensor, device: torch.device) -> LinearWeight:
    """A matrix [out, in] on a device, in the form that `linear` is fastest with there: packed, or with its counters.

    In float32 on the CPU its product for a row has the same bits whatever the other rows, and however many.
    """
    there = weight.detach().to(device)
    if device.type != "cpu":
        return prepare(there)
    packed = pack(there)
    plain = isinstance(packed, DenseWeight) and there.dtype == torch.float32
    return BlockedWeight(there) if plain else packed


def put(target: Rows | None, values: Tensor) -> Tensor | None:
    """Write an output where it belongs, or give it back if it belongs nowhere."""
    if target is None:
        return values
    target.scatter(values)
    return None


def landing(target: Rows | None, like: Rows, index: Tensor) -> Rows:
    """`target`, or a table of its own for an output that is only returned: a row such as `like` has per index."""
    if target is not None:
        return target
    count = len(index)
    table = like.table.new_empty((count, *like.table.shape[1:]))
    return Rows(table, torch.arange(count, device=index.device))


def returned(targets: Sequence[Rows | None], landed: Sequence[Rows]) -> tuple[Tensor | None, ...]:
    """The values of a `RowsOutput`, given where each output landed."""
    return tuple(rows.table if target is None else None for target, rows in zip(targets, landed, strict=True))


def finite_rows(values: Tensor) -> Tensor:
    """values: [b, ...] -> [b] bool: True where all of a row's numbers are finite."""
    flat = values.reshape(len(values), -1)
    # Zero times a finite number is zero, so that no sum can overflow.
    return (flat * 0).sum(1) == 0


def number_rows(values: Tensor) -> Tensor:
    """values: [b, ...] -> [b] bool: True where none of a row's numbers is NaN."""
    return ~values.reshape(len(values), -1).isnan().any(1)
