"""The CellRuntime protocol: workers of task plans, and their banks. Implementations: `local.py` and `fake.py`."""

from __future__ import annotations

from typing import Protocol

from cellar.core.tasks import CellCapacity, TaskPlan, TaskResult
from cellar.runtime.protocol import Workers


class CellRuntime(Workers[TaskPlan, TaskResult], Protocol):
    """Runs task plans on one or more workers, whose `in_flight` counts plans of which some task was not answered."""

    @property
    def capacity(self) -> CellCapacity:
        """Rows of every bank on each worker, fixed at start."""

    def poll(self, timeout: float | None) -> list[TaskResult]:
        """Results so far; nothing is copied between tiers."""
