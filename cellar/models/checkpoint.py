"""A directory of weights as Hugging Face writes them: which tensors it has, and reading them.

The files are safetensors; where there are none, those of `pickled.py`. They are memory-mapped, and the map is let go
after every `WINDOW` bytes, so that the pages of a large checkpoint do not stay in this process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from cellar.core.errors import CheckpointError
from cellar.models.pickled import PickledFiles, dtype_of, read_pickled

SAFE = "model.safetensors"
PICKLED = "pytorch_model.bin"
INDEX = ".index.json"
"""After the name of what would be one file: the tensors of several."""

LONGEST_NAME = 255
"""Bytes of a file's name that file systems allow."""

# Bytes read from a file before its map is let go.
WINDOW = 64 * 2**20

# Element types of safetensors that are plain numbers, and the bytes of all that are read; the others belong to
# quantized formats.
FLOATS = ("F64", "F32", "BF16", "F16")
ELEMENT_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies and what it is; `dtype` in the file's own words (F32, BF16, ...)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """The tensors of a directory by name. All headers are read at once, so that damage is found before any work.

    Raises CheckpointError if the directory has no complete set of sound files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors: Mapping[str, StoredTensor] = _tensors(directory)
        self._pickled = PickledFiles()

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> Iterator[tuple[int, Tensor]]:
        """A tensor, or some rows and columns of it, in blocks of rows; use a block before asking for the next.

        Each comes with the number of its first row, counted from the first that was asked for.
        """
        stored = self.tensors[name]
        if not stored.shape:
            yield 0, self._number(stored.file, name)
            return
        rows = range(stored.shape[0]) if rows is None else rows
        step = max(1, WINDOW // max(1, math.prod(stored.shape[1:]) * ELEMENT_BYTES[stored.dtype]))
        for first in range(rows.start, rows.stop, step):
            stop = min(rows.stop, first + step)
            if _is_pickled(stored.file):
                block = self._pickled.rows(stored.file, name, first, stop)
                yield first - rows.start, block if columns is None else block[:, columns.start : columns.stop]
                continue
            with _open(stored.file) as file:
                there = file.get_slice(name)
                if columns is None:
                    yield first - rows.start, there[first:stop]
                else:
                    yield first - rows.start, there[first:stop, columns.start : columns.stop]

    def _number(self, file: Path, name: str) -> Tensor:
        """A tensor without dimensions."""
        if _is_pickled(file):
            raise CheckpointError(
                f"{name} in {file} is a single number, which is read of safetensors only; convert it."
            )
        with _open(file) as opened:
            number: Tensor = opened.get_tensor(name)
            return number


def _tensors(directory: Path) -> dict[str, StoredTensor]:
    if not directory.is_dir():
        there = "is not a directory" if directory.exists() else "does not exist"
        raise CheckpointError(f"model directory {directory} {there}; give one in Hugging Face's layout.")
    for single in (SAFE, PICKLED):
        if (directory / single).is_file():
            return _headers(directory / single)
        if (directory / (single + INDEX)).is_file():
            return _indexed(directory, single + INDEX)
        ending = Path(single).suffix
        if any(directory.glob(f"*{ending}")):
            raise CheckpointError(
                f"{directory} has {ending} files, but neither {single} nor {single}{INDEX}; add one of these."
            )
    raise CheckpointError(
        f"{directory} has no weights; {SAFE}, or {SAFE}{INDEX} and the files it names, must be there."
    )


def _indexed(directory: Path, index: str) -> dict[str, StoredTensor]:
    """Tensors of the files that the index names, each where the index says."""
    try:
        places = json.loads((directory / index).read_text(encoding="utf-8"))["weight_map"]
        expected = {name: directory / str(file) for name, file in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{directory / index} is damaged ({error}); get it again.") from error
    for named in set(map(str, places.values())):
        if not _is_inside(named):
            raise CheckpointError(
                f"{directory / index} names {named[:80]!r}, but may name files of its own folder only; get it again."
            )
    files = sorted(set(expected.values()))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{directory} lacks {', '.join(missing)}, which {index} names; get what is missing.")
    found = {file: _headers(file) for file in files}
    for name, file in expected.items():
        if name not in found[file]:
            raise CheckpointError(
                f"{index} of {directory} says that {name} is in {file.name}, but it is not; get both again."
            )
    return {name: tensor for tensors in found.values() for name, tensor in tensors.items()}


def _is_inside(file: str) -> bool:
    """True for a path that a file system can have, and that leads out of no folder."""
    parts = Path(file).parts
    short = all(len(part.encode(errors="replace")) <= LONGEST_NAME for part in parts)
    return bool(parts) and short and ".." not in parts and not Path(file).is_absolute() and "\0" not in file


def _headers(file: Path) -> dict[str, StoredTensor]:
    if _is_pickled(file):
        return {name: StoredTensor(file, tuple(t.shape), dtype_of(t)) for name, t in read_pickled(file).items()}
    with _open(file) as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        return {name: StoredTensor(file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}


def _is_pickled(file: Path) -> bool:
    return file.suffix == Path(PICKLED).suffix


def _open(file: Path) -> Any:
    """The file, mapped. safetensors checks that header and length agree, so a truncated file is found here."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or damaged ({error}); get it again.") from error
