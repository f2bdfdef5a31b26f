"""Quantized rows as pieces of bytes (`core/pieces.py`), and weights over such bytes, which copy nothing.

What a kernel wants in an order of its own is put into it before it is placed, not when it arrives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cellar.core.errors import ConfigError
from cellar.core.formats import Format
from cellar.core.pieces import Array, arrays, is_ordered
from cellar.ops.linear.weight import LinearWeight
from cellar.quant.bytes import ByteWeight, multiplies_bytes_of
from cellar.quant.device import PackedWeight
from cellar.quant.expanded import ExpandedWeight
from cellar.quant.matrix import Quantized
from cellar.quant.packed import Packed, packed
from cellar.quant.weight import QuantizedWeight, StackedWeight

_CODES = {"int4": torch.uint8, "mxfp4": torch.uint8, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
_HALVES = (torch.float16, torch.bfloat16)


def piece_of(
    weight: LinearWeight, rows: range, format: Format, kind: str, device: torch.device | None
) -> tuple[Tensor, torch.dtype]:
    """Rows of a quantized weight, all of `format`, as a piece for a `kind` of what multiplies (cpu, gpu), put together
    on `device` (None: where the weight lies); and the type of its scales.

    Raises ConfigError for what has no such form.
    """
    columns = weight.in_features
    matrix, order = _matrix(weight.slice(0, rows), format, device)
    device = matrix.codes.device
    there = arrays(format, (len(rows), columns), kind)
    found: dict[str, Tensor | None] = {"codes": matrix.codes, "scales": matrix.scales, "zeros": matrix.zeros}
    if there[0].name == "words":
        if multiplies_bytes_of(format, (len(rows), columns), device) and order is None:
            found = {"words": matrix.codes, "scales": _apart(matrix.scales, there[1])}
        else:
            words = packed(matrix)
            found = {"words": words.words, "scales": words.scales, "zeros": words.zeros}
    if is_ordered(format):
        found["order"] = torch.arange(columns, device=device) if order is None else order
    out = torch.zeros(there[-1].offset + there[-1].nbytes, dtype=torch.uint8, device=device)
    for array in there:
        source = found[array.name]
        assert source is not None, "its format has it"
        source = source.contiguous().view(-1).view(torch.uint8)
        out[array.offset : array.offset + len(source)] = source
    return out, matrix.scales.dtype


def scales_of(format: Format) -> torch.dtype:
    """The type of the scales of rows that `quantized` makes, and most checkpoints have."""
    return {"int4": torch.float16, "mxfp4": torch.uint8}.get(format.name, torch.float32)


def weight_of(there: Tensor, shape: tuple[int, int], format: Format, kind: str, scales: torch.dtype) -> LinearWeight:
    """The weight [out, in] over a piece of bytes, whose memory may be filled with another one of the same shape."""
    found = arrays(format, shape, kind)
    bytes_of: Mapping[str, Tensor] = {a.name: there[a.offset : a.offset + a.nbytes] for a in found}
    shapes = {a.name: a.shape for a in found}
    order = bytes_of["order"].view(torch.int64) if "order" in bytes_of else None
    if "codes" in bytes_of:
        zeros = None
        if "zeros" in bytes_of:
            zeros = bytes_of["zeros"].view(_zeros(format)).view(shapes["zeros"])
        codes = bytes_of["codes"].view(_CODES[format.name]).view(shapes["codes"])
        matrix = Quantized(format, codes, bytes_of["scales"].view(scales).view(shapes["scales"]), zeros)
        return QuantizedWeight(matrix, order) if there.is_cpu else ExpandedWeight(matrix, order)
    if multiplies_bytes_of(format, shape, there.device) and order is None:
        return _bytes(bytes_of, shape, format)
    words = bytes_of["words"].view(torch.int16).view(shapes["words"])
    across = bytes_of["scales"].view(scales).view(shapes["scales"])
    zeros = bytes_of["zeros"].view(_zeros(format)).view(shapes["zeros"]) if "zeros" in bytes_of else None
    return PackedWeight(Packed(format, shape, words, across, zeros), order, None)


def _bytes(bytes_of: Mapping[str, Tensor], shape: tuple[int, int], format: Format) -> LinearWeight:
    """Codes as they lie, where tensor cores multiply them."""
    rows, columns = shape
    codes = bytes_of["words"][: rows * columns].view(_CODES[format.name]).view(shape)
    scales = bytes_of["scales"].view(torch.float32)
    if not format.group:
        return ByteWeight(Quantized(format, codes, scales.view(rows, 1)))
    blocks, groups = -(-rows // format.rows), -(-columns // format.group)
    return ByteWeight(Quantized(format, codes, scales.view(blocks, -1)[:, :groups]))


def _apart(scales: Tensor, array: Array) -> Tensor:
    """Scales of blocks with room up to a multiple of four behind each row; others as they are."""
    if scales.shape[1] == 1:
        return scales
    return torch.nn.functional.pad(scales, (0, array.shape[0] - scales.shape[1]))


def _matrix(weight: LinearWeight, format: Format, device: torch.device | None) -> tuple[Quantized, Tensor | None]:
    """One matrix of these rows with scales of the types that pieces have, and its order of columns."""
    parts: Sequence[LinearWeight] = weight.parts if isinstance(weight, StackedWeight) else (weight,)
    found = [_canonical(part, format, device) for part in parts]
    if len({matrix.scales.dtype for matrix, _ in found}) > 1 or (len(found) > 1 and is_ordered(format)):
        raise ConfigError(
            f"parts of one matrix in {format.name} have scales of unequal types, which are not offloaded; raise "
            "device_memory so that the model fits."
        )
    if len(found) == 1:
        return found[0]
    zeros = [matrix.zeros for matrix, _ in found if matrix.zeros is not None]
    return Quantized(
        format,
        torch.cat([matrix.codes for matrix, _ in found]),
        torch.cat([matrix.scales for matrix, _ in found]),
        torch.cat(zeros) if zeros else None,
    ), None


def _canonical(weight: LinearWeight, format: Format, device: torch.device | None) -> tuple[Quantized, Tensor | None]:
    if not isinstance(weight, QuantizedWeight) or weight.matrix.groups is not None:
        raise ConfigError(
            f"a matrix in {format.name} has columns in groups of unequal sizes, which are not offloaded; raise "
            "device_memory so that the model fits."
        )
    if weight.order is not None and not is_ordered(format):
        raise ConfigError(
            "a matrix has columns in an order (g_idx) that its quantization config does not promise (desc_act), which "
            "is not offloaded; set desc_act, or raise device_memory so that the model fits."
        )
    matrix = weight.matrix
    device = matrix.codes.device if device is None else device
    rows, zeros = matrix.shape[0], matrix.zeros
    scales = matrix.scales if matrix.format.rows else matrix.scales.expand(rows, -1)
    if zeros is not None:
        zeros = zeros if matrix.format.rows else zeros.expand(rows, -1)
        if not format.zero_points and format.name != "int4":
            if bool(zeros.any()):
                raise ConfigError(f"a symmetric matrix in {format.name} has zero points; get the checkpoint again.")
            zeros = None
    made = replace(
        matrix,
        format=format,
        codes=matrix.codes.to(device),
        scales=_typed(scales, format).to(device),
        zeros=None if zeros is None else zeros.to(device),
    )
    return made, None if weight.order is None else weight.order.to(device)


def _typed(scales: Tensor, format: Format) -> Tensor:
    """Scales in the bytes that a piece has for them, none of them rounded."""
    if format.name == "mxfp4":
        return scales
    if format.name != "int4":
        return scales.float()
    if scales.dtype in _HALVES:
        return scales
    for half in _HALVES:
        if bool((scales.to(half).to(scales.dtype) == scales).all()):
            return scales.to(half)
    raise ConfigError(
        "a matrix in int4 has scales of 32 bits, which 16 bits do not hold and which are not offloaded; raise "
        "device_memory so that the model fits."
    )


def _zeros(format: Format) -> torch.dtype:
    return torch.uint8 if format.name == "int4" else torch.int8
