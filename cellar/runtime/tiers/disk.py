"""A directory on a disk as a tier that outlives the process.

    DIR/lock                         one engine at a time
    DIR/<fingerprint>/header.json    what the chunks below are, for people; another format or size is never read
    DIR/<fingerprint>/index          which chunk lies in which slot; see `index.py`
    DIR/<fingerprint>/segment-00000  slots, each at a multiple of 4 KiB; preallocated when the first of them is needed

The fingerprint is that of all that makes KV what it is: weights, dtype, rotary embedding, chunk size, layer groups,
format. So chunks of other models are never read; they stay beside until the room is needed, the oldest going first.
Where the file system takes it, reads and writes go past the page cache (O_DIRECT): memory is for KV, not for copies.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import mmap
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from cellar.core.errors import CapacityError, ConfigError
from cellar.core.messages import ChunkLabel, KeptChunk
from cellar.runtime.memory import human
from cellar.runtime.tiers.index import RECORD_NBYTES, Index
from cellar.runtime.tiers.storage import Bytes

logger = logging.getLogger(__name__)

FORMAT = 1
NUM_THREADS = 4
"""Reads and writes at a time: enough to keep a solid-state disk busy."""

_ALIGNMENT = 4096
_SEGMENT_NBYTES = 2**30


class DiskTier:
    """As many chunks as fit into `size` bytes of `directory`. Raises ConfigError if another engine uses it or it cannot
    be used, CapacityError if the disk has not so much room, or not one chunk fits.
    """

    def __init__(self, directory: Path, size: int, fingerprint: bytes, chunk_nbytes: int) -> None:
        self._root = directory
        self._size = size
        self._chunk_nbytes = chunk_nbytes
        self._stride = -(-chunk_nbytes // _ALIGNMENT) * _ALIGNMENT
        self._num_slots = size // (self._stride + RECORD_NBYTES)
        if self._num_slots < 1:
            raise CapacityError(
                f"kv_disk_size asks for {human(size)}, but one chunk takes {human(self._stride + RECORD_NBYTES)} of "
                "disk; ask for more, or leave it out."
            )
        self._per_segment = max(1, min(_SEGMENT_NBYTES // self._stride, -(-self._num_slots // 8)))
        self._lock = _locked(directory)
        try:
            self._home = directory / fingerprint.hex()
            self._check_room()
            self._adopt()
            self._index = Index(self._home / "index", self._num_slots)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"kv_disk_path {directory} cannot be used ({error}); give another directory.") from error
        except BaseException:
            os.close(self._lock)
            raise
        self.direct = True
        self.num_damaged = self._index.num_damaged
        self._segments: dict[int, int] = {}
        self._opening = threading.Lock()
        self._rooms = threading.local()
        self._kept = [chunk for chunk in self._index.kept if self._segment_path(chunk.slot).exists()]

    @property
    def num_slots(self) -> int:
        """Chunks that it holds."""
        return self._num_slots

    @property
    def num_threads(self) -> int:
        """Several reads at a time are faster than one."""
        return NUM_THREADS

    def kept(self) -> Sequence[KeptChunk]:
        """Chunks from before this process."""
        return self._kept

    def write(self, slot: int, chunk: Bytes, label: ChunkLabel | None) -> None:
        """Keep a chunk. Raises OSError if the disk does not take it."""
        assert label is not None, "what outlives the process must say what it is"
        self._index.wipe(slot)
        room = self._room()
        room[: self._chunk_nbytes] = chunk
        file, offset = self._place(slot)
        written = os.pwritev(file, [room.data], offset)
        if written != self._stride:
            raise OSError(errno.ENOSPC, f"of a chunk {written} of {self._stride} bytes were written")
        self._index.put(slot, label, xxh3_64_intdigest(room[: self._chunk_nbytes].data))

    def read(self, slot: int, chunk: Bytes, label: ChunkLabel | None) -> None:
        """Fill `chunk`. Raises OSError if the disk does not bring what was written; it is not asked again then."""
        assert label is not None, "whoever reads knows what"
        checksum = self._index.says(slot, label)
        room = self._room()
        try:
            file, offset = self._place(slot)
            count = os.preadv(file, [room.data], offset)
            if count < self._chunk_nbytes:
                raise OSError(f"slot {slot} is cut short: {count} of {self._chunk_nbytes} bytes")
            if xxh3_64_intdigest(room[: self._chunk_nbytes].data) != checksum:
                raise OSError(f"slot {slot} is damaged: its checksum is another")
        except OSError:
            self.num_damaged += 1
            raise
        chunk[:] = room[: self._chunk_nbytes]

    def erase(self, slot: int) -> None:
        """Wipe a slot's record, and its bytes where the file system can. Raises OSError."""
        self._index.wipe(slot)
        if self._segment_path(slot).exists():
            file, offset = self._place(slot)
            room = self._room()
            room[:] = 0
            os.pwritev(file, [room.data], offset)

    def close(self) -> None:
        """Everything is on the disk by then, and another engine may use the directory."""
        try:
            for file in self._segments.values():
                os.fsync(file)
                os.close(file)
            self._index.close()
        except OSError as error:
            logger.warning("the disk tier was not closed well (%s); what it has is tested when it is read", error)
        self._segments.clear()
        os.close(self._lock)

    # -- files ------------------------------------------------------------------------------------

    def _check_room(self) -> None:
        """Raise CapacityError unless the disk has room for all of the tier, given that what is there may go."""
        taken = sum(_nbytes(home) for home in self._homes())
        free = shutil.disk_usage(self._root).free
        if self._size > free + taken:
            raise CapacityError(
                f"kv_disk_size asks for {human(self._size)} at {self._root}, but {human(free + taken)} are free there; "
                f"ask for {(free + taken) / 2**30:.1f} or less (GiB)."
            )

    def _adopt(self) -> None:
        """Make the directory of this fingerprint, or go on with the one that is there if it is of the same form."""
        form = {
            "format": FORMAT,
            "fingerprint": self._home.name,
            "chunk_bytes": self._chunk_nbytes,
            "slot_bytes": self._stride,
        }
        path = self._home / "header.json"
        if self._home.exists():
            try:
                held = json.loads(path.read_text())
                count = held.pop("slots_per_segment")
                if held == form and isinstance(count, int) and count > 0:
                    self._per_segment = count
                    self._drop_segments()
                    return
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                pass
            logger.warning("%s is of another form, or damaged; it is emptied", self._home)
            shutil.rmtree(self._home)
        self._home.mkdir(mode=0o700, parents=True)
        path.write_text(json.dumps({**form, "slots_per_segment": self._per_segment}, indent=1) + "\n")

    def _drop_segments(self) -> None:
        """Remove those beyond the last slot: the tier was larger before."""
        count = -(-self._num_slots // self._per_segment)
        for path in self._home.glob("segment-*"):
            if int(path.name.removeprefix("segment-")) >= count:
                path.unlink()

    def _homes(self) -> list[Path]:
        """Directories of chunks, this one's included, the one that was used last at the end."""
        found = [path.parent for path in self._root.glob("*/header.json") if len(path.parent.name) == 32]
        return sorted(found, key=_used)

    def _segment_path(self, slot: int) -> Path:
        return self._home / f"segment-{slot // self._per_segment:05}"

    def _place(self, slot: int) -> tuple[int, int]:
        """The file of a slot, open, and where in it the slot begins."""
        number = slot // self._per_segment
        file = self._segments.get(number)
        if file is None:
            with self._opening:
                file = self._segments.get(number)
                if file is None:
                    count = min(self._per_segment, self._num_slots - number * self._per_segment)
                    file = self._segments[number] = self._open(self._segment_path(slot), count * self._stride)
        return file, slot % self._per_segment * self._stride

    def _open(self, path: Path, nbytes: int) -> int:
        """A segment with all its bytes taken. Raises OSError if the disk has not so many."""
        fresh = not path.exists()
        if fresh:
            self._make_room(nbytes)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            file = os.open(path, flags | (getattr(os, "O_DIRECT", 0) if self.direct else 0), 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            self.direct = False
            logger.warning("the file system of %s takes no O_DIRECT; the disk tier goes through the page cache", path)
            file = os.open(path, flags, 0o600)
        try:
            if os.fstat(file).st_size < nbytes:
                os.posix_fallocate(file, 0, nbytes)
        except OSError:
            os.close(file)
            if fresh:
                path.unlink()
            raise
        return file

    def _make_room(self, nbytes: int) -> None:
        """Remove the oldest chunks of other models until a segment more keeps all within the size."""
        homes = self._homes()
        taken = {home: _nbytes(home) for home in homes}
        for home in homes:
            if sum(taken.values()) + nbytes <= self._size:
                return
            if home != self._home:
                logger.warning("KV of another model (%s) makes room: %s", human(taken[home]), home)
                shutil.rmtree(home)
                del taken[home]

    def _room(self) -> Bytes:
        """This thread's buffer of a slot, aligned as O_DIRECT wants it."""
        room: Bytes | None = getattr(self._rooms, "room", None)
        if room is None:
            room = self._rooms.room = np.frombuffer(mmap.mmap(-1, self._stride), np.uint8)
        return room


def _locked(directory: Path) -> int:
    """The lock of a directory, held until the file is closed or the process ends. Raises ConfigError."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"kv_disk_path {directory} cannot be used ({error}); give another directory.") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(file, 20, 0).decode("ascii", "replace").strip()
        os.close(file)
        raise ConfigError(
            f"kv_disk_path {directory} is in use by another engine (process {holder or 'unknown'}); give each engine a "
            "directory of its own, or end the other one."
        ) from None
    os.ftruncate(file, 0)
    os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    return file


def _used(home: Path) -> float:
    try:
        return (home / "index").stat().st_mtime
    except OSError:
        return 0.0


def _nbytes(home: Path) -> int:
    """Bytes of disk that a directory takes."""
    return sum(path.stat().st_blocks * 512 for path in home.iterdir())
