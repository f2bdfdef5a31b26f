"""Identity of a chunk: H(parent, tokens), chained from a root that says what computes K and V, and for whom.

    root_identity(spec, weights) -> salted_identity(root, salt) -> chunk_identity(parent, tokens) -> ...

Equal identities mean equal K and V, whichever request or process wrote them, because K and V of a position depend
on all tokens before it, on the model, and on nothing else of the request. The identity needs the tokens, not the KV,
of what comes before: a chunk stays valid when an earlier one is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
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


class Chain:
    """Identities of the leading chunks of one sequence; grows as the tokens become known."""

    __slots__ = ("_chunk_size", "_root", "identities")

    def __init__(self, root: bytes, chunk_size: int) -> None:
        self._root = root
        self._chunk_size = chunk_size
        self.identities: list[bytes] = []

    def parent(self, chunk: int) -> bytes:
        """What comes before chunk number `chunk`, whose predecessors are known."""
        return self.identities[chunk - 1] if chunk else self._root

    def grow(self, tokens: NDArray[np.int32], num_chunks: int) -> list[bytes]:
        """Identities of at least the first `num_chunks` chunks of `tokens` [n], n >= num_chunks * chunk_size."""
        identities = self.identities
        first = len(identities)
        if first < num_chunks:
            parent = identities[-1] if identities else self._root
            width = self._chunk_size * _TOKEN_BYTES
            data = tokens[first * self._chunk_size : num_chunks * self._chunk_size].tobytes()
            for at in range(0, len(data), width):
                parent = chunk_identity(parent, data[at : at + width])
                identities.append(parent)
        return identities
