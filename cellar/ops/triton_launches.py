"""Launches of a compiled Triton kernel, those like an earlier one without all that Triton looks up for each.

A layer has five to nine launches, and Triton takes 20 to 40 us of the host for each: longer than the device for a short
step. Steps that no graph holds (prompts behind a load, offloaded layers), and the recording of graphs, wait for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_KNOWN = "3.6."
"""The Triton whose compiled kernels are called directly here; by any other's, each launch goes all of its way."""


class Launched(NamedTuple):
    """A kernel that has been launched: what another launch with arguments of the same kinds wants.

    `constants` are the values of the parameters behind the positional ones, in their order.
    """

    run: Callable[..., None]
    function: int
    metadata: Any
    constants: tuple[Any, ...]


def kind_of(argument: Any) -> Any:
    """What of an argument Triton compiles for, or more: with arguments of equal kinds a kernel is the same one.

    None for one that only Triton can tell.
    """
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() & 15 == 0
    if type(argument) is int:
        return argument if argument == 1 else (argument & 15 == 0, -(2**31) <= argument < 2**31, argument < 2**63)
    return type(argument) if argument is None or type(argument) in (float, bool) else None


class Launches:
    """Of one kernel (a `triton.JITFunction`): positional arguments are a launch's own, keywords are constants and
    options of compiling.
    """

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._launched: dict[Any, Launched] = {}
        # AMD's kernels depend on the sizes of tensors, too.
        self._all_of_it = torch.version.hip is not None or not _version().startswith(_KNOWN)

    def launch(self, device: int, grid: tuple[int, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Launch on that GPU, which must be the current one, in its current stream."""
        kinds = tuple(map(kind_of, args))
        key = device, kinds, tuple(kwargs.items())
        found = self._launched.get(key)
        if found is not None:
            x, y, z = (*grid, 1, 1)[:3]
            stream = torch._C._cuda_getCurrentRawStream(device)
            found.run(x, y, z, stream, found.function, found.metadata, None, None, None, *args, *found.constants)
            return
        made = self._compiled[grid](*args, **kwargs)
        if not self._all_of_it and None not in kinds:
            constants = (kwargs.get(p.name, p.default) for p in self._compiled.params[len(args) :])
            self._launched[key] = Launched(made.run, made.function, made.packed_metadata, tuple(constants))


def _version() -> str:
    import triton

    return str(triton.__version__)
