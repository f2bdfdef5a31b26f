"""Columns: the filters of all replicas, turned around: each bit has a word that says which replicas have it set.

bit 0   [ 0 1 0 0 ... ]    one column a replica, 64 of them in a word: a chunk's two rows,
bit 1   [ 1 1 0 0 ... ]    and-ed, say at once which replicas may hold it
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cellar.routing.digest import Bits, Keys, Positions, positions

Words = NDArray[np.uint64]

WORD = 64


class Columns:
    """`num_bits` rows of `num_words` words: replica r is bit r % 64 of word r // 64."""

    def __init__(self, num_bits: int, num_words: int = 1) -> None:
        self.num_bits = num_bits
        self._rows = np.zeros((num_bits, num_words), np.uint64)
        self._count = np.zeros(num_words * WORD, np.int64)  # bits set in each column by `write` and `flip`

    @property
    def nbytes(self) -> int:
        """Memory of the table."""
        return self._rows.nbytes

    def widened(self) -> None:
        """Room for 64 replicas more."""
        self._rows = np.concatenate((self._rows, np.zeros((self.num_bits, 1), np.uint64)), 1)
        self._count = np.concatenate((self._count, np.zeros(WORD, np.int64)))

    def write(self, column: int, packed: Bits) -> None:
        """A column becomes this filter, uint8 [num_bits / 8]."""
        word, bit = _place(column)
        held = np.unpackbits(packed, bitorder="little").astype(np.bool_)
        self._rows[:, word] = (self._rows[:, word] & ~bit) | np.where(held, bit, np.uint64(0))
        self._count[column] = int(held.sum())

    def flip(self, column: int, changed: Positions) -> None:
        """These bits of a column, each named once, become their opposites."""
        word, bit = _place(column)
        rows = self._rows[changed, word] ^ bit
        self._rows[changed, word] = rows
        now = int(np.count_nonzero(rows & bit))
        self._count[column] += 2 * now - len(changed)

    def clear(self, column: int) -> None:
        """A column becomes empty."""
        word, bit = _place(column)
        self._rows[:, word] &= ~bit
        self._count[column] = 0

    def add(self, column: int, keys: Keys) -> None:
        """A column gets these keys, too."""
        word, bit = _place(column)
        where = positions(keys, self.num_bits).ravel()
        self._rows[where, word] |= bit

    def remove(self, column: int, keys: Keys) -> None:
        """A column loses the bits of these keys, though others of its keys may need them."""
        word, bit = _place(column)
        where = positions(keys, self.num_bits).ravel()
        self._rows[where, word] &= ~bit

    def find(self, keys: Keys) -> Words:
        """Who may hold each key: [n] -> [n, num_words]."""
        where = positions(keys, self.num_bits)
        return self._rows[where[:, 0]] & self._rows[where[:, 1]]

    def false_share(self, count: int) -> NDArray[np.float64]:
        """Of each of the first `count` columns, the chance that it has a key that no filter gave it: fill ** 2."""
        return np.square(self._count[:count] / self.num_bits)


def unpacked(words: Words, count: int) -> NDArray[np.float32]:
    """The first `count` columns as numbers: [n, num_words] -> [n, count], 1 where the replica's bit is set."""
    data = np.ascontiguousarray(words.astype("<u8", copy=False)).view(np.uint8)
    return np.unpackbits(data, axis=1, count=count, bitorder="little").astype(np.float32)


def _place(column: int) -> tuple[int, np.uint64]:
    return column // WORD, np.uint64(1 << column % WORD)
