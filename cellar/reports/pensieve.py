"""Pensieve's evaluation (§3.6) simulated: its models, machine, conversations and lines, and one run of each.

What is the paper's: models and devices (table 3.1), 40 GB of KV and 220 GB of host memory per A100, conversations
(table 3.2), Poisson arrivals, exponential thinking, the metric. What is ours: everything that decides, and what a step
costs. vLLM 0.2.0 is represented by what set it apart: nothing is kept, and prompts are computed first, by themselves.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cellar.bench.sharegpt import MAX_CONTEXT, table_conversations
from cellar.bench.workloads import Conversation, Load, Piece, Turn, Vocabulary, gamma_arrivals, with_think_times
from cellar.core.config import ScheduleConfig
from cellar.core.errors import ConfigError
from cellar.core.messages import Tier
from cellar.core.specs import ModelSpec
from cellar.kv.policy import PolicyName, named_policy
from cellar.models.registry import open_model, shipped_config
from cellar.planner.cost import dimensions
from cellar.planner.machines import GB, Machine, a100
from cellar.planner.partition import BF16
from cellar.planner.steps import StepPrices, chunk_costs
from cellar.runtime.protocol import Capacity
from cellar.simulate.link import LinkModel
from cellar.simulate.simulator import Simulation

CHUNK = 32
KV_BYTES, HOST_BYTES = 40 * GB, 220 * GB
"""Of each device (§3.6.1)."""

DUPLEX = 0.81
"""An A100's link loses 18 to 20 % in each direction while both are busy (§3.5.1)."""

MAX_STEP_TOKENS, MAX_SEQS = 8192, 256
HOST_SECONDS = 150e-6


@dataclass(frozen=True)
class Served:
    """A model of table 3.1 and the number of devices that it is served on."""

    name: str
    config: str
    devices: int
    kv_heads: int | None = None

    @cached_property
    def spec(self) -> ModelSpec:
        """With the context of the evaluation; `kv_heads` is the paper's change of Llama 2-13B."""
        config = shipped_config(self.config)
        assert config is not None, "ships with the package"
        if self.kv_heads is not None:
            config = {**config, "num_key_value_heads": self.kv_heads}
        return open_model(config, "float16", CHUNK, None).spec

    @cached_property
    def machine(self) -> Machine:
        """A100s of one host."""
        return a100().with_devices(self.devices)

    @cached_property
    def prices(self) -> StepPrices:
        """Seconds of its steps; tensor parallel over several devices, in the layout that the planner finds fastest."""
        return StepPrices(dimensions(self.spec), self.machine, BF16)

    def slots(self, nbytes: float) -> int:
        """Chunks that `nbytes` of each device hold."""
        return int(nbytes * self.devices / (self.spec.kv.nbytes_per_token() * CHUNK))


MODELS = {
    served.name: served
    for served in (
        Served("OPT-13B", "opt-13b", 1),
        Served("Llama 2-13B", "llama-2-13b", 1, kv_heads=10),
        Served("OPT-66B", "opt-66b", 4),
        Served("Llama 2-70B", "llama-2-70b", 4),
    )
}


@dataclass(frozen=True)
class Line:
    """A way to serve. `policy` None: nothing is kept of a request that has ended."""

    label: str
    policy: PolicyName | None = None
    host: bool = False
    phases_apart: bool = False


LINES = {
    "apart": Line("stateless, phases apart (as vLLM 0.2.0)", phases_apart=True),
    "unified": Line("stateless, unified"),
    "device": Line("device only", "value"),
    "tiers": Line("device and host", "value", host=True),
    "lru": Line("device and host, LRU", "lru", host=True),
    "chance": Line("device and host, learned chances", "chance", host=True),
    "tiers apart": Line("device and host, phases apart", "value", host=True, phases_apart=True),
}


@dataclass(frozen=True)
class Cell:
    """What a curve is of: a model, a way to serve it, seconds of thinking, fewest turns of a conversation, and which of
    all such loads it is (`seed`).
    """

    model: str
    line: str
    think: float = 60.0
    min_turns: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Window:
    """Requests that end in [warm, warm + measured) seconds after the start count."""

    warm: float = 200.0
    measured: float = 300.0

    @property
    def end(self) -> float:
        return self.warm + self.measured


WINDOW = Window()


@dataclass(frozen=True)
class Point:
    """One run. Rates are requests per second, latencies seconds per output token (§3.6.1).

    `hit_share` is how much of the history of returning conversations was found; `recomputed_*` are what was not, in
    tokens and in seconds of the device, per request; `seconds` of a processor are what the simulation took.
    """

    offered: float
    throughput: float
    p50: float
    p90: float
    hit_share: float
    recomputed_tokens: float
    recomputed_seconds: float
    busy: float
    preemptions: int
    num_requests: int
    loaded_chunks: int
    saved_chunks: int
    seconds: float


def conversations(count: int, think: float, min_turns: int, seed: int) -> tuple[Conversation, ...]:
    """Of the paper's statistics; those with fewer turns are left out (§3.6.4)."""
    share = 1.0 if min_turns == 1 else 0.36
    found: list[Conversation] = []
    number = int(count / share)
    while len(found) < count:
        number = int(number * 1.1) + 10
        found = [c for c in table_conversations(number, seed) if len(c.turns) >= min_turns]
    return with_think_times(found[:count], think, seed=seed)


def run(cell: Cell, offered: float, window: Window, costs: Mapping[int, float] | None = None) -> Point:
    """Simulate `offered` requests per second. `costs` are what the policy assumes, instead of the model's own."""
    served, line = MODELS[cell.model], LINES[cell.line]
    load = offered_load(cell, offered, window, cell.seed)
    capacity = Capacity(
        served.slots(KV_BYTES), MAX_SEQS, CHUNK, MAX_CONTEXT, {Tier.HOST: served.slots(HOST_BYTES)} if line.host else {}
    )
    known = chunk_costs(served.prices, CHUNK, MAX_CONTEXT) if costs is None else costs
    simulation: Simulation[Turn] = Simulation(
        load,
        Vocabulary(0, served.spec.vocab_size, cell.seed).tokens,
        served.prices,
        capacity,
        ScheduleConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_STEP_TOKENS),
        prefix_caching=line.policy is not None,
        stop_seconds=window.end,
        host_seconds=HOST_SECONDS,
        links={Tier.HOST: LinkModel.of_host(served.machine, DUPLEX)} if line.host else {},
        policy=lambda: named_policy(line.policy or "lru", known),
        phases_apart=line.phases_apart,
    )
    begun = time.process_time()
    gc.collect()
    gc.freeze()
    try:
        found = simulation.run()
    finally:
        gc.unfreeze()
    begin, end = found.start + window.warm, found.start + window.end
    ended = [r for r in found.requests if len(r.token_times) == r.num_output and begin <= r.finish < end]
    if not ended:
        raise ConfigError("no request ends in the measured window; take a longer one, or a higher rate.")
    latency = np.array([(r.finish - r.arrival) / r.num_output for r in ended])
    history = sum(r.num_history for r in ended)
    moved = found.stats.tiers[1] if line.host else None
    return Point(
        offered=offered,
        throughput=len(ended) / window.measured,
        p50=float(np.percentile(latency, 50)),
        p90=float(np.percentile(latency, 90)),
        hit_share=1.0 - sum(r.num_recomputed for r in ended) / history if history else 0.0,
        recomputed_tokens=float(np.mean([r.num_recomputed for r in ended])),
        recomputed_seconds=float(np.mean([r.recomputed_seconds for r in ended])),
        busy=found.busy,
        preemptions=found.stats.preemptions,
        num_requests=len(ended),
        loaded_chunks=moved.loaded if moved else 0,
        saved_chunks=moved.saved if moved else 0,
        seconds=time.process_time() - begun,
    )


def offered_load(cell: Cell, offered: float, window: Window, seed: int) -> Load:
    """`offered` requests per second from the first minute on: new conversations, and those that are under way already.

    Long conversations last for hours, so a load that begins with none has too few of them for as long. Who is under way
    waits for its user at the start, each wait of each conversation with the same chance; its first prompt brings the
    history, which nobody has seen yet.
    """
    random = np.random.default_rng([seed, *b"under way"])
    made = conversations(4000, cell.think, cell.min_turns, seed)
    turns = np.array([len(c.turns) for c in made])
    rate = offered / float(turns.mean())
    waiting = int(rate * float((turns - 1).mean()) * cell.think)
    picks = random.choice(len(made), waiting, p=(turns - 1) / (turns - 1).sum())
    begun = [_gone_on(made[k], 1 + int(random.integers(turns[k] - 1)), key) for key, k in enumerate(picks.tolist())]
    count = int(rate * window.end) + 1
    fresh = conversations(count, cell.think, cell.min_turns, seed + 1)
    moments = np.concatenate((random.exponential(cell.think, waiting), gamma_arrivals(count, rate, seed=seed)))
    order = np.argsort(moments, kind="stable")
    both = (*begun, *fresh)
    return Load(tuple(both[k] for k in order.tolist()), moments[order])


_HISTORY = 1 << 50
"""Keys from here on are histories of conversations that are under way."""


def _gone_on(conversation: Conversation, turn: int, key: int) -> Conversation:
    """The rest of a conversation from a turn on, which says all that came before."""
    length = conversation.contexts()[turn]
    first = replace(conversation.turns[turn], pieces=(Piece(_HISTORY + key, length),), think_time=0.0)
    return replace(conversation, turns=(first, *conversation.turns[turn + 1 :]))
