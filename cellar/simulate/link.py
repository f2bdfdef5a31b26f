"""Link: a way for chunks between the device and a slower tier, on the simulated clock.

Each direction carries one batch at a time, in order. A batch outwards does not begin while one inwards waits or runs
(Pensieve §3.5.1); one that has begun goes on, and both are slower then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from cellar.core.messages import CopyBatch, CopyResult, Tier
from cellar.planner.machines import Machine


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Bytes per second to the device (`load_rate`) and from it (`save_rate`), and seconds that each chunk takes on top.

    While both directions are busy each has `duplex` of its rate. `layerwise` overlaps a load with the step that needs
    it: the scheduler hears of a load when the rest takes no longer than its `lead`, if its first layer is there, and
    layer j of the step waits for layer j of the chunks (§3.4.3.3); otherwise it hears of it when all is there.
    """

    load_rate: float
    save_rate: float
    chunk_seconds: float = 0.0
    duplex: float = 1.0
    layerwise: bool = True

    @classmethod
    def of_host(cls, machine: Machine, duplex: float | None = None, layerwise: bool = True) -> LinkModel:
        """That of one device of a machine to its host. `duplex` if it was not measured; else 1."""
        known = machine.to_device.duplex.value if machine.to_device.duplex is not None else 1.0
        latency = machine.to_device.latency.value if machine.to_device.latency is not None else 0.0
        return cls(
            machine.to_device.bandwidth.value,
            machine.to_host.bandwidth.value,
            latency,
            known if duplex is None else duplex,
            layerwise,
        )


_NOTHING = 1e-12
"""Seconds that rounding may leave."""


@dataclass(slots=True)
class Transfer:
    """A batch on its way: `left` seconds of work if it has the link for itself, of `work` in all."""

    batch: CopyBatch
    nbytes: int
    work: float
    left: float
    begun: float = 0.0
    told: bool = False

    @property
    def inwards(self) -> bool:
        return self.batch.target is Tier.DEVICE


class Link:
    """One link of chunks of `chunk_nbytes` bytes, in `num_layers` layers; `advance` lets time pass."""

    def __init__(self, model: LinkModel, chunk_nbytes: float, num_layers: int) -> None:
        self._model = model
        self._chunk_nbytes = chunk_nbytes
        self._num_layers = num_layers
        self._loads: deque[Transfer] = deque()
        self._saves: deque[Transfer] = deque()
        self._saving: Transfer | None = None  # what has begun of the saves
        self._now = 0.0
        self._results: list[tuple[float, CopyResult]] = []
        self.ended: list[int] = []
        """Loads of which nothing is on its way any more; whoever reads them takes them out."""
        self.busy = [0.0, 0.0]
        """Seconds inwards, and outwards."""

    def submit(self, batch: CopyBatch, now: float) -> None:
        """Queue a batch; times never go back."""
        self._advance(now)
        model = self._model
        rate = model.load_rate if batch.target is Tier.DEVICE else model.save_rate
        work = len(batch) * (self._chunk_nbytes / rate + model.chunk_seconds)
        transfer = Transfer(batch, int(len(batch) * self._chunk_nbytes), work, work)
        (self._loads if transfer.inwards else self._saves).append(transfer)
        self._start()

    def next_time(self) -> float:
        """When a result comes, unless more is submitted; inf if nothing is on its way."""
        return self._results[0][0] if self._results else self._next_event()

    def collect(self, now: float) -> list[tuple[float, CopyResult]]:
        """Results up to a moment, in order."""
        self._advance(now)
        results, self._results = self._results, []
        return results

    def last_layer(self, number: int, now: float) -> tuple[float, float] | None:
        """When the first and the last layer of a load arrive that was told of, but is under way; None if it is not."""
        self._advance(now)
        for transfer in self._loads:
            if transfer.batch.number == number and transfer.told:
                share = self._share()
                end = self._now + transfer.left / share
                return end - self._after_first(transfer) / share, end
        return None

    # -- how --------------------------------------------------------------------------------------

    def _next_event(self) -> float:
        share = self._share()
        found = [self._now + transfer.left / share for transfer in self._running()]
        if self._loads and self._is_early(self._loads[0]):
            found.append(self._now + max(0.0, self._loads[0].left - self._early(self._loads[0])) / share)
        return min(found, default=np.inf)

    def _advance(self, until: float) -> None:
        while (at := self._next_event()) <= until:
            self._pass(at)
            first = self._loads[0] if self._loads else None
            if first is not None and self._is_early(first) and first.left <= self._early(first) + _NOTHING:
                first.told = True
                self._results.append((at, self._result(first, at)))
            for transfer in self._running():
                if transfer.left <= _NOTHING:
                    self._end(transfer)
                    if not transfer.told:
                        self._results.append((at, self._result(transfer, at)))
        if until > self._now:
            self._pass(until)

    def _running(self) -> list[Transfer]:
        return [t for t in (self._loads[0] if self._loads else None, self._saving) if t is not None]

    def _share(self) -> float:
        return self._model.duplex if self._loads and self._saving is not None else 1.0

    def _is_early(self, transfer: Transfer) -> bool:
        """True for a load that counts as arrived before its end, and has not been told of."""
        return self._model.layerwise and not transfer.told and transfer.batch.lead > 0 and self._num_layers > 1

    def _early(self, transfer: Transfer) -> float:
        """Seconds of work that may be left when a load counts as arrived."""
        return min(transfer.batch.lead, self._after_first(transfer))

    def _after_first(self, transfer: Transfer) -> float:
        """Seconds of work that all layers but the first take."""
        return transfer.work * (1 - 1 / self._num_layers)

    def _pass(self, at: float) -> None:
        done = (at - self._now) * self._share()
        for transfer in self._running():
            transfer.left = max(0.0, transfer.left - done)
            self.busy[0 if transfer.inwards else 1] += at - self._now
        self._now = at

    def _end(self, transfer: Transfer) -> None:
        if transfer.inwards:
            self.ended.append(self._loads.popleft().batch.number)
        else:
            self._saving = None
        self._start()

    def _start(self) -> None:
        """What may begin, begins."""
        if self._loads and not self._loads[0].begun:
            self._loads[0].begun = self._now
        if self._saving is None and self._saves and not self._loads:
            self._saving = self._saves.popleft()
            self._saving.begun = self._now

    def _result(self, transfer: Transfer, at: float) -> CopyResult:
        ok = np.ones(len(transfer.batch), np.bool_)
        return CopyResult(transfer.batch.number, ok, transfer.nbytes, at - transfer.begun)
