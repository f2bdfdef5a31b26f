"""A server whose engine is a process of its own, over the fake device; `python -m` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from cellar.core.config import ScheduleConfig
from cellar.core.errors import CapacityError
from cellar.core.messages import StepPlan, StepResult
from cellar.core.priority import yield_to_engine
from cellar.engine.client import StepClient
from cellar.engine.front import Front
from cellar.engine.opened import Opened
from cellar.engine.steps import step_engine
from cellar.runtime.steps.fake import FakeRuntime
from cellar.runtime.steps.fake.under_way import Pending
from cellar.schedule.steps.scheduler import StepScheduler
from cellar.server.app import build_app
from cellar.server.config import LimitConfig, ServerConfig
from cellar.server.host import ServedModel
from cellar.server.run import serve_by_several
from cellar.server.serving import listen, run
from cellar.server.supervisor import Supervisor
from cellar.server.wire import Ready
from cellar.text.grammar import GrammarCompiler
from cellar.text.masker import Masker, sampled_rows
from tests.fake_front import engine_of, open_fake
from tests.limits import SECONDS, until


def over(opened: Opened, engine: StepClient) -> Opened:
    """The same text over another engine."""
    front = opened.front
    return replace(opened, front=Front(engine, front.reader, front.tokenizer, front.templates))


def open_engine(gate: str | None = None, **fake: Any) -> Opened:
    """What runs in the engine's process. It checks its books whenever work ends: a breach is the end of it.

    It does not start while there is a file `gate`.
    """
    if gate is not None:
        until(lambda: not Path(gate).exists())
    opened, runtime = open_fake(**fake)
    before, tokenizer = engine_of(opened), opened.front.tokenizer
    assert tokenizer is not None
    masker = Masker(GrammarCompiler(tokenizer, tokenizer.vocab_size, (2,)))
    return over(opened, step_engine(before.scheduler, runtime, check_seconds=0.0, masker=masker))


class IdleRuntime(FakeRuntime):
    """A device that costs no time of this machine's: each step lasts `latency`, every token is 3."""

    def submit(self, plan: StepPlan) -> None:
        ready = max(time.monotonic(), self._under_way.pending[-1].ready if self._under_way.pending else 0.0) + float(
            self.latency
        )  # type: ignore[arg-type]
        count = len(sampled_rows(plan))
        ones, tokens = np.ones(count, np.int32), np.full((count, 1), 3, np.int32)
        result = StepResult(plan.step, tokens, ones, np.zeros(count, np.int32))
        with self._signal:
            self._under_way.pending.append(Pending(plan, {}, 0, ready, result))
            self._signal.notify_all()


def open_metered(path: str, **fake: Any) -> Opened:
    """As `open_engine` with wide steps; writes when each step was committed (seconds) and its tokens, a line each."""
    opened = open_fake(**fake)[0]
    capacity = engine_of(opened).runtime.capacity
    scheduler = StepScheduler(
        capacity.num_slots,
        capacity.num_rows,
        capacity.chunk_size,
        capacity.max_model_len,
        ScheduleConfig(max_num_seqs=capacity.num_rows),
    )
    file = open(path, "w", buffering=1 << 16)  # noqa: SIM115 (open as long as the process is)
    commit = scheduler.commit

    def noted(result: Any, now: float) -> Any:
        output = commit(result, now)
        file.write(f"{time.perf_counter()} {len(output.ids)}\n")
        if result.step % 64 == 0:
            file.flush()
        return output

    scheduler.commit = noted  # type: ignore[method-assign]
    return over(opened, step_engine(scheduler, IdleRuntime(capacity, latency=fake["latency"])))


def open_nothing() -> Opened:
    raise CapacityError("there is no room; free some.")


def attach(ready: Ready, engine: StepClient, **fake: Any) -> Opened:
    """The server's side: the same reader and tokenizer over another engine."""
    opened = open_fake(**fake)[0]
    opened.front.engine.close()
    return replace(over(opened, engine), config=ready.config, spec=ready.spec, checkpoint=ready.checkpoint)


def supervise(opener: Any = open_engine, **fake: Any) -> Supervisor:
    """A supervisor over the fake device."""
    return Supervisor(partial(opener, **fake), partial(attach, **fake), first_pause=0.1)


def main() -> None:
    """Options are a JSON object: `fronts`, `replicas`, `limits`, `server`, `gate` and those of `open_fake`."""
    options = json.loads(sys.argv[1])
    count, limits = options.pop("fronts", 1), LimitConfig(**options.pop("limits", {}))
    gate, replicas = options.pop("gate", None), options.pop("replicas", 1)
    server = ServerConfig(port=0, log_level="warning", api_server_count=count, **options.pop("server", {}))
    fake = {"num_rows": 64, "num_slots": 1024, **options}
    if count > 1 or replicas > 1:
        openers, say = [partial(open_engine, gate, **fake)] * replicas, partial(print, flush=True)
        serve_by_several(openers, ("fake",), server, limits, say, partial(attach, **fake), first_pause=0.3)
        return
    host = supervise(**fake)
    app = build_app(host, ServedModel.of(host.opened, ("fake",)), server, limits)
    listener = listen(server.host, 0)
    print(f"fake is served at http://127.0.0.1:{listener.getsockname()[1]}/v1", flush=True)
    yield_to_engine()
    run(app, listener, server, limits)


def started(**options: Any) -> tuple[subprocess.Popen[str], str]:
    """A server as a program, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.server.fake_process", json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    url = process.stdout.readline().rpartition(" at ")[2].strip().removesuffix("/v1")
    assert httpx.get(f"{url}/health", timeout=SECONDS).status_code == 200
    return process, url


def wait_until_refused(url: str) -> None:
    """Until nobody takes new connections any more."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            httpx.get(f"{url}/health", timeout=SECONDS)
        except httpx.TimeoutException:
            raise
        except httpx.TransportError:
            return
        assert time.monotonic() < end, "new connections are still taken"
        time.sleep(0.02)


def children_of(pid: int) -> list[Path]:
    """The processes that a server has started, oldest first: entries of /proc that are there while they live."""
    pids: list[str] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile; so may a process
            pids += (thread / "children").read_text().split()
    found: list[tuple[int, Path]] = []
    for path in (Path(f"/proc/{p}") for p in pids):
        with suppress(OSError):
            begun = int((path / "stat").read_text().rpartition(")")[2].split()[19])  # numbers of processes come again
            found += [(begun, path)] if b"spawn_main" in (path / "cmdline").read_bytes() else []
    return [path for _, path in sorted(found)]


if __name__ == "__main__":
    main()
