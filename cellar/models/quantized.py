"""Readers of quantized tensors: what each layout stores for a module, and how it becomes a `Quantized` matrix.

A reader is asked for a region of a module's matrix [out, in], so that a rank reads its share and no more than the words
in which it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from cellar.core.errors import CheckpointError
from cellar.core.specs import Region, StoredPart
from cellar.quant.matrix import Quantized
from cellar.quant.pack import AWQ_ORDER, from_words, to_bytes

# (suffix, rows, columns) -> those of the tensor, None if the checkpoint has none of that suffix.
Get = Callable[[str, range | None, range | None], Tensor | None]

_SCALES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a module: its name behind the module's, what shapes and types it may have."""

    suffix: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    optional: bool = False


class QuantizedReader(Protocol):
    """Reads one layout."""

    def tensors(self, part: StoredPart) -> tuple[Stored, ...]:
        """What a module of that shape and format consists of. Raises CheckpointError for a shape it cannot have."""

    def read(self, part: StoredPart, region: Region, get: Get) -> Quantized:
        """A region of it."""


class AwqReader:
    """AutoAWQ's gemm: qweight int32 [in, out / 8], qzeros [in / group, out / 8], scales [in / group, out]."""

    def tensors(self, part: StoredPart) -> tuple[Stored, ...]:
        """As `QuantizedReader` says."""
        out, columns = part.shape
        groups = _groups(part)
        _divisible(part, out, 8)
        return (
            Stored(".qweight", ((columns, out // 8),), ("I32",)),
            Stored(".qzeros", ((groups, out // 8),), ("I32",)),
            Stored(".scales", ((groups, out),), _SCALES),
        )

    def read(self, part: StoredPart, region: Region, get: Get) -> Quantized:
        """As `QuantizedReader` says."""
        columns = _columns(part, region)
        groups = _group_range(part, columns)
        words, inside = _words(region.rows, 8)
        codes = from_words(_there(get(".qweight", columns, words)), 4, AWQ_ORDER)[:, inside]
        zeros = from_words(_there(get(".qzeros", groups, words)), 4, AWQ_ORDER)[:, inside]
        scales = _there(get(".scales", groups, region.rows))
        return Quantized(part.format, to_bytes(codes.T.contiguous()), scales.T.contiguous(), zeros.T.contiguous())


class GptqReader:
    """qweight int32 [in / n, out], n codes a word along the input; qzeros [in / group, out / n], scales [in / group,
    out], g_idx int32 [in]: the group of each column, which are neighbours without act-order.

    `lowered`: zero points are stored less one (the first format), modulo 2^bits.
    """

    def __init__(self, *, lowered: bool) -> None:
        self._lowered = lowered

    def tensors(self, part: StoredPart) -> tuple[Stored, ...]:
        """As `QuantizedReader` says."""
        out, columns = part.shape
        groups, count = _groups(part), 32 // _bits(part)
        needless = not (_promises(part, "ordered") and part.format.group)
        _divisible(part, out, count)
        _divisible(part, columns, count)
        return (
            Stored(".qweight", ((columns // count, out),), ("I32",)),
            Stored(".qzeros", ((groups, out // count),), ("I32",)),
            Stored(".scales", ((groups, out),), _SCALES),
            Stored(".g_idx", ((columns,),), ("I32", "I64"), optional=needless),
        )

    def read(self, part: StoredPart, region: Region, get: Get) -> Quantized:
        """As `QuantizedReader` says."""
        bits, columns = _bits(part), _columns(part, region)
        count = 32 // bits
        order = _given_order(part, get(".g_idx", columns, None), columns)
        groups = range(_groups(part)) if order is not None else _group_range(part, columns)
        words, inside = _words(columns, count)
        codes = from_words(_there(get(".qweight", words, region.rows)).T.contiguous(), bits)[:, inside]
        words, inside = _words(region.rows, count)
        zeros = from_words(_there(get(".qzeros", groups, words)), bits)[:, inside].T.contiguous()
        if self._lowered:
            zeros = (zeros.int() + 1 & (1 << bits) - 1).to(torch.uint8)
        if _promises(part, "symmetric") and bool((zeros != 1 << (bits - 1)).any()):
            raise CheckpointError(
                f"{part.name} has other zero points than {1 << (bits - 1)}, which symmetric codes have; check sym and "
                "checkpoint_format (gptq or gptq_v2) in its quantization config."
            )
        scales = _there(get(".scales", groups, region.rows)).T.contiguous()
        return _integers(part, codes, scales, zeros, order)


class PackedReader:
    """compressed-tensors' pack-quantized: weight_packed int32 [out, in / n], n codes a word, raised by 2^(bits - 1);
    weight_scale [out, groups], weight_zero_point int32 [out / n, groups] packed along the output, weight_g_idx [in].
    """

    def tensors(self, part: StoredPart) -> tuple[Stored, ...]:
        """As `QuantizedReader` says."""
        out, columns = part.shape
        count = 32 // _bits(part)
        rows, groups = _scale_shape(part)
        zero = Stored(".weight_zero_point", ((-(-rows // count), groups),), ("I32",))
        return (
            Stored(".weight_packed", ((out, -(-columns // count)),), ("I32",)),
            Stored(".weight_scale", _scale_shapes(part), _SCALES),
            Stored(".weight_shape", ((2,),), ("I64", "I32"), optional=True),
            Stored(".weight_g_idx", ((columns,),), ("I32", "I64"), optional=not _promises(part, "ordered")),
            *([zero] if part.format.zero_points else []),
        )

    def read(self, part: StoredPart, region: Region, get: Get) -> Quantized:
        """As `QuantizedReader` says."""
        shape = get(".weight_shape", None, None)
        if shape is not None and tuple(shape.tolist()) != part.shape:
            raise CheckpointError(
                f"{part.name} says that it packs a matrix {shape.tolist()}, but config.json calls for "
                f"{list(part.shape)}; check that they belong together."
            )
        bits, columns = _bits(part), _columns(part, region)
        count = 32 // bits
        order = _given_order(part, get(".weight_g_idx", columns, None), columns)
        words, inside = _words(columns, count)
        codes = from_words(_there(get(".weight_packed", region.rows, words)), bits)[:, inside]
        rows = region.rows if part.format.rows else range(1)
        groups = range(_groups(part)) if order is not None else _group_range(part, columns)
        scales = _scales_of(part, get(".weight_scale", None, None), rows, groups)
        if part.format.zero_points:
            words, inside = _words(rows, count)
            packed = _there(get(".weight_zero_point", words, groups))
            zeros = from_words(packed.T.contiguous(), bits)[:, inside].T.contiguous()
        else:
            zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8, device=scales.device)
        return _integers(part, codes, scales, zeros, order)


class ScaledReader:
    """A byte an element with a scale beside it: weight int8 or e4m3 [out, in], `scale` by tensor, row or block."""

    def __init__(self, scale: str) -> None:
        self._scale = scale

    def tensors(self, part: StoredPart) -> tuple[Stored, ...]:
        """As `QuantizedReader` says."""
        shapes = _scale_shapes(part)
        if part.format.layout == "fp8":
            # The config does not say whether rows have scales of their own.
            shapes = (*shapes, (part.shape[0], 1), (part.shape[0],))
        zero = Stored(".weight_zero_point", _scale_shapes(part), ("I8",))
        return (
            Stored(".weight", (part.shape,), ("I8",) if part.format.name == "int8" else ("F8_E4M3",)),
            Stored(self._scale, shapes, _SCALES),
            *([zero] if part.format.zero_points else []),
        )

    def read(self, part: StoredPart, region: Region, get: Get) -> Quantized:
        """As `QuantizedReader` says."""
        columns = _columns(part, region)
        codes = _there(get(".weight", region.rows, columns))
        if part.format.name == "fp8" and bool(((codes.view(torch.uint8) & 127) == 127).any()):
            raise CheckpointError(f"{part.name} has elements that are not a number; it is damaged, get it again.")
        scale = _there(get(self._scale, None, None))
        if not part.format.rows and scale.numel() == part.shape[0] > 1:
            part = replace(part, format=replace(part.format, rows=1))
        step = part.format.rows
        rows = range(region.rows.start // step, -(-region.rows.stop // step)) if step else range(1)
        groups = _group_range(part, columns)
        zeros = None
        if part.format.zero_points:
            zeros = _scales_of(part, get(".weight_zero_point", None, None), rows, groups)
        return Quantized(part.format, codes, _scales_of(part, scale, rows, groups), zeros)


class Mxfp4Reader:
    """weight_blocks uint8 [out, in / 32, 16], the first of two in the low bits; weight_scales uint8 [out, in / 32]."""

    def tensors(self, part: StoredPart) -> tuple[Stored, ...]:
        """As `QuantizedReader` says."""
        out, groups = part.shape[0], _groups(part)
        return (
            Stored(".weight_blocks", ((out, groups, 16),), ("U8",)),
            Stored(".weight_scales", ((out, groups),), ("U8",)),
        )

    def read(self, part: StoredPart, region: Region, get: Get) -> Quantized:
        """As `QuantizedReader` says."""
        groups = _group_range(part, _columns(part, region))
        blocks = _there(get(".weight_blocks", region.rows, groups))
        scales = _there(get(".weight_scales", region.rows, groups))
        return Quantized(part.format, blocks.flatten(1).contiguous(), scales)


_READERS: Mapping[str, QuantizedReader] = {
    "awq": AwqReader(),
    "gptq": GptqReader(lowered=True),
    "gptq_v2": GptqReader(lowered=False),
    "packed": PackedReader(),
    "scaled": ScaledReader(".weight_scale"),
    "fp8": ScaledReader(".weight_scale"),
    "fp8_blocks": ScaledReader(".weight_scale_inv"),
    "mxfp4": Mxfp4Reader(),
}


def quantized_reader(part: StoredPart) -> QuantizedReader:
    """By the first word of its format's layout; the others are what a config promises of the tensors."""
    return _READERS[part.format.layout.split()[0]]


def _promises(part: StoredPart, word: str) -> bool:
    """`symmetric`: zero points are all in the middle; `ordered`: tensors say which group a column belongs to."""
    return word in part.format.layout.split()[1:]


def _bits(part: StoredPart) -> int:
    return 4 if part.format.name == "int4" else 8


def _groups(part: StoredPart) -> int:
    """Groups of a row."""
    columns, group = part.shape[1], part.format.group
    if group:
        _divisible(part, columns, group)
    return columns // group if group else 1


def _divisible(part: StoredPart, length: int, by: int) -> None:
    if length % by:
        raise CheckpointError(
            f"{part.name} is {list(part.shape)}, which {part.format.layout} cannot store: {length} is no multiple of "
            f"{by}; check that the quantization config belongs to these weights."
        )


def _columns(part: StoredPart, region: Region) -> range:
    return range(part.shape[1]) if region.columns is None else region.columns


def _group_range(part: StoredPart, columns: range) -> range:
    group = part.format.group
    return range(columns.start // group, -(-columns.stop // group)) if group else range(1)


def _words(elements: range, count: int) -> tuple[range, slice]:
    """The words in which these elements lie, and where in what they hold."""
    words = range(elements.start // count, -(-elements.stop // count))
    first = elements.start - words.start * count
    return words, slice(first, first + len(elements))


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "its presence was checked"
    return tensor


def _scale_shape(part: StoredPart) -> tuple[int, int]:
    rows = part.format.rows
    return -(-part.shape[0] // rows) if rows else 1, -(-part.shape[1] // part.format.group) if part.format.group else 1


def _scale_shapes(part: StoredPart) -> tuple[tuple[int, ...], ...]:
    """As written: one scale as a number or a list of one, one a row with or without a second axis."""
    rows, groups = _scale_shape(part)
    if not part.format.rows:
        return ((), (1,), (1, 1))
    return ((rows, groups), (rows,)) if groups == 1 else ((rows, groups),)


def _scales_of(part: StoredPart, scale: Tensor | None, rows: range, groups: range) -> Tensor:
    """[row groups, groups] of a region."""
    whole = _there(scale).reshape(_scale_shape(part))
    return whole[rows.start : rows.stop, groups.start : groups.stop].contiguous()


def _given_order(part: StoredPart, order: Tensor | None, columns: range) -> Tensor | None:
    """The group of each column; None where they are neighbours."""
    if order is None or not part.format.group:
        return None
    order = order.long()
    if bool((order < 0).any()) or bool((order >= _groups(part)).any()):
        raise CheckpointError(
            f"the order of columns of {part.name} names groups that it does not have; it is damaged, get it again."
        )
    plain = torch.arange(columns.start, columns.stop, device=order.device) // part.format.group
    return None if torch.equal(order, plain) else order


def _integers(part: StoredPart, codes: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None) -> Quantized:
    """codes uint8 [out, in] with zero points uint8: packed if of 4 bits, signed if of 8."""
    if part.format.name == "int4":
        return Quantized(part.format, to_bytes(codes), scales, zeros, order)
    signed = (codes.short() - 128).to(torch.int8)
    return Quantized(part.format, signed, scales, (zeros.short() - 128).to(torch.int8), order)
