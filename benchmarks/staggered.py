"""A model larger than its device with its sequences of one age, or of all ages: tokens a second of both schedules.

    python -m benchmarks.staggered opt-30b --load-format dummy --device cuda --device-memory 16 --host-memory 96

For a zig-zag and a diagonal block (FlexGen §A.2) in the same memory, one engine after the other. A diagonal one begins
with as many sequences of these lengths as its KV has room for, the k-th of n as if it had generated k / n of its tokens
already, and whoever ends makes room for a new one. A zig-zag block has as many of one age, half of the output less half
of the passes, so that its passes are those of the middle of its life; what its prompts take is not counted, while those
of the new ones are. Passes are counted from the first one in which nobody has a part of a prompt. Prints one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from cellar.bench.meter import MeteredRuntime, record
from cellar.core.config import EngineConfig
from cellar.core.messages import Request, StepPlan, StepResult
from cellar.core.sampling import SamplingParams
from cellar.engine.opened import Opened, open_front
from cellar.planner.offload import Job, Schedule
from cellar.planner.passes import decode_seconds, diagonal_seconds, kv_sequences
from cellar.schedule.steps.stagger import Stagger

SCHEDULES = ("zigzag", "diagonal")

TOLD = 16
"""Passes after which it says how far it has come."""


class Step(NamedTuple):
    """When a pass had ended, its tokens, and those that it gave."""

    ended: float
    tokens: int
    sampled: int


@dataclass(frozen=True)
class Block:
    """A run of one schedule: sequences that it began with and that there were at most, counted passes, and rates."""

    planned: int
    most: int
    passes: int
    seconds: float
    tokens: int
    predicted_tokens_per_second: float

    @property
    def tokens_per_second(self) -> float:
        """Of the counted passes."""
        return self.tokens / self.seconds


class Freely(Stagger):
    """A stagger whose first `count` sequences are of all ages already: they begin at once and owe nothing."""

    count = 0

    def may_begin(self, busy: bool) -> bool:
        """Always, for these."""
        return self.count > 0 or super().may_begin(busy)

    def began(self, num_prompt: int, limit: int) -> None:
        """Not charged, for these."""
        if self.count > 0:
            self.count -= 1
        else:
            super().began(num_prompt, limit)


def requests(order: str, rows: int, prompt: int, generate: int, passes: int) -> list[Request]:
    """Those that a block begins with, and of a diagonal one those that follow."""
    ages = [k * generate // rows for k in reversed(range(rows))] + [0] * (rows * passes // generate + 2)
    if order == "zigzag":
        ages = [max(0, (generate - passes) // 2)] * rows
    found = []
    for k, age in enumerate(ages):
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=generate - age, seed=1)
        tokens = np.full(prompt + age, k % 100 + 3, np.int32)
        found.append(Request(str(k), tokens, params, frozenset(), generate - age))
    return found


def run(config: EngineConfig, prompt: int, generate: int, passes: int) -> Block:
    """One schedule. Raises ValueError if the model fits, or its requests end too early."""
    steps: list[Step] = []

    def observe(plan: StepPlan, result: StepResult) -> None:
        found = record(plan, result)
        steps.append(Step(time.perf_counter(), found.num_tokens, found.num_sampled))
        if len(steps) % TOLD == 0:
            print(f"{len(steps)} passes", file=sys.stderr, flush=True)

    opened = open_front(config, wrap=lambda runtime: MeteredRuntime(runtime, observe))
    try:
        return _counted(opened, config.offload.schedule, steps, prompt, generate, passes)
    finally:
        opened.front.engine.close()


def _counted(opened: Opened, order: Schedule, steps: Sequence[Step], prompt: int, generate: int, passes: int) -> Block:
    plan, engine, job = opened.plan, opened.front.engine, Job(prompt, generate)
    if plan is None or plan.limits is None or plan.cost is None:
        raise ValueError("the model fits its device; give it less device memory.")
    kv = plan.placement.num_chunks * opened.spec.kv.chunk_nbytes()
    rows = kv_sequences(opened.spec, plan.limits, kv, job if order == "diagonal" else None)
    stagger = engine.scheduler._prompts._stagger  # type: ignore[attr-defined]
    if stagger is not None:
        stagger.__class__ = Freely
        stagger.count = rows
    for request in requests(order, rows, prompt, generate, passes):
        engine.add(request)
    begun = 0
    while engine.has_work() and (not begun or len(steps) < begun + passes):
        engine.turn(None)
        begun = begun or next((i + 1 for i, step in enumerate(steps) if step.tokens == step.sampled), 0)
    if len(steps) < begun + passes or not begun:
        raise ValueError(f"the {order} block ended after {len(steps)} passes, of which it was filled by {begun}.")
    window = steps[begun : begun + passes]
    if order == "diagonal":
        seconds = diagonal_seconds(plan.cost, job, rows)
    else:
        seconds = decode_seconds(plan.cost, rows, prompt + generate / 2)
    return Block(
        planned=rows,
        most=max(step.sampled for step in window),
        passes=passes,
        seconds=window[-1].ended - steps[begun - 1].ended,
        tokens=sum(step.sampled for step in window),
        predicted_tokens_per_second=rows / seconds,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=None, help="default: the demo model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--device-memory", type=float, required=True)
    parser.add_argument("--host-memory", type=float, default=None)
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=None)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--generate", type=int, default=512)
    parser.add_argument("--passes", type=int, default=64)
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {"prompt": options.prompt, "generate": options.generate}
    for order in options.schedules.split(","):
        config = EngineConfig.of(
            model=options.model,
            load_format=options.load_format,
            dtype=options.dtype,
            quantization=options.quantization,
            device=options.device,
            device_memory=options.device_memory,
            host_memory=options.host_memory,
            kv_cache_memory_bytes=options.kv_cache_memory_bytes,
            schedule=order,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.prompt + options.generate,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )
        block = run(config, options.prompt, options.generate, options.passes)
        found[order] = {**asdict(block), "tokens_per_second": block.tokens_per_second}
        print(order, json.dumps(found[order]), flush=True)
    if all(order in found for order in SCHEDULES):
        found["gain"] = found["diagonal"]["tokens_per_second"] / found["zigzag"]["tokens_per_second"]
        found["block_ratio"] = found["diagonal"]["planned"] / found["zigzag"]["planned"]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
