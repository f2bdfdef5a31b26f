"""`cellar simulate`: the real loop, scheduler and KV store, driven by the cost model's clock instead of a device.

Nothing of the deciding side is modelled: requests go through `engine.py`, `schedule/` and `kv/` as they do when a model
runs; only the runtime is `SimulatedRuntime`. So chunks are shared, evicted and recomputed exactly as they would be, if
steps take as long as the planner says.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic

from cellar.core.config import CacheConfig, ScheduleConfig
from cellar.core.errors import CapacityError, ConfigError
from cellar.core.messages import FinishReason, IntArray, Request, SchedulerStats, StepOutput, Tier
from cellar.core.sampling import SamplingParams
from cellar.core.specs import ModelSpec
from cellar.kv.policy import Policy
from cellar.planner.steps import StepPrices, kv_room
from cellar.runtime.protocol import Capacity
from cellar.simulate.fleet import Fleet, Placements, route_prices
from cellar.simulate.link import LinkModel
from cellar.simulate.load import Load, Talks, TurnT
from cellar.simulate.options import RoutingOptions
from cellar.simulate.replica import SimulatedReplica, link_models, summed
from cellar.simulate.runtime import MAX_SEED, StepRecord

NO_STOPS: frozenset[int] = frozenset()


@dataclass(slots=True)
class SimulatedRequest:
    """One turn of a conversation as it went; times are in seconds on the simulated clock.

    `token_times` are those of its tokens; `num_cached` of its prompt's tokens were found in the cache. Of the
    `num_history` tokens of earlier turns whose KV had been computed `num_recomputed` were computed again, which took
    the device `recomputed_seconds` (products and attention, as part of a large step).
    """

    conversation: int
    turn: int
    arrival: float
    num_prompt: int
    num_output: int
    token_times: list[float] = field(default_factory=list)
    num_cached: int = 0
    num_history: int = 0
    num_recomputed: int = 0
    recomputed_seconds: float = 0.0
    queue_seconds: float = 0.0
    error: str | None = None
    replica: int = 0

    @property
    def finish(self) -> float:
        """When its last token came; its arrival if none did."""
        return self.token_times[-1] if self.token_times else self.arrival


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Queues and cache at a moment."""

    now: float
    stats: SchedulerStats


@dataclass(frozen=True, eq=False)
class SimulatedRun:
    """What happened. `requests` are in order of arrival, `snapshots` (of all replicas together) in order of time.

    Of each replica there are the steps that it ran, and its last stats.
    """

    requests: tuple[SimulatedRequest, ...]
    replica_steps: tuple[tuple[StepRecord, ...], ...]
    snapshots: tuple[Snapshot, ...]
    replica_stats: tuple[SchedulerStats, ...]
    start: float
    end: float
    placements: Placements

    @cached_property
    def stats(self) -> SchedulerStats:
        """Of all replicas together."""
        return summed(self.replica_stats)

    @cached_property
    def steps(self) -> tuple[StepRecord, ...]:
        """Of all replicas, one replica after the other."""
        return tuple(step for steps in self.replica_steps for step in steps)

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last token."""
        return self.end - self.start

    @property
    def busy(self) -> float:
        """Share of the duration in which a step ran, on average over the replicas."""
        whole = self.duration * len(self.replica_steps)
        return sum(step.end - step.begin for step in self.steps) / whole if whole else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were found in the cache."""
        return self.stats.prefix_hits / self.stats.prefix_queries if self.stats.prefix_queries else 0.0


def capacity_of(
    spec: ModelSpec,
    prices: StepPrices,
    cache: CacheConfig,
    schedule: ScheduleConfig,
    max_model_len: int,
    kv_bytes: int | None = None,
) -> Capacity:
    """Slots and rows of a machine: `kv_bytes` of KV cache, or what weights and buffers leave of its memory; and as many
    slots of the host's memory as the options ask for.

    Raises CapacityError if not even one request of `max_model_len` tokens would fit, or if the host has less.
    """
    tokens = schedule.max_num_batched_tokens
    assert tokens is not None, "decided by EngineConfig.on"
    size = cache.block_size
    nbytes = cache.kv_cache_memory_bytes or kv_bytes
    if nbytes is not None:
        num_slots = int(nbytes / (spec.kv.nbytes_per_token() * size))
    else:
        num_slots = kv_room(prices, cache.gpu_memory_utilization, schedule.max_num_seqs, tokens) // size
    if num_slots * size < max_model_len:
        raise CapacityError(
            f"there is room for {num_slots * size:,} tokens of KV cache, but one request may have {max_model_len:,}; "
            f"ask for --max-model-len {max(num_slots, 1) * size} or less, or give the cache more memory."
        )
    return Capacity(num_slots, schedule.max_num_seqs, size, max_model_len, _tiers(spec, prices, cache))


def _tiers(spec: ModelSpec, prices: StepPrices, cache: CacheConfig) -> dict[Tier, int]:
    if cache.kv_offloading_size is None:
        return {}
    asked, usable = cache.kv_offloading_size * 2**30, prices.machine.usable("host")
    if asked > usable:
        raise CapacityError(
            f"kv_offloading_size asks for {cache.kv_offloading_size:g} GiB, but the host of {prices.machine.name} has "
            f"{usable / 2**30:.0f} GiB to give; ask for less."
        )
    return {Tier.HOST: int(asked / (spec.kv.nbytes_per_token() * cache.block_size))}


class Simulation(Generic[TurnT]):
    """One load on one engine, or on several behind a router; `run` it once.

    `spell` gives a turn's tokens: equal prefixes are shared, as equal tokens are. At most `max_concurrency`
    conversations are open at a time, later ones begin when one ends. Turns that are due later than `max_seconds` after
    the first are not sent, and nothing is simulated later than `stop_seconds`. `snapshot_seconds` is the least time
    between two snapshots. `host_seconds` is what a turn of the loop costs the host. Slower tiers are those of
    `capacity`; `links` say how chunks get there (default: the host as the machine of `prices` has it). `policy` makes
    an engine's; it and `phases_apart` are the scheduler's. `routing` says how many engines there are, and who chooses.
    """

    def __init__(
        self,
        load: Load[TurnT],
        spell: Callable[[TurnT], IntArray],
        prices: StepPrices,
        capacity: Capacity,
        schedule: ScheduleConfig,
        *,
        prefix_caching: bool = True,
        max_concurrency: int | None = None,
        max_seconds: float = math.inf,
        stop_seconds: float = math.inf,
        host_seconds: float = 0.0,
        snapshot_seconds: float = 1.0,
        links: Mapping[Tier, LinkModel] | None = None,
        policy: Callable[[], Policy] | None = None,
        phases_apart: bool = False,
        routing: RoutingOptions | None = None,
    ) -> None:
        if not len(load.conversations):
            raise ConfigError("there is nothing to simulate: no conversation fits the context; raise max_model_len.")
        if len(load.conversations) > MAX_SEED:
            raise ConfigError(f"{len(load.conversations)} conversations are too many; at most {MAX_SEED} have a name.")
        self._cost = prices.cost
        first = float(load.arrivals[0])
        self._talks = Talks(load, spell, max_concurrency, first + max_seconds)
        self._stop = first + stop_seconds
        self._snapshot_seconds = snapshot_seconds
        routing = routing or RoutingOptions()
        self.replicas = tuple(
            SimulatedReplica(
                f"r{k}",
                prices,
                capacity,
                schedule,
                prefix_caching=prefix_caching,
                host_seconds=host_seconds,
                links=links,
                policy=policy,
                phases_apart=phases_apart,
            )
            for k in range(routing.replicas)
        )
        number = sum(len(conversation.turns) for conversation in load.conversations)
        models = link_models(prices, capacity) if links is None else links
        self._fleet = Fleet(self.replicas, routing, route_prices(prices, capacity, models), number)
        self._requests: list[SimulatedRequest] = []
        self._running: dict[str, SimulatedRequest] = {}

    def run(self, progress: Callable[[float, int], None] | None = None) -> SimulatedRun:
        """Serve the whole load. `progress` hears the time and the number of finished requests with each snapshot."""
        talks, fleet, replicas = self._talks, self._fleet, self.replicas
        snapshots: list[Snapshot] = []
        now = start = talks.start
        for replica in replicas:
            replica.stand(start)
        busy: list[tuple[float, int]] = []  # a heap of the replicas with work, by their clocks
        idle = set(range(len(replicas)))
        seen = -math.inf
        moment = talks.next(start)
        while True:
            # The one that is behind all others goes on, up to the next thing that happens to all.
            at = busy[0][0] if busy else moment
            if at is None or at >= self._stop:
                break
            push = fleet.next_push
            if moment is not None and moment <= at and moment <= push:
                for due, number, turn in talks.due(moment):
                    k = self._send(due, number, turn)
                    if k in idle:
                        idle.remove(k)
                        replicas[k].stand(moment)
                        heapq.heappush(busy, (replicas[k].now, k))
                moment = talks.next(now)
                continue
            if push <= at:
                fleet.push(push)
                continue
            _, k = heapq.heappop(busy)
            replica = replicas[k]
            until = push if moment is None else min(moment, push)
            outputs = replica.engine.turn(None if until == math.inf else until - replica.now)
            now = replica.now
            for output in outputs:
                if self._deliver(output, now):
                    moment = talks.next(now)
            if replica.engine.has_work():
                heapq.heappush(busy, (now, k))
            else:
                idle.add(k)
            if now >= seen + self._snapshot_seconds:
                seen = now
                snapshots.append(Snapshot(seen, summed([each.engine.stats() for each in replicas])))
                if progress is not None:
                    progress(seen, len(self._requests) - len(self._running))
        stats = []
        for replica in replicas:
            replica.scheduler.check_integrity()
            stats.append(replica.engine.stats())
            replica.engine.close()
        end = max((r.finish for r in self._requests), default=start)
        steps = tuple(tuple(replica.runtime.steps) for replica in replicas)
        return SimulatedRun(
            tuple(self._requests), steps, tuple(snapshots), tuple(stats), start, end, fleet.placements()
        )

    def _send(self, at: float, number: int, turn: int) -> int:
        """Hand a turn over; -> the number of the replica that gets it."""
        prompt, asked, before = self._talks.prompt(number, turn)
        params = SamplingParams(temperature=0.0, max_tokens=asked.output_tokens, seed=number, detokenize=False)
        id = f"{number}.{turn}"
        k = self._fleet.place(id, prompt, number, asked.output_tokens, at)
        request = SimulatedRequest(
            number, turn, at, len(prompt), asked.output_tokens, num_history=max(before - 1, 0), replica=k
        )
        self._requests.append(request)
        self._running[id] = request
        self.replicas[k].engine.add(Request(id, prompt, params, NO_STOPS, asked.output_tokens))
        return k

    def _note_recomputed(self, request: SimulatedRequest) -> None:
        """What of the history was computed before the first token."""
        for start, stop in self.replicas[request.replica].runtime.computed.pop(request.conversation, ()):
            stop = min(stop, request.num_history)
            if start < stop:
                request.num_recomputed += stop - start
                attended = (stop - start) * (start + stop + 1) / 2
                request.recomputed_seconds += self._cost.token_flops * (stop - start) + self._cost.attended * attended

    def _deliver(self, output: StepOutput, now: float) -> bool:
        """Note down who got what; True if somebody ended, after whom others may begin."""
        running = self._running
        for id in output.ids:
            running[id].token_times.append(now)
        for id, count in output.num_cached_tokens.items():
            request = running[id]
            request.num_cached = count
            request.queue_seconds = output.queue_seconds[id]
            self._note_recomputed(request)
            self._fleet.started(id, now)
        for id, (reason, said) in output.finished.items():
            request = running.pop(id)
            # What a suspension cost is no history's.
            self.replicas[request.replica].runtime.computed.pop(request.conversation, None)
            if reason is FinishReason.ERROR:
                request.error = str(said)
            self._fleet.ended(id, len(request.token_times), now)
            self._talks.ended(request.conversation, request.turn, now, request.error is None)
        return bool(output.finished)
