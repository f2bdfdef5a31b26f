"""Cell: a torch module that is computed for many nodes at once, with the names and sizes that scheduling needs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from cellar.core.errors import ConfigError, RequestError

DEFAULT_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, eq=False)
class Cell:
    """A cell type: definition, weights and inputs (BatchMaker §2.4.1).

    name         unique in its model
    module       forward(*inputs) -> a tensor, a sequence, or a dict by output name; dimension 0 of all is the batch
    outputs      names of what `forward` returns, in order
    priority     of the cells that could run, the highest runs; give later cells a higher one, but an expensive cell
                 that runs again and again (a decoder, the inner nodes of a tree) a lower one than the cheap cells
                 that fill its batches
    batch_sizes  sizes that the runtime prepares (`cellar profile` finds the best largest one); smaller batches are
                 padded to the next, and after the first task of a call no task is smaller than the first size
    inputs       names of the inputs; default: the parameters of `forward`
    shapes       shape of an input, without the batch, that the example request only ever leaves at zero
    high         integer inputs from outside are in [0, high)
    infinite     outputs that may hold infinities, such as masked logits of -inf; elsewhere they fail the request, as
                 NaN does everywhere
    """

    name: str
    module: nn.Module
    outputs: tuple[str, ...]
    priority: int = 0
    batch_sizes: tuple[int, ...] = DEFAULT_BATCH_SIZES
    inputs: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    high: Mapping[str, int] = field(default_factory=dict)
    infinite: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "outputs", _names(self.name, "outputs", self.outputs))
        set_(self, "inputs", _names(self.name, "inputs", self.inputs or _parameters(self.module)))
        set_(self, "batch_sizes", tuple(sorted(set(self.batch_sizes))))
        if not self.batch_sizes or self.batch_sizes[0] < 1:
            raise ConfigError(
                f"cell {self.name!r} has batch_sizes {self.batch_sizes}; give one or more sizes of at least 1."
            )
        set_(self, "infinite", tuple(self.infinite))
        for name in self.infinite:
            if name not in self.outputs:
                raise ConfigError(f"infinite of cell {self.name!r} names {name!r}; its outputs are {self.outputs}.")
        for option in ("shapes", "high"):
            for name in getattr(self, option):
                if name not in self.inputs:
                    raise ConfigError(f"{option} of cell {self.name!r} names {name!r}; its inputs are {self.inputs}.")

    @property
    def float_dtype(self) -> torch.dtype:
        """That of the first floating parameter or buffer; float32 without one."""
        tensors = (*self.module.parameters(), *self.module.buffers())
        return next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)

    @property
    def device(self) -> torch.device:
        """Where the weights lie; the CPU without any."""
        tensor = next(iter((*self.module.parameters(), *self.module.buffers())), None)
        return torch.device("cpu") if tensor is None else tensor.device

    def run(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute a batch. Raises RequestError if what the module returns is not as `outputs` say."""
        with torch.inference_mode():
            returned = self.module(*inputs)
        if isinstance(returned, Tensor):
            returned = (returned,)
        elif isinstance(returned, Mapping):
            missing = [name for name in self.outputs if name not in returned]
            if missing:
                raise RequestError(f"cell {self.name!r} did not return {missing[0]!r}; it declares {self.outputs}.")
            returned = tuple(returned[name] for name in self.outputs)
        if len(returned) != len(self.outputs):
            raise RequestError(f"cell {self.name!r} returned {len(returned)} tensors; it declares {self.outputs}.")
        batch = inputs[0].shape[0] if inputs else 1
        for name, tensor in zip(self.outputs, returned, strict=True):
            if not isinstance(tensor, Tensor) or tensor.ndim == 0 or tensor.shape[0] != batch:
                found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise RequestError(
                    f"output {name!r} of cell {self.name!r} is {found} for a batch of {batch}; return [batch, ...]."
                )
        return tuple(returned)


def _parameters(module: nn.Module) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds)


def _names(cell: str, what: str, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not names or len(set(names)) != len(names):
        raise ConfigError(f"cell {cell!r} has {what} {names!r}; give a sequence of different names.")
    return tuple(names)
