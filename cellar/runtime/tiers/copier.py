"""Copier: carries out CopyBatches beside the steps, each tier's in threads of its own.

    copy -> lane of the slower tier -> [loads before stores] -> a thread copies a piece -> CopyResult after the last

A slow disk holds up no copy from the host. Loads go first: somebody waits for them (Pensieve §3.5.1). The scheduler
orders no copy whose slots a step or another copy uses, so copies need no order among themselves, nor against steps, but
for those that are answered before they end: `arrivals` has these.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cellar.core.errors import ConfigError, DeviceError
from cellar.core.messages import CopyBatch, CopyResult, EraseBatch, KeptChunk, Tier, TierOrder
from cellar.runtime.tiers.arena import ArenaChunks
from cellar.runtime.tiers.arrivals import Arrivals
from cellar.runtime.tiers.early import Answer, EarlyLoads
from cellar.runtime.tiers.host import HostTier
from cellar.runtime.tiers.storage import Bytes, DistantStorage, Storage

logger = logging.getLogger(__name__)

_PIECE_NBYTES = 4 * 2**20
"""Of a batch, what one of several threads copies at a time; at least a chunk."""

Publish = Callable[[CopyResult], None]


@dataclass
class _Job:
    """A batch, and what has come of its pieces."""

    batch: TierOrder
    ok: NDArray[np.bool_]
    left: int
    begin: float = 0.0
    said: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Copier:
    """Copies between the device's chunks and `tiers`; `publish` takes each result, from threads of the copier.

    With `arrivals` loads from the host may be answered before they end; whoever uses their slots asks there.
    """

    def __init__(
        self,
        device: ArenaChunks,
        tiers: Mapping[Tier, Storage],
        publish: Publish,
        arrivals: Arrivals | None = None,
    ) -> None:
        self._tiers = dict(tiers)
        self._closed = False
        self._lanes = {
            tier: _Lane(device, self._tiers, tier, storage.num_threads, publish, arrivals)
            for tier, storage in tiers.items()
        }
        self._lanes.setdefault(Tier.DEVICE, _Lane(device, self._tiers, Tier.DEVICE, 1, publish, arrivals))

    @property
    def kept(self) -> Mapping[Tier, Sequence[KeptChunk]]:
        """Chunks that tiers have from before this process."""
        return {tier: storage.kept() for tier, storage in self._tiers.items() if tier.persistent}

    def submit(self, batch: TierOrder) -> None:
        """Hand over a batch; never blocks. Raises ConfigError for what is not carried out here."""
        slowest = batch.tier if isinstance(batch, EraseBatch) else max(batch.source, batch.target)
        for tier in (slowest,) if isinstance(batch, EraseBatch) else (batch.source, batch.target):
            if tier is not Tier.DEVICE and tier not in self._tiers:
                raise ConfigError(f"this runtime has no tier {tier.name.lower()}; plan without it.")
        if isinstance(batch, CopyBatch) and (batch.before_step >= 0 or batch.after_step >= 0):
            raise ConfigError("this runtime holds no step for a copy; wait for the copy's result before planning it.")
        if self._closed:
            raise DeviceError("the runtime is closed and takes no copies; open a new one.")
        self._lanes[slowest].submit(batch)

    def close(self) -> None:
        """Drop what has not begun, and let go of the tiers."""
        self._closed = True
        for lane in self._lanes.values():
            lane.end()
        for lane in self._lanes.values():
            lane.join()
        for storage in self._tiers.values():
            storage.close()


class _Lane:
    """The threads that copy to and from one tier (or within the device)."""

    def __init__(
        self,
        device: ArenaChunks,
        tiers: Mapping[Tier, Storage],
        tier: Tier,
        num_threads: int,
        publish: Publish,
        arrivals: Arrivals | None,
    ) -> None:
        self._device = device
        self._arrivals = arrivals
        self._tiers = tiers
        self._publish = publish
        self._several = num_threads > 1
        self.waiting: list[tuple[int, int, int, _Job, range]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"cellar-{tier.name.lower()}-{k}", daemon=True)
            for k in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, batch: TierOrder) -> None:
        count = len(batch)
        piece = max(1, _PIECE_NBYTES // self._device.chunk_nbytes) if self._several else max(1, count)
        pieces = [range(at, min(at + piece, count)) for at in range(0, max(1, count), piece)]
        # What must not be found again goes first, then what somebody waits for.
        rank = 0 if isinstance(batch, EraseBatch) else 1 if batch.target is Tier.DEVICE else 2
        job = _Job(batch, np.zeros(count, np.bool_), len(pieces))
        with self._changed:
            for part in pieces:
                heapq.heappush(self.waiting, (rank, batch.number, part.start, job, part))
            self._changed.notify(len(pieces))

    def end(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        cuda = self._device.device.type == "cuda"
        stream = torch.cuda.Stream(self._device.device) if cuda else None  # type: ignore[no-untyped-call]
        hand = _Hand(self._device, self._tiers, stream, self._arrivals)
        with torch.inference_mode(), torch.cuda.stream(stream):  # None: nothing changes
            while (found := self._next()) is not None:
                self._work(hand, *found)

    def _next(self) -> tuple[_Job, range] | None:
        with self._changed:
            while not self.waiting and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            *_, job, part = heapq.heappop(self.waiting)
            return job, part

    def _work(self, hand: _Hand, job: _Job, part: range) -> None:
        """Copy a piece; who copies the last one says what has come of all."""
        batch = job.batch
        with job.lock:
            job.begin = job.begin or time.perf_counter()
        if isinstance(batch, CopyBatch) and not self._several and hand.loads_early(batch):
            self._load_early(hand, batch, job.begin)
            return
        ok, said = hand.carry_out(batch, part)
        with job.lock:
            job.ok[part.start : part.stop] = ok
            job.said = job.said or said
            job.left -= 1
            if job.left:
                return
        if job.said is not None:
            logger.warning(
                "%d of %d chunks were not copied from %s", len(batch) - int(job.ok.sum()), len(batch), job.said
            )
        nbytes = int(job.ok.sum()) * self._device.chunk_nbytes
        self._publish(CopyResult(batch.number, job.ok, nbytes, time.perf_counter() - job.begin, job.said))

    def _load_early(self, hand: _Hand, batch: CopyBatch, begin: float) -> None:
        """A load that may be answered before it ends. If it fails after that, who uses its slots is told."""
        count, answered = len(batch), False

        def answer(seconds: float) -> None:
            nonlocal answered
            answered = True
            nbytes = count * self._device.chunk_nbytes
            self._publish(CopyResult(batch.number, np.ones(count, np.bool_), nbytes, seconds))

        try:
            hand.load_early(batch, answer)
        except Exception as error:  # whatever it is, somebody waits for the result
            said = f"{_way(batch)}: {error}"
            logger.warning("%d of %d chunks were not copied from %s", count, count, said)
            if not answered:
                seconds = time.perf_counter() - begin
                self._publish(CopyResult(batch.number, np.zeros(count, np.bool_), 0, seconds, said))


class _Hand:
    """What one thread copies with: a stream, and a chunk's room on the way to or from a tier that is not memory."""

    def __init__(
        self,
        device: ArenaChunks,
        tiers: Mapping[Tier, Storage],
        stream: torch.cuda.Stream | None,
        arrivals: Arrivals | None,
    ) -> None:
        self._device = device
        self._arrivals = arrivals
        self._early = None if arrivals is None else EarlyLoads(device, arrivals)
        self._tiers = tiers
        self._stream = stream
        self._staging = np.empty(device.chunk_nbytes, np.uint8)
        self._stage = torch.from_numpy(self._staging)
        self._far: Bytes | None = None

    def carry_out(self, batch: TierOrder, part: range) -> tuple[NDArray[np.bool_], str | None]:
        """-> which of a piece have arrived, and why the first of the others has not."""
        ok = np.zeros(len(part), np.bool_)
        self._join_arrivals(batch)
        slowest = batch.tier if isinstance(batch, EraseBatch) else max(batch.source, batch.target)
        distant = self._tiers.get(slowest)
        if isinstance(distant, DistantStorage):
            return self._carry_far(distant, batch, part)
        said: str | None = None
        for k, at in enumerate(part):
            try:
                if isinstance(batch, EraseBatch):
                    self._tiers[batch.tier].erase(int(batch.slots[at]))
                else:
                    self._copy(batch, at)
                ok[k] = True
            except Exception as error:  # whatever it is, somebody waits for the result
                said = said or f"{_way(batch)}: {error}"
        try:
            self._wait()
        except Exception as error:
            ok[:] = False
            said = said or str(error)
        return ok, said

    def loads_early(self, batch: CopyBatch) -> bool:
        """Whether a batch may be answered before it ends."""
        held = isinstance(self._tiers.get(batch.source), HostTier)
        return self._early is not None and held and batch.target is Tier.DEVICE and self._early.may(batch)

    def load_early(self, batch: CopyBatch, answer: Answer) -> None:
        """Load a batch that may be answered before it ends."""
        storage = self._tiers[batch.source]
        assert self._early is not None
        assert isinstance(storage, HostTier)
        self._join_arrivals(batch)
        try:
            self._early.run(batch, storage.chunks, answer)
        finally:
            self._wait()

    def _join_arrivals(self, batch: TierOrder) -> None:
        """Wait for what is still on its way into slots of the device that a batch reads or writes."""
        if not self._arrivals or isinstance(batch, EraseBatch):
            return
        for tier, slots in ((batch.source, batch.source_slots), (batch.target, batch.target_slots)):
            if tier is Tier.DEVICE:
                for arrival in self._arrivals.touching(slots):
                    arrival.join()

    def _carry_far(
        self, distant: DistantStorage, batch: TierOrder, part: range
    ) -> tuple[NDArray[np.bool_], str | None]:
        """`carry_out` where the slower tier is far: a piece with one exchange."""
        here = slice(part.start, part.stop)
        try:
            if isinstance(batch, EraseBatch):
                failed = distant.erase_many(batch.slots[here].tolist())
            elif batch.target > batch.source:
                chunks = self._staged(len(part))
                self._gather(batch, part, chunks)
                failed = distant.write_many(batch.target_slots[here].tolist(), chunks, batch.labels[here])
            else:
                chunks = self._staged(len(part))
                failed = distant.read_many(batch.source_slots[here].tolist(), chunks, batch.labels[here])
                self._scatter(batch, part, chunks, failed)
        except Exception as error:  # whatever it is, somebody waits for the result
            return np.zeros(len(part), np.bool_), f"{_way(batch)}: {error}"
        said = next((f"{_way(batch)}: {error}" for error in failed if error is not None), None)
        return np.array([error is None for error in failed], np.bool_), said

    def _staged(self, count: int) -> Bytes:
        """Room for so many chunks [count, chunk_nbytes]."""
        if self._far is None or len(self._far) < count:
            self._far = np.empty((count, self._device.chunk_nbytes), np.uint8)
        return self._far[:count]

    def _gather(self, batch: CopyBatch, part: range, chunks: Bytes) -> None:
        """Chunks of a piece, from where they lie now."""
        for at, chunk in zip(part, chunks, strict=True):
            source = int(batch.source_slots[at])
            if batch.source is Tier.DEVICE:
                self._device.read(source, torch.from_numpy(chunk))
            else:
                self._tiers[batch.source].read(source, chunk, batch.labels[at])
        self._wait()

    def _scatter(self, batch: CopyBatch, part: range, chunks: Bytes, failed: Sequence[OSError | None]) -> None:
        """Chunks that have come, to where they shall lie."""
        for at, chunk, error in zip(part, chunks, failed, strict=True):
            target = int(batch.target_slots[at])
            if error is None and batch.target is Tier.DEVICE:
                self._device.write(target, torch.from_numpy(chunk))
            elif error is None:
                self._tiers[batch.target].write(target, chunk, batch.labels[at])
        self._wait()

    def _copy(self, batch: CopyBatch, at: int) -> None:
        device, source, target = self._device, int(batch.source_slots[at]), int(batch.target_slots[at])
        label = batch.labels[at] if batch.labels else None
        if batch.source is Tier.DEVICE and batch.target is Tier.DEVICE:
            device.copy(source, target)
        elif batch.source is Tier.DEVICE:
            held = self._memory(batch.target, target)
            device.read(source, held)
            if held is self._stage:
                self._wait()
                self._tiers[batch.target].write(target, self._staging, label)
        elif batch.target is Tier.DEVICE:
            held = self._memory(batch.source, source)
            if held is self._stage:
                self._wait()  # what was staged before may not have left yet
                self._tiers[batch.source].read(source, self._staging, label)
            device.write(target, held)
        else:
            self._tiers[batch.source].read(source, self._staging, label)
            self._tiers[batch.target].write(target, self._staging, label)

    def _memory(self, tier: Tier, slot: int) -> Tensor:
        """The bytes of a chunk that lies in memory, or the staging buffer."""
        storage = self._tiers[tier]
        return torch.from_numpy(storage.chunks[slot]) if isinstance(storage, HostTier) else self._stage

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _way(batch: TierOrder) -> str:
    if isinstance(batch, EraseBatch):
        return f"{batch.tier.name.lower()} to nowhere"
    return f"{batch.source.name.lower()} to {batch.target.name.lower()}"
