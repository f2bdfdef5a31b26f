"""A stand-in for a CUDA graph on the CPU: what torch computes meanwhile, again into the same tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Tape(TorchDispatchMode):
    """`log` gets "begin", "end" and "replay", with the number of this one."""

    def __init__(self, log: list[str], number: int) -> None:
        super().__init__()
        self._log = log
        self._number = number
        self._done: list[tuple[Any, Sequence[Any], Mapping[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute it, and keep how."""
        found = func(*args, **(kwargs or {}))
        self._done.append((func, args, kwargs or {}, found))
        return found

    @contextmanager
    def recording(self) -> Iterator[None]:
        """As `runtime/captured.py` has it."""
        self._log.append(f"begin {self._number}")
        try:
            with self:
                yield
        finally:
            self._log.append(f"end {self._number}")

    def replay(self) -> None:
        """All of it again; views and what is written in place are there already."""
        self._log.append(f"replay {self._number}")
        for func, args, kwargs, found in self._done:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(found), _tensors(again), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


def tapes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CUDA graphs are tapes from now on, numbered from 0; -> what they are asked for."""
    said: list[str] = []
    made: list[Tape] = []

    def graph() -> Tape:
        made.append(Tape(said, len(made)))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    return said


def _tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [x for x in found or () if isinstance(x, Tensor)]
