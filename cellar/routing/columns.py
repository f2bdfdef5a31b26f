"""Columns: the filters of all replicas, turned around: each bit has a word that says which replicas have it set.

bit 0   [ 0 1 0 0 ... ]    one column a replica, 64 of them in a word: a chunk's two rows,
bit 1   [ 1 1 0 0 ... ]    and-ed, say at once which replicas may hold it

In memory all rows' first words come first, then all second ones: what is gathered is one number after the other.
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
        self._words = np.zeros((num_words, num_bits), np.uint64)
        self._count = np.zeros(num_words * WORD, np.int64)  # bits set in each column by `write` and `flip`

    @property
    def nbytes(self) -> int:
        """Memory of the table."""
        return self._words.nbytes

    def widened(self) -> None:
        """Room for 64 replicas more."""
        self._words = np.concatenate((self._words, np.zeros((1, self.num_bits), np.uint64)))
        self._count = np.concatenate((self._count, np.zeros(WORD, np.int64)))

    def write(self, column: int, packed: Bits) -> None:
        """A column becomes this filter, uint8 [num_bits / 8]."""
        words, bit = self._place(column)
        held = np.unpackbits(packed, bitorder="little").astype(np.bool_)
        words &= ~bit
        words |= np.where(held, bit, np.uint64(0))
        self._count[column] = int(held.sum())

    def flip(self, column: int, changed: Positions) -> None:
        """These bits of a column, each named once, become their opposites."""
        words, bit = self._place(column)
        where = changed.astype(np.int64)
        flipped = words.take(where) ^ bit
        words[where] = flipped
        now = int(np.count_nonzero(flipped & bit))
        self._count[column] += 2 * now - len(changed)

    def clear(self, column: int) -> None:
        """A column becomes empty."""
        words, bit = self._place(column)
        words &= ~bit
        self._count[column] = 0

    def add(self, column: int, keys: Keys) -> None:
        """A column gets these keys, too."""
        words, bit = self._place(column)
        where = positions(keys, self.num_bits).ravel()
        words[where] = words.take(where) | bit

    def remove(self, column: int, keys: Keys) -> None:
        """A column loses the bits of these keys, though others of its keys may need them."""
        words, bit = self._place(column)
        where = positions(keys, self.num_bits).ravel()
        words[where] = words.take(where) & ~bit

    def find(self, keys: Keys) -> Words:
        """Who may hold each key: [n] -> [n, num_words]."""
        first, second = positions(keys, self.num_bits)
        found = np.empty((len(keys), len(self._words)), np.uint64)
        for k, words in enumerate(self._words):
            np.bitwise_and(words.take(first), words.take(second), out=found[:, k])
        return found

    def false_share(self, count: int) -> NDArray[np.float64]:
        """Of each of the first `count` columns, the chance that it has a key that no filter gave it: fill ** 2."""
        return np.square(self._count[:count] / self.num_bits)

    def _place(self, column: int) -> tuple[Words, np.uint64]:
        """A column's words of all rows, [num_bits], and its bit in them."""
        return self._words[column // WORD], np.uint64(1 << column % WORD)


def unpacked(words: Words, count: int) -> NDArray[np.float32]:
    """The first `count` columns as numbers: [n, num_words] -> [n, count], 1 where the replica's bit is set."""
    data = np.ascontiguousarray(words.astype("<u8", copy=False)).view(np.uint8)
    bits = np.unpackbits(data.ravel(), bitorder="little").reshape(len(words), -1)
    return bits[:, :count].astype(np.float32)
