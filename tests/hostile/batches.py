"""Batches interrupted, torn and fed with lines of all kinds, from a seed: in the end every line has one result."""

from __future__ import annotations

import errno
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from typer.testing import CliRunner

from cellar.cli.main import build
from cellar.server.batch import BadLine, read_requests
from tests.hostile.mutations import dumped, spoilt, spoilt_bytes

ASKED: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}
SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def line(rng: random.Random, name: str) -> bytes:
    """One line without its end: sound, spoilt in its meaning, or in its bytes."""
    url, body = rng.choice((("/v1/completions", ASKED), ("/v1/chat/completions", SAID)))
    value: Any = {"custom_id": name, "method": "POST", "url": url, "body": body}
    kind = rng.randrange(10)
    if kind >= 6:
        value = spoilt(rng, value)
    data = dumped(value)
    if kind == 5:
        data = spoilt_bytes(rng, data).replace(b"\n", b" ")
    return data


def batch(rng: random.Random) -> bytes:
    """A file: ends of lines of both kinds, blank lines, names that come twice, a mark at its beginning, an open end."""
    lines = [line(rng, f"r{k - (rng.random() < 0.1)}") for k in range(rng.randrange(1, 30))]
    for _ in range(rng.randrange(3)):
        lines.insert(rng.randrange(len(lines) + 1), rng.choice((b"", b"  ", b"\t", b"\xff\xfe", b"\xef\xbb\xbf")))
    end = rng.choice((b"\n", b"\r\n"))
    return rng.choice((b"", b"", b"\xef\xbb\xbf")) + end.join(lines) + rng.choice((end, b""))


def full_after(nbytes: int, output: Path) -> Callable[[int, bytes], int]:
    """A disk with so much room for one file: the last write is a part, and none comes after it."""
    left, write = nbytes, os.write

    def limited(descriptor: int, data: bytes) -> int:
        nonlocal left
        if os.fstat(descriptor).st_ino != output.stat().st_ino:
            return write(descriptor, data)
        if left <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write(descriptor, data[:left])
        left -= count
        return count

    return limited


def interrupted(rng: random.Random, source: Path, output: Path, run: Callable[[Path, Path], Any]) -> str:
    """A run that does not come to its end, or something done to its files afterwards; -> which."""
    match rng.randrange(4):
        case 0:  # as SIGKILL or a lost machine leaves it
            run(source, output)
            data = output.read_bytes()
            output.write_bytes(data[: rng.randrange(len(data) + 1)] + b"\0" * rng.choice((0, 0, 7)))
            return "torn"
        case 1:
            with mock.patch("os.write", full_after(rng.randrange(3000), output)):
                run(source, output)
            return "full"
        case 2:
            run(source, output)
            with source.open("ab") as file:
                file.write(b"\n" + line(rng, f"late{rng.randrange(100)}") + b"\n")
            return "grown"
        case _:
            run(source, output)
            return "whole"


def try_one(seed: int, folder: Path) -> Counter[str]:
    """One batch until it is done; -> what happened to it. The engine is whatever `cellar batch` opens."""
    rng, happened = random.Random(seed), Counter[str]()
    source, output, app = folder / "in.jsonl", folder / "out.jsonl", build()
    source.write_bytes(batch(rng))

    def run(source: Path, output: Path) -> int:
        done = CliRunner().invoke(app, ["batch", str(source), "-o", str(output), "--max-in-flight", "4"])
        assert done.exception is None or isinstance(done.exception, SystemExit), (seed, done.exception)
        assert done.exit_code in (0, 1, 2), (seed, done.output)
        if done.exit_code == 2:
            assert done.stderr.strip().endswith("."), (seed, done.stderr)
        return done.exit_code

    for _ in range(rng.randrange(4)):
        happened[interrupted(rng, source, output, run)] += 1
    ended = run(source, output)
    assert ended in (0, 1), (seed, ended)
    records = [json.loads(data) for data in output.read_bytes().splitlines()]
    answered = Counter(record["custom_id"] for record in records if record["response"] is not None)
    told = Counter(record["error"]["line"] for record in records if record["response"] is None)
    for one in read_requests(source):
        if isinstance(one, BadLine):
            assert told[one.line] >= 1, (seed, one)
            happened[one.code] += 1
        else:
            assert answered[one.custom_id] == 1, (seed, one)
    statuses = Counter(record["response"]["status_code"] for record in records if record["response"] is not None)
    assert statuses.keys() <= {200, 400, 404}, (seed, statuses)
    happened.update({str(status): count for status, count in statuses.items()})
    return happened
