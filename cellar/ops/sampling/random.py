"""Random numbers as a function of (seed, output index): no state, so company and restarts change nothing.

The function is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) twice
over: the seed is mixed into the start of a stream, and the output index picks a place in it. In arithmetic modulo 2^64,

    mix(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    u(seed, index) = (mix(mix(seed + G) + (index + 1) G) >> 11) / 2^53,     G = 0x9E3779B97F4A7C15

so u(0, 0) = 0x1.4e0dba5e9a32fp-1 = 0.65244... and u(42, 3) = 0x1.13e5dec6f8fd8p-4 = 0.06735....
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# The constants as signed 64-bit integers, which is what torch multiplies; the product's low 64 bits are the same.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLIER_2 = 0x94D049BB133111EB - 2**64
_UNSIGNED = tuple(np.uint64(constant % 2**64) for constant in (_GOLDEN, _MULTIPLIER_1, _MULTIPLIER_2))
_SHIFTS = tuple(np.uint64(bits) for bits in (30, 27, 31, 11))
_ONE = np.uint64(1)


def uniform_definition(seed: Tensor, index: Tensor) -> Tensor:
    """u(seed, index) in [0, 1): seed, index: int64 [n] -> float64 [n], the same bits on every device."""
    start = _mix(seed + _GOLDEN)
    return (_shift(_mix(start + (index + 1) * _GOLDEN), 11)).double() * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _MULTIPLIER_1
    z = (z ^ _shift(z, 27)) * _MULTIPLIER_2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """z >> bits with zeros coming in, as for an unsigned number."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def uniform_cpu(seed: Tensor, index: Tensor) -> Tensor:
    """u(seed, index) in NumPy, which is faster than torch for a few numbers."""
    start = _mix_array(seed.numpy().view(np.uint64) + _UNSIGNED[0])
    bits = _mix_array(start + (index.numpy().view(np.uint64) + _ONE) * _UNSIGNED[0]) >> _SHIFTS[3]
    scaled: NDArray[np.float64] = bits.astype(np.float64)
    scaled *= 2.0**-53
    return torch.from_numpy(scaled)


def _mix_array(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> _SHIFTS[0])) * _UNSIGNED[1]
    z = (z ^ (z >> _SHIFTS[1])) * _UNSIGNED[2]
    return z ^ (z >> _SHIFTS[2])
