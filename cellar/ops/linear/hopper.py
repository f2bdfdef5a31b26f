"""The wide product: 33 to 1,024 tokens by a matrix on Hopper, weights at memory's speed (FlashDecoding++ §4, §5).

Up to 256 tokens one wave of blocks covers the matrix: tiles of [64, 128 or 192 tokens] x [16 to 256 rows], the width
chosen so that there are as many tiles as multiprocessors, and sums split among the blocks of a cluster where the matrix
has too few rows; beyond, blocks go on from tile to tile. The kernel is CUDA C++ (`wide.cu`);
docs/decisions/0016-hopper-kernels.md says why.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from cellar.ops.cuda.compiler import compile_cuda
from cellar.ops.cuda.driver import Function, TensorMap, tensor_map
from cellar.ops.cuda.hopper import DTYPES, hopper_available, hopper_source, multiply_wide
from cellar.ops.linear.choice import Wide

_DEPTH = 64


def wide_takes(x: Tensor, weight: Tensor) -> bool:
    """True if the kernel can multiply these: x [m, k], weight [n, k]; 16-bit floats, rows on 16 bytes."""
    n, k = weight.shape
    return (
        weight.dtype in DTYPES
        and n % 8 == 0
        and k % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
        and hopper_available(weight.device)
    )


def wide(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Wide, *, gate: bool = False) -> Tensor:
    """x W^T + b: x: [m, k], weight: [n, k], bias: [n] or None -> [m, n] in x's dtype; all contiguous.

    With `gate` silu(x G^T) * (x U^T) -> [m, n / 2], where G is the upper half of the matrix and U the lower; the
    products are not rounded in between.
    """
    m, k = x.shape
    n = weight.shape[0] // (2 if gate else 1)
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    function, at_once = _function(sizes, gate, bias is not None, x.dtype, x.device)
    down = -(-m // (sizes.tokens * sizes.sharing_rows))
    clusters = down * -(-n // (sizes.columns(gate) * sizes.sharing_tokens))
    function.launch(
        min(clusters, at_once) if sizes.persistent else clusters,
        (
            _map(x, sizes.tokens // sizes.sharing_tokens),
            _map(weight, sizes.columns(gate) // sizes.sharing_rows),
            ctypes.c_void_p(0 if bias is None else bias.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int(m),
            ctypes.c_int(n),
            ctypes.c_int(-(-k // _DEPTH)),
            ctypes.c_int(down),
            ctypes.c_int(clusters),
        ),
        torch.cuda.current_stream(x.device).cuda_stream,
        dependent=True,
    )
    return out


def wide_source(sizes: Wide, gate: bool, bias: bool, dtype: torch.dtype) -> tuple[str, dict[str, int]]:
    """CUDA C++ of one variant, and the constants that it is compiled with."""
    constants = {
        "TM": sizes.tokens,
        "BN": sizes.rows,
        "STAGES": sizes.stages,
        "CM": sizes.sharing_rows,
        "CN": sizes.sharing_tokens,
        "CK": sizes.parts,
        "GATED": gate,
        "HAS_BIAS": bias,
        "PERSIST": sizes.persistent,
        "BF16": dtype == torch.bfloat16,
    }
    source = hopper_source("linear/wide.cu", instructions=[multiply_wide(sizes.rows, dtype)])
    return source, {name: int(value) for name, value in constants.items()}


@functools.cache
def _function(sizes: Wide, gate: bool, bias: bool, dtype: torch.dtype, device: torch.device) -> tuple[Function, int]:
    """The kernel, and how many of its clusters run at once (0 where nobody asks)."""
    cubin = compile_cuda(*wide_source(sizes, gate, bias, dtype))
    with torch.cuda.device(device):
        function = Function(cubin, "product", sizes.threads, sizes.shared(gate), sizes.cluster)
        return function, function.clusters_at_once() if sizes.persistent else 0


def _map(matrix: Tensor, rows: int) -> TensorMap:
    """Of [n, k]: boxes of so many rows, 64 columns wide."""
    n, k = matrix.shape
    return tensor_map(matrix.data_ptr(), matrix.dtype, (k, n), (k,), (_DEPTH, rows))
