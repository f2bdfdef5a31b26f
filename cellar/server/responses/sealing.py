"""Encrypted reasoning: what a client keeps for the server, which stored nothing, and brings back with its next turn.

AES-256-GCM (NIST SP 800-38D) with a random nonce of 96 bits and the owner as associated data: one owner's text opens
for no other, and no changed text opens at all. The key is a file of the data directory, made once.
"""

from __future__ import annotations

import base64
import os
import secrets
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cellar.core.errors import ConfigError
from cellar.server.errors import refused

KEY_FILE = "reasoning.key"

_VERSION = b"\x01"
_KEY_BYTES, _NONCE_BYTES = 32, 12


class Seal:
    """Seals and opens texts with one key of 32 bytes."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    @classmethod
    def of(cls, directory: Path) -> Seal:
        """With the key of a data directory, which is made there if there is none. Raises ConfigError."""
        return cls(_kept(directory / KEY_FILE))

    def seal(self, text: str, owner: str) -> str:
        """The text, so that only `open` reads it, for the same owner. URL-safe base64."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, text.encode(errors="replace"), owner.encode())
        return base64.urlsafe_b64encode(_VERSION + nonce + sealed).decode()

    def open(self, sealed: str, owner: str) -> str:
        """The text again. Raises ApiError for what was not sealed here for this owner."""
        try:
            raw = base64.urlsafe_b64decode(sealed.encode())
            if raw[:1] != _VERSION:
                raise ValueError
            nonce, body = raw[1 : 1 + _NONCE_BYTES], raw[1 + _NONCE_BYTES :]
            return self._cipher.decrypt(nonce, body, owner.encode()).decode()
        except (ValueError, InvalidTag):
            raise refused(
                "the encrypted_content of a reasoning item was not made here for this API key; leave the item out.",
                "input",
                "invalid_encrypted_content",
            ) from None


def _kept(path: Path) -> bytes:
    """The key in a file; whoever comes first makes it, whole, and readable for this user alone. Raises ConfigError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            made = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
            descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(made, path)
            except FileExistsError:
                pass
            finally:
                made.unlink()
        key = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the key of encrypted reasoning cannot be kept in {path} ({error.strerror}).") from error
    if len(key) != _KEY_BYTES:
        raise ConfigError(f"{path} holds {len(key)} bytes, but a key has {_KEY_BYTES}; restore it, or delete it.")
    return key
