"""Holdings: what the router knows of who holds which chunk: digests, and what it has sent since."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import ConfigError
from cellar.core.messages import Tier
from cellar.routing.columns import WORD, Columns, unpacked
from cellar.routing.digest import Digest, DigestShape, Keys

Held = Mapping[Tier, NDArray[np.float32]]
"""By tier, [n, replicas]: 1 where a replica holds chunk n in this tier and in no faster one."""

SENT_BITS = 1 << 20

ALL = np.uint64(2**64 - 1)


class Holdings:
    """Columns are the router's numbers of replicas."""

    def __init__(self, shape: DigestShape) -> None:
        self._tiers = {tier: Columns(bits) for tier, bits in sorted(shape.bits.items())}
        self._sent = Columns(SENT_BITS)
        self._versions: dict[int, int] = {}
        self._room = WORD

    @property
    def nbytes(self) -> int:
        """Memory of all tables."""
        return sum(columns.nbytes for columns in (*self._tiers.values(), self._sent))

    def open(self, column: int) -> None:
        """A column may be used."""
        if column >= self._room:
            for columns in (*self._tiers.values(), self._sent):
                columns.widened()
            self._room += WORD

    def close(self, column: int) -> None:
        """A column holds nothing any more."""
        for columns in (*self._tiers.values(), self._sent):
            columns.clear(column)
        self._versions.pop(column, None)

    def take(self, column: int, digest: Digest) -> bool:
        """Take in a digest. False, and nothing is changed, if it is a delta to another version than the last one.

        Raises ConfigError for filters of another shape.
        """
        if digest.base is not None and self._versions.get(column) != digest.base:
            return False
        for tier, part in digest.tiers.items():
            columns = self._tiers.get(tier)
            whole = len(part) * 8 if digest.base is None else 1 + int(part.max(initial=0))
            fits = columns is not None and (
                whole == columns.num_bits if digest.base is None else whole <= columns.num_bits
            )
            if not fits:
                raise ConfigError(
                    f"a digest of {tier.name} has another shape than this router's; give all replicas and fronts "
                    "the same DigestShape."
                )
        for tier, part in digest.tiers.items():
            if digest.base is None:
                self._tiers[tier].write(column, part.astype(np.uint8, copy=False))
            else:
                self._tiers[tier].flip(column, part.astype(np.uint32, copy=False))
        self._versions[column] = digest.version
        return True

    def send(self, column: int, keys: Keys) -> None:
        """These chunks are going to be on the column's device, which no digest says yet."""
        if len(keys):
            self._sent.add(column, keys)

    def settle(self, column: int, gone: Keys, left: Keys) -> None:
        """Of what was sent to a column `gone` is for its digests to say; `left` is not."""
        self._sent.remove(column, gone)
        self._sent.add(column, left)

    def held(self, keys: Keys, count: int) -> dict[Tier, NDArray[np.float32]]:
        """Where the first `count` columns hold the chunks; the remote tier is everybody's."""
        found: dict[Tier, NDArray[np.float32]] = {}
        if not len(keys):
            return found
        slower = np.full((len(keys), self._room // WORD), ALL)  # who is not known to hold it in a faster tier
        for tier, columns in self._tiers.items():
            words = columns.find(keys)
            if tier is Tier.DEVICE:
                words |= self._sent.find(keys)
            if tier is Tier.REMOTE:
                words = np.where(words.any(1, keepdims=True), ALL, np.uint64(0))
            words &= slower
            if words.any():
                found[tier] = unpacked(words, count)
                slower &= ~words
        return found

    def false_share(self, count: int) -> dict[Tier, NDArray[np.float64]]:
        """By tier, of each of the first `count` columns: the chance that it is said to hold what it does not."""
        return {tier: columns.false_share(count) for tier, columns in self._tiers.items()}
