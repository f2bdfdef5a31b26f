"""Index of a disk tier: for each slot a record of fixed size that says which chunk it holds, and its checksum.

A record is written after the bytes that it vouches for and wiped before they are overwritten, so a process that dies at
any moment leaves records of whole chunks only. What a power failure tears apart is found by the checksums: that of the
record, and that of the chunk, which is tested when it is read.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from cellar.core.messages import ChunkLabel, KeptChunk

RECORD_NBYTES = 512
"""A sector: it is written whole, or not at all."""

# Magic, end, seconds since 1970, checksum of the chunk, identity, parent, owner, bytes of tokens.
_HEAD = struct.Struct("<4sIdQ16s16s16sI")
_MAGIC = b"KV01"
_TAIL = struct.Struct("<Q")
_NOTHING = bytes(RECORD_NBYTES)


class Index:
    """A file of `num_slots` records. Threads may use it at a time for different slots."""

    def __init__(self, path: Path, num_slots: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.num_damaged = 0
        self._checksum: NDArray[np.uint64] = np.zeros(num_slots, np.uint64)
        self._identity: list[bytes] = [b""] * num_slots
        self.kept = self._read(num_slots)
        if os.fstat(self._file).st_size != num_slots * RECORD_NBYTES:
            os.ftruncate(self._file, num_slots * RECORD_NBYTES)

    def put(self, slot: int, label: ChunkLabel, checksum: int) -> None:
        """From now on the slot holds this chunk. Raises OSError."""
        head = _HEAD.pack(
            _MAGIC,
            label.end,
            time.time(),
            checksum,
            label.identity,
            label.parent,
            label.owner,
            len(label.tokens),
        )
        body = (head + label.tokens).ljust(RECORD_NBYTES - _TAIL.size, b"\0")
        self._write(slot, body + _TAIL.pack(xxh3_64_intdigest(body, slot)))
        self._checksum[slot] = checksum
        self._identity[slot] = label.identity

    def wipe(self, slot: int) -> None:
        """From now on the slot holds nothing. Raises OSError."""
        if self._identity[slot]:
            self._write(slot, _NOTHING)
            self._identity[slot] = b""

    def says(self, slot: int, label: ChunkLabel) -> int:
        """Checksum of the chunk of that label. Raises OSError if the slot holds another, or none."""
        if self._identity[slot] != label.identity:
            raise OSError(f"slot {slot} does not hold the chunk any more")
        return int(self._checksum[slot])

    def close(self) -> None:
        """Every record is safe by then."""
        os.fsync(self._file)
        os.close(self._file)

    def _write(self, slot: int, record: bytes) -> None:
        written = os.pwrite(self._file, record, slot * RECORD_NBYTES)
        if written != len(record):
            raise OSError(f"of a record {written} bytes were written")

    def _read(self, num_slots: int) -> list[KeptChunk]:
        """All records that are whole."""
        found: list[KeptChunk] = []
        now = time.time()
        for first in range(0, num_slots, 4096):
            block = os.pread(self._file, min(4096, num_slots - first) * RECORD_NBYTES, first * RECORD_NBYTES)
            for k in range(len(block) // RECORD_NBYTES):
                record = block[k * RECORD_NBYTES : (k + 1) * RECORD_NBYTES]
                if record == _NOTHING:
                    continue
                slot, body = first + k, record[: -_TAIL.size]
                magic, end, written, checksum, identity, parent, owner, count = _HEAD.unpack_from(record)
                if magic != _MAGIC or _TAIL.unpack_from(record, len(body))[0] != xxh3_64_intdigest(body, slot):
                    self.num_damaged += 1
                    continue
                tokens = body[_HEAD.size : _HEAD.size + count]
                label = ChunkLabel(identity, parent, end, owner if any(owner) else b"", tokens)
                self._checksum[slot], self._identity[slot] = checksum, identity
                found.append(KeptChunk(slot, label, max(0.0, now - written)))
        return found
