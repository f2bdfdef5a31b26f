"""Identity of a chunk: H(parent, tokens), chained from a root that says what computes K and V, and for whom.

    root_identity(spec, weights) -> salted_identity(root, salt) -> chunk_identity(parent, tokens) -> ...

Equal identities mean equal K and V, whichever request or process wrote them, because K and V of a position depend
on all tokens before it, on the model, and on nothing else of the request. The identity needs the tokens, not the KV,
of what comes before: a chunk stays valid when an earlier one is gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from cellar.core.specs import ModelSpec

IDENTITY_BYTES = 16

FORMAT_VERSION = 1
"""Of a chunk's bytes outside the device; to be raised whenever what they mean changes."""

# Of a ModelSpec, what changes no K and no V of a token: how long a sequence may get, how it ends, and the head.
_WITHOUT_EFFECT = ("max_position", "eos_token_ids", "bos_token_id", "vocab_size", "head", "tied_head")

_TOKEN_BYTES = np.dtype(np.int32).itemsize

DEPTHS = (8, 64, 512)
"""Chunks of a sequence by which it is recalled."""

MOST_RECALLED = 1 << 23
"""Tokens: 32 MiB of them, and half as much of identities."""


def root_identity(spec: ModelSpec, weights: bytes) -> bytes:
    """All that makes K and V of equal tokens differ: weights, dtype, rotary embedding, chunk size, layer groups.

    `weights` is a fingerprint of their content (`models/fingerprint.py`).
    """
    said = {f.name: getattr(spec, f.name) for f in fields(spec) if f.name not in _WITHOUT_EFFECT}
    if spec.rope is not None and spec.rope.kind != "dynamic":
        said["rope"] = replace(spec.rope, max_position=0)  # the table's length alone
    data = f"cellar kv {FORMAT_VERSION} {_spelled(said)}".encode()
    return blake2b(weights + data, digest_size=IDENTITY_BYTES).digest()


def _spelled(value: object) -> str:
    """The same text for equal specs, in every process: fields and keys in order of their names."""
    if is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_spelled(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ",".join(_spelled(item) for item in value) + "]"
    return repr(value)


def salted_identity(root: bytes, salt: bytes) -> bytes:
    """The parent of all first chunks of those who share `salt`; it keeps users apart."""
    # The length keeps (ab, c) and (a, bc) apart.
    return blake2b(len(root).to_bytes(8, "little") + root + salt, digest_size=IDENTITY_BYTES).digest()


def owner_identity(salt: bytes, name: str) -> bytes:
    """Of the conversation that a user calls `name`: equal in every process, and telling nobody the name."""
    return blake2b(salt, digest_size=IDENTITY_BYTES // 2, person=b"cellar salt").digest() + name_identity(name)


def name_identity(name: str) -> bytes:
    """What the owner identities of all users' conversations of that name end with."""
    data = name.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=IDENTITY_BYTES // 2, person=b"cellar name").digest()


def chunk_identity(parent: bytes, tokens: bytes) -> bytes:
    """`tokens` are the int32 bytes of one chunk, or of a part of it: a tail is found by its exact tokens."""
    return blake2b(parent + tokens, digest_size=IDENTITY_BYTES).digest()


class Recalled:
    """Tokens and identities of the sequences that came last, by what they have in common with whoever begins alike.

    A conversation's next turn repeats all that was said: hashing 8,192 tokens takes 0.2 to 0.5 ms of the engine's
    thread, comparing them a hundredth. A sequence is found by the identity of its chunk number 8, 64 or 512, so those
    who share no more than a system prompt do not hide each other.
    """

    def __init__(self, most_tokens: int = MOST_RECALLED) -> None:
        self._most = most_tokens
        self._held = 0
        self._numbers = 0
        self._kept: OrderedDict[int, tuple[NDArray[np.int32], list[bytes]]] = OrderedDict()
        self._newest: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Tokens that are held."""
        return self._held

    def clear(self) -> None:
        """Somebody is to be forgotten."""
        self._kept.clear()
        self._newest.clear()
        self._held = 0

    def keep(self, tokens: NDArray[np.int32], identities: Sequence[bytes]) -> None:
        """A sequence of whole chunks; the oldest are let go of beyond so many tokens."""
        names = [identities[depth - 1] for depth in DEPTHS if depth <= len(identities)]
        if not names or len(tokens) > self._most:
            return
        number, self._numbers = self._numbers, self._numbers + 1
        self._kept[number] = tokens.copy(), list(identities)
        self._held += len(tokens)
        self._newest |= dict.fromkeys(names, number)
        while self._held > self._most:
            old, (gone, whose) = self._kept.popitem(last=False)
            self._held -= len(gone)
            for depth in DEPTHS:
                if depth <= len(whose) and self._newest.get(whose[depth - 1]) == old:
                    del self._newest[whose[depth - 1]]

    def after(self, identity: bytes, depth: int, tokens: NDArray[np.int32], chunk_size: int) -> list[bytes]:
        """Identities of the chunks of `tokens` behind the first `depth`, of which `identity` is the last, as far as the
        newest sequence that begins with those has the same tokens.
        """
        number = self._newest.get(identity)
        if number is None:
            return []
        held, identities = self._kept[number]
        begin, end = depth * chunk_size, min(len(held), len(tokens))
        differ = np.flatnonzero(held[begin:end] != tokens[begin:end])
        same = int(differ[0]) if len(differ) else end - begin
        return identities[depth : depth + same // chunk_size]


class Chain:
    """Identities of the leading chunks of one sequence; grows as the tokens become known."""

    __slots__ = ("_chunk_size", "_recalled", "_root", "identities")

    def __init__(self, root: bytes, chunk_size: int, recalled: Recalled | None = None) -> None:
        """`recalled`: of other sequences, and of this one from now on."""
        self._root = root
        self._chunk_size = chunk_size
        self._recalled = recalled
        self.identities: list[bytes] = []

    def parent(self, chunk: int) -> bytes:
        """What comes before chunk number `chunk`, whose predecessors are known."""
        return self.identities[chunk - 1] if chunk else self._root

    def grow(self, tokens: NDArray[np.int32], num_chunks: int) -> list[bytes]:
        """Identities of at least the first `num_chunks` chunks of `tokens` [n], n >= num_chunks * chunk_size."""
        identities, size, recalled = self.identities, self._chunk_size, self._recalled
        first = len(identities)
        if recalled is not None and num_chunks >= first + DEPTHS[0]:
            known = tokens[: num_chunks * size]
            for depth in DEPTHS:
                if len(identities) < depth < num_chunks:
                    self._hash(known, depth)
                    identities += recalled.after(identities[-1], depth, known, size)
            self._hash(known, num_chunks)
            recalled.keep(known, identities)
        else:
            self._hash(tokens, num_chunks)
        return identities

    def _hash(self, tokens: NDArray[np.int32], num_chunks: int) -> None:
        identities = self.identities
        first = len(identities)
        if first < num_chunks:
            parent = identities[-1] if identities else self._root
            width = self._chunk_size * _TOKEN_BYTES
            data = tokens[first * self._chunk_size : num_chunks * self._chunk_size].tobytes()
            for at in range(0, len(data), width):
                parent = chunk_identity(parent, data[at : at + width])
                identities.append(parent)
