"""All operations in one list: name, public function, definition, kernel, example cases.

Each module of this package lists its operations in a tuple `OPS`; `all_ops` collects them. The one conformance
test (`tests/conformance/test_ops.py`) walks this list, so an operation that is here is tested.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import cellar.ops

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """One example call. `make(device, dtype)` returns the keyword arguments, the same ones (seeded) each time.

    `dtypes` are those the case is tried with; `heavy` cases are too slow for tests without a GPU.
    """

    name: str
    make: Callable[[torch.device, torch.dtype], dict[str, Any]]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    heavy: bool = False


@dataclass(frozen=True)
class Op:
    """One operation. The three functions have the same parameters; `kernel` None: the definition is enough everywhere.

    `definition` is plain torch, runs on any device and is the oracle. `kernel` launches Triton: on the GPU compiled,
    on CPU tensors through Triton's interpreter. `changes` names the arguments that are written in place. Results
    may differ by `tolerance[dtype]`, absolute and relative; integers not at all.
    """

    name: str
    function: Callable[..., Any]
    definition: Callable[..., Any]
    kernel: Callable[..., Any] | None
    cases: tuple[Case, ...]
    changes: tuple[str, ...] = ()
    tolerance: Mapping[torch.dtype, float] = field(default_factory=lambda: TOLERANCE)

    def __post_init__(self) -> None:
        if not callable(self.definition):
            raise TypeError(f"operation {self.name} has no definition; write one in plain torch.")
        if not self.cases:
            raise TypeError(f"operation {self.name} has no example cases; add some.")
        wanted = list(inspect.signature(self.definition).parameters)
        for other in (self.function, self.kernel):
            if other is not None and list(inspect.signature(other).parameters) != wanted:
                raise TypeError(f"operation {self.name}: {other.__name__} must take the parameters {wanted}.")


def all_ops() -> tuple[Op, ...]:
    """Every operation of the package, by module name."""
    found: list[Op] = []
    for module in sorted(pkgutil.iter_modules(cellar.ops.__path__), key=lambda m: m.name):
        found += getattr(importlib.import_module(f"cellar.ops.{module.name}"), "OPS", ())
    return tuple(found)
