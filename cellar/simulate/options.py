"""RoutingOptions: how many engines a simulation has, and who chooses among them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from cellar.core.errors import ConfigError


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class RoutingOptions:
    """Several engines, and who chooses among them."""

    replicas: int = _option(1, "Engines on as many machines, behind one router.")
    routing: Literal["affinity", "round-robin", "least-loaded", "two-choices"] = _option(
        "affinity",
        "affinity: by chunks, waiting and prices; round-robin; least-loaded: fewest requests; two-choices: the same of "
        "two at random.",
    )
    digest_interval: float = _option(1.0, "Seconds between two reports of a replica to the router.")
    judged: int = _option(0, "Placements that are compared with what a router without stale reports would know.")

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas is {self.replicas}; it must be at least 1.")
        if not self.digest_interval > 0 or not math.isfinite(self.digest_interval):
            raise ConfigError(f"digest_interval is {self.digest_interval}; it must be above 0.")
        if self.judged < 0:
            raise ConfigError(f"judged is {self.judged}; it must not be negative.")
