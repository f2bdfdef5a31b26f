"""Linear layers: the one entry point, and the packed weights that make them fast on a CPU.

A weight is packed once, when the model is loaded, into one of two forms; the plain matrix need not be kept.

* *half*: 16-bit floats in FBGEMM's order, multiplied with float32 activations and summed in float32. Decoding reads
  every weight per step, so half the bytes is nearly half the time. It is used where 16 bits hold the matrix: for
  float16, for bfloat16 on processors without bfloat16 arithmetic, and for float32 that was 16-bit in the checkpoint.
* *oneDNN*: blocked for the processor's matrix instructions, in the weight's own dtype. Its results for a row do not
  depend on how many rows there are.

Figures: docs/performance/linear-cpu.md.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cellar.ops.linear_cuda import linear_kernel
from cellar.ops.registry import Case, Op

# Rows of 16-bit weights that are widened at a time: 1 M elements stay in the cache and bound the extra memory.
_WIDEN_ELEMENTS = 1 << 20
# The rows that oneDNN's layout is made for: the one that is best from 1 to 512 (measured).
_PACK_ROWS = 64


class HalfWeight(Tensor):
    """A matrix [out_features, in_features] packed by FBGEMM: an empty tensor that carries the packed object."""

    packed: Any
    out_features: int
    in_features: int

    # Without this every torch function on the weight would take a slow way through Python.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: x: [t, in]; weight: [out, in], plain or from `pack`; bias: [out] or None -> [t, out] in x's dtype."""
    if type(weight) is HalfWeight:
        return _half(x, weight, bias)
    if weight.is_mkldnn:
        return _onednn(x, weight, bias)
    if weight.is_cuda:
        # Of float32 only the library knows ways that are exact and fast.
        return functional.linear(x, weight, bias) if weight.dtype == torch.float32 else linear_kernel(x, weight, bias)
    if weight.dtype == torch.float32:
        return functional.linear(x, weight, bias)
    return _widened(x, weight, bias)


def linear_definition(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b in float32, rounded once; for plain weights."""
    out = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return out.to(x.dtype)


def pack(weight: Tensor) -> Tensor:
    """The form of a matrix [out, in] that `linear` is fastest with on this CPU; the matrix itself if none is faster.

    Half keeps the matrix to within float32's own rounding: the change it makes is at most 2^-24 of the matrix, in the
    Frobenius norm.
    """
    if weight.is_cuda or weight.dim() != 2 or not weight.numel() or is_packed(weight):
        return weight
    if weight.dtype == torch.bfloat16 and _onednn_packs(torch.bfloat16):
        return _pack_onednn(weight)
    if _half_works() and _half_holds(weight):
        return _pack_half(weight)
    if weight.dtype == torch.float32 and _onednn_packs(torch.float32):
        return _pack_onednn(weight)
    return weight


def is_packed(weight: Tensor) -> bool:
    """True for what `pack` made."""
    return type(weight) is HalfWeight or weight.is_mkldnn


def out_features(weight: Tensor) -> int:
    """Columns of the result, for plain and packed weights."""
    return weight.out_features if isinstance(weight, HalfWeight) else weight.shape[0]


def weight_nbytes(weight: Tensor) -> int:
    """Bytes of a weight in memory, for plain and packed weights (packing may add some padding, not counted)."""
    if isinstance(weight, HalfWeight):
        return 2 * weight.out_features * weight.in_features
    return weight.numel() * weight.element_size()


def _half(x: Tensor, weight: HalfWeight, bias: Tensor | None) -> Tensor:
    if not x.shape[0]:
        return x.new_empty((0, weight.out_features))
    # Of torch's two operations on such weights, this one divides its work among threads.
    out: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x.float(), weight.packed)
    if bias is not None:
        out += bias
    return out.to(x.dtype)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not x.shape[0]:
        return x.new_empty((0, weight.shape[0]))
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return out


def _widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """16-bit weights on a CPU without 16-bit arithmetic: products in float32, some rows of the weight at a time."""
    if weight.dtype == torch.bfloat16 and (x.shape[0] < 5 or _onednn_packs(torch.bfloat16)):
        return functional.linear(x, weight, bias)
    wide = x.float()
    rows = max(1, _WIDEN_ELEMENTS // max(1, weight.shape[1]))
    out = wide.new_empty((x.shape[0], weight.shape[0]))
    for start in range(0, weight.shape[0], rows):
        torch.mm(wide, weight[start : start + rows].float().t(), out=out[:, start : start + rows])
    if bias is not None:
        out += bias
    return out.to(x.dtype)


def _pack_onednn(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous(), _PACK_ROWS)
    return packed


def _pack_half(weight: Tensor) -> HalfWeight:
    half: HalfWeight = torch.Tensor._make_subclass(HalfWeight, torch.empty(0))
    half.packed = torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), None)
    half.out_features, half.in_features = weight.shape
    return half


def _half_holds(weight: Tensor) -> bool:
    """True if 16-bit floats keep the matrix to 2^-24 of its norm: exact but for a few tiny elements."""
    if weight.dtype == torch.float16:
        return True
    change = size = 0.0
    rows = max(1, _WIDEN_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        part = weight[start : start + rows].float()
        change += float((part - part.half().float()).square_().sum(dtype=torch.float64))
        size += float(part.square().sum(dtype=torch.float64))
    # Not a number compares false: infinite elements, and those beyond 65504.
    return change <= 2.0**-48 * size


@functools.cache
def _half_works() -> bool:
    """True if this build and processor have FBGEMM (x86 with AVX2)."""
    x, weight = torch.ones((1, 2)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    try:
        return _half(x, _pack_half(weight), None).tolist() == [[3.0, 7.0]]
    except (RuntimeError, AttributeError):
        return False


@functools.cache
def _onednn_packs(dtype: torch.dtype) -> bool:
    """True if oneDNN is built in and takes weights of this dtype on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        _onednn(torch.ones((1, 2), dtype=dtype), _pack_onednn(torch.ones((2, 2), dtype=dtype)), None)
    except RuntimeError:
        return False
    return True


def _case(name: str, t: int, n: int, k: int, bias: bool) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(n)
        return {
            "x": torch.randn((t, k), generator=generator).to(dtype).to(device),
            "weight": (torch.randn((n, k), generator=generator) / k**0.5).to(dtype).to(device),
            "bias": torch.randn((n,), generator=generator).to(dtype).to(device) if bias else None,
        }

    return Case(name, make)


OPS = (
    Op(
        "linear",
        linear,
        linear_definition,
        linear_kernel,
        (
            _case("one token", 1, 33, 48, True),
            _case("few tokens", 3, 64, 20, False),
            _case("eight tokens, split", 8, 40, 8200, True),
            _case("a padded batch", 20, 33, 300, False),
            _case("many tokens", 70, 16, 64, True),
        ),
    ),
)
