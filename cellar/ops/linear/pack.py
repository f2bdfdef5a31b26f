"""The form of a matrix that is fastest on a CPU. A weight is packed once, when the model is loaded.

Half is used where 16 bits hold the matrix: for float16, for bfloat16 on processors without bfloat16 arithmetic, and for
float32 that was 16-bit in the checkpoint. Figures: docs/performance/linear-cpu.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cellar.ops.linear.dense import DenseWeight
from cellar.ops.linear.half import HalfWeight, half_holds, half_works
from cellar.ops.linear.onednn import OneDnnWeight, onednn_packs
from cellar.ops.linear.weight import LinearWeight


def pack(matrix: Tensor) -> LinearWeight:
    """The form of a matrix [out, in] that is multiplied fastest on this CPU; plain if no other is faster.

    Half keeps the matrix to within float32's own rounding: the change it makes is at most 2^-24 of the matrix, in the
    Frobenius norm.
    """
    if not matrix.numel():
        return DenseWeight(matrix)
    if matrix.dtype == torch.bfloat16 and onednn_packs(torch.bfloat16):
        return OneDnnWeight(matrix)
    if half_works() and half_holds(matrix):
        return HalfWeight(matrix)
    if matrix.dtype == torch.float32 and onednn_packs(torch.float32):
        return OneDnnWeight(matrix)
    return DenseWeight(matrix)
