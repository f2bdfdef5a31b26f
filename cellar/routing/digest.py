"""Digest: which chunks a replica holds in which tier, as one Bloom filter a tier (Bloom, CACM 1970, §2, method 2).

Identities of chunks are random already: two halves of their first 64 bits are the two hashes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import ConfigError
from cellar.core.messages import Tier

Keys = NDArray[np.uint64]
Bits = NDArray[np.uint8]
Positions = NDArray[np.uint32]

HASHES = 2
BITS_PER_CHUNK = 16
MIN_BITS, MAX_BITS = 1 << 10, 1 << 22


def keys_of(identities: Sequence[bytes]) -> Keys:
    """The first 64 bits of each identity: [n]."""
    if not identities:
        return np.empty(0, np.uint64)
    return np.frombuffer(b"".join(identities), np.dtype("<u8")).reshape(len(identities), -1)[:, 0].astype(np.uint64)


def positions(keys: Keys, num_bits: int) -> NDArray[np.int64]:
    """The bits of each key in a filter: [n] -> [HASHES, n]."""
    mask = np.uint64(num_bits - 1)
    found = np.empty((HASHES, len(keys)), np.uint64)
    np.bitwise_and(keys, mask, out=found[0])
    np.bitwise_and(keys >> np.uint64(32), mask, out=found[1])
    return found.view(np.int64)  # as they are below 2**32


@dataclass(frozen=True)
class DigestShape:
    """Bits of each tier's filter, powers of two up to 2**32; the same in all replicas and fronts.

    Raises ConfigError.
    """

    bits: Mapping[Tier, int]

    def __post_init__(self) -> None:
        for tier, count in self.bits.items():
            if count.bit_count() != 1 or not 8 <= count <= 1 << 32:
                raise ConfigError(f"a filter of {count} bits for {tier.name} is no power of two from 8 to 2**32.")

    @classmethod
    def of(cls, num_slots: Mapping[Tier, int]) -> DigestShape:
        """16 bits a slot or more, which finds 1.4 % of what is not there, but at most 512 KiB a tier."""
        bits = {}
        for tier, count in sorted(num_slots.items()):
            wanted = 1 << max(1, BITS_PER_CHUNK * count - 1).bit_length()
            bits[tier] = min(max(wanted, MIN_BITS), MAX_BITS)
        return cls(bits)


@dataclass(frozen=True, slots=True, eq=False)
class Digest:
    """The filters of one moment: whole (`base` None), packed with the first bit lowest, uint8 [bits / 8]; or the bits,
    uint32 [n], that have changed since the version `base`.
    """

    version: int
    base: int | None
    tiers: Mapping[Tier, Bits | Positions]

    @property
    def nbytes(self) -> int:
        """Bytes of the filters or changes."""
        return sum(part.nbytes for part in self.tiers.values())


class DigestKeeper:
    """Makes the digests of one replica, each from what is held at that moment, so that none can drift."""

    def __init__(self, shape: DigestShape) -> None:
        self._shape = shape
        self._version = 0
        self._filters: dict[Tier, NDArray[np.bool_]] = {t: np.zeros(n, np.bool_) for t, n in shape.bits.items()}

    def digest(self, keys: Mapping[Tier, Keys], whole: bool = False) -> Digest:
        """Of the chunks with these keys, by tier. It is whole if a delta is not asked for, or not smaller."""
        changed: dict[Tier, Positions] = {}
        for tier, before in self._filters.items():
            now = np.zeros(len(before), np.bool_)
            now[positions(keys.get(tier, np.empty(0, np.uint64)), len(before)).ravel()] = True
            changed[tier] = np.flatnonzero(now != before).astype(np.uint32)
            self._filters[tier] = now
        self._version += 1
        delta_nbytes, nbytes = sum(part.nbytes for part in changed.values()), sum(self._shape.bits.values()) // 8
        if whole or self._version == 1 or delta_nbytes >= nbytes:
            packed = {tier: np.packbits(held, bitorder="little") for tier, held in self._filters.items()}
            return Digest(self._version, None, packed)
        return Digest(self._version, self._version - 1, changed)
