"""Directory: all chunks with an identity, whichever tiers they lie in, as a struct of arrays over chunk numbers.

A partly filled tail is a chunk, too: its identity is that of its exact tokens, and it is found by its parent and by
being a beginning of what is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import IntegrityError
from cellar.kv.pool import Chunks


class Tails:
    """Those that follow one chunk: `numbers` by their tokens, and how many there are of each length in bytes."""

    __slots__ = ("lengths", "numbers")

    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {}
        self.lengths: Counter[int] = Counter()

    def add(self, tokens: bytes, chunk: int) -> None:
        """Another one."""
        self.lengths[len(tokens)] += 1
        self.numbers[tokens] = chunk

    def remove(self, tokens: bytes) -> None:
        """One that is there."""
        del self.numbers[tokens]
        self.lengths[len(tokens)] -= 1
        if not self.lengths[len(tokens)]:
            del self.lengths[len(tokens)]

    def find(self, tokens: bytes) -> tuple[int, int]:
        """The longest that `tokens` begin with; -> its number (or -1), and its bytes. There may be thousands that begin
        alike, but there are no more lengths than tokens in a chunk.
        """
        for length in sorted(self.lengths, reverse=True):
            chunk = self.numbers.get(tokens[:length]) if length <= len(tokens) else None
            if chunk is not None:
                return chunk, length
        return -1, 0


class Directory:
    """At most `capacity` chunks in `num_tiers` tiers.

    slot [tier, chunk]   where it lies or is going to lie, -1: not there
    end [chunk]          context length at its end, in tokens
    audience [chunk]     whose it is; see `conversations.py`
    grown [chunk]        True once another chunk has followed it
    key [chunk]          the first 64 bits of its identity
    """

    def __init__(self, capacity: int, num_tiers: int) -> None:
        self.slot = np.full((num_tiers, capacity), -1, np.int32)
        self.end = np.zeros(capacity, np.int32)
        self.audience = np.full(capacity, -1, np.int32)
        self.grown = np.zeros(capacity, np.bool_)
        self.key = np.zeros(capacity, np.uint64)
        self._identity: list[bytes | None] = [None] * capacity
        self._parent: list[bytes] = [b""] * capacity
        self._number: dict[bytes, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._tails: dict[bytes, Tails] = {}  # by parent
        self._tail: dict[int, tuple[bytes, bytes]] = {}  # number -> parent, tokens

    def __len__(self) -> int:
        return len(self._number)

    def find(self, identities: Sequence[bytes]) -> Chunks:
        """Number of each chunk, or -1."""
        get = self._number.get
        return np.array([get(identity, -1) for identity in identities], np.int32)

    def get(self, identity: bytes) -> int:
        """Number of one chunk, or -1."""
        return self._number.get(identity, -1)

    def is_named(self, chunk: int, identity: bytes) -> bool:
        """True if a chunk (-1: none) has this identity."""
        return chunk >= 0 and self._identity[chunk] == identity

    def identity(self, chunk: int) -> bytes:
        """Of a chunk that is there."""
        identity = self._identity[chunk]
        assert identity is not None
        return identity

    def parent(self, chunk: int) -> bytes:
        """Identity of what comes before a chunk that is there."""
        return self._parent[chunk]

    def tail_tokens(self, chunk: int) -> bytes:
        """The int32 bytes of what fills a tail; empty for a whole chunk."""
        return self._tail[chunk][1] if chunk in self._tail else b""

    def add(
        self, identities: Sequence[bytes], parents: Sequence[bytes], ends: NDArray[np.integer], audience: int
    ) -> Chunks:
        """Chunks that are not there yet; -> their numbers. They must be given slots."""
        if len(self._free) < len(identities):
            raise IntegrityError("there are more chunks than slots")
        chunks = [self._free.pop() for _ in identities]
        for chunk, identity, parent in zip(chunks, identities, parents, strict=True):
            self._identity[chunk] = identity
            self._parent[chunk] = parent
            self._number[identity] = chunk
        numbers = np.array(chunks, np.int32)
        self.key[numbers] = np.frombuffer(b"".join(identity[:8] for identity in identities), "<u8")
        self.end[numbers] = ends
        self.audience[numbers] = audience
        self.grown[numbers] = False
        return numbers

    def add_tail(self, identity: bytes, parent: bytes, tokens: bytes, end: int, audience: int) -> int:
        """`add` for a partly filled chunk; `tokens` are the int32 bytes of what fills it."""
        chunk = int(self.add([identity], [parent], np.array([end]), audience)[0])
        self._tails.setdefault(parent, Tails()).add(tokens, chunk)
        self._tail[chunk] = parent, tokens
        return chunk

    def has_tail(self, parent: bytes) -> bool:
        """True if any tail follows `parent`: most chunks that are missing have none."""
        return parent in self._tails

    def find_tail(self, parent: bytes, tokens: bytes) -> tuple[int, int]:
        """The longest tail after `parent` that `tokens` begin with; -> its number (or -1), and its bytes."""
        tails = self._tails.get(parent)
        return tails.find(tokens) if tails is not None else (-1, 0)

    def is_tail(self, chunk: int) -> bool:
        """True for a partly filled chunk."""
        return chunk in self._tail

    def remove(self, chunk: int) -> None:
        """A chunk that lies nowhere any more."""
        identity = self._identity[chunk]
        if identity is None:
            raise IntegrityError(f"chunk {chunk} has no identity to lose")
        del self._number[identity]
        self._identity[chunk] = None
        self.audience[chunk] = -1
        if chunk in self._tail:
            parent, tokens = self._tail.pop(chunk)
            self._tails[parent].remove(tokens)
            if not self._tails[parent].numbers:
                del self._tails[parent]
        self._free.append(chunk)

    def check(self) -> None:
        """Raise IntegrityError unless numbers and identities map one to one and every chunk lies somewhere."""
        named = {chunk: identity for chunk, identity in enumerate(self._identity) if identity is not None}
        if {identity: chunk for chunk, identity in named.items()} != self._number or len(named) != len(self._number):
            raise IntegrityError("identities and chunks do not map one to one")
        if len(named) + len(self._free) != len(self._identity) or named.keys() & set(self._free):
            raise IntegrityError("a chunk's number is lost, or given twice")
        somewhere = (self.slot >= 0).any(0)
        if np.flatnonzero(somewhere).tolist() != sorted(named):
            raise IntegrityError("a chunk lies nowhere, or a slot holds a chunk that is not there")
        if {(p, t, c) for p, held in self._tails.items() for t, c in held.numbers.items()} != {
            (p, t, c) for c, (p, t) in self._tail.items()
        } or not self._tail.keys() <= named.keys():
            raise IntegrityError("the tails and their parents differ")
        if any(Counter(map(len, held.numbers)) != held.lengths for held in self._tails.values()):
            raise IntegrityError("the lengths of tails are not counted")
