"""What is sealed opens for its name, model and key alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cellar.core.errors import ConfigError
from cellar.core.messages import ChunkLabel
from cellar.runtime.tiers.sealed import LABEL_NBYTES, OVERHEAD_NBYTES, Seal, pack_label, unpack_label

KEY = "0123456789abcdef" * 2
DATA = bytes(range(256)) * 3


def seal(key: str = KEY, fingerprint: bytes = b"w" * 16) -> Seal:
    return Seal(key, fingerprint)


def test_it_opens_and_is_never_sealed_alike() -> None:
    once, twice = (seal().seal(DATA, b"name") for _ in range(2))
    assert seal().open(once, b"name") == seal().open(twice, b"name") == DATA
    assert once != twice
    assert len(once) == len(DATA) + OVERHEAD_NBYTES
    assert DATA[:16] not in once


WRONG: dict[str, Callable[[bytes], tuple[Seal, bytes, bytes]]] = {
    "another name": lambda sealed: (seal(), sealed, b"other"),
    "another model": lambda sealed: (seal(fingerprint=b"v" * 16), sealed, b"name"),
    "another key": lambda sealed: (seal(KEY[::-1]), sealed, b"name"),
    "a flipped bit of the salt": lambda sealed: (seal(), bytes([sealed[0] ^ 1]) + sealed[1:], b"name"),
    "a flipped bit of the text": lambda sealed: (seal(), sealed[:40] + bytes([sealed[40] ^ 8]) + sealed[41:], b"name"),
    "a flipped bit of the tag": lambda sealed: (seal(), sealed[:-1] + bytes([sealed[-1] ^ 128]), b"name"),
    "cut short": lambda sealed: (seal(), sealed[:-1], b"name"),
    "next to nothing": lambda sealed: (seal(), sealed[:20], b"name"),
    "nothing": lambda sealed: (seal(), b"", b"name"),
    "longer": lambda sealed: (seal(), sealed + b"x", b"name"),
}


@pytest.mark.parametrize("name", WRONG)
def test_nothing_else_opens(name: str) -> None:
    opener, sealed, bound = WRONG[name](seal().seal(DATA, b"name"))
    with pytest.raises(OSError):
        opener.open(sealed, bound)


@pytest.mark.parametrize("owner", [b"", b"o" * 16])
@pytest.mark.parametrize("tokens", [b"", b"t" * 4, b"t" * 63 * 4])
def test_labels_come_back(owner: bytes, tokens: bytes) -> None:
    label = ChunkLabel(b"i" * 16, b"p" * 16, 96, owner, tokens)
    assert len(pack_label(label)) == LABEL_NBYTES
    assert unpack_label(pack_label(label)) == label


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 32"):
        seal("secret")
