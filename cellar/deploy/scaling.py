"""How many engines there should be: by requests that run or wait, and by the share of KV that running requests hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.serve.config import AutoscalingContext

from cellar.core.errors import ConfigError
from cellar.core.messages import SchedulerStats

REQUESTS, PRESSURE = "cellar_requests", "cellar_kv_pressure"
"""What an engine tells of itself: requests there, and the share of its KV that those hold that run."""


def load_of(stats: SchedulerStats) -> dict[str, float]:
    """What an engine tells of itself."""
    held = stats.total_chunks - stats.free_chunks - stats.cached_chunks
    return {REQUESTS: float(stats.running + stats.waiting), PRESSURE: held / max(1, stats.total_chunks)}


@dataclass(frozen=True, slots=True)
class Targets:
    """How much an engine should have to do: `requests` that run or wait, and `pressure`, a share of its KV.

    A request beyond its engine's memory waits or is suspended, so the pressure never tells how many there are, and
    their number not how long they are: whichever asks for more engines counts.
    """

    requests: float = 64.0
    pressure: float = 0.7

    def __post_init__(self) -> None:
        if not self.requests > 0:
            raise ConfigError(f"requests is {self.requests}; it must be above 0.")
        if not 0 < self.pressure <= 1:
            raise ConfigError(f"pressure is {self.pressure}; it must be in (0, 1].")

    def engines(self, requests: Sequence[float], pressures: Sequence[float]) -> int:
        """How many engines take what the present ones have; 0 if there is nothing to do."""
        return max(_shared(sum(requests), self.requests), _shared(sum(pressures), self.pressure))


class Policy:
    """`Targets` as Ray Serve's autoscaling calls it: with `autoscaling_config.policy` `cellar.deploy.scaling:Policy`.

    Bounds, delays and factors are Ray's: see `min_replicas`, `max_replicas`, `upscale_delay_s`, `downscale_delay_s`.
    """

    def __init__(self, requests: float = 64.0, pressure: float = 0.7) -> None:
        self._targets = Targets(requests, pressure)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """-> how many engines, and nothing to remember. Engines that have told nothing yet count as idle."""
        told: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        wanted = self._targets.engines(*([*told.get(name, {}).values()] for name in (REQUESTS, PRESSURE)))
        return wanted, {}


def _shared(amount: float, each: float) -> int:
    """`amount / each`, rounded up, but for what floating point adds."""
    return math.ceil(amount / each - 1e-9)
