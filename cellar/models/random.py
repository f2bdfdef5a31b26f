"""Random weights that are a function of seed, tensor and place: f(seed, name, row, column).

So a shard, or a tensor of which a part lies elsewhere, has the numbers that the whole has, on every kind of device.
Integers are hashed (SplitMix64, Steele et al. 2014: one sequence per row), and four of the hash's bytes are added: an
Irwin-Hall distribution, nearly normal, with no function of the library whose last bit might differ.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

# Elements that are made at a time: on the CPU they stay in its cache, elsewhere they bound the extra memory.
_CPU_ELEMENTS = 1 << 17
_DEVICE_ELEMENTS = 1 << 24

_BYTES_MEAN = 4 * 255 / 2
_BYTES_DEVIATION = (4 * (256**2 - 1) / 12) ** 0.5


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


_GAMMA = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)
_BYTES_OF_TWO = _signed(0x00FF00FF00FF00FF)
_WORDS_OF_TWO = _signed(0x0000FFFF0000FFFF)


def key_of(seed: int, name: str) -> int:
    """The key of one tensor's sequence, 64 bits."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return _signed(int.from_bytes(digest, "big"))


def fill_random(out: Tensor, key: int, rows: range, columns: range, deviation: float) -> None:
    """out[i, j] = number (rows[i], columns[j]) of the key's, mean 0, so wide; out: [rows, columns], any float dtype."""
    elements = _CPU_ELEMENTS if out.device.type == "cpu" else _DEVICE_ELEMENTS
    step = max(1, elements // max(1, len(columns)))
    first, stop = columns.start // 2, -(-columns.stop // 2)
    pairs = torch.arange(first, stop, device=out.device) * _GAMMA
    skipped = columns.start - 2 * first
    for start in range(0, len(rows), step):
        count = min(step, len(rows) - start)
        row = torch.arange(rows.start + start, rows.start + start + count, device=out.device)
        hashed = _mixed(_mixed(row * _GAMMA + key)[:, None] + pairs)
        # Bytes to sums of two, of four; each half of a hash is then one number.
        hashed = (hashed & _BYTES_OF_TWO) + ((hashed >> 8) & _BYTES_OF_TWO)
        hashed = (hashed & _WORDS_OF_TWO) + ((hashed >> 16) & _WORDS_OF_TWO)
        numbers = hashed.view(torch.int32)[:, skipped : skipped + len(columns)].float()
        out[start : start + count] = numbers.sub_(_BYTES_MEAN).mul_(deviation / _BYTES_DEVIATION)


def _mixed(z: Tensor) -> Tensor:
    """SplitMix64's output function, in place."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        z ^= (z >> shift) & ((1 << (64 - shift)) - 1)
        z *= factor
    z ^= (z >> 31) & ((1 << 33) - 1)
    return z
