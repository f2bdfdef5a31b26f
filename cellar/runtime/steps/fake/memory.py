"""The fake runtime's memory: what each slot of each tier holds, read and written through the row tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.core.messages import (
    ChunkLabel,
    CopyBatch,
    CopyResult,
    EraseBatch,
    IntArray,
    KeptChunk,
    TableUpdate,
    Tier,
    TierOrder,
)
from cellar.runtime.protocol import Capacity

_PRIME = 1_000_003
_FACTOR = 31
_UNWRITTEN = -1


class FakeMemory:
    """A simulated KV cache: per tier [position | token | digest, slot, offset], the digest of a token and all before.

    tiers      chunks in each tier
    fail_copy  says whether chunk k of a batch does not arrive
    """

    def __init__(
        self, capacity: Capacity, tiers: Mapping[Tier, int], fail_copy: Callable[[TierOrder, int], bool]
    ) -> None:
        self.num_copied = 0
        self._labels: dict[tuple[Tier, int], ChunkLabel] = {}  # of chunks in persistent tiers
        self._fail_copy = fail_copy
        self._chunk_size = capacity.chunk_size
        self._tiers = {
            tier: np.full((3, count, capacity.chunk_size), _UNWRITTEN, np.int64) for tier, count in tiers.items()
        }
        self._position, self._token, self._digest = self._tiers[Tier.DEVICE]
        self._table = np.full((capacity.num_rows, -(-capacity.max_model_len // capacity.chunk_size)), -1, np.int64)
        # By row: up to where it has written, and the digest there.
        self._written: list[tuple[int, int]] = [(0, 0)] * capacity.num_rows

    def clear(self, row: int) -> None:
        """A row has no slots: it was opened or closed."""
        self._table[row] = -1
        self._written[row] = (0, 0)

    def update(self, table: TableUpdate) -> None:
        """Slots of rows, as a plan gives them."""
        self._table[table.row, table.column] = table.slot

    def expect(self, batch: TierOrder) -> None:
        """A batch has been handed over: its targets hold nothing until it is copied."""
        if isinstance(batch, CopyBatch):
            self._wipe(batch.target, batch.target_slots)

    def copy(self, batch: TierOrder) -> CopyResult:
        """Copy or erase a batch, but for chunks that are made to fail."""
        ok = np.array([not self._fail_copy(batch, k) for k in range(len(batch))], np.bool_)
        if isinstance(batch, EraseBatch):
            self._wipe(batch.tier, batch.slots[ok])
            return CopyResult(batch.number, ok, error=None if ok.all() else "made to fail")
        if batch.source.persistent or batch.target.persistent:
            self._label(batch, ok)
        source, target = self._tiers[batch.source], self._tiers[batch.target]
        target[:, batch.target_slots[ok]] = source[:, batch.source_slots[ok]]
        self.num_copied += int(ok.sum())
        return CopyResult(batch.number, ok, int(ok.sum()), error=None if ok.all() else "made to fail")

    def _wipe(self, tier: Tier, slots: IntArray) -> None:
        self._tiers[tier][:, slots] = _UNWRITTEN
        for slot in slots.tolist():
            self._labels.pop((tier, slot), None)

    def _label(self, batch: CopyBatch, ok: NDArray[np.bool_]) -> None:
        """What outlives a process must be said to be what it is, when it is written and when it is read."""
        if len(batch.labels) != len(batch):
            raise IntegrityError(f"batch {batch.number} has {len(batch.labels)} labels for {len(batch)} chunks")
        for k, label in enumerate(batch.labels):
            held = self._labels.get((batch.source, int(batch.source_slots[k])))
            if batch.source.persistent and (held is None or held.identity != label.identity):
                raise IntegrityError(f"batch {batch.number} reads another chunk than tier {batch.source.name} holds")
            if batch.target.persistent and ok[k]:
                self._labels[batch.target, int(batch.target_slots[k])] = label

    def kept(self) -> dict[Tier, list[KeptChunk]]:
        """Chunks that persistent tiers have, as the next process finds them."""
        found: dict[Tier, list[KeptChunk]] = {tier: [] for tier in self._tiers if tier.persistent}
        for (tier, slot), label in self._labels.items():
            found[tier].append(KeptChunk(slot, label, 0.0))
        return found

    def inherit(self, before: FakeMemory) -> None:
        """The process of another memory was killed: what outlived it is here."""
        self._labels = dict(before._labels)
        for tier, chunks in self._tiers.items():
            if tier.persistent:
                chunks[:] = before._tiers[tier]

    def write(self, row: int, start: int, tokens: IntArray) -> None:
        """Append a row's tokens from position `start` on. Raises IntegrityError if those before are not its own."""
        before = self._read(row, start)[1] if start else 0
        written, digest = self._written[row]
        if start == written and before != digest:
            raise IntegrityError(f"the KV of row {row} before position {start} was overwritten by another sequence")
        slots, offsets = self._places(row, start, start + len(tokens))
        for k, token in enumerate(tokens.tolist()):
            before = (before * _FACTOR + token + 1) % _PRIME
            self._position[slots[k], offsets[k]] = start + k
            self._token[slots[k], offsets[k]] = token
            self._digest[slots[k], offsets[k]] = before
        self._written[row] = (start + len(tokens), before)

    def context(self, row: int, stop: int) -> NDArray[np.int64]:
        """Tokens of positions [0, stop). Raises IntegrityError if any is not there."""
        return self._read(row, stop)[0]

    def _read(self, row: int, stop: int) -> tuple[NDArray[np.int64], int]:
        """Tokens of positions [0, stop), and the digest at the last. Raises IntegrityError if any is not there."""
        slots, offsets = self._places(row, 0, stop)
        positions, tokens, digests = (part[slots, offsets] for part in (self._position, self._token, self._digest))
        wrong = positions != np.arange(stop)
        before = np.concatenate(([0], digests[:-1]))
        wrong |= (before * _FACTOR + tokens + 1) % _PRIME != digests
        if wrong.any():
            at = int(np.argmax(wrong))
            raise IntegrityError(
                f"row {row} attends to position {at}, but slot {slots[at]} does not hold it: "
                f"it was never written, or overwritten by another sequence"
            )
        return tokens, int(digests[-1])

    def _places(self, row: int, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        size = self._chunk_size
        positions = np.arange(start, stop)
        slots = self._table[row, positions // size]
        if len(slots) and slots.min() < 0:
            raise IntegrityError(f"row {row} has no slot for position {int(positions[np.argmin(slots)])}")
        return slots, positions % size
