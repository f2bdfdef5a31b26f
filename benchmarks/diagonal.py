"""What evenly staggered starts are worth: the real scheduler on the clock of a streamed model's price, both schedules.

    python -m benchmarks.diagonal opt-30b --device-memory 16 --host-memory 96 --prompt 128 --generate 512

For a zig-zag and a diagonal block (FlexGen §A.2) in the same memory: the sequences of a block and the tokens a second
that the planner predicts, and those that the scheduler reaches with many times as many requests, all there at once.
Nothing is computed: a pass lasts as long as the plan's price says. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

import numpy as np

from cellar.core.config import ScheduleConfig
from cellar.core.messages import Request
from cellar.core.sampling import SamplingParams
from cellar.core.specs import ModelSpec
from cellar.engine.steps import step_engine
from cellar.models.registry import open_model, shipped_config
from cellar.planner.capped import Room, capped_plan
from cellar.planner.cost import dimensions
from cellar.planner.machines import h200
from cellar.planner.offload import Job, Schedule
from cellar.planner.partition import BF16
from cellar.planner.rates import Rates
from cellar.planner.saved import Limits, SavedPlan
from cellar.planner.steps import StepPrices
from cellar.runtime.protocol import Capacity
from cellar.schedule.steps.scheduler import StepScheduler
from cellar.simulate.runtime import SimulatedRuntime


@dataclass(frozen=True)
class Reached:
    """A run of the scheduler: sequences that ran at most, passes, tokens a second in all and in its middle half."""

    most: int
    passes: int
    suspended: int
    tokens_per_second: float
    steady_tokens_per_second: float


def planned(
    spec: ModelSpec, room: Room, limits: Limits, job: Job, order: Schedule, rates: Rates | None = None
) -> SavedPlan:
    """The plan of one schedule; without rates with those of an H200."""
    return capped_plan(spec, room, limits, model="model", machine="H200", rates=rates, job=job, order=order)


def reached(plan: SavedPlan, spec: ModelSpec, job: Job, requests: int) -> Reached:
    """So many requests of the job through the real scheduler. A zig-zag block has as many rows as it predicts."""
    assert plan.limits is not None
    assert plan.cost is not None
    assert plan.placement.block is not None
    diagonal = plan.placement.block.order == "diagonal"
    rows = plan.limits.max_num_seqs if diagonal else plan.figures["predicted"]["sequences"]
    tokens = plan.limits.max_num_batched_tokens
    capacity = Capacity(plan.placement.num_chunks, rows, spec.kv.chunk_size, plan.limits.max_model_len)
    prices = StepPrices(dimensions(spec), h200(), BF16)
    prices.cost = plan.cost
    runtime = SimulatedRuntime(capacity, prices)
    config = ScheduleConfig(max_num_seqs=rows, max_num_batched_tokens=tokens, run_ahead=1)
    scheduler = StepScheduler(
        capacity.num_slots, rows, capacity.chunk_size, capacity.max_model_len, config, False, diagonal=diagonal
    )
    engine = step_engine(scheduler, runtime, run_ahead=1, clock=lambda: runtime.now, check_seconds=1e9)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=job.generate, seed=1)
    for k in range(requests):
        prompt = np.full(job.prompt, k % 100 + 3, np.int32)
        engine.add(Request(str(k), prompt, params, frozenset(), job.generate))
    most = 0
    while engine.has_work():
        engine.turn(None)
        most = max(most, scheduler.stats().running)
    steps = runtime.steps
    quarter = len(steps) // 4
    middle = steps[quarter : 3 * quarter]
    steady = sum(step.num_sampled for step in middle) / (middle[-1].end - middle[0].begin)
    whole = requests * job.generate / steps[-1].end
    return Reached(most, len(steps), scheduler.stats().preemptions, whole, steady)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="opt-30b")
    parser.add_argument("--device-memory", type=float, default=16.0)
    parser.add_argument("--host-memory", type=float, default=96.0)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--generate", type=int, default=512)
    parser.add_argument("--requests", type=int, default=600)
    options = parser.parse_args()
    job = Job(options.prompt, options.generate)
    raw = shipped_config(options.model)
    assert raw is not None, f"{options.model} is no config that ships with the package"
    spec = open_model(raw, "bfloat16", 32, job.prompt + job.generate).spec
    room = Room(int(options.device_memory * 2**30), int(options.host_memory * 2**30), 0, None, "gpu")
    limits = Limits(256, 8192, job.prompt + job.generate)
    found: dict[str, object] = {"model": options.model, "prompt": job.prompt, "generate": job.generate}
    rates = []
    for order in ("zigzag", "diagonal"):
        plan = planned(spec, room, limits, job, order)
        run = reached(plan, spec, job, options.requests)
        rates.append((plan.figures["predicted"], run))
        found[order] = {"plan": plan.figures["plan"], "predicted": plan.figures["predicted"], "reached": asdict(run)}
    (before, first), (after, second) = rates
    found["block_ratio"] = after["sequences"] / before["sequences"]
    found["predicted_gain"] = after["tokens_per_second"] / before["tokens_per_second"]
    found["steady_gain"] = second.steady_tokens_per_second / first.steady_tokens_per_second
    found["whole_gain"] = second.tokens_per_second / first.tokens_per_second
    print(json.dumps(found))


if __name__ == "__main__":
    main()
