"""Entries: what lies on a shared server of one model's chunks, and under which names.

    cellar:1:FINGERPRINT:c:IDENTITY   head | label, sealed | chunk, sealed
    cellar:1:FINGERPRINT:t:PARENT     label of the last tail that was written after PARENT, sealed
    cellar:1:FINGERPRINT:a:WRITER     there while the engine that calls itself so is

Nothing that is read here is trusted: what was changed, cut short or moved to another name raises OSError.
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass

import numpy as np

from cellar.core.messages import ChunkLabel
from cellar.runtime.tiers.sealed import LABEL_NBYTES, OVERHEAD_NBYTES, Seal, pack_label, unpack_label
from cellar.runtime.tiers.storage import Bytes

_HEAD = struct.Struct("<4s8sd")  # magic, writer, seconds since 1970
_MAGIC = b"CK01"
HEAD_NBYTES = _HEAD.size + LABEL_NBYTES + OVERHEAD_NBYTES
"""Of an entry, what says whose it is, and of which chunk."""

ENTRY_OVERHEAD_NBYTES = HEAD_NBYTES + OVERHEAD_NBYTES
"""Bytes of an entry beside those of its chunk."""

WRITER_RANGE = (4, 11)
"""First and last byte of the writer in an entry."""


@dataclass(frozen=True, slots=True)
class Head:
    """When an entry was written (seconds since 1970), of which chunk, and by whom."""

    since: float
    label: ChunkLabel
    writer: bytes


class Entries:
    """Entries of chunks of one fingerprint, sealed with `key`; `writer` is who this engine is. Raises ConfigError for a
    key that is too short.
    """

    def __init__(self, key: str, fingerprint: bytes, chunk_nbytes: int) -> None:
        self.writer = os.urandom(8)
        self._seal = Seal(key, fingerprint)
        self._prefix = b"cellar:1:" + fingerprint.hex().encode() + b":"
        self._chunk_nbytes = chunk_nbytes

    # -- names ------------------------------------------------------------------------------------

    @property
    def pattern(self) -> bytes:
        """What the names of all chunks match."""
        return self._prefix + b"c:*"

    def name(self, identity: bytes) -> bytes:
        """Of a chunk."""
        return self._prefix + b"c:" + identity.hex().encode()

    def tail_name(self, parent: bytes) -> bytes:
        """Of the last tail after a chunk."""
        return self._prefix + b"t:" + parent.hex().encode()

    def names(self, label: ChunkLabel) -> list[bytes]:
        """All under which something of a chunk may lie."""
        return [self.name(label.identity), *([self.tail_name(label.parent)] if label.tokens else [])]

    def alive(self, writer: bytes | None = None) -> bytes:
        """There while a writer is; without one, this engine."""
        return self._prefix + b"a:" + (writer or self.writer).hex().encode()

    # -- contents ---------------------------------------------------------------------------------

    def sealed(self, label: ChunkLabel, chunk: Bytes) -> bytes:
        """The entry of a chunk, written now by this engine."""
        head = _HEAD.pack(_MAGIC, self.writer, time.time())
        said = self._seal.seal(pack_label(label), b"label" + label.identity + head[12:])
        return head + said + self._seal.seal(np.ascontiguousarray(chunk).data, b"chunk" + label.identity)

    def open(self, entry: bytes, label: ChunkLabel, chunk: Bytes) -> None:
        """Fill `chunk` from the entry of a label. Raises OSError."""
        if entry[:4] != _MAGIC:
            raise OSError("an entry is of another form")
        data = self._seal.open(memoryview(entry)[HEAD_NBYTES:], b"chunk" + label.identity)
        if len(data) != self._chunk_nbytes:
            raise OSError(f"an entry has {len(data)} bytes of KV, but a chunk has {self._chunk_nbytes}")
        chunk[:] = np.frombuffer(data, np.uint8)

    def head(self, name: bytes, entry: bytes) -> Head | None:
        """What the first HEAD_NBYTES of an entry say; None if they are of another form. Raises OSError."""
        try:
            identity = bytes.fromhex(name.removeprefix(self.pattern[:-1]).decode())
            magic, writer, since = _HEAD.unpack_from(entry)
            label = unpack_label(self._seal.open(entry[_HEAD.size :], b"label" + identity + entry[12 : _HEAD.size]))
        except (ValueError, struct.error) as error:
            raise OSError(f"no entry of a chunk: {error}") from None
        return Head(since, label, writer) if magic == _MAGIC and label.identity == identity else None

    def sealed_tail(self, label: ChunkLabel) -> bytes:
        """The entry that tells of a tail."""
        return self._seal.seal(pack_label(label), b"tail" + label.parent)

    def open_tail(self, parent: bytes, sealed: bytes | None) -> ChunkLabel:
        """The tail that an entry after `parent` tells of. Raises OSError, also if there is none."""
        tail = unpack_label(self._seal.open(sealed or b"", b"tail" + parent))
        if tail.parent != parent:
            raise OSError("an entry tells of a tail that follows another chunk")
        return tail
