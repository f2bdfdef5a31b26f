"""Matrices as a plan places them, filled with numbers that mean nothing, to be timed."""

from __future__ import annotations

import torch
from torch import Tensor

from cellar.core.pieces import Run, arrays, piece_nbytes, runs
from cellar.core.specs import ModelSpec, TensorSpec
from cellar.ops.linear.in_place import in_place
from cellar.ops.linear.weight import LinearWeight
from cellar.quant.pieces import scales_of, weight_of
from cellar.runtime.offload.layout import aligned

ONE, ONE_EXPONENT = 0x38, 127
"""Codes of 1 in e4m3, and of the scale 1 in MXFP4: none of them subnormal, which processors multiply slowly."""

NUMBERS = 0x77
"""The bits of codes that mean numbers in every format."""

DEVICE_NBYTES, DEVICE_QUANTIZED_NBYTES = 2**27, 2**26
"""Of a matrix on an accelerator, at most: it says all that a larger one does. A quantized one has more rows, and so has
its product with many tokens.
"""

_ROWS = 128


def largest_matrix(spec: ModelSpec) -> TensorSpec:
    """Of a layer."""
    return max((t for t in spec.layers[0].tensors if len(t.shape) == 2), key=lambda t: t.nbytes)


def matrices(spec: ModelSpec, memory: Tensor) -> list[LinearWeight]:
    """As often as it fits into a processor's `memory`, the largest matrix of a layer as it is placed there: quantized
    ones of ones, plain ones of what the memory has.
    """
    tensor = largest_matrix(spec)
    run = runs(tensor)[0]
    each = piece_nbytes(tensor, run, run.start, run.stop, "cpu")
    shape, found = (run.stop - run.start, tensor.shape[1]), list[LinearWeight]()
    for k in range(max(1, memory.nbytes // aligned(each))):
        there = memory[k * aligned(each) :][:each]
        if run.format.is_quantized:
            there.fill_(ONE)
        found.append(_over(there, shape, run, tensor.dtype, 1.0))
    return found


def device_matrices(tensor: TensorSpec, device: torch.device, nbytes: int) -> list[LinearWeight]:
    """Matrices of so many bytes together, at least one, on an accelerator: as a layer's `tensor`, and no larger than
    `DEVICE_NBYTES`, or `DEVICE_QUANTIZED_NBYTES`: then they have fewer rows. Of random numbers, since a processor
    computes equal ones at a higher clock.
    """
    run, columns = runs(tensor)[0], tensor.shape[1]
    row = -(-piece_nbytes(tensor, run, run.start, run.stop, "gpu") // (run.stop - run.start))
    most = DEVICE_QUANTIZED_NBYTES if run.format.is_quantized else DEVICE_NBYTES
    shape = (min(tensor.shape[0], max(1, most // row // _ROWS) * _ROWS), columns)
    if run.format.is_quantized:
        last = arrays(run.format, shape, "gpu")[-1]
        each = last.offset + last.nbytes
    else:
        each = shape[0] * row
    found = list[LinearWeight]()
    for _ in range(max(1, nbytes // each)):
        there = torch.empty(each, dtype=torch.uint8, device=device)
        if run.format.is_quantized:
            there.random_(0, 256).bitwise_and_(NUMBERS)
        else:
            there.view(getattr(torch, tensor.dtype)).normal_(std=columns**-0.5)
        found.append(_over(there, shape, run, tensor.dtype, columns**-0.5))
    return found


def _over(there: Tensor, shape: tuple[int, int], run: Run, dtype: str, scale: float) -> LinearWeight:
    """The weight over a piece of bytes. Quantized ones get scales of about so much, and no zero points."""
    format, kind = run.format, "cpu" if there.is_cpu else "gpu"
    if not format.is_quantized:
        return in_place(there.view(getattr(torch, dtype)).view(shape))
    scales = scales_of(format)
    for array in arrays(format, shape, kind):
        part = there[array.offset :][: array.nbytes]
        if array.name == "zeros":
            part.zero_()
        elif array.name == "order":
            part.view(torch.int64).copy_(torch.arange(shape[1]))
        elif array.name == "scales" and scales == torch.uint8:
            part.fill_(ONE_EXPONENT)
        elif array.name == "scales":
            part.view(scales).fill_(scale)
    return weight_of(there, shape, format, kind, scales)
