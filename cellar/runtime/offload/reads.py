"""The rate of a disk while something else goes on: records read again and again, as a pass reads its layers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from cellar.core.errors import DeviceError
from cellar.runtime.offload.file import WeightFile
from cellar.runtime.offload.held import HeldMemory
from cellar.runtime.offload.layout import PAGE, aligned

Found = TypeVar("Found")


class DiskReads:
    """Two records of `nbytes` on the disk of `directory`, one of them queued while the other comes. A context.

    Raises CapacityError or DeviceError.
    """

    def __init__(self, directory: Path | None, nbytes: int) -> None:
        self._file = WeightFile(directory, [nbytes] * 2)
        self._memory = HeldMemory("host", 2 * aligned(nbytes, PAGE))
        self._records = [self._memory.carve(aligned(nbytes, PAGE), PAGE).numpy() for _ in range(2)]

    def __enter__(self) -> DiskReads:
        try:
            for number, record in enumerate(self._records):
                record.fill(number + 1)
                self._file.write(number, record)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._memory.close()

    def rate_while(self, work: Callable[[], Found]) -> tuple[float, Found]:
        """Bytes/s of reads while `work` goes on, and what that found."""
        ended, found = threading.Event(), list[float | DeviceError]()
        thread = threading.Thread(target=self._read, args=(ended, found), name="cellar-rates", daemon=True)
        thread.start()
        try:
            had = work()
        finally:
            ended.set()
            thread.join()
        (rate,) = found
        if isinstance(rate, DeviceError):
            raise rate
        return rate, had

    def _read(self, ended: threading.Event, found: list[float | DeviceError]) -> None:
        """The thread: a record is queued when another has come, until nobody wants more."""
        begin, nbytes = time.perf_counter(), 0
        fences = [self._file.begin(number, record) for number, record in enumerate(self._records)]
        try:
            while not nbytes or not ended.is_set():
                number = (nbytes // self._records[0].nbytes) % 2
                fences[number]()
                nbytes += self._records[number].nbytes
                seconds = time.perf_counter() - begin
                fences[number] = self._file.begin(number, self._records[number])
            found.append(nbytes / seconds)
            for fence in fences:
                fence()
        except DeviceError as error:
            found[:] = [error]
