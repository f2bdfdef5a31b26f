"""What it takes to hand a step's plan to every rank: pipes, as engines do it, against a ring in shared memory.

Real decode plans of a scheduler go to processes that do nothing but say when they had them. Both ways answer over the
same pipes, so the difference is the orders'. A step is begun every few milliseconds, as on a GPU; what a plan takes on
its way is hidden behind the step before it (an engine runs two ahead), what the engine's processor spends is not.

    python -m benchmarks.orders --ranks 2,4,8 --rows 1,64,256
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.synchronize import Semaphore
from queue import Queue, SimpleQueue
from typing import Any

import numpy as np

from cellar.core.config import ScheduleConfig
from cellar.core.messages import Request, StepPlan, StepResult
from cellar.core.sampling import SamplingParams
from cellar.engine.steps import step_engine
from cellar.runtime.protocol import Capacity
from cellar.runtime.ranks import rank as rank_module
from cellar.runtime.ranks.lines import Answer, read, written
from cellar.runtime.ranks.rank import MOST_AT_ONCE as AT_ONCE
from cellar.runtime.ranks.rank import News, Opened, Packed, ProcessRank, obey
from cellar.runtime.steps.fake import FakeRuntime
from cellar.schedule.steps.scheduler import StepScheduler

SLOTS, SLOT_NBYTES = 16, 2**18
LEAST_ROOM = Capacity(1, 1, 16, 32)


class Recorded(FakeRuntime):
    """Keeps the plans that it is given."""

    plans: list[StepPlan]

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        super().submit(plan)


def decode_plan(rows: int) -> StepPlan:
    """A step in which so many rows get a token each."""
    runtime = Recorded(Capacity(rows * 8, rows, 16, 128))
    runtime.plans = []
    config = ScheduleConfig(max_num_seqs=rows, max_num_batched_tokens=max(2048, 32 * rows))
    engine = step_engine(StepScheduler(rows * 8, rows, 16, 128, config), runtime)
    params = SamplingParams(max_tokens=20, seed=0, temperature=0)
    for k in range(rows):
        prompt = np.arange(k, k + 24, dtype=np.int32) % 97
        engine.add(Request(f"r{k}", prompt, params, frozenset(), 20))
    while engine.has_work():
        engine.turn(1.0)
    return next(plan for plan in runtime.plans[8:] if len(plan.spans.row) == rows)


class Sink:
    """A runtime of which every plan is done at once: its seconds are when it came."""

    capacity = LEAST_ROOM
    in_flight = 0

    def __init__(self) -> None:
        self.workers = (self,)
        self._results: SimpleQueue[StepResult | None] = SimpleQueue()

    def submit(self, plan: StepPlan) -> None:
        one = np.ones(1, np.int32)
        self._results.put(StepResult(plan.step, one.reshape(1, 1), one, one, seconds=time.perf_counter()))

    def poll(self, timeout: float | None) -> list[StepResult]:
        found = self._results.get()
        return [] if found is None else [found]

    def close(self) -> None:
        self._results.put(None)


class Ring:
    """Orders in shared memory; a semaphore wakes each rank."""

    def __init__(self, ranks: int) -> None:
        self.memory = SharedMemory(create=True, size=SLOTS * SLOT_NBYTES)
        context = multiprocessing.get_context("spawn")
        self.wakes = [context.Semaphore(0) for _ in range(ranks)]
        self._count = 0

    def send(self, order: Any) -> None:
        """To all ranks; of a size that fits a slot. Nobody is SLOTS behind here, so none is overwritten."""
        packed = written(order)
        at = self._count % SLOTS * SLOT_NBYTES
        buffer = self.memory.buf
        assert buffer is not None
        buffer[at : at + 4] = struct.pack("I", len(packed))
        buffer[at + 4 : at + 4 + len(packed)] = packed
        self._count += 1
        for wake in self.wakes:
            wake.release()


def run_ring_rank(number: int, pipe: Any, name: str, wake: Semaphore) -> None:
    """In a rank's process: obeys what comes round the ring."""
    memory, count = SharedMemory(name), 0
    buffer = memory.buf
    assert buffer is not None

    def order() -> Any:
        nonlocal count
        wake.acquire()
        at = count % SLOTS * SLOT_NBYTES
        count += 1
        (length,) = struct.unpack("I", buffer[at : at + 4])
        return read(bytes(buffer[at + 4 : at + 4 + length]))

    def answer(result: Any) -> None:
        pipe.send_bytes(written(Answer(number, result)))

    pipe.send_bytes(written(Opened(number, LEAST_ROOM)))
    obey(Sink(), order, answer, lambda error: None)  # type: ignore[arg-type]


def measured_all(
    send: Callable[[StepPlan], None], answer: Callable[[], News], plans: dict[int, StepPlan], ranks: int, steps: int,
    gap: float,
) -> dict[int, dict[str, float]]:  # fmt: skip
    """By rows of the plan."""
    return {rows: measured(send, answer, plan, ranks, steps, gap) for rows, plan in plans.items()}


def measured(send: Callable[[StepPlan], None], answer: Callable[[], News], plan: StepPlan, ranks: int, steps: int,
             gap: float) -> dict[str, float]:  # fmt: skip
    """Microseconds of a step: until the last rank has its plan, of the thread that gives orders, of the process."""
    took, mine = [], []
    process = time.process_time()
    for _ in range(steps):
        time.sleep(gap)
        begin, thread = time.perf_counter(), time.thread_time()
        send(plan)
        mine.append((time.thread_time() - thread) * 1e6)
        answers = [answer() for _ in range(ranks)]
        came = [one.result.seconds for one in answers]  # type: ignore[union-attr]
        took.append((max(came) - begin) * 1e6)
    whole = (time.process_time() - process) / steps * 1e6
    tenth = statistics.quantiles(took, n=10)[0]
    return {"median": statistics.median(took), "tenth": tenth, "thread": statistics.median(mine), "process": whole}


def over_pipes(
    plans: dict[int, StepPlan], ranks: int, steps: int, gap: float, *, at_once: bool = True
) -> dict[int, dict[str, float]]:
    """As `RankGroup` does; `at_once` False: every order is written by a thread."""
    rank_module.MOST_AT_ONCE = AT_ONCE if at_once else 0
    news: SimpleQueue[News] = SimpleQueue()
    made = [ProcessRank(k, Sink, news) for k in range(ranks)]  # type: ignore[arg-type]
    for _ in made:
        news.get()

    def send(order: StepPlan) -> None:
        packed = Packed(order)
        for rank in made:
            rank.send(order, packed)

    try:
        return measured_all(send, news.get, plans, ranks, steps, gap)
    finally:
        for rank in made:
            rank.stop()
        for rank in made:
            rank.join(4.0)


def over_ring(plans: dict[int, StepPlan], ranks: int, steps: int, gap: float) -> dict[int, dict[str, float]]:
    """The same through shared memory; answers come over pipes, read by a thread for each."""
    context = multiprocessing.get_context("spawn")
    ring, news = Ring(ranks), Queue[News]()
    processes = []
    for k in range(ranks):
        mine, theirs = context.Pipe()
        process = context.Process(target=run_ring_rank, args=(k, theirs, ring.memory.name, ring.wakes[k]), daemon=True)
        process.start()
        processes.append(process)
        threading.Thread(target=partial(_pass_on, mine, news), daemon=True).start()
    for _ in processes:
        news.get()
    try:
        return measured_all(ring.send, news.get, plans, ranks, steps, gap)
    finally:
        for process in processes:
            process.kill()
            process.join()
        ring.memory.close()
        ring.memory.unlink()


def _pass_on(pipe: Any, news: Queue[News]) -> None:
    try:
        while True:
            news.put(read(pipe.recv_bytes()))
    except (EOFError, OSError):
        return


def packed(plan: StepPlan) -> tuple[int, float, float]:
    """Bytes, and microseconds to make and to read them."""
    data = written(plan)
    begin = time.perf_counter()
    for _ in range(500):
        written(plan)
    middle = time.perf_counter()
    for _ in range(500):
        read(data)
    return len(data), (middle - begin) * 2000, (time.perf_counter() - middle) * 2000


def main(arguments: Sequence[str] | None = None) -> None:
    """A line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--gap", type=float, default=0.0026, help="seconds between steps")
    parser.add_argument("--rounds", type=int, default=2, help="of both ways in turn; the best of each counts")
    given = parser.parse_args(arguments)
    plans = {int(rows): decode_plan(int(rows)) for rows in given.rows.split(",")}
    for rows, plan in plans.items():
        nbytes, make, take = packed(plan)
        print(f"{rows} rows: {nbytes:,} bytes, written in {make:.1f} us, read in {take:.1f} us", flush=True)
    print("ranks rows way    last rank has it (median, tenth)  orders' thread  engine's process   us a step")
    for ranks in (int(count) for count in given.ranks.split(",")):
        found: dict[tuple[int, str], dict[str, float]] = {}
        for _ in range(given.rounds):
            for name, way in (
                ("thread", partial(over_pipes, at_once=False)),
                ("pipes", over_pipes),
                ("ring", over_ring),
            ):
                for rows, now in way(plans, ranks, given.steps, given.gap).items():
                    before = found.get((rows, name), now)
                    found[rows, name] = {key: min(value, before[key]) for key, value in now.items()}
        for (rows, name), figures in found.items():
            print(
                f"{ranks:5} {rows:4} {name:6} {figures['median']:16.0f} {figures['tenth']:8.0f} "
                f"{figures['thread']:20.0f} {figures['process']:17.0f}",
                flush=True,
            )


if __name__ == "__main__":
    from benchmarks.orders import main as run  # a rank's process finds `Sink` there

    run()
