"""One client's requests against another's: `python -m tests.hostile.crowding [CASE ...] [--tree FOLDER]`.

A client asks for 8 tokens every 0.2 s, first alone, then while an attack of one case runs; what it felt, and what the
server's processes took, is one line per case: `back` is what each of them has a minute later, as a ratio, and `new_MB`
what those have that were started meanwhile. `back` and `peak_MB` leave out the KV cache, which is promised to the
engine at its start, and whose pages the system hands out when they are first used: `kv_MB` is how much more of it is in
use. `--tree` serves from another checkout, for a figure from before. `--turns` names a file that runs beside each other
share: one at a time has its attack, while the others wait for their memory. `crowds.py` runs all cases so.
The clients share the machine with the server: on a busy one compare ratios within a run.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tests.server.load import children, quantile, resident

ROOT = Path(__file__).parents[2]

PERIOD = 0.2
DEADLINE = 120.0

AMBIGUOUS = "start: s\ns: s s s | s s | T |\nT: /[a-z .]/\n"

LEAST_CACHE = 2**29
"""Bytes of a mapping that is taken for a KV cache: the server here has GiB of it, and nothing else that is as large."""

Attack = tuple[str, dict[str, Any], int]
"""Path, body, and how many clients send it at once."""


def biases(count: int) -> dict[str, float]:
    return {str(token): 0.25 for token in range(1, count + 1)}


def stops(count: int, length: int) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices("abcdefgh", k=length)) for _ in range(count)]


def deep(depth: int) -> Any:
    found: Any = "x"
    for _ in range(depth):
        found = {"a": found}
    return found


def ids(count: int) -> list[int]:
    return [5 + k % 4000 for k in range(count)]


C, H = "/v1/completions", "/v1/chat/completions"
SAY = [{"role": "user", "content": "tell me a story"}]

CASES: dict[str, Callable[[], Attack]] = {
    "biases": lambda: (C, {"prompt": [[5]] * 1000, "n": 128, "max_tokens": 4, "logit_bias": biases(4000)}, 1),
    "biases-256": lambda: (C, {"prompt": [[5]] * 8, "n": 32, "max_tokens": 64, "logit_bias": biases(1000)}, 4),
    "stop-ids": lambda: (C, {"prompt": [5], "n": 128, "max_tokens": 4, "stop_token_ids": ids(10**6)}, 1),
    "sequences": lambda: (C, {"prompt": [[5]] * 1000, "n": 128, "max_tokens": 16}, 1),
    "sequences-many": lambda: (C, {"prompt": [[5]] * 128, "n": 1, "max_tokens": 200, "ignore_eos": True}, 8),
    "rows": lambda: (C, {"prompt": [5], "n": 128, "max_tokens": 1900, "ignore_eos": True}, 4),
    "stops": lambda: (C, {"prompt": [[5]] * 1024, "max_tokens": 4, "stop": stops(16, 512)}, 1),
    "logprobs": lambda: (H, {"messages": SAY, "n": 128, "max_tokens": 64, "logprobs": True, "top_logprobs": 20}, 1),
    "logprobs-stream": lambda: (
        H,
        {"messages": SAY, "n": 128, "max_tokens": 64, "logprobs": True, "top_logprobs": 20, "stream": True},
        1,
    ),
    "scores": lambda: (C, {"prompt": [ids(2000)] * 32, "max_tokens": 1, "prompt_logprobs": 20}, 1),
    "echo": lambda: (C, {"prompt": [ids(2000)] * 32, "max_tokens": 0, "echo": True, "logprobs": 20}, 1),
    "messages": lambda: (H, {"messages": [{"role": "user", "content": "a"}] * 25000, "max_tokens": 1}, 1),
    "tools": lambda: (
        H,
        {
            "messages": SAY,
            "max_tokens": 1,
            "tools": [{"type": "function", "function": {"name": f"f{k}"}} for k in range(10000)],
        },
        1,
    ),
    "metadata": lambda: (C, {"prompt": "a", "max_tokens": 1, "metadata": {str(k): "x" for k in range(70000)}}, 1),
    "deep": lambda: (C, {"prompt": "a", "max_tokens": 1, "metadata": deep(900)}, 4),
    "long-prompts": lambda: (C, {"prompt": [ids(1900)] * 100, "max_tokens": 1}, 1),
    "lists": lambda: (C, {"prompt": [[5]] * 1300000, "max_tokens": 1}, 2),
    "empties": lambda: (H, {"messages": SAY, "max_tokens": 1, "metadata": {"a": [[]] * 2000000}}, 2),
    "tokenize-digits": lambda: ("/tokenize", {"prompt": "1" * 8000000}, 1),
    "tokenize-many": lambda: ("/tokenize", {"prompt": "once upon a time " * 490000}, 8),
    "tokenize": lambda: ("/tokenize", {"prompt": "once upon a time " * 490000}, 1),
    "detokenize": lambda: ("/detokenize", {"tokens": ids(1500000)}, 1),
    "wrong-ids": lambda: (C, {"prompt": [*ids(200000), "x"], "max_tokens": 1}, 1),
    "mask": lambda: (
        C,
        {"prompt": "a", "max_tokens": 400, "min_tokens": 399, "structured_outputs": {"grammar": AMBIGUOUS}},
        1,
    ),
    "masks": lambda: (
        C,
        {"prompt": "a", "n": 32, "max_tokens": 400, "structured_outputs": {"grammar": AMBIGUOUS}},
        4,
    ),
}


@contextmanager
def served(tree: Path, *options: str) -> Iterator[tuple[int, int]]:
    """`cellar serve` with the demo model; process and port. Its conversations have a folder of their own."""
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    command = [sys.executable, "-m", "cellar", "serve", "--port", "0", "--log-level", "error"]
    command += ["--data-dir", folder.name, *options]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tree, env=environment)
    try:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline().split("/v1")[0].rpartition(":")[2])
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
        folder.cleanup()


def post(port: int, path: str, body: bytes, timeout: float) -> Iterator[bytes]:
    """The answer's pieces as they come."""
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        while piece := connection.recv(2**20):
            yield piece


def attack(port: int, path: str, sent: bytes, seconds: float) -> str:
    """Send it until the time is over -> how the last answer began."""
    end, said = time.monotonic() + seconds, ""
    while (left := end - time.monotonic()) > 0:
        begun, status, size = time.monotonic(), b"", 0
        try:
            for piece in post(port, path, sent, left):
                status, size = (status + piece)[:12], size + len(piece)
        except OSError:
            status = status or b"no answer in time"
        said = f"{status.decode(errors='replace')[-3:]} {size / 1e6:.1f} MB {time.monotonic() - begun:.1f} s"
        time.sleep(0.05)
    return said


def attacking(port: int, case: str, seconds: float, pipe: Any) -> None:
    """Say that all is ready, since getting there takes cores from the server, too, and attack when told."""
    path, body, _ = CASES[case]()
    sent = json.dumps(body).encode()
    pipe.send(None)
    pipe.recv()
    pipe.send(attack(port, path, sent, seconds))


def honest(port: int, seconds: float) -> dict[str, Any]:
    """8 tokens every 0.2 s -> seconds of whole answers and of the longest wait for a piece of each, and failures."""
    wholes, gaps, failures, end = [], [], 0, time.monotonic() + seconds
    sent = json.dumps({"prompt": "One day", "max_tokens": 8, "ignore_eos": True, "stream": True}).encode()
    while time.monotonic() < end:
        begun = last = time.monotonic()
        gap, tail = 0.0, b""
        try:
            for piece in post(port, C, sent, DEADLINE):
                now = time.monotonic()
                gap, last, tail = max(gap, now - last), now, (tail + piece)[-400:]
        except OSError:
            tail = b""
        if b"[DONE]" in tail and b'"error":' not in tail:
            wholes.append(last - begun)
            gaps.append(gap)
        else:
            failures += 1
        time.sleep(max(0.0, begun + PERIOD - time.monotonic()))
    wholes, gaps = wholes or [float("inf")], gaps or [float("inf")]
    return {
        "count": len(wholes),
        "p50": quantile(wholes, 0.5),
        "p99": quantile(wholes, 0.99),
        "gap": max(gaps),
        "gap_p99": quantile(gaps, 0.99),
        "failures": failures,
    }


@contextmanager
def turn(file: Path | None) -> Iterator[None]:
    """Wait until nobody else has this file's turn, and have it; without a file at once."""
    with nullcontext() if file is None else file.open("w") as held:
        if held is not None:
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def one(
    tree: Path, case: str, seconds: float, after: float, options: list[str], turns: Path | None = None
) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        attacks = stack.enter_context(ExitStack())
        attacks.enter_context(turn(turns))
        pid, port = stack.enter_context(served(tree, *options))
        honest(port, 2.0)
        before, kv = resident(pid), cached(pid)
        start = sum(before.values())
        quiet = honest(port, 6.0)
        ends = []
        for _ in range(CASES[case]()[2]):
            ours, theirs = context.Pipe()
            process = context.Process(target=attacking, args=(port, case, seconds, theirs), daemon=True)
            process.start()
            ends.append((ours, process))
        watcher_end, theirs = context.Pipe()
        watcher = context.Process(target=watch, args=(pid, seconds, theirs), daemon=True)
        watcher.start()
        for end, _ in (*ends, (watcher_end, watcher)):
            end.recv()
        for end, _ in (*ends, (watcher_end, watcher)):
            end.send(None)
        under = honest(port, seconds)
        said = ends[0][0].recv()
        peak = watcher_end.recv()
        for process in (watcher, *(process for _, process in ends)):
            process.join(10)
        attacks.close()
        time.sleep(after)
        attacks.enter_context(turn(turns))  # that a server ends is felt by others, too
        then, kv_then = resident(pid), cached(pid)
    return {
        "case": case,
        "answer": said,
        "quiet_p99": quiet["p99"],
        "quiet_gap": quiet["gap"],
        **{name: under[name] for name in ("count", "p50", "p99", "gap", "gap_p99", "failures")},
        "peak_MB": (peak - start + sum(kv.values())) / 1e6,
        "back": {
            name: round((then.get(name, 0.0) - kv_then.get(name, 0.0)) / (size - kv.get(name, 0.0)), 3)
            for name, size in before.items()
        },
        "kv_MB": (sum(kv_then.values()) - sum(kv.values())) / 1e6,
        "new_MB": sum(size for name, size in then.items() if name not in before) / 1e6,
    }


def cached(pid: int) -> dict[str, float]:
    """Bytes that a server's processes have of mappings as large as a KV cache is, by the names of `resident`."""
    found: dict[str, float] = {}
    number = 0
    for process in (pid, *children(pid)):
        try:
            command = Path(f"/proc/{process}/cmdline").read_bytes()
            mappings = Path(f"/proc/{process}/smaps").read_text().splitlines()
        except OSError:  # it has ended meanwhile
            continue
        if b"resource_tracker" in command:
            continue
        name = "server" if process == pid else f"child {number}"
        number += 1
        size = 0
        for line in mappings:
            field, _, value = line.partition(":")
            if field == "Size":
                size = int(value.split()[0])
            elif field == "Rss" and size >= LEAST_CACHE // 1024:
                found[name] = found.get(name, 0.0) + 1024.0 * int(value.split()[0])
    return found


def watch(pid: int, seconds: float, pipe: Any) -> None:
    pipe.send(None)
    pipe.recv()
    end, peak = time.monotonic() + seconds, 0.0
    while time.monotonic() < end:
        peak = max(peak, sum(resident(pid).values()) - sum(cached(pid).values()))
        time.sleep(0.1)
    pipe.send(peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--seconds", type=float, default=12.0, help="how long each attack lasts")
    parser.add_argument("--after", type=float, default=60.0, help="seconds until memory is looked at again")
    parser.add_argument("--turns", type=Path, metavar="FILE", help="whose holder alone attacks")
    parser.add_argument("--option", action="append", default=[], help="of cellar serve, as --option=--name=value")
    options = parser.parse_args()
    for case in options.cases or CASES:
        found = one(options.tree.resolve(), case, options.seconds, options.after, options.option, options.turns)
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}), flush=True)


if __name__ == "__main__":
    main()
