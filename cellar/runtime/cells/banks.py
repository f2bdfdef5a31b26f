"""Banks of a worker: all values of one shape and dtype of one model, as one table on the device.

row 0          zeros, for ever
rows 1 ..      given out by the scheduler to the requests that this worker runs
row num_rows   spare: what pads a batch writes there, and nobody reads it
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cellar.core.errors import CapacityError, ConfigError
from cellar.core.tasks import BankSpec, CellModelSpec, IntArray, Values
from cellar.ops.upload import Upload as Uploader
from cellar.runtime.memory import human

# Rows that no bank has more of: a million states are more than any load, and their numbers stay small.
MOST_ROWS = 2**20
# Rows without which a model could hardly run one request.
LEAST_FRAMES = 4


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a bank or port. Raises ConfigError for a name that torch does not know."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype {name!r} is not known; use torch's names, such as float32 or int64.")
    return found


def row_nbytes(bank: BankSpec) -> int:
    """Bytes of one row."""
    return math.prod(bank.shape) * torch_dtype(bank.dtype).itemsize


def bank_rows(models: Sequence[CellModelSpec], nbytes: int) -> tuple[tuple[int, ...], ...]:
    """Rows of every bank of every model within `nbytes` for all: equal numbers of frames, as far as that goes.

    The narrow ones get `MOST_ROWS` first, since tokens cost little and a request has many; what they leave is shared.
    Raises CapacityError if a bank would have fewer than `LEAST_FRAMES` frames.
    """
    banks = [(m, b, bank) for m, model in enumerate(models) for b, bank in enumerate(model.banks)]
    rows: dict[tuple[int, int], int] = {}
    left = nbytes
    for count, (m, b, bank) in zip(
        range(len(banks), 0, -1), sorted(banks, key=lambda x: row_nbytes(x[2])), strict=True
    ):
        frames = min(MOST_ROWS, left // count // row_nbytes(bank)) // bank.width
        if frames < LEAST_FRAMES:
            raise CapacityError(
                f"bank {bank.name} of model {models[m].name} has room for {frames} frames of "
                f"{human(bank.width * row_nbytes(bank))}, with {human(nbytes)} for the states of all models; "
                "serve fewer models, or free memory before the start (in Python also: raise memory_bytes)."
            )
        rows[m, b] = frames * bank.width
        left -= rows[m, b] * row_nbytes(bank)
    return tuple(tuple(rows[m, b] for b in range(len(model.banks))) for m, model in enumerate(models))


class Banks:
    """`tables[m][b]`: [rows + 1, *shape] of bank b of model m; `spares[m][b]`: the number of its spare row."""

    def __init__(
        self, models: Sequence[CellModelSpec], rows: Sequence[Sequence[int]], device: torch.device, uploader: Uploader
    ) -> None:
        self._device = device
        self._uploader = uploader
        self.spares = rows
        self.tables: Sequence[Sequence[Tensor]] = [
            [_table(bank, count + 1, device) for bank, count in zip(model.banks, counts, strict=True)]
            for model, counts in zip(models, rows, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return sum(table.nbytes for tables in self.tables for table in tables)

    def put(self, model: int, bank: int, rows: IntArray, values: Values) -> None:
        """table[rows] = values, in stream order."""
        table = self.tables[model][bank]
        if values.dtype in (np.float32, np.int64, np.int32):
            where, what = self._uploader([rows.astype(np.int64), np.ascontiguousarray(values)])
        else:
            (where,) = self._uploader([rows.astype(np.int64)])
            what = torch.from_numpy(np.ascontiguousarray(values)).to(self._device)
        table.index_copy_(0, where, what.to(table.dtype))


def _table(bank: BankSpec, rows: int, device: torch.device) -> Tensor:
    dtype = torch_dtype(bank.dtype)
    shape = (rows, *bank.shape)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Zero pages that the system hands out when they are first touched: rows that are never used cost nothing.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
