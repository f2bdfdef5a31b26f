"""`cellar simulate`: the real loop, scheduler and KV store, driven by the cost model's clock instead of a device.

Nothing of the deciding side is modelled: requests go through `engine.py`, `schedule/` and `kv/` as they do when a model
runs; only the runtime is `SimulatedRuntime`. So chunks are shared, evicted and recomputed exactly as they would be, if
steps take as long as the planner says.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cellar.core.config import CacheConfig, ScheduleConfig
from cellar.core.errors import CapacityError, ConfigError
from cellar.core.messages import FinishReason, IntArray, Request, SchedulerStats, StepOutput, Tier
from cellar.core.sampling import SamplingParams
from cellar.core.specs import ModelSpec
from cellar.engine.steps import step_engine
from cellar.kv.policy import Policy
from cellar.planner.partition import kv_bytes_per_chip
from cellar.planner.steps import StepPrices, kv_room
from cellar.runtime.protocol import Capacity
from cellar.schedule.steps.scheduler import StepScheduler
from cellar.simulate.link import Link, LinkModel
from cellar.simulate.runtime import MAX_SEED, SimulatedRuntime, StepRecord, generated

NO_STOPS: frozenset[int] = frozenset()


class Turn(Protocol):
    """What a user says, and how many tokens answer it; `think_time` seconds pass before it, after the last answer."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def output_tokens(self) -> int: ...

    @property
    def think_time(self) -> float: ...


TurnT = TypeVar("TurnT", bound=Turn)
TurnT_co = TypeVar("TurnT_co", bound=Turn, covariant=True)


class Conversation(Protocol[TurnT_co]):
    """Turns, each sent with all before it and their answers."""

    @property
    def turns(self) -> Sequence[TurnT_co]: ...


class Load(Protocol[TurnT_co]):
    """Conversation k begins arrivals[k] seconds after the start; arrivals ascend. `bench/workloads.py` makes them."""

    @property
    def conversations(self) -> Sequence[Conversation[TurnT_co]]: ...

    @property
    def arrivals(self) -> NDArray[np.float64]: ...


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
    """What happened. `requests` are in order of arrival, `snapshots` in order of time; `stats` are the last."""

    requests: tuple[SimulatedRequest, ...]
    steps: tuple[StepRecord, ...]
    snapshots: tuple[Snapshot, ...]
    stats: SchedulerStats
    start: float
    end: float

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last token."""
        return self.end - self.start

    @property
    def busy(self) -> float:
        """Share of the duration in which a step ran."""
        return sum(step.end - step.begin for step in self.steps) / self.duration if self.duration else 0.0

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
    """One load on one engine; `run` it once.

    `spell` gives a turn's tokens: equal prefixes are shared, as equal tokens are. At most `max_concurrency`
    conversations are open at a time, later ones begin when one ends. Turns that are due later than `max_seconds` after
    the first are not sent, and nothing is simulated later than `stop_seconds`. `snapshot_seconds` is the least time
    between two snapshots. `host_seconds` is what a turn of the loop costs the host. Slower tiers are those of
    `capacity`; `links` say how chunks get there (default: the host as the machine of `prices` has it). `policy` and
    `phases_apart` are the scheduler's.
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
        policy: Policy | None = None,
        phases_apart: bool = False,
    ) -> None:
        if not len(load.conversations):
            raise ConfigError("there is nothing to simulate: no conversation fits the context; raise max_model_len.")
        if len(load.conversations) > MAX_SEED:
            raise ConfigError(f"{len(load.conversations)} conversations are too many; at most {MAX_SEED} have a name.")
        self._load = load
        self._spell = spell
        self._cost = prices.cost
        models = {tier: LinkModel.of_host(prices.machine) for tier in capacity.tiers} if links is None else links
        d, layout = prices.d, prices.layout
        nbytes = kv_bytes_per_chip(d, layout, 1, capacity.chunk_size, prices.formats)  # each device has a link
        self.links = {tier: Link(model, nbytes, d.layers) for tier, model in models.items()}
        self.runtime = SimulatedRuntime(capacity, prices, host_seconds, self.links)
        self.scheduler = StepScheduler(
            capacity.num_slots,
            capacity.num_rows,
            capacity.chunk_size,
            capacity.max_model_len,
            schedule,
            prefix_caching,
            tiers=capacity.tiers,
            policy=policy,
            phases_apart=phases_apart,
        )
        self.engine = step_engine(
            self.scheduler,
            self.runtime,
            run_ahead=schedule.run_ahead,
            clock=lambda: self.runtime.now,
            check_seconds=600.0,
        )
        self._snapshot_seconds = snapshot_seconds
        self._max_concurrency = max_concurrency or len(load.conversations)
        self._last = float(load.arrivals[0]) + max_seconds
        self._stop = float(load.arrivals[0]) + stop_seconds
        self._requests: list[SimulatedRequest] = []
        self._running: dict[str, SimulatedRequest] = {}
        self._histories: dict[int, IntArray] = {}
        # Turns to come: (moment, conversation, turn). The first turns come from the load, in its order.
        self._due: list[tuple[float, int, int]] = []
        self._started = 0

    def run(self, progress: Callable[[float, int], None] | None = None) -> SimulatedRun:
        """Serve the whole load. `progress` hears the time and the number of finished requests with each snapshot."""
        runtime, engine, running = self.runtime, self.engine, self._running
        snapshots: list[Snapshot] = []
        arrivals = [moment for moment in self._load.arrivals.tolist() if moment <= self._last]
        runtime.now = start = arrivals[0]
        seen = -math.inf
        moment: float | None = start
        while runtime.now < self._stop:
            if moment is not None and moment <= runtime.now:
                self._post(arrivals)
                moment = self._next(arrivals)
            if not engine.has_work():
                if moment is None:
                    break
                runtime.now = moment
                continue
            for output in engine.turn(None if moment is None else moment - runtime.now):
                if self._deliver(output, runtime.now):
                    moment = self._next(arrivals)
            if runtime.now >= seen + self._snapshot_seconds:
                seen = runtime.now
                snapshots.append(Snapshot(seen, engine.stats()))
                if progress is not None:
                    progress(seen, len(self._requests) - len(running))
        engine.scheduler.check_integrity()
        stats = engine.stats()
        engine.close()
        end = max((r.finish for r in self._requests), default=start)
        return SimulatedRun(tuple(self._requests), tuple(runtime.steps), tuple(snapshots), stats, start, end)

    @property
    def _may_open(self) -> bool:
        """True if the next conversation may begin."""
        return len(self._histories) < self._max_concurrency

    def _next(self, arrivals: list[float]) -> float | None:
        """The moment of the next turn that no end of another must come before; None if there is none."""
        moments = [self._due[0][0]] if self._due else []
        if self._started < len(arrivals) and self._may_open:
            moments.append(max(arrivals[self._started], self.runtime.now))
        return min(moments, default=None)

    def _post(self, arrivals: list[float]) -> None:
        """Hand over all turns that are due."""
        now = self.runtime.now
        while self._due and self._due[0][0] <= now:
            self._send(*heapq.heappop(self._due))
        while self._started < len(arrivals) and arrivals[self._started] <= now and self._may_open:
            # What waited for its turn counts from now, as in a client that bounds its concurrency.
            bounded = self._max_concurrency < len(arrivals)
            self._send(now if bounded else arrivals[self._started], self._started, 0)
            self._started += 1

    def _send(self, at: float, number: int, turn: int) -> None:
        turns = self._load.conversations[number].turns
        asked = turns[turn]
        if turn == 0:
            length = sum(t.num_tokens + t.output_tokens for t in turns)
            self._histories[number] = np.empty(length, np.int32)
            before = 0
        else:
            done = turns[:turn]
            before = sum(t.num_tokens + t.output_tokens for t in done)
        history = self._histories[number]
        stop = before + asked.num_tokens
        history[before:stop] = self._spell(asked)
        end = stop + asked.output_tokens
        history[stop:end] = generated(number, stop, end)  # what the runtime is going to answer
        params = SamplingParams(temperature=0.0, max_tokens=asked.output_tokens, seed=number, detokenize=False)
        id = f"{number}.{turn}"
        request = SimulatedRequest(number, turn, at, stop, asked.output_tokens, num_history=max(before - 1, 0))
        self._requests.append(request)
        self._running[id] = request
        self.engine.add(Request(id, history[:stop], params, NO_STOPS, asked.output_tokens))

    def _note_recomputed(self, request: SimulatedRequest) -> None:
        """What of the history was computed before the first token."""
        for start, stop in self.runtime.computed.pop(request.conversation, ()):
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
        for id, (reason, said) in output.finished.items():
            request = running.pop(id)
            self.runtime.computed.pop(request.conversation, None)  # what a suspension cost is no history's
            if reason is FinishReason.ERROR:
                request.error = str(said)
            turns = self._load.conversations[request.conversation].turns
            following = request.turn + 1
            goes_on = following < len(turns) and request.error is None
            due = now + turns[following].think_time if goes_on else 0.0
            if goes_on and due <= self._last:
                heapq.heappush(self._due, (due, request.conversation, following))
            else:
                del self._histories[request.conversation]
        return bool(output.finished)
