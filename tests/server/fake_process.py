"""A server whose engine is a process of its own, over the fake device; `python -m` runs it."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import numpy as np

from cellar.core.config import ScheduleConfig
from cellar.core.errors import CapacityError
from cellar.core.messages import StepPlan, StepResult
from cellar.engine import Engine
from cellar.front import Front, Opened
from cellar.runtime.fake import FakeRuntime, _Pending
from cellar.schedule.steps import StepScheduler
from cellar.server.app import build_app
from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.host import ServedModel
from cellar.server.remote import Ready
from cellar.server.run import listen, run
from cellar.server.supervisor import Supervisor
from cellar.text.masker import sampled_rows
from tests.fake_front import open_fake


def open_engine(**fake: Any) -> Opened:
    """What runs in the engine's process."""
    return open_fake(**fake)[0]


class IdleRuntime(FakeRuntime):
    """A device that costs no time of this machine's: each step lasts `latency`, every token is 3."""

    def submit(self, plan: StepPlan) -> None:
        ready = max(time.monotonic(), self._pending[-1].ready if self._pending else 0.0) + float(self.latency)  # type: ignore[arg-type]
        count = len(sampled_rows(plan))
        ones, tokens = np.ones(count, np.int32), np.full((count, 1), 3, np.int32)
        result = StepResult(plan.step, tokens, ones, np.zeros(count, np.int32))
        with self._signal:
            self._pending.append(_Pending(plan, {}, 0, ready, result))
            self._signal.notify_all()


def open_metered(path: str, **fake: Any) -> Opened:
    """As `open_engine` with wide steps; writes when each step was committed (seconds) and its tokens, a line each."""
    opened = open_fake(**fake)[0]
    capacity = opened.front.engine.runtime.capacity
    opened.front.engine.runtime = IdleRuntime(capacity, latency=fake["latency"])
    opened.front.engine.scheduler = StepScheduler(
        capacity.num_slots,
        capacity.num_rows,
        capacity.chunk_size,
        capacity.max_model_len,
        ScheduleConfig(max_num_seqs=capacity.num_rows),
    )
    file = open(path, "w", buffering=1 << 16)  # noqa: SIM115 (open as long as the process is)
    engine = opened.front.engine
    commit = engine.scheduler.commit

    def noted(result: Any, now: float) -> Any:
        output = commit(result, now)
        file.write(f"{time.perf_counter()} {len(output.ids)}\n")
        if result.step % 64 == 0:
            file.flush()
        return output

    engine.scheduler.commit = noted  # type: ignore[method-assign]
    return opened


def open_nothing() -> Opened:
    raise CapacityError("there is no room; free some.")


def attach(ready: Ready, engine: Engine[StepPlan], **fake: Any) -> Opened:
    """The server's side: the same reader and tokenizer over another engine."""
    opened = open_fake(**fake)[0]
    opened.front.engine.close()
    front = Front(engine, opened.front.reader, opened.front.tokenizer, opened.front.templates)
    return Opened(front, ready.config, ready.spec, ready.checkpoint)


def supervise(opener: Any = open_engine, **fake: Any) -> Supervisor:
    """A supervisor over the fake device."""
    return Supervisor(partial(opener, **fake), partial(attach, **fake), first_pause=0.1)


def main() -> None:
    latency, timeout = float(sys.argv[1]), float(sys.argv[2])
    limits = LimitConfig(shutdown_timeout=timeout)
    server = ServerConfig(port=0, log_level="warning")
    host = supervise(latency=latency, num_rows=64, num_slots=1024)
    app = build_app(host, ServedModel.of(host.opened, ("fake",)), server, limits)
    listener = listen(server.host, 0)
    print(listener.getsockname()[1], flush=True)
    run(app, listener, server, limits)


if __name__ == "__main__":
    main()
