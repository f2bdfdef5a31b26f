"""KVStore: which chunks of which sequences are resident; gives orders, moves no byte (Pensieve §3.4.3).

One tier so far, the device. A lookup answers per chunk and a reservation names copies and ranges to compute,
so that more tiers change the answers and not the questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.core.messages import CopyJob
from cellar.kv.hashing import Chain, root_identity
from cellar.kv.pool import ChunkPool, Slots

NO_SLOTS: Slots = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Memory for a sequence: the slot of each of its chunks, and how they get their content.

    `compute` are the half-open ranges of positions that are nowhere, ascending; what lies between them is
    resident, or on its way by `copies_in`.
    """

    slots: Slots
    compute: tuple[tuple[int, int], ...]
    copies_in: tuple[CopyJob, ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class KVStats:
    """Slots by state: free + cached + referenced == total."""

    total: int
    free: int
    cached: int
    referenced: int


class KVStore:
    """Chunks of `chunk_size` tokens in `num_slots` slots.

    `namespace` is all that makes K and V of equal tokens differ between stores: model, dtype, rotary.
    """

    def __init__(self, num_slots: int, chunk_size: int, namespace: bytes = b"") -> None:
        self.chunk_size = chunk_size
        self._namespace = namespace
        self._pool = ChunkPool(num_slots)

    @property
    def num_available(self) -> int:
        """Slots that a reservation could get: free ones and cached ones."""
        return self._pool.num_available

    def chain(self, salt: bytes) -> Chain:
        """An empty chain of identities for one sequence; only equal salts share."""
        return Chain(root_identity(self._namespace, salt), self.chunk_size)

    def lookup(self, tokens: NDArray[np.int32], salt: bytes = b"") -> Slots:
        """Slots of the leading whole chunks of `tokens` [n], -1 where a chunk is not resident.

        It goes on past missing chunks. At least the last token is left to be computed, since its logits are
        wanted: [(n - 1) // chunk_size] answers.
        """
        return self.find(self.chain(salt), tokens)

    def find(self, chain: Chain, tokens: NDArray[np.int32]) -> Slots:
        """`lookup` for a sequence whose chain is kept, so that nothing is hashed twice."""
        num_chunks = (len(tokens) - 1) // self.chunk_size
        return self._pool.find(chain.grow(tokens, num_chunks)[:num_chunks])

    def reserve(self, found: Slots, num_tokens: int, keep_free: int = 0) -> Reservation | None:
        """References on the chunks that a lookup found, and new slots for the rest of `num_tokens` tokens.

        None, and nothing is changed, if fewer than `keep_free` slots would stay available.
        """
        size = self.chunk_size
        slots = np.full(-(-num_tokens // size), -1, np.int32)
        slots[: len(found)] = found
        missing = np.flatnonzero(slots < 0)
        hits = slots[slots >= 0]
        left = self._pool.num_available - self._pool.num_unreferenced(hits) - len(missing)
        if left < keep_free:
            return None
        self._pool.hold(hits)  # before taking, or a hit could be reclaimed
        fresh = self._pool.take(len(missing))
        if fresh is None:
            raise IntegrityError(f"{len(missing)} slots were counted as available, but could not be taken")
        slots[missing] = fresh
        return Reservation(slots, _ranges(missing, size, num_tokens), (), len(hits) * size)

    def extend(self, count: int) -> Slots | None:
        """`count` new slots for chunks to be computed, or None (and no change)."""
        return self._pool.take(count)

    def commit(self, slots: Sequence[int], identities: Sequence[bytes]) -> None:
        """Chunks whose tokens and KV are now final get their identity.

        Of two equal chunks the later one gets none and is freed with its last reference.
        """
        for slot, identity in zip(slots, identities, strict=True):
            self._pool.name(slot, identity)

    def release(self, slots: Slots) -> None:
        """Drop one reference on each chunk of a sequence, given in order.

        Those with an identity stay cached; leading chunks, the cheapest to compute again, become the oldest
        and are lost first (§3.4.3.1).
        """
        self._pool.drop(slots)

    def forget(self, slots: Slots) -> None:
        """Chunks that turned out not to count, or to be wrong, lose their identity, unless others use them."""
        self._pool.forget(slots)

    def stats(self) -> KVStats:
        """A snapshot; O(1)."""
        pool = self._pool
        return KVStats(pool.num_slots, pool.num_free, pool.num_cached, pool.num_slots - pool.num_available)

    def check_integrity(self, references: NDArray[np.int32] | None = None) -> None:
        """Raise IntegrityError unless free + cached + referenced == total, identities and slots map one to one,
        and (if given) `references` [num_slots], the users of each slot as its owner counts them, are true."""
        self._pool.check(references)


def _ranges(missing: NDArray[np.intp], chunk_size: int, num_tokens: int) -> tuple[tuple[int, int], ...]:
    """Runs of adjacent missing chunks as ranges of positions; the last may end within a chunk."""
    if not len(missing):
        return ()
    breaks = np.flatnonzero(np.diff(missing) > 1)
    firsts = missing[np.concatenate(([0], breaks + 1))].tolist()
    lasts = missing[np.concatenate((breaks, [len(missing) - 1]))].tolist()
    return tuple(
        (first * chunk_size, min((last + 1) * chunk_size, num_tokens))
        for first, last in zip(firsts, lasts, strict=True)
    )
