"""SimulatedReplica: one engine on a clock of its own, and the sums over several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TypeVar

from cellar.core.config import ScheduleConfig
from cellar.core.messages import SchedulerStats, Tier, TierStats
from cellar.engine.steps import step_engine
from cellar.kv.policy import Policy
from cellar.planner.partition import kv_bytes_per_chip
from cellar.planner.steps import StepPrices
from cellar.runtime.protocol import Capacity
from cellar.schedule.steps.scheduler import StepScheduler
from cellar.simulate.link import Link, LinkModel
from cellar.simulate.runtime import SimulatedRuntime

StatsT = TypeVar("StatsT", SchedulerStats, TierStats)


class SimulatedReplica:
    """The real engine, scheduler and store over a simulated runtime. Arguments are those of `Simulation`."""

    def __init__(
        self,
        name: str,
        prices: StepPrices,
        capacity: Capacity,
        schedule: ScheduleConfig,
        *,
        prefix_caching: bool = True,
        host_seconds: float = 0.0,
        links: Mapping[Tier, LinkModel] | None = None,
        policy: Callable[[], Policy] | None = None,
        phases_apart: bool = False,
    ) -> None:
        self.name = name
        nbytes = chunk_nbytes(prices, capacity)
        models = link_models(prices, capacity) if links is None else links
        self.links = {tier: Link(model, nbytes, prices.d.layers) for tier, model in models.items()}
        self.runtime = SimulatedRuntime(capacity, prices, host_seconds, self.links)
        self.scheduler = StepScheduler(
            capacity.num_slots,
            capacity.num_rows,
            capacity.chunk_size,
            capacity.max_model_len,
            schedule,
            prefix_caching,
            tiers=capacity.tiers,
            policy=None if policy is None else policy(),
            phases_apart=phases_apart,
        )
        self.engine = step_engine(
            self.scheduler,
            self.runtime,
            run_ahead=schedule.run_ahead,
            clock=lambda: self.runtime.now,
            check_seconds=600.0,
        )

    @property
    def now(self) -> float:
        """Its clock: when it heard last of what it does."""
        return self.runtime.now

    def stand(self, now: float) -> None:
        """Nothing happens here until then."""
        self.runtime.now = max(self.runtime.now, now)


def chunk_nbytes(prices: StepPrices, capacity: Capacity) -> float:
    """Bytes of a chunk on one device, which has its own link."""
    return kv_bytes_per_chip(prices.d, prices.layout, 1, capacity.chunk_size, prices.formats)


def link_models(prices: StepPrices, capacity: Capacity) -> dict[Tier, LinkModel]:
    """The host's link as the machine has it, for all slower tiers."""
    return {tier: LinkModel.of_host(prices.machine) for tier in capacity.tiers}


def summed(stats: Sequence[SchedulerStats]) -> SchedulerStats:
    """The figures of several engines, as if they were one."""
    if len(stats) == 1:
        return stats[0]
    tiers = tuple(
        _added(each, {"tier": each[0].tier}) for each in zip(*(engine.tiers for engine in stats), strict=True)
    )
    width = max(len(engine.steps) for engine in stats)
    steps = tuple(sum(engine.steps[k] for engine in stats if k < len(engine.steps)) for k in range(width))
    return _added(stats, {"tiers": tiers, "steps": steps})


def _added(parts: Sequence[StatsT], said: Mapping[str, object]) -> StatsT:
    """Sums of all fields but those that are `said`."""
    sums = {f.name: sum(getattr(part, f.name) for part in parts) for f in fields(parts[0]) if f.name not in said}
    return type(parts[0])(**{**sums, **said})
