"""All operations in one list, for dispatch and for conformance: definition, variants, example cases.

A family of operations is a folder: `definition.py` says in plain torch what its operations mean, `triton.py`, `cpu.py`
and `hopper.py` compute the same faster, `cases.py` has examples, and the package itself has the public functions and
says in `OPS` which variant serves whom:

    GATED = Op("gated", gated_definition, (Variant("triton", gated_kernel), Variant("cpu", gated_cpu)), CASES)

    def gated(x: Tensor, kind: str) -> Tensor:
        return (GATED.on_cpu if x.is_cpu else GATED.on_gpu)(x, kind)

The choice is made when the module is imported, as far as arguments do not matter, so a call costs an attribute. The
one conformance test (`tests/conformance/test_ops.py`) walks the same list: a variant that is here is tested.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar

import torch

import cellar.ops

P = ParamSpec("P")
R = TypeVar("R")

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}

VariantName = Literal["triton", "cpu", "hopper"]


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
class Variant(Generic[P, R]):
    """One way to compute an operation: `cpu` for CPU tensors; `triton` and `hopper` for a GPU's.

    Triton's kernels run on CPU tensors, too, in its interpreter (tests). `when` is asked with the call's own arguments
    whether the variant takes them; None: it takes all.
    """

    name: VariantName
    function: Callable[P, R]
    when: Callable[P, bool] | None = None


@dataclass(frozen=True, eq=False)
class Op(Generic[P, R]):
    """One operation. Definition, variants and public function have the same parameters.

    `definition` is plain torch, runs on any device, and is the oracle. Of the variants for a device the first that
    takes the arguments computes them; if none does, the definition. `changes` names the arguments that are written in
    place. Results may differ by `tolerance[dtype]`, absolute and relative; integers not at all.
    `on_gpu`, `on_cpu`: what a call on such tensors runs. Raises TypeError for an operation that cannot be tested.
    """

    name: str
    definition: Callable[P, R]
    variants: tuple[Variant[P, R], ...]
    cases: tuple[Case, ...]
    changes: tuple[str, ...] = ()
    tolerance: Mapping[torch.dtype, float] = field(default_factory=lambda: TOLERANCE)
    on_gpu: Callable[P, R] = field(init=False)
    on_cpu: Callable[P, R] = field(init=False)

    def __post_init__(self) -> None:
        if not callable(self.definition):
            raise TypeError(f"operation {self.name} has no definition; write one in plain torch.")
        if not self.cases:
            raise TypeError(f"operation {self.name} has no example cases; add some.")
        for variant in self.variants:
            self.check_parameters(variant.function)
        gpu = [v for v in self.variants if v.name != "cpu"]
        cpu = [v for v in self.variants if v.name == "cpu"]
        object.__setattr__(self, "on_gpu", _first(gpu, self.definition))
        object.__setattr__(self, "on_cpu", _first(cpu, self.definition))

    def check_parameters(self, function: Callable[..., Any]) -> None:
        """Raises TypeError if the function's parameters are not the definition's."""
        expected = list(inspect.signature(self.definition).parameters)
        if list(inspect.signature(function).parameters) != expected:
            raise TypeError(f"operation {self.name}: {function.__name__} must take the parameters {expected}.")


def _first(variants: Iterable[Variant[P, R]], definition: Callable[P, R]) -> Callable[P, R]:
    """The first variant that takes the arguments; without a call in between where that is always the same one."""
    conditional: list[tuple[Callable[P, bool], Callable[P, R]]] = []
    otherwise = definition
    for variant in variants:
        if variant.when is None:
            otherwise = variant.function
            break
        conditional.append((variant.when, variant.function))
    if not conditional:
        return otherwise

    def choose(*args: P.args, **kwargs: P.kwargs) -> R:
        for takes, function in conditional:
            if takes(*args, **kwargs):
                return function(*args, **kwargs)
        return otherwise(*args, **kwargs)

    return choose


class PublicOp(NamedTuple):
    """An operation and the function that the rest of the program calls."""

    op: Op[..., Any]
    function: Callable[..., Any]


def all_ops(package: ModuleType = cellar.ops) -> tuple[PublicOp, ...]:
    """Every operation of a package, by module. Raises TypeError for one whose public function does not fit."""
    return tuple(_found(package))


def _found(package: ModuleType) -> Iterator[PublicOp]:
    found_modules = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    for found in sorted(found_modules, key=lambda m: m.name):
        module = importlib.import_module(found.name)
        for op in getattr(module, "OPS", ()):
            function = getattr(module, op.name, None)
            if function is None:
                raise TypeError(
                    f"operation {op.name} is registered in {found.name}, which has no function of that name."
                )
            op.check_parameters(function)
            yield PublicOp(op, function)
