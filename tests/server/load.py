"""Load on a server, and what it does to the engine: `python -m tests.server.load steps|memory|waiting|structured`.

The figures of docs/performance/server.md come from here. The clients are cheap (bytes are counted, not parsed) and run
at the lowest priority, because they share the machine with the server that they measure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]


@dataclass
class Answer(asyncio.Protocol):
    """One streamed answer: when its bytes came (seconds of `perf_counter`), and whether it ended well."""

    path: str
    body: dict[str, Any]
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    nbytes: int = 0
    tail: bytes = b""
    head: bytes = b""
    done: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def connection_made(self, transport: Any) -> None:
        data = json.dumps(self.body).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        self.transport = transport
        self.sent = time.perf_counter()
        transport.write(head.encode() + data)

    def data_received(self, data: bytes) -> None:
        self.times.append(time.perf_counter())
        if not self.nbytes:
            self.head = data[:16]
        self.nbytes += len(data)
        self.tail = (self.tail + data)[-400:]

    def connection_lost(self, error: Exception | None) -> None:
        ok = error is None and b" 200 " in self.head and b"[DONE]" in self.tail and b'"error":' not in self.tail
        if not self.done.done():
            self.done.set_result(ok)


async def ask(port: int, body: dict[str, Any], path: str = "/v1/completions") -> Answer:
    """Send a request; `await answer.done` waits for its end."""
    loop = asyncio.get_running_loop()
    _, answer = await loop.create_connection(lambda: Answer(path, {**body, "stream": True}), "127.0.0.1", port)
    return answer


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# -- steps: the engine's own period, with and without streams ------------------------------------


def metered(path: str, fronts: int, pipe: Any) -> None:
    """In a process: a server over a fake device that steps every 20 ms."""
    from cellar.core.priority import yield_to_engine
    from cellar.server.app import build_app
    from cellar.server.config import LimitConfig, ServerConfig
    from cellar.server.host import ServedModel
    from cellar.server.run import serve_by_several
    from cellar.server.serving import listen, run
    from tests.server.fake_process import attach, open_metered, supervise

    fake = {"latency": 0.02, "num_rows": 300, "num_slots": 80000, "max_model_len": 65536}
    opener, server, limits = partial(open_metered, path), ServerConfig(port=0, log_level="error"), LimitConfig()

    def say(line: str) -> None:
        pipe.send(int(line.split("/v1")[0].rpartition(":")[2]))

    if fronts > 1:
        server = replace(server, api_server_count=fronts)
        serve_by_several([partial(opener, **fake)], ("fake",), server, limits, say, partial(attach, **fake))
        return
    host = supervise(opener, **fake)
    app = build_app(host, ServedModel.of(host.opened, ("fake",)), server, limits)
    listener = listen("127.0.0.1", 0)
    yield_to_engine()
    say(f":{listener.getsockname()[1]}/v1")
    run(app, listener, server, limits)


async def waves(port: int, streams: int, rounds: int, seconds: float) -> int:
    """One stream all the time, and `streams` more in every other window; -> answers that ended badly."""
    body = {"prompt": [5, 6, 7], "ignore_eos": True}
    lone = await ask(port, {**body, "max_tokens": 60000})
    bad = 0
    await asyncio.sleep(1)
    for _ in range(rounds):
        await asyncio.sleep(seconds)
        answers = [await ask(port, {**body, "max_tokens": int(seconds / 0.02)}) for _ in range(streams)]
        bad += sum([not await answer.done for answer in answers])
    lone.transport.abort()
    return bad


def steps(options: argparse.Namespace) -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/steps"
        server = context.Process(target=metered, args=(path, options.fronts, theirs))
        server.start()
        port = mine.recv()
        os.nice(19)
        before = cpu_seconds(server.pid)
        bad = asyncio.run(waves(port, options.streams, options.rounds, options.seconds))
        print({name: round(b - before.get(name, 0), 2) for name, b in cpu_seconds(server.pid).items()})
        server.terminate()
        server.join(SECONDS)
        rows = [tuple(map(float, line.split())) for line in Path(path).read_text().splitlines()[:-1]]
    periods: dict[bool, list[float]] = {False: [], True: []}
    for (a, n), (b, m) in pairwise(rows):
        if n == m and (m == 1 or m == options.streams + 1):
            periods[m > 1].append((b - a) * 1e3)
    alone, beside = periods[False], periods[True]
    report = {"bad": bad}
    for name, found in (("alone", alone), ("streams", beside)):
        report[name] = {"n": len(found), "median": statistics.median(found), "p99": quantile(found, 0.99)}
    report["median_ratio"] = statistics.median(beside) / statistics.median(alone)
    report["p99_ratio"] = quantile(beside, 0.99) / quantile(alone, 0.99)
    report["p99_over_20ms"] = quantile(beside, 0.99) / 20
    print(json.dumps(report, indent=1))


# -- the demo model as users serve it ----------------------------------------------------------------


@contextmanager
def served(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`cellar serve` with the demo model; its process and port."""
    command = [sys.executable, "-m", "cellar", "serve", "--port", "0", "--log-level", "error", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline().split("/v1")[0].rpartition(":")[2])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


PROMPT = "Once upon a time there was a little girl who lived in a house near the {place}. One day"


async def crowd(port: int, count: int, seconds: float, tokens: int, each_second: Any) -> dict[str, Any]:
    """`count` streams at any time, for so long; each that ends makes room for another."""
    end, total, bad = time.perf_counter() + seconds, 0, 0
    first: list[float] = []

    async def client(k: int) -> None:
        nonlocal total, bad
        turn = 0
        while time.perf_counter() < end:
            turn += 1
            body = {"prompt": PROMPT.format(place=f"place {k} {turn}"), "max_tokens": tokens, "ignore_eos": True}
            answer = await ask(port, body)
            ok = await answer.done
            total += 1
            bad += not ok
            if answer.times:
                first.append(answer.times[0] - answer.sent)

    async def watch() -> None:
        started = time.perf_counter()
        while time.perf_counter() < end:
            each_second(time.perf_counter() - started)
            await asyncio.sleep(1)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(client(k) for k in range(count)))
    await watching
    return {"answers": total, "errors": bad, "first_byte_median": statistics.median(first)}


def memory(options: argparse.Namespace) -> None:
    """Resident memory of each process while `--streams` run for `--seconds`."""
    extra = ["--api-server-count", str(options.fronts), "--kv-cache-memory-bytes", str(options.cache)]
    with served("--num-threads", "1", *extra) as (process, port):
        os.nice(10)
        found: dict[str, list[float]] = {}
        times: list[float] = []

        def look(now: float) -> None:
            times.append(now)
            for name, nbytes in resident(process.pid).items():
                found.setdefault(name, []).append(nbytes)

        report = asyncio.run(crowd(port, options.streams, options.seconds + 1, options.tokens, look))
    for name, sizes in found.items():
        early = [size for now, size in zip(times, sizes, strict=True) if 10 <= now < 15]
        late = sizes[-5:]
        report[name] = {
            "MiB": [round(size / 2**20) for size in sizes[:: max(1, len(sizes) // 12)]],
            "mean": f"{statistics.mean(early) / 2**20:.1f} to {statistics.mean(late) / 2**20:.1f} MiB",
            "growth": f"{statistics.mean(late) / statistics.mean(early) - 1:+.2%}",
            "growth of the largest": f"{max(late) / max(early) - 1:+.2%}",
        }
    print(json.dumps(report))


SCHEMA = {
    "type": "array",
    "minItems": 50,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "kind": {"enum": ["boy", "girl", "dog", "cat"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
}


def gaps(answers: list[Answer]) -> list[float]:
    """Milliseconds between the pieces of each answer, without the first few."""
    return [(b - a) * 1e3 for answer in answers for a, b in pairwise(answer.times[3:])]


async def neighbours(port: int, plain: int, others: int, rounds: int, tokens: int) -> dict[str, Any]:
    """Gaps between tokens of `plain` streams: alone, beside `others` plain ones, beside as many structured ones.

    The three take turns, in this order and in the other one. No two streams of the whole run have the same seed: those
    that had would write the same text.
    """
    base = {"prompt": PROMPT.format(place="sea"), "max_tokens": tokens, "ignore_eos": True}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    kinds: dict[str, list[dict[str, Any]]] = {
        "alone": [],
        "beside plain ones": [base] * others,
        "beside structured ones": [{**base, "response_format": wanted}] * others,
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    by_round: dict[str, list[float]] = {name: [] for name in kinds}
    seeds = count()
    for turn in range(rounds + 1):  # the first is for warming up: grammars, caches
        for name, bodies in sorted(kinds.items(), reverse=bool(turn % 2)):
            beside = [await ask(port, {**body, "max_tokens": 2 * tokens, "seed": next(seeds)}) for body in bodies]
            while not all(answer.times for answer in beside):
                await asyncio.sleep(0.01)
            mine = [await ask(port, {**base, "seed": next(seeds)}) for _ in range(plain)]
            for answer in mine:
                assert await answer.done
            if turn:
                found[name] += gaps(mine)
                by_round[name].append(statistics.median(gaps(mine)))
            for answer in beside:
                answer.transport.abort()
            await asyncio.sleep(0.3)
    report: dict[str, Any] = {
        name: {"median": round(statistics.median(times), 3), "p99": round(quantile(times, 0.99), 3), "gaps": len(times)}
        for name, times in found.items()
    }
    plain_ones, structured_ones = by_round["beside plain ones"], by_round["beside structured ones"]
    report["ratio of each round"] = [round(b / a, 3) for a, b in zip(plain_ones, structured_ones, strict=True)]
    return report


def structured(options: argparse.Namespace) -> None:
    """Whether structured requests slow the plain ones beside them."""
    with served("--num-threads", "1") as (_, port):
        report = asyncio.run(neighbours(port, options.plain, options.others, options.rounds, options.tokens))
    report["ratio of medians"] = round(
        report["beside structured ones"]["median"] / report["beside plain ones"]["median"], 3
    )
    print(json.dumps(report))


async def queue(port: int, wait: int, rounds: int) -> dict[str, Any]:
    """How long a request's first byte takes while `wait` others stand before it, and what else the server answers."""
    first, health = list[float](), list[float]()
    for turn in range(rounds):
        body = {"max_tokens": 32, "ignore_eos": True}
        crowd = [await ask(port, {**body, "prompt": PROMPT.format(place=f"{turn} {k}")}) for k in range(wait + 8)]
        late = await ask(port, {**body, "prompt": PROMPT.format(place=f"{turn} late"), "max_tokens": 4})
        started = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        await reader.read()
        health.append(time.perf_counter() - started)
        writer.close()
        assert await late.done
        first.append(late.times[0] - late.sent)
        assert all([await answer.done for answer in crowd])
    return {"first_byte": [round(x, 3) for x in first], "health": [round(x, 4) for x in health]}


def waiting(options: argparse.Namespace) -> None:
    """Time to first byte of a request while others wait: with 8 rows it waits its turn, with 256 for its share."""
    for rows in (8, 256):
        with served("--num-threads", "1", "--max-num-seqs", str(rows)) as (_, port):
            report = asyncio.run(queue(port, options.wait, options.rounds))
        print(rows, "rows:", json.dumps(report))


def resident(pid: int) -> dict[str, float]:
    """Bytes of a server's processes by what they are."""
    found = {}
    for p in (pid, *children(pid)):
        try:
            line = Path(f"/proc/{p}/cmdline").read_bytes()
            pages = int(Path(f"/proc/{p}/statm").read_text().split()[1])
        except OSError:  # it has ended meanwhile
            continue
        if b"resource_tracker" not in line:
            name = "server" if p == pid else f"child {len(found)}"
            found[name] = float(pages * os.sysconf("SC_PAGE_SIZE"))
    return found


def children(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have; none of a process or thread that has ended."""
    found = list[int]()
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return sorted(found + [grand for child in found for grand in children(child)])


def cpu_seconds(pid: int) -> dict[str, float]:
    """CPU time of a process and its descendants."""
    found = {}
    for p in (pid, *children(pid)):
        fields = Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()
        found[str(p)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and servers end, too
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("steps")
    verb.add_argument("--fronts", type=int, default=1)
    verb.add_argument("--streams", type=int, default=256)
    verb.add_argument("--rounds", type=int, default=4)
    verb.add_argument("--seconds", type=float, default=5)
    verb.set_defaults(call=steps)
    verb = verbs.add_parser("memory")
    verb.add_argument("--fronts", type=int, default=1)
    verb.add_argument("--streams", type=int, default=256)
    verb.add_argument("--seconds", type=float, default=60)
    verb.add_argument("--tokens", type=int, default=24)
    verb.add_argument("--cache", type=int, default=64 * 2**20)
    verb.set_defaults(call=memory)
    verb = verbs.add_parser("structured")
    verb.add_argument("--plain", type=int, default=8)
    verb.add_argument("--others", type=int, default=8)
    verb.add_argument("--rounds", type=int, default=6)
    verb.add_argument("--tokens", type=int, default=128)
    verb.set_defaults(call=structured)
    verb = verbs.add_parser("waiting")
    verb.add_argument("--wait", type=int, default=200)
    verb.add_argument("--rounds", type=int, default=3)
    verb.set_defaults(call=waiting)
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
