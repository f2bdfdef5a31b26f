"""Copier: carries out CopyBatches in a thread of its own, beside the steps.

    copy -> [loads before stores] -> copies -> CopyResult -> the runtime's results

Loads go first: somebody waits for them (Pensieve §3.5.1). The scheduler orders no copy whose slots a step or another
copy uses, so copies need no order among themselves, and none against steps.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from cellar.core.errors import ConfigError, DeviceError
from cellar.core.messages import CopyBatch, CopyResult, Tier
from cellar.runtime.tiers.arena import ArenaChunks
from cellar.runtime.tiers.host import HostTier
from cellar.runtime.tiers.storage import Storage

logger = logging.getLogger(__name__)


class Copier:
    """Copies between the device's chunks and `tiers`; `publish` takes each result, from the copier's thread."""

    def __init__(
        self, device: ArenaChunks, tiers: Mapping[Tier, Storage], publish: Callable[[CopyResult], None]
    ) -> None:
        self._device = device
        self._tiers = dict(tiers)
        self._publish = publish
        self._waiting: list[tuple[bool, int, CopyBatch]] = []
        self._changed = threading.Condition()
        self._closed = False
        # One chunk on its way to or from a tier that is not memory.
        self._staging = np.empty(device.chunk_nbytes, np.uint8)
        self._stage = torch.from_numpy(self._staging)
        self._thread = threading.Thread(target=self._run, name="cellar-copier", daemon=True)
        self._thread.start()

    def submit(self, batch: CopyBatch) -> None:
        """Hand over a batch; never blocks. Raises ConfigError for what is not carried out here."""
        for tier in (batch.source, batch.target):
            if tier is not Tier.DEVICE and tier not in self._tiers:
                raise ConfigError(f"this runtime has no tier {tier.name.lower()}; plan without it.")
        if batch.before_step >= 0 or batch.after_step >= 0:
            raise ConfigError("this runtime holds no step for a copy; wait for the copy's result before planning it.")
        if self._closed:
            raise DeviceError("the runtime is closed and takes no copies; open a new one.")
        with self._changed:
            heapq.heappush(self._waiting, (batch.target is not Tier.DEVICE, batch.number, batch))
            self._changed.notify()

    def close(self) -> None:
        """Drop the batches that have not begun, and let go of the tiers."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        for storage in self._tiers.values():
            storage.close()

    def _run(self) -> None:
        cuda = self._device.device.type == "cuda"
        stream = torch.cuda.Stream(self._device.device) if cuda else None  # type: ignore[no-untyped-call]
        with torch.inference_mode(), torch.cuda.stream(stream):  # None: nothing changes
            while (batch := self._next()) is not None:
                self._publish(self._carry_out(batch, stream))

    def _next(self) -> CopyBatch | None:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            return None if self._closed else heapq.heappop(self._waiting)[2]

    def _carry_out(self, batch: CopyBatch, stream: torch.cuda.Stream | None) -> CopyResult:
        begin = time.perf_counter()
        ok = np.zeros(len(batch), np.bool_)
        said: str | None = None
        for k, (source, target) in enumerate(
            zip(batch.source_slots.tolist(), batch.target_slots.tolist(), strict=True)
        ):
            try:
                self._copy(batch, source, target, stream)
                ok[k] = True
            except Exception as error:  # whatever it is, somebody waits for the result
                said = said or f"{batch.source.name.lower()} to {batch.target.name.lower()}: {error}"
        try:
            if stream is not None:
                stream.synchronize()
        except Exception as error:
            ok[:] = False
            said = said or str(error)
        if said is not None:
            logger.warning("%d of %d chunks were not copied from %s", len(batch) - int(ok.sum()), len(batch), said)
        nbytes = int(ok.sum()) * self._device.chunk_nbytes
        return CopyResult(batch.number, ok, nbytes, time.perf_counter() - begin, said)

    def _copy(self, batch: CopyBatch, source: int, target: int, stream: torch.cuda.Stream | None) -> None:
        device = self._device
        if batch.source is Tier.DEVICE and batch.target is Tier.DEVICE:
            device.copy(source, target)
        elif batch.source is Tier.DEVICE:
            held = self._memory(batch.target, target)
            device.read(source, held)
            if held is self._stage:
                _wait(stream)
                self._tiers[batch.target].write(target, self._staging)
        elif batch.target is Tier.DEVICE:
            held = self._memory(batch.source, source)
            if held is self._stage:
                _wait(stream)  # what was staged before may not have left yet
                self._tiers[batch.source].read(source, self._staging)
            device.write(target, held)
        else:
            self._tiers[batch.source].read(source, self._staging)
            self._tiers[batch.target].write(target, self._staging)

    def _memory(self, tier: Tier, slot: int) -> Tensor:
        """The bytes of a chunk that lies in memory, or the staging buffer."""
        storage = self._tiers[tier]
        return torch.from_numpy(storage.chunks[slot]) if isinstance(storage, HostTier) else self._stage


def _wait(stream: torch.cuda.Stream | None) -> None:
    if stream is not None:
        stream.synchronize()
