"""Sealed: bytes that leave this machine, so that others can neither read nor change them unnoticed.

    salt (16 random bytes) | AES-256-GCM of the bytes | tag (16)

The key of each is BLAKE2b(salt, fingerprint), keyed with the operator's; no two have the same, so the nonce is fixed.
What it is bound to (the name under which it lies) is authenticated with it. AES-GCM: NIST SP 800-38D.
"""

from __future__ import annotations

import os
import struct
from hashlib import blake2b

from cellar.core.errors import ConfigError
from cellar.core.extras import missing
from cellar.core.messages import ChunkLabel

SALT_NBYTES = 16
OVERHEAD_NBYTES = SALT_NBYTES + 16
MIN_KEY_CHARACTERS = 32

_NONCE = bytes(12)
_LABEL = struct.Struct("<I16s16s16sH")
_TOKENS_NBYTES = 64 * 4
LABEL_NBYTES = _LABEL.size + _TOKENS_NBYTES
"""Of a label in one piece, padded: its length tells nothing."""


class Seal:
    """Seals with `key`, the operator's text of at least 32 characters, for KV of `fingerprint`.

    Raises ConfigError for a shorter key, or without the package that encrypts.
    """

    def __init__(self, key: str, fingerprint: bytes) -> None:
        if len(key) < MIN_KEY_CHARACTERS:
            raise ConfigError(
                f"the key of the remote tier has {len(key)} characters; it must have at least {MIN_KEY_CHARACTERS}. "
                "Make one with: openssl rand -hex 32"
            )
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ModuleNotFoundError as error:
            raise missing("kv_remote needs", error.name, "redis") from error
        self._cipher, self._invalid = AESGCM, InvalidTag
        self._master = blake2b(key.encode(), digest_size=32, person=b"cellar remote").digest()
        self._fingerprint = fingerprint

    def seal(self, data: bytes | memoryview, bound: bytes) -> bytes:
        """`data` sealed, OVERHEAD_NBYTES longer; it opens with equal `bound` only."""
        salt = os.urandom(SALT_NBYTES)
        return salt + self._cipher(self._key(salt)).encrypt(_NONCE, data, bound)

    def open(self, sealed: bytes | memoryview, bound: bytes) -> bytes:
        """What was sealed. Raises OSError for anything else."""
        salt = bytes(sealed[:SALT_NBYTES])
        if len(sealed) < OVERHEAD_NBYTES:
            raise OSError(f"an entry is cut short: {len(sealed)} bytes")
        try:
            return self._cipher(self._key(salt)).decrypt(_NONCE, sealed[SALT_NBYTES:], bound)
        except self._invalid:
            raise OSError("an entry was changed, or is not of this model, name and key") from None

    def _key(self, salt: bytes) -> bytes:
        return blake2b(salt + self._fingerprint, key=self._master, digest_size=32, person=b"cellar entry").digest()


def pack_label(label: ChunkLabel) -> bytes:
    """A label as LABEL_NBYTES bytes."""
    head = _LABEL.pack(label.end, label.identity, label.parent, label.owner, len(label.tokens))
    return (head + label.tokens).ljust(LABEL_NBYTES, b"\0")


def unpack_label(data: bytes) -> ChunkLabel:
    """The label of `pack_label`."""
    end, identity, parent, owner, count = _LABEL.unpack_from(data)
    return ChunkLabel(identity, parent, end, owner if any(owner) else b"", data[_LABEL.size : _LABEL.size + count])
