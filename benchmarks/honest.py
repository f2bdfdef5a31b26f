"""Honest speed of one tree against another's, by turns: `python -m benchmarks.honest BEFORE AFTER [--rounds 24]`.

A server and an offline engine of each tree, with the demo model, are up at once; in a round each of them has its turn,
in one order and then in the other. A turn of a server is `--waves` waves of `--streams` streamed answers, one of an
offline engine the first wave's prompts in one call. Prompts are random and nobody's before. Printed are, for tokens a
second over HTTP, offline, and the one by the other, and for the first token's median and p99, the medians of both trees
and the median of the rounds' ratios with the interval that holds it in 19 of 20 such runs; the last line is JSON. For
2 % of p99 that takes hundreds of rounds, which are short with `--no-offline --output 8`. The same tree twice says
whether the interval is to be believed. `taskset -c 0,1` before it keeps all of that on two cores, several pairs of them
beside each other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import comb
from os import environ
from pathlib import Path
from typing import Any

INPUT = 32
"""Tokens of a prompt."""

VOCABULARY = range(5, 4000)
"""Tokens of the demo model that stand for text."""

OFFLINE = """
import json, sys, time
from cellar import LLM, SamplingParams
with LLM() as llm:
    params = SamplingParams(max_tokens={output}, ignore_eos=True, temperature=0.0)
    print("ready", flush=True)
    for line in sys.stdin:
        prompts = [{{"prompt_token_ids": ids}} for ids in json.loads(line)]
        begun = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        print(time.perf_counter() - begun, flush=True)
"""


@dataclass
class Turn:
    """What a tree did in a round."""

    http: float = 0.0  # tokens a second
    offline: float = 0.0
    first: list[float] = field(default_factory=list)  # seconds to each stream's first token

    def figures(self) -> dict[str, float]:
        """By name; more is better for the first three."""
        ordered = sorted(self.first)
        found = {
            "http": self.http,
            "first p50": statistics.median(ordered),
            "first p99": ordered[int(0.99 * len(ordered))],
        }
        return {**found, "offline": self.offline, "http / offline": self.http / self.offline} if self.offline else found


class Stream(asyncio.Protocol):
    """One streamed answer; bytes are looked at as little as can be, since the client shares the server's cores."""

    def __init__(self, request: bytes) -> None:
        self.done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._request = request
        self._first = 0.0
        self._tail = b""

    def connection_made(self, transport: Any) -> None:
        self._begun = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-400:]
        if not self._first and b"data: " in data:
            self._first = time.perf_counter() - self._begun

    def connection_lost(self, error: Exception | None) -> None:
        if b"[DONE]" in self._tail and b'"error":' not in self._tail:
            self.done.set_result(self._first)
        else:
            self.done.set_exception(RuntimeError(f"an answer ended with {self._tail[-200:]!r}"))


class Tree:
    """A checkout's server and offline engine."""

    def __init__(self, folder: Path, port: int, offline: subprocess.Popen[str] | None) -> None:
        self.name = str(folder)
        self._port = port
        self._offline = offline

    def turn(self, waves: Sequence[Sequence[list[int]]], output: int) -> Turn:
        """The server's waves, then the first of them offline."""
        found, tokens = Turn(), sum(len(wave) * output for wave in waves)
        begun = time.perf_counter()
        for wave in waves:
            found.first += asyncio.run(self._wave(wave, output))
        found.http = tokens / (time.perf_counter() - begun)
        if self._offline is not None:
            assert self._offline.stdin is not None
            assert self._offline.stdout is not None
            print(json.dumps(waves[0]), file=self._offline.stdin, flush=True)
            found.offline = len(waves[0]) * output / float(self._offline.stdout.readline())
        return found

    async def _wave(self, prompts: Sequence[list[int]], output: int) -> list[float]:
        loop, streams = asyncio.get_running_loop(), list[Stream]()
        for prompt in prompts:
            body = {"prompt": prompt, "max_tokens": output, "ignore_eos": True, "temperature": 0, "stream": True}
            data = json.dumps(body).encode()
            head = (
                "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
                f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
            )
            stream = Stream(head.encode() + data)
            streams.append(stream)
            await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", self._port)  # type: ignore[misc]
        return list(await asyncio.gather(*(stream.done for stream in streams)))


@contextmanager
def opened(folder: Path, output: int, offline: bool) -> Iterator[Tree]:
    """A tree's server, and its offline engine if wanted, until the end."""
    environment = {**environ, "PYTHONPATH": f"{folder}:{environ.get('PYTHONPATH', '')}"}
    with ExitStack() as stack:
        data = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        command = [sys.executable, "-m", "cellar", "serve", "--port", "0", "--log-level", "error", "--data-dir", data]
        server = stack.enter_context(_process(command, folder, environment))
        assert server.stdout is not None
        port = int(server.stdout.readline().split("/v1")[0].rpartition(":")[2])
        engine = None
        if offline:
            command = [sys.executable, "-c", OFFLINE.format(output=output)]
            engine = stack.enter_context(_process(command, folder, environment))
            assert engine.stdout is not None
            while engine.stdout.readline() != "ready\n":
                if engine.poll() is not None:
                    raise RuntimeError(f"the offline engine of {folder} has ended with status {engine.returncode}")
        yield Tree(folder, port, engine)


@contextmanager
def _process(command: Sequence[str], folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=folder, env=environment, **pipes)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def compare(before: Tree, after: Tree, options: argparse.Namespace) -> list[tuple[Turn, Turn]]:
    """Rounds until there are enough, or the time is over; a first one is not counted."""
    draw, found, end = random.Random(options.seed), list[tuple[Turn, Turn]](), time.monotonic() + options.seconds
    for k in range(options.rounds + 1):
        if time.monotonic() > end:
            break
        waves = [[draw.choices(VOCABULARY, k=INPUT) for _ in range(options.streams)] for _ in range(options.waves)]
        if k % 2:
            second = after.turn(waves, options.output)
            first = before.turn(waves, options.output)
        else:
            first = before.turn(waves, options.output)
            second = after.turn(waves, options.output)
        if k:
            found.append((first, second))
        print(
            f"round {k}: "
            + "; ".join(
                f"{n} {a:.4g}, {b:.4g}"
                for (n, a), b in zip(first.figures().items(), second.figures().values(), strict=True)
            ),
            flush=True,
        )
    return found


def report(rounds: Sequence[tuple[Turn, Turn]]) -> dict[str, dict[str, float]]:
    """Of each figure: medians of both trees, median of the rounds' ratios, and `low` and `high` about it (`around`)."""
    figures = [(first.figures(), second.figures()) for first, second in rounds]
    found = {}
    for name in figures[0][0]:
        ratios = [second[name] / first[name] for first, second in figures]
        low, high = around(ratios)
        found[name] = {
            "before": statistics.median(first[name] for first, _ in figures),
            "after": statistics.median(second[name] for _, second in figures),
            "ratio": statistics.median(ratios),
            "low": low,
            "high": high,
        }
    return found


def around(ratios: Sequence[float]) -> tuple[float, float]:
    """The interval that holds the median of what these are drawn from with 95 % confidence, whatever its shape: each
    of them lies above that median or below it like a coin. Of five or fewer: all of them.
    """
    ordered, count = sorted(ratios), len(ratios)
    outside, unlikely = -1, 0
    while 40 * (unlikely := unlikely + comb(count, outside + 1)) <= 2**count:
        outside += 1
    outside = max(0, outside)
    return ordered[outside], ordered[count - 1 - outside]


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.honest", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round after so many")
    parser.add_argument("--waves", type=int, default=2)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--output", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-offline", dest="offline", action="store_false")
    options = parser.parse_args()
    with ExitStack() as stack:
        before = stack.enter_context(opened(options.before.resolve(), options.output, options.offline))
        after = stack.enter_context(opened(options.after.resolve(), options.output, options.offline))
        rounds = compare(before, after, options)
    if not rounds:
        sys.exit("no round was ended in time; raise --seconds.")
    found = report(rounds)
    print(f"{len(rounds)} rounds; after / before: median (95 % confidence)")
    for name, figure in found.items():
        print(
            f"{name}: {figure['before']:.4g} before, {figure['after']:.4g} after, "
            f"{figure['ratio']:.3f} ({figure['low']:.3f}, {figure['high']:.3f})"
        )
    print(json.dumps({"rounds": len(rounds), "figures": found}))


if __name__ == "__main__":
    main()
