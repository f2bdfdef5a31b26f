"""What one choice of the affinity router costs: 64 replicas, prompts as long as Mooncake's, 1,000 requests a second.

    python -m benchmarks.routing [--replicas 64] [--rate 1000] [--seconds 20] [--interval 1.0]

Time passes as in a real front: choices, first tokens, ends and reports come in the order of their moments, and each
call is measured by itself, in seconds of the processor, so that other programs on the machine do not count. Digests are
of full tiers: 25,000 chunks on each device, 50,000 in each host.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections.abc import Callable
from itertools import count

import numpy as np

from cellar.core.messages import Outlook, Tier
from cellar.routing.digest import DigestShape
from cellar.routing.prices import LoadPrice, RoutePrices, StepPrice
from cellar.routing.report import Reporter
from cellar.routing.request import RoutedRequest
from cellar.routing.router import AffinityRouter, Choice

CHUNK = 32
SLOTS = {Tier.DEVICE: 25_000, Tier.HOST: 50_000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two reports of a replica")
    parser.add_argument("--mean-chunks", type=float, default=375.0, help="of a prompt")
    args = parser.parse_args()
    random = np.random.default_rng(0)
    prices = RoutePrices(CHUNK, {1: 1e-3, 1 << 17: 4e-3}, {Tier.HOST: LoadPrice(0, 1e-4)}, StepPrice(5e-3, 1e-5, 3e-8))
    shape = DigestShape.of(SLOTS)
    router = AffinityRouter(prices, shape)
    pools = [random.integers(0, 2**63, sum(SLOTS.values())).astype(np.uint64) for _ in range(args.replicas)]
    reporters = [Reporter(f"r{k}", prices, shape) for k in range(args.replicas)]
    seen = [0] * args.replicas
    spent: dict[str, list[float]] = {"choose": [], "first token": [], "end": [], "report": [], "making a report": []}
    nbytes: list[int] = []

    def timed(name: str, call: Callable[[], object]) -> object:
        begun = time.thread_time()
        found = call()
        spent[name].append(time.thread_time() - begun)
        return found

    def push(k: int, now: float) -> None:
        pool = pools[k]
        fresh = random.integers(0, len(pool), 800)  # what some prompts a second write
        pool[fresh] = random.integers(0, 2**63, len(fresh)).astype(np.uint64)
        keys = {Tier.DEVICE: pool[: SLOTS[Tier.DEVICE]], Tier.HOST: pool[SLOTS[Tier.DEVICE] :]}
        outlook = Outlook(np.array([[0, 20_000]], np.int32), 30, 300_000, 0, 500_000, 800_000, keys)
        report = timed("making a report", lambda: reporters[k].report(outlook, {"router": seen[k]}))
        nbytes.append(report.digest.nbytes)  # type: ignore[attr-defined]
        timed("report", lambda: router.report(report, now))  # type: ignore[arg-type]

    events: list[tuple[float, int, Callable[[float], None]]] = []
    order = count()

    def later(at: float, what: Callable[[float], None]) -> None:
        heapq.heappush(events, (at, next(order), what))

    def report(k: int) -> Callable[[float], None]:
        def run(now: float) -> None:
            push(k, now)
            later(now + args.interval, run)

        return run

    def arrive(now: float) -> None:
        length = int(min(random.exponential(args.mean_chunks), 4000)) + 1
        pool = pools[int(random.integers(0, args.replicas))]
        start = int(random.integers(0, len(pool) - length))
        mine = pool[start : start + length // 2].tobytes()  # half of it lies somewhere
        names = [mine[8 * j : 8 * j + 8] + bytes(8) for j in range(length // 2)]
        names += [random.bytes(16) for _ in range(length - length // 2)]
        asked = RoutedRequest(length * CHUNK + 1, tuple(names), random.bytes(8))
        choice = timed("choose", lambda: router.choose(asked, now))
        assert isinstance(choice, Choice)
        number = choice.number
        seen[int(choice.replica[1:])] = number
        later(now + 0.5, lambda at: void(timed("first token", lambda: router.started(number, at))))
        later(now + 4.0, lambda at: void(timed("end", lambda: router.ended(number, 300, at))))
        later(now + float(random.exponential(1 / args.rate)), arrive)

    for k in range(args.replicas):
        push(k, 0.0)
        later(args.interval * k / args.replicas, report(k))
    for name in ("report", "making a report"):
        spent[name].clear()
    nbytes.clear()
    later(0.0, arrive)
    while events[0][0] < args.seconds:
        at, _, what = heapq.heappop(events)
        what(at)

    rows = {}
    for name, parts in spent.items():
        each = np.array(parts) * 1e6
        rows[name] = {"count": len(each), "mean_us": each.mean(), "p50_us": np.median(each)}
        rows[name] |= {"p99_us": np.percentile(each, 99), "max_us": each.max()}
        print(
            f"{name:16} {len(each):7,} calls: mean {each.mean():7.0f}  p50 {np.median(each):7.0f}"
            f"  p99 {np.percentile(each, 99):7.0f}  max {each.max():7.0f} us"
        )
    busy = sum(sum(spent[name]) for name in ("choose", "first token", "end", "report")) / args.seconds
    print(
        f"the router's thread is busy {100 * busy:.0f} % of the time; its tables have {router.nbytes / 2**20:.0f} MiB"
    )
    print(f"a digest has {np.mean(nbytes) / 1024:.0f} KiB on average, {max(nbytes) / 1024:.0f} at most")
    print(
        json.dumps({"calls": rows, "busy": busy, "table_bytes": router.nbytes, "digest_bytes": float(np.mean(nbytes))})
    )


def void(_: object) -> None:
    """Nothing."""


if __name__ == "__main__":
    main()
