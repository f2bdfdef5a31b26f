"""Names: chunks of sequences get their identities, by which others find them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.kv.identity import Chain, chunk_identity
from cellar.kv.pool import Chunks, Slots
from cellar.kv.shelves import Shelves


class Names:
    """Of chunks in slots of the device that sequences have computed."""

    def __init__(self, shelves: Shelves, chunk_size: int) -> None:
        self._shelves = shelves
        self._chunk_size = chunk_size

    def commit(self, slots: Slots, chain: Chain, first: int, conversation: int) -> None:
        """Chunks `first` and later of a sequence, whose tokens and KV are now final, get their identity.

        `chain` has grown as far. Of two equal chunks the later one gets none and is freed with its last reference.
        """
        directory = self._shelves.directory
        before = directory.get(chain.parent(first))
        chunks = self._shelves.device.chunk[slots]
        identities = chain.identities[first : first + len(slots)]
        parents = [chain.parent(first), *identities]
        fresh, held = list[int](), list[int]()
        for k, (chunk, identity) in enumerate(zip(chunks.tolist(), identities, strict=True)):
            if not directory.is_named(chunk, identity):  # the others were found by theirs
                (fresh if chunk < 0 and directory.get(identity) < 0 else held).append(k)
        if fresh:
            ends = (first + np.array(fresh) + 1) * self._chunk_size
            names, whose = [identities[k] for k in fresh], [parents[k] for k in fresh]
            chunks[fresh] = self._new(np.asarray(slots)[fresh], names, whose, ends, conversation)
        for k in held:
            end = (first + k + 1) * self._chunk_size
            chunks[k] = self._name(int(slots[k]), identities[k], parents[k], end, conversation)
        if before >= 0:
            directory.grown[before] = True
        directory.grown[chunks[:-1]] = True

    def keep_tail(self, slot: int, chain: Chain, tokens: NDArray[np.int32], conversation: int) -> None:
        """The last chunk of a sequence that ends is partly filled: it is found by its exact tokens from now on.

        `tokens` are all whose KV is there.
        """
        column = len(tokens) // self._chunk_size
        held = tokens[column * self._chunk_size :].tobytes()
        if not held:
            return
        held_by = int(self._shelves.device.chunk[slot])
        if held_by >= 0 and not self._shelves.directory.is_tail(held_by):
            return  # others use it as the whole chunk that it was before its sequence was cut
        parent = chain.parent(column)
        self._name(slot, chunk_identity(parent, held), parent, len(tokens), conversation, held)

    def _name(self, slot: int, identity: bytes, parent: bytes, end: int, conversation: int, tail: bytes = b"") -> int:
        """Give a referenced slot its identity, unless it has one or another slot has it; -> the chunk.

        `tail`: the int32 bytes of what fills it, if that is only a part.
        """
        shelves, directory = self._shelves, self._shelves.directory
        held = int(shelves.device.chunk[slot])
        chunk = directory.get(identity)
        if chunk >= 0 and directory.slot[0, chunk] >= 0:
            return chunk
        if held >= 0:
            if not directory.is_tail(held):
                raise IntegrityError(f"slot {slot} has another identity already")
            shelves.clear(0, np.array([held], np.int32))  # the sequence has written on in it
            chunk = directory.get(identity)
        if chunk >= 0:
            found = np.array([chunk], np.int32)
            shelves.settle(np.array([slot], np.int32), found)
            shelves.leaving.classify(found)
            return chunk
        if not tail:
            slots, ends = np.array([slot], np.int32), np.array([end])
            return int(self._new(slots, [identity], [parent], ends, conversation)[0])
        audience = shelves.conversations.audience(conversation)
        chunk = directory.add_tail(identity, parent, tail, end, audience)
        shelves.conversations.count(audience, 1)
        shelves.settle(np.array([slot], np.int32), np.array([chunk], np.int32))
        return chunk

    def _new(
        self,
        slots: Slots,
        identities: Sequence[bytes],
        parents: Sequence[bytes],
        ends: NDArray[np.integer],
        conversation: int,
    ) -> Chunks:
        """Give referenced slots that hold no chunk identities that nothing has; -> the chunks."""
        shelves = self._shelves
        audience = shelves.conversations.audience(conversation)
        chunks = shelves.directory.add(identities, parents, ends, audience)
        shelves.conversations.count(audience, len(chunks))
        shelves.settle(slots, chunks)
        return chunks
