"""The Runtime protocol: takes plans as plain data, runs them in order, answers by `poll`.

Three implementations: `local.py` (this process), `process.py` (another process, later) and `fake.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cellar.core.messages import CopyResult, StepResult

PlanT_contra = TypeVar("PlanT_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a runtime has room for: chunks of KV cache on the device, and rows."""

    num_slots: int
    num_rows: int
    chunk_size: int
    max_model_len: int


class Worker(Protocol[PlanT_contra]):
    """One queue of a runtime; plans run first in, first out."""

    @property
    def id(self) -> int:
        """Number of the worker, from 0."""

    @property
    def in_flight(self) -> int:
        """Plans submitted whose result no `poll` has returned yet."""

    def submit(self, plan: PlanT_contra) -> None:
        """Hand over a plan; never blocks."""


class Runtime(Protocol[PlanT_contra]):
    """Runs plans on a device."""

    @property
    def workers(self) -> Sequence[Worker[PlanT_contra]]:
        """One for a transformer."""

    @property
    def capacity(self) -> Capacity:
        """Fixed at start."""

    def poll(self, timeout: float | None) -> list[StepResult | CopyResult]:
        """Results so far, FIFO per worker; waits up to `timeout` seconds (None: for ever) for a first one or `wake`."""

    def wake(self) -> None:
        """End a waiting `poll` from another thread."""

    def supply(self, step: int, masks: Mapping[int, NDArray[np.int32]]) -> None:
        """Token bit masks for the masked rows of a submitted step."""

    def close(self) -> None:
        """Stop the workers and free the device's memory."""
