"""Identity of a chunk: H(parent, tokens), chained from a root made of namespace and salt.

Equal identities mean equal K and V, whichever request wrote them, because K and V of a position depend on
all tokens before it and on nothing else of the request. The identity needs the tokens, not the KV, of what
comes before: a chunk stays valid when an earlier one is gone.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

IDENTITY_BYTES = 16

_TOKEN_BYTES = np.dtype(np.int32).itemsize


def root_identity(namespace: bytes, salt: bytes) -> bytes:
    """The parent of all first chunks. `namespace` says model, dtype and rotary; `salt` keeps users apart."""
    # The length keeps (ab, c) and (a, bc) apart.
    return blake2b(len(namespace).to_bytes(8, "little") + namespace + salt, digest_size=IDENTITY_BYTES).digest()


def chunk_identity(parent: bytes, tokens: bytes) -> bytes:
    """`tokens` are the int32 bytes of one whole chunk."""
    return blake2b(parent + tokens, digest_size=IDENTITY_BYTES).digest()


class Chain:
    """Identities of the leading chunks of one sequence; grows as the tokens become known."""

    __slots__ = ("_chunk_size", "_root", "identities")

    def __init__(self, root: bytes, chunk_size: int) -> None:
        self._root = root
        self._chunk_size = chunk_size
        self.identities: list[bytes] = []

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
