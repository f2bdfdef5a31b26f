"""What a cell must be so that its nodes may be batched: not in training, and with rows that ignore each other."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from cellar.cells.cell import Cell
from cellar.core.errors import ConfigError, is_interrupt
from cellar.core.tasks import Port
from cellar.ops.recurrent.rows import RowsModule

logger = logging.getLogger(__name__)

Node = tuple[Tensor, ...]
"""The inputs of one node, [1, *shape] each."""


def stop_training(model: str, cells: Sequence[Cell]) -> None:
    """Call `.eval()` on the modules, and say so once: dropout and batch statistics would mix a batch's requests.

    Nothing is said of modules of Cellar's own, which do the same in both modes.
    """
    training = [cell for cell in cells if any(module.training for module in cell.module.modules())]
    for cell in training:
        cell.module.eval()
    names = [cell.name for cell in training if not isinstance(cell.module, RowsModule)]
    if names:
        logger.warning(
            "model %r: cells %s were in training mode and have been set to evaluation, as if by .eval().",
            model,
            ", ".join(map(repr, names)),
        )


def check_shapes(cell: Cell, inputs: Sequence[Port], outputs: Sequence[Port]) -> None:
    """A batch of 2 must come back as a batch of 2. Raises ConfigError."""
    zeros = [torch.zeros((2, *p.shape), dtype=getattr(torch, p.dtype), device=cell.device) for p in inputs]
    try:
        found = cell.run(zeros)
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise ConfigError(f"cell {cell.name!r} fails on a batch of 2 zeros: {error or type(error).__name__}") from error
    for port, tensor in zip(outputs, found, strict=True):
        if tuple(tensor.shape[1:]) != port.shape:
            raise ConfigError(
                f"output {port.name!r} of cell {cell.name!r} changes its shape with the batch; return [batch, ...]."
            )


def check_rows(cell: Cell, inputs: Sequence[Port], seen: Sequence[Node]) -> None:
    """Two different nodes must come out of one batch as they do alone. Raises ConfigError.

    `seen`: up to two nodes of the example request. Where it has but one, the second is the first with other numbers,
    or zeros. Numbers agree if they differ by at most sqrt(eps) of their dtype (3.5e-4 in float32, 0.09 in bfloat16)
    times the largest number that goes in or comes out: kernels for other batches sum in another order. Integers must be
    equal, unless they may follow from 16-bit numbers, of which many are equal. A cell that draws random numbers, so
    that even one node alone comes out differently, is not checked.
    """
    if not seen or not inputs:
        return
    first = seen[0]
    alone = cell.run(first)
    if _differing(first, alone, cell.run(first)) is not None:
        return
    for second in _others(cell, inputs, seen):
        try:
            other = cell.run(second)
        except BaseException as error:  # these numbers mean nothing to the cell
            if is_interrupt(error):
                raise
            continue
        try:
            together = cell.run([torch.cat(pair) for pair in zip(first, second, strict=True)])
        except BaseException as error:
            if is_interrupt(error):
                raise
            reason = error or type(error).__name__
            raise ConfigError(f"cell {cell.name!r} computes two nodes alone but not as a batch: {reason}") from error
        for n, (node, expected) in enumerate(((first, alone), (second, other))):
            found = tuple(tensor[n : n + 1] for tensor in together)
            o = _differing(node, expected, found)
            if o is not None:
                raise ConfigError(
                    f"output {cell.outputs[o]!r} of cell {cell.name!r} depends on which other rows are in the batch, "
                    "but requests share batches: compute every row from its own inputs alone (no sum, mean or batch "
                    "statistics over dimension 0)."
                )
        return


def _others(cell: Cell, inputs: Sequence[Port], seen: Sequence[Node]) -> list[Node]:
    """Nodes that differ from the first one seen, the likeliest to make sense first."""
    found = [*seen[1:]]
    generator = torch.Generator().manual_seed(0)
    changed = []
    for port, tensor in zip(inputs, seen[0], strict=True):
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor = tensor + noise.to(device=tensor.device, dtype=tensor.dtype)
        elif port.high is not None:
            tensor = (tensor + 1) % port.high
        changed.append(tensor)
    zeros = [torch.zeros_like(tensor) for tensor in seen[0]]
    found += [tuple(changed), tuple(zeros)]
    return [node for node in found if any(not torch.equal(a, b) for a, b in zip(node, seen[0], strict=True))]


def _differing(node: Node, expected: Sequence[Tensor], found: Sequence[Tensor]) -> int | None:
    """The first output that is not what it should be."""
    floats = [t for t in (*node, *expected) if t.is_floating_point()]
    exact = all(torch.finfo(t.dtype).bits > 16 for t in floats)
    size = max((_largest(t) for t in floats), default=0.0)
    for o, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one.is_floating_point():
            allowed = torch.finfo(one.dtype).eps ** 0.5 * max(size, _largest(other))
            if not torch.allclose(one.double(), other.double(), rtol=0.0, atol=allowed, equal_nan=True):
                return o
        elif exact and not torch.equal(one, other):
            return o
    return None


def _largest(tensor: Tensor) -> float:
    finite = tensor.double().nan_to_num(0.0, 0.0, 0.0)
    return float(finite.abs().max()) if finite.numel() else 0.0
