"""Weights on disk: a file of records without a name, read past the page cache by a few threads at a time.

    begin(record) -> [queue of pieces] -> threads: read, compare the checksum -> fence

Records are queued behind one another, so that the disk has work while whoever asked waits for the first of them.

The file is gone when the process is, however it ends. Every piece that is read is tested against its checksum.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from cellar.core.errors import CapacityError, DeviceError
from cellar.runtime.memory import human
from cellar.runtime.offload.channels import Channel
from cellar.runtime.offload.layout import PAGE, aligned
from cellar.runtime.offload.mover import Fence

logger = logging.getLogger(__name__)

NUM_THREADS = 8
"""Reads at a time: enough to keep a solid-state disk busy while a few threads wait for a core."""
PIECE_NBYTES = 2**22

Bytes = NDArray[np.uint8]


class WeightFile:
    """Records of `sizes` bytes in `directory` (None: where the system keeps temporary files).

    `failure`: how reading failed first, if it ever did. Raises CapacityError if the disk has no room, DeviceError if
    the directory cannot be used.
    """

    def __init__(self, directory: Path | None, sizes: list[int]) -> None:
        self._sizes = sizes
        self._starts = [0, *np.cumsum([aligned(size, PAGE) for size in sizes]).tolist()]
        self._digests: list[list[int]] = [[] for _ in sizes]
        self._where = Path(tempfile.gettempdir() if directory is None else directory)
        self.direct = True
        self.failure: str | None = None
        self._file = self._open(self._starts[-1])
        self._threads = ThreadPoolExecutor(NUM_THREADS, "cellar-disk")

    @property
    def nbytes(self) -> int:
        """Bytes of disk that it takes, records being rounded up to pages."""
        return int(self._starts[-1])

    def write(self, number: int, record: Bytes) -> None:
        """Write a record; `record` is aligned to a page and as long as whole pages. Raises CapacityError if the disk
        is full, DeviceError if it fails.
        """
        start, nbytes = self._starts[number], aligned(self._sizes[number], PAGE)
        digests = []
        try:
            for at in range(0, nbytes, PIECE_NBYTES):
                piece = record[at : min(at + PIECE_NBYTES, nbytes)]
                digests.append(xxh3_64_intdigest(piece.data))
                if os.pwritev(self._file, [piece.data], start + at) != len(piece):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise self._full(nbytes, error) from error
            raise DeviceError(f"weights cannot be written to {self._where} ({error}); check the disk.") from error
        self._digests[number] = digests

    def begin(self, number: int, record: Bytes, channel: Channel | None = None) -> Fence:
        """Queue the reads of a record, which fill `record`, aligned and long like that of `write`. The channel is busy
        while any of them is at the disk.

        The fence returns once none of them writes any more; it raises DeviceError if the disk failed or brought other
        bytes than were written.
        """
        channel = channel or Channel()
        start, nbytes = self._starts[number], aligned(self._sizes[number], PAGE)

        def piece(k: int) -> None:
            at = k * PIECE_NBYTES
            part = record[at : min(at + PIECE_NBYTES, nbytes)]
            with channel.busy():
                count = self._pread(part, start + at)
            if count != len(part):
                raise OSError(f"it is cut short: {count} of {len(part)} bytes")
            if xxh3_64_intdigest(part.data) != self._digests[number][k]:
                raise OSError("it is damaged: a checksum is another")

        reads = [self._threads.submit(piece, k) for k in range(len(self._digests[number]))]
        return lambda: self._finish(reads)

    def _finish(self, reads: list[Future[None]]) -> None:
        wait(reads)
        try:
            for read in reads:
                read.result()
        except OSError as error:
            what = f"the weights on the disk of {self._where} cannot be read ({error})"
            self.failure = self.failure or what
            raise DeviceError(f"{what}; check the disk, and start again.") from error

    def read(self, number: int, record: Bytes, channel: Channel | None = None) -> None:
        """`begin`, and wait for it."""
        self.begin(number, record, channel)()

    def close(self) -> None:
        """Let go of the file, and so of its room on the disk."""
        self._threads.shutdown()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _pread(self, part: Bytes, offset: int) -> int:
        return os.preadv(self._file, [part.data], offset)

    def _open(self, nbytes: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        path = self._where / f".cellar-weights-{os.getpid()}-{id(self):x}"
        try:
            self._where.mkdir(parents=True, exist_ok=True)
            try:
                file = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
                path.unlink(missing_ok=True)
                logger.warning(
                    "the file system of %s takes no O_DIRECT; weights on disk go through the page cache", self._where
                )
                file = os.open(path, flags, 0o600)
        except OSError as error:
            raise DeviceError(f"weights cannot be kept in {self._where} ({error}); give another disk_path.") from error
        path.unlink()
        try:
            if nbytes:
                os.posix_fallocate(file, 0, nbytes)
        except OSError as error:
            os.close(file)
            raise self._full(nbytes, error) from error
        return file

    def _full(self, nbytes: int, error: OSError) -> CapacityError:
        return CapacityError(
            f"{self._where} has no room for {human(nbytes)} of weights ({error.strerror}); give another disk_path, or "
            "raise host_memory."
        )
