"""A file of tensors that torch.save wrote (pytorch_model.bin), memory-mapped.

Such a file is a pickle, which could name any code to be run. It is read by an unpickler that knows tensors and
containers of them only (torch's `weights_only`), and refused if it names anything else.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cellar.core.errors import CheckpointError

# Bytes read from a file before its map is let go. Mapping it again reads its pickle again: 70 ms for 500 tensors.
WINDOW = 256 * 2**20

# As safetensors calls the element types that are read; torch's own names for the others.
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def read_pickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; they lie in its map, which lasts as long as one of them.

    Raises CheckpointError if it is damaged, older than torch 1.6, or holds anything else than tensors.
    """
    _check_stored(file)
    try:
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise _refusal(file, named[1] if named else "objects of other kinds") from error
    except (RuntimeError, OSError, ValueError, KeyError, EOFError) as error:
        raise CheckpointError(
            f"{file} is truncated, damaged, or was saved by torch before 1.6; get it again, or as safetensors."
        ) from error
    if not isinstance(loaded, Mapping):
        raise _refusal(file, f"a {type(loaded).__name__}")
    for name, value in loaded.items():
        if not isinstance(name, str) or not _is_plain(value):
            raise _refusal(file, f"a {type(value).__name__} under {str(name)!r}")
    return {name: value.detach() for name, value in loaded.items()}


class PickledFiles:
    """Reads tensors of such files piece by piece, with one file mapped at a time."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._tensors: dict[str, Tensor] = {}
        self._num_read = 0

    def rows(self, file: Path, name: str, first: int, stop: int) -> Tensor:
        """Rows of a tensor, in the file's map. Raises CheckpointError."""
        if file != self._file or self._num_read > WINDOW:
            self._tensors = {}  # the old map goes before the new one comes
            self._file, self._tensors, self._num_read = file, read_pickled(file), 0
        block = self._tensors[name][first:stop]
        self._num_read += block.nbytes
        return block


def dtype_of(tensor: Tensor) -> str:
    """The type of a tensor's elements in the words of safetensors (F32, BF16)."""
    return _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def _check_stored(file: Path) -> None:
    """torch stores what it saves as it is; a file that is compressed could be a thousand times its size in memory."""
    try:
        with zipfile.ZipFile(file) as archive:
            packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError):
        return  # torch says what is wrong with it
    if packed:
        raise CheckpointError(f"{file} is compressed, which torch.save does not do; get it again, or as safetensors.")


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_quantized


def _refusal(file: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file} holds {what}, but only plain tensors by name are read from such files; save a state dict, or convert "
        "it to safetensors."
    )
