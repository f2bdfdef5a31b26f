"""The CellRuntime protocol: `Runtime` (protocol.py) for task plans. Implementations: `cells.py` and `fake_cells.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cellar.core.tasks import CellCapacity, TaskPlan, TaskResult
from cellar.runtime.protocol import Worker


class CellRuntime(Protocol):
    """Runs task plans on one or more workers."""

    @property
    def workers(self) -> Sequence[Worker[TaskPlan]]:
        """Worker k has id k. `in_flight` counts plans of which some task has not been answered by `poll`."""

    @property
    def capacity(self) -> CellCapacity:
        """Rows of every bank, fixed at start."""

    def poll(self, timeout: float | None) -> list[TaskResult]:
        """Results so far, FIFO per worker; waits up to `timeout` seconds (None: for ever) for a first one or `wake`."""

    def wake(self) -> None:
        """End a waiting `poll` from another thread."""

    def close(self) -> None:
        """Stop the workers and free the device's memory."""
