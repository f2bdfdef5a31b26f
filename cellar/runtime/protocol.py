"""The Runtime protocol: takes plans as plain data, runs them in order, answers by `poll`.

Three implementations: `local.py` (this process), `process.py` (another process, later) and `fake/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cellar.core.messages import CopyResult, KeptChunk, StepResult, Tier, TierOrder

PlanT_contra = TypeVar("PlanT_contra", contravariant=True)
ResultT_co = TypeVar("ResultT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a runtime has room for: chunks of KV cache on the device and (`tiers`) below it, and rows.

    `kept` are the chunks that tiers have from before this process. Rows are dealt out to `homes` in equal runs, and
    each home has so many slots of its own.
    """

    num_slots: int
    num_rows: int
    chunk_size: int
    max_model_len: int
    tiers: Mapping[Tier, int] = field(default_factory=dict)
    kept: Mapping[Tier, Sequence[KeptChunk]] = field(default_factory=dict)
    homes: int = 1


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


class Workers(Protocol[PlanT_contra, ResultT_co]):
    """What an engine asks of any runtime: plans in, results out."""

    @property
    def workers(self) -> Sequence[Worker[PlanT_contra]]:
        """Worker k has id k. One for a transformer."""

    def copy(self, batch: TierOrder) -> None:
        """Hand over copies between tiers, or slots to be erased; never blocks, and needs no plan to run.

        A batch that a step waits for comes before that step's plan; its result comes out of `poll`.
        """

    def poll(self, timeout: float | None) -> Sequence[ResultT_co | CopyResult]:
        """Results so far; waits up to `timeout` seconds (None: for ever) for a first one or `wake`.

        Those of one worker come in the order of its plans, that of a batch before the step that waits for it.
        """

    def wake(self) -> None:
        """End a waiting `poll` from another thread."""

    def close(self) -> None:
        """Stop the workers and free the device's memory."""


class Runtime(Workers[PlanT_contra, StepResult], Protocol[PlanT_contra]):
    """Runs transformer steps on a device."""

    @property
    def capacity(self) -> Capacity:
        """Fixed at start."""

    def poll(self, timeout: float | None) -> list[StepResult | CopyResult]:
        """Results so far."""

    def supply(self, step: int, masks: Mapping[int, NDArray[np.int32] | None]) -> None:
        """Token bit masks for masked rows of a submitted step, in any thread; rows may come one by one.

        None: the row's mask is late. Nothing is chosen for it, and its result says so (`Flag.LATE`).
        """

    def masking(self, threads: int) -> None:
        """So many threads of this process compute masks from now on; in any thread. Steps on the same cores may leave
        them one.
        """
