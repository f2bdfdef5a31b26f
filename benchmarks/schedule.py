"""Time of the scheduler alone: one plan and one commit of n running decodes, without any runtime.

    python -m benchmarks.schedule [--requests 1 16 1000] [--steps 400] [--aligned] [--chunks 100000] [--prompt 128]

The limits are the project's own: 2 ms with 1,000 requests, 150 us with 16, 80 us with one. With `--chunks` so many lie
in three tiers and memory is short: a plan may take 1 ms; the column "turn" has what comes with it, the commit, deciding
on copies and taking in their results. With `--prompt` one request of so many tokens after another comes, gets one token
and ends, while memory has room (first line) and while it is full of others' chunks: a plan with its request's arrival,
and in the column "turn" the commit as well. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from cellar.core.config import ScheduleConfig
from cellar.core.messages import ChunkLabel, CopyResult, KeptChunk, Request, StepPlan, StepResult, Tier, TierOrder
from cellar.core.sampling import SamplingParams
from cellar.kv.policy import RetentionValue
from cellar.schedule.steps.scheduler import StepScheduler

LIMIT_SECONDS = {1: 80e-6, 16: 150e-6, 1000: 2e-3}
TIERS_LIMIT_SECONDS = 1e-3
CHUNK_SIZE = 32
TALK_CHUNKS = 16
STEP_SECONDS = 0.02
FULL_CHUNKS = 2048
VOCAB = 4096


@dataclass(frozen=True)
class Timing:
    """Seconds of one plan + commit while `requests` decode, or of the plan alone, and then `turn` is the median of all
    that is decided in a step; `limit` is None where the project sets none.
    """

    requests: int
    steps: int
    best: float
    median: float
    p99: float
    limit: float | None
    turn: float | None = None


def measure(requests: int, steps: int, *, aligned: bool = False, seed: int = 0, run_ahead: int = 2) -> Timing:
    """Decode `requests` requests for `steps` steps, `run_ahead` plans in flight, and time each plan + commit.

    Prompts are 16 to 512 tokens, so chunk borders fall on different steps, as they do in use; `aligned` makes
    them equally long, so that all requests cross a border in the same step: the worst case, one step in 32.
    """
    rng = np.random.default_rng(seed)
    lengths = np.full(requests, 250) if aligned else rng.integers(16, 513, requests)
    warm_up = 20
    output = steps + warm_up + run_ahead + 2
    chunks = sum(-(-(int(n) + output) // CHUNK_SIZE) for n in lengths)
    config = ScheduleConfig(max_num_seqs=requests, max_num_batched_tokens=1 << 20, run_ahead=run_ahead)
    scheduler = StepScheduler(2 * chunks + 16, requests, CHUNK_SIZE, 1024 + output, config)
    params = SamplingParams(temperature=0.0, max_tokens=output, seed=0)
    for k, n in enumerate(lengths.tolist()):
        prompt = rng.integers(3, VOCAB, n, dtype=np.int32)
        scheduler.add(Request(f"request-{k}", prompt, params, frozenset({1, 2}), output), now=0.0)
    flying = [_plan(scheduler) for _ in range(run_ahead)]
    seconds: list[float] = []
    for _ in range(steps + warm_up):
        result = _result(flying.pop(0), rng)
        begin = time.perf_counter()
        delivered = scheduler.commit(result, 0.0)
        plan = scheduler.plan(0, 0.0)
        seconds.append(time.perf_counter() - begin)
        if plan is None or len(delivered.ids) != requests or len(plan.spans) != requests:
            raise RuntimeError(f"not all of {requests} requests decode")
        flying.append(plan)
    return _timing(requests, steps, seconds[warm_up:], LIMIT_SECONDS.get(requests))


def _timing(requests: int, steps: int, seconds: list[float], limit: float | None) -> Timing:
    timed = sorted(seconds)
    return Timing(
        requests=requests,
        steps=steps,
        best=timed[0],
        median=statistics.median(timed),
        p99=timed[min(len(timed) - 1, int(0.99 * len(timed)))],
        limit=limit,
    )


def measure_tiers(requests: int, steps: int, chunks: int, *, seed: int = 0, run_ahead: int = 2) -> Timing:
    """A plan with `chunks` chunks of conversations of `TALK_CHUNKS` at rest in device, host and disk.

    What runs and what rests fill the device, so for each chunk that a decode begins another one leaves; each copy's
    result comes with the next step. Plans are timed by processor time, as one in a hundred is asked for.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(16, 513, requests)
    warm_up = 40
    output = steps + warm_up + run_ahead + 2
    begun = sum(-(-int(n) // CHUNK_SIZE) for n in lengths)
    growth = sum(-(-(int(n) + output) // CHUNK_SIZE) for n in lengths) - begun
    shares = {Tier.DEVICE: chunks // 10 + growth, Tier.HOST: 4 * chunks // 10, Tier.DISK: chunks // 2}
    config = ScheduleConfig(max_num_seqs=requests, max_num_batched_tokens=1 << 20, run_ahead=run_ahead)
    scheduler = StepScheduler(
        begun + shares[Tier.DEVICE],
        requests,
        CHUNK_SIZE,
        1024 + output,
        config,
        tiers={Tier.HOST: shares[Tier.HOST] + 64, Tier.DISK: shares[Tier.DISK] + 64},
        policy=RetentionValue({1: 1.0, 1024: 2.0}),
    )
    scheduler.restore({tier: _kept(tier, count, rng) for tier, count in shares.items()}, 0.0)
    params = SamplingParams(temperature=0.0, max_tokens=output, seed=0)
    now = 100.0
    for k, n in enumerate(lengths.tolist()):
        prompt = rng.integers(3, VOCAB, n, dtype=np.int32)
        scheduler.add(Request(f"request-{k}", prompt, params, frozenset({1, 2}), output), now=now)
    flying, copies = [_plan(scheduler) for _ in range(run_ahead)], list[TierOrder]()
    seconds: list[float] = []
    turns: list[float] = []
    moved = 0
    for _ in range(steps + warm_up):
        result = _result(flying.pop(0), rng)
        came = [CopyResult(order.number, np.ones(len(order), np.bool_)) for order in copies]
        moved += sum(map(len, copies))
        now += STEP_SECONDS
        begin = time.perf_counter()
        for copied in came:
            scheduler.commit_copy(copied, now)
        delivered = scheduler.commit(result, now)
        planned = time.thread_time()
        plan = scheduler.plan(0, now)
        seconds.append(time.thread_time() - planned)
        copies = list(scheduler.copies(now))
        turns.append(time.perf_counter() - begin)
        if plan is None or len(delivered.ids) != requests or len(plan.spans) != requests:
            raise RuntimeError(f"not all of {requests} requests decode")
        flying.append(plan)
    if moved < steps:
        raise RuntimeError(f"only {moved} chunks were copied in {steps} steps; memory is not short")
    timing = _timing(requests, steps, seconds[warm_up:], TIERS_LIMIT_SECONDS)
    return replace(timing, turn=statistics.median(turns[warm_up:]))


def measure_prompt(tokens: int, steps: int, *, full: bool, seed: int = 0) -> Timing:
    """Requests that come one after another, of which nothing is found; if `full`, their memory was another's."""
    rng = np.random.default_rng(seed)
    each = -(-(tokens + 1) // CHUNK_SIZE)
    warm_up = FULL_CHUNKS // each + 40 if full else 40
    room = FULL_CHUNKS if full else each * (steps + warm_up)
    config = ScheduleConfig(max_num_seqs=256, max_num_batched_tokens=1 << 20)
    scheduler = StepScheduler(room, 256, CHUNK_SIZE, tokens + 64, config)
    params = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
    seconds: list[float] = []
    turns: list[float] = []
    for k in range(steps + warm_up):
        request = Request(f"request-{k}", rng.integers(3, VOCAB, tokens, dtype=np.int32), params, frozenset({1, 2}), 1)
        begin = time.perf_counter()
        scheduler.add(request, 0.0)
        plan = _plan(scheduler)
        planned = time.perf_counter()
        if scheduler.plan(0, 0.0) is not None:
            raise RuntimeError("a second plan had something to compute")
        result = _result(plan, rng)
        came = time.perf_counter()
        scheduler.commit(result, 0.0)
        seconds.append(planned - begin)
        turns.append(time.perf_counter() - came + planned - begin)
    return replace(_timing(1, steps, seconds[warm_up:], None), turn=statistics.median(turns[warm_up:]))


def _kept(tier: Tier, count: int, rng: np.random.Generator) -> list[KeptChunk]:
    """Chunks of conversations that were active up to 100 s ago."""
    found = []
    parent, age = b"", 0.0
    for slot in range(count):
        place = slot % TALK_CHUNKS
        if not place:
            parent, age = b"root" + bytes([tier]), float(rng.uniform(0, 100))
        identity = rng.bytes(16)
        found.append(KeptChunk(slot, ChunkLabel(identity, parent, (place + 1) * CHUNK_SIZE), age))
        parent = identity
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table and a last line of JSON; 1 if a median is above its limit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedule", description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=sorted(LIMIT_SECONDS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--aligned", action="store_true", help="all requests cross chunk borders together")
    parser.add_argument("--chunks", type=int, help="in three tiers, with memory short")
    parser.add_argument("--prompt", type=int, help="one request of so many tokens after another")
    options = parser.parse_args(argv)
    if options.prompt:
        timings = [measure_prompt(options.prompt, options.steps, full=full) for full in (False, True)]
    elif options.chunks:
        timings = [measure_tiers(count, options.steps, options.chunks) for count in options.requests]
    else:
        timings = [measure(count, options.steps, aligned=options.aligned) for count in options.requests]
    print(f"{'requests':>8}  {'best us':>8}  {'median us':>9}  {'p99 us':>8}  {'limit us':>8}  {'turn us':>8}")
    for t in timings:
        limit = "-" if t.limit is None else f"{t.limit * 1e6:.0f}"
        turn = "-" if t.turn is None else f"{t.turn * 1e6:.0f}"
        print(f"{t.requests:8}  {t.best * 1e6:8.1f}  {t.median * 1e6:9.1f}  {t.p99 * 1e6:8.1f}  {limit:>8}  {turn:>8}")
    print(json.dumps({"benchmark": "schedule", "unit": "s", "timings": [asdict(t) for t in timings]}))
    return int(any(t.limit is not None and t.median > t.limit for t in timings))


def _plan(scheduler: StepScheduler) -> StepPlan:
    plan = scheduler.plan(0, 0.0)
    if plan is None:
        raise RuntimeError("nothing to plan")
    return plan


def _result(plan: StepPlan, rng: np.random.Generator) -> StepResult:
    """A token for every span; none is an end symbol."""
    count = len(plan.spans)
    return StepResult(
        plan.step,
        rng.integers(3, VOCAB, (count, 1), dtype=np.int32),
        np.ones(count, np.int32),
        np.zeros(count, np.int32),
    )


if __name__ == "__main__":
    sys.exit(main())
