"""EarlyLoads: loads from the host's memory, some layers after others, answered before they end (decision 0057)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from cellar.core.messages import CopyBatch
from cellar.runtime.tiers.arena import ArenaChunks
from cellar.runtime.tiers.arrivals import Arrival, Arrivals, EventMark, ThreadMark
from cellar.runtime.tiers.storage import Bytes

Answer = Callable[[float], None]
"""All has come, or will: the load takes so many seconds in all."""

_AHEAD_SECONDS = 0.004
"""So much of a load is asked for ahead of what is copied: more than a thread waits for the interpreter."""

_NEWEST = 0.25
"""What the newest load weighs in what is expected of the next."""


class EarlyLoads:
    """One thread's loads, in its queue of the device."""

    def __init__(self, device: ArenaChunks, arrivals: Arrivals) -> None:
        self._device = device
        self._arrivals = arrivals
        self._rate: float | None = None  # bytes per second so far

    def may(self, batch: CopyBatch) -> bool:
        """Whether a load can be answered before its end."""
        return batch.lead > 0 and self._device.num_parts > 1

    def run(self, batch: CopyBatch, memory: Bytes, answer: Answer) -> None:
        """Copy the batch's chunks, which lie in `memory` [slots, chunk_nbytes], and return when all is there; `answer`
        is called once, then or before.

        What it raises before `answer` was called has failed; after that whoever waits is told.
        """
        if self._device.device.type == "cpu":
            self._by_hand(batch, memory, answer)
        else:
            self._in_queue(batch, memory, answer)

    def _in_queue(self, batch: CopyBatch, memory: Bytes, answer: Answer) -> None:
        """Part after part is asked for, some ahead of what is copied: asking holds up whoever launches the step that
        waits for the load, which may be answered meanwhile.
        """
        device = self._device
        watch = _Watch(len(batch) * device.chunk_nbytes, self._rate)
        marks = [EventMark() for _ in range(device.num_parts)]
        arrival = Arrival(batch.target_slots, marks, device.part_of_layer)
        begins = [0.0, *device.shares]  # of each part, as a share of the load
        ahead = _AHEAD_SECONDS / watch.expected  # 0: nothing is known
        asked, answered = 0, False
        self._arrivals.add(arrival)
        try:
            for done, mark in enumerate(marks, 1):
                while asked < len(marks) and (not ahead or asked < done or begins[asked] < begins[done - 1] + ahead):
                    if not answered and watch.left() <= batch.lead:
                        answered = True
                        answer(watch.expected)
                    device.write_part(asked, batch.target_slots, memory, batch.source_slots)
                    marks[asked].record()
                    asked += 1
                    watch.asked()
                if not mark.reached():
                    # The moment to answer, if it comes while this part is copied.
                    pause = watch.left() - batch.lead
                    if not answered and pause < watch.expected * (begins[done] - begins[done - 1]):
                        time.sleep(max(0.0, pause))
                        answered = True
                        answer(watch.expected)
                mark.join()
                # Where asking took longer than copying, several are there by now: of these the last one tells the rate.
                if done == asked or not marks[done].reached():
                    watch.reached(begins[done])
            self._rate = watch.rate()
            if not answered:
                answer(watch.expected)
        except Exception as error:
            for mark in marks[asked:]:
                mark.fail(error)
            raise
        finally:
            self._arrivals.remove(arrival)

    def _by_hand(self, batch: CopyBatch, memory: Bytes, answer: Answer) -> None:
        """This thread copies part after part."""
        device = self._device
        watch = _Watch(len(batch) * device.chunk_nbytes, self._rate)
        marks = [ThreadMark() for _ in range(device.num_parts)]
        arrival: Arrival | None = None
        done = 0
        try:
            for mark in marks:
                if arrival is None and watch.left() <= batch.lead:
                    arrival = Arrival(batch.target_slots, marks, device.part_of_layer)
                    self._arrivals.add(arrival)
                    answer(watch.expected)
                device.write_part(done, batch.target_slots, memory, batch.source_slots)
                mark.set()
                watch.reached(device.shares[done])
                done += 1
            self._rate = watch.rate()
            if arrival is None:
                answer(watch.expected)
        except Exception as error:
            if arrival is None:
                raise
            for mark in marks[done:]:
                mark.set(error)
        finally:
            if arrival is not None:
                self._arrivals.remove(arrival)


class _Watch:
    """How long a load of so many bytes takes; `rate`: bytes per second of those before, if there were any."""

    def __init__(self, nbytes: int, rate: float | None) -> None:
        self._begin = time.perf_counter()
        self._nbytes = nbytes
        self._before = rate
        self._idle = 0.0  # seconds before any of it was on its way
        self.expected = math.inf if rate is None else nbytes / rate
        """Seconds of all of it."""

    def left(self) -> float:
        """Seconds until the end."""
        return max(0.0, self.expected - (time.perf_counter() - self._begin))

    def asked(self) -> None:
        """A part of it is on its way."""
        self._idle = self._idle or time.perf_counter() - self._begin

    def reached(self, share: float) -> None:
        """So much of it is there."""
        self.expected = self._idle + (time.perf_counter() - self._begin - self._idle) / share

    def rate(self) -> float:
        """Bytes per second to expect from the next, when this one has ended."""
        now = self._nbytes / self.expected
        return now if self._before is None else (1 - _NEWEST) * self._before + _NEWEST * now
