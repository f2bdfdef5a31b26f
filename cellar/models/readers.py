"""The reader of plain tensors: what a checkpoint must have, and how it comes into memory. Others: `quantized.py`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from cellar.core.errors import CheckpointError
from cellar.core.specs import Region, StoredPart
from cellar.models.checkpoint import FLOATS, Checkpoint


class Reader(Protocol):
    """Reads one stored part of a tensor, in one format."""

    def check(self, checkpoint: Checkpoint, name: str, part: StoredPart, *, transposed: bool) -> None:
        """Raises CheckpointError unless the tensor `name` of the checkpoint is that part."""

    def read(self, checkpoint: Checkpoint, name: str, region: Region, out: Tensor, *, transposed: bool) -> None:
        """A region of it into `out`: [rows, columns] of the region, in the dtype and on the device of the run."""


class PlainReader:
    """Plain numbers, in any of the floating-point types."""

    def check(self, checkpoint: Checkpoint, name: str, part: StoredPart, *, transposed: bool) -> None:
        """As `Reader` says."""
        there = checkpoint.tensors[name]
        if there.dtype not in FLOATS:
            raise CheckpointError(
                f"{name} in {there.file} is stored as {there.dtype}, but its config.json does not say that it is "
                f"quantized, and plain numbers are {', '.join(FLOATS)}; get both again."
            )
        expected = part.shape[::-1] if transposed else part.shape
        if there.shape != expected:
            raise CheckpointError(
                f"{name} in {there.file} has shape {list(there.shape)}, but config.json calls for {list(expected)}; "
                "check that they belong together."
            )

    def read(self, checkpoint: Checkpoint, name: str, region: Region, out: Tensor, *, transposed: bool) -> None:
        """As `Reader` says, some rows of what is stored at a time."""
        rows, columns = region.rows, region.columns
        if transposed:
            out = out.T
            rows, columns = range(len(out)) if columns is None else columns, rows
        for first, block in checkpoint.read(name, rows, columns):
            out[first : first + len(block)].copy_(block.to(out.device))


PLAIN: Reader = PlainReader()
"""Of all formats that are not quantized, or are quantized when they have been read."""
