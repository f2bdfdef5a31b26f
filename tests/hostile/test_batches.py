"""Batches that are interrupted, torn, or fed with what nobody should send: nothing is lost, and nothing of others."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import cellar.engine.opened
from cellar.server.batch import MOST_BYTES, BatchRequest, ResultFile, _Lines
from tests.cli.test_batch import ROOT, by_id, no_profile, open_for_batch, request, results, run, write
from tests.hostile.batches import try_one
from tests.limits import SECONDS

__all__ = ["no_profile"]  # a fixture of every test here, too


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cellar.engine.opened, "open_front", lambda config, wrap: open_for_batch(config))


@pytest.mark.parametrize("seed", [1, 2, pytest.param(100, marks=pytest.mark.long)])
def test_random_batches_come_to_their_end(tmp_path: Path, seed: int) -> None:
    happened = Counter[str]()
    for k in range(seed, seed + (12 if seed == 100 else 1)):
        folder = tmp_path / str(k)
        folder.mkdir()
        happened += try_one(k, folder)
    assert happened["200"] > 0


def test_a_custom_id_that_asks_for_something_else_is_not_done(tmp_path: Path) -> None:
    """It was counted as done before, and its request was never sent."""
    source, output = write(tmp_path / "in.jsonl", [request("a"), request("b")]), tmp_path / "out.jsonl"
    assert run(source, output).exit_code == 0
    same = {key: request("a")[key] for key in ("url", "body", "method", "custom_id")}
    write(source, [same, request("b"), request("c")])
    assert "1 succeeded, 0 failed, 2 were done before" in run(source, output).stdout, "the order of keys says nothing"
    kept = output.read_bytes()
    write(source, [request("a", max_tokens=7), request("d")])
    done = run(source, output)
    assert done.exit_code == 2
    assert "line 1 asks for something else" in done.stderr
    assert output.read_bytes() == kept


def test_results_of_earlier_versions_count(tmp_path: Path) -> None:
    """Their ids were random and say nothing of what was asked."""
    source, output = write(tmp_path / "in.jsonl", [request("a"), request("b")]), tmp_path / "out.jsonl"
    response = {"status_code": 200, "request_id": "", "body": {}}
    old = {"id": "batch_req_0f8fad5bd9cb469fa16570867728950e", "custom_id": "a", "response": response, "error": None}
    write(output, [old])
    assert "1 succeeded, 0 failed, 1 were done before" in run(source, output).stdout


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a line, and the next one behind it once there is room again, could not be read any more."""
    output, record = tmp_path / "out.jsonl", {"id": "batch_req_x", "custom_id": "a", "response": {"status_code": 200}}
    write_to, room = os.write, [60]

    def limited(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        count = write_to(descriptor, data[: room[0]])
        room[0] -= count
        return count

    monkeypatch.setattr("os.write", limited)
    with ResultFile(output) as file:
        with pytest.raises(Exception, match="No space left"):
            file.append(record)
        room[0] = 10_000
        with pytest.raises(Exception, match="run the same command again"):
            file.append(record)
    assert output.read_bytes() == b""


def test_an_output_that_is_deleted_meanwhile_ends_the_batch(tmp_path: Path) -> None:
    with ResultFile(tmp_path / "out.jsonl") as file:
        file.append({"id": "x"})
        (tmp_path / "other").write_text("")
        (tmp_path / "other").replace(tmp_path / "out.jsonl")
        with pytest.raises(Exception, match="deleted or replaced"):
            file.append({"id": "y"})
    assert (tmp_path / "out.jsonl").read_text() == ""


@pytest.mark.parametrize("tail", [b"\0" * 100, b'{"id":"batch_req_4' + b"\0" * 50])
def test_zeros_where_a_line_should_be(tmp_path: Path, tail: bytes) -> None:
    """What some file systems leave of the last lines when the machine loses its power."""
    source, output = write(tmp_path / "in.jsonl", [request("a"), request("b")]), tmp_path / "out.jsonl"
    run(write(tmp_path / "part.jsonl", [request("a")]), output)
    whole = output.read_bytes()
    output.write_bytes(whole + tail)
    assert "1 succeeded, 0 failed, 1 were done before" in run(source, output).stdout
    assert output.read_bytes().startswith(whole)
    assert set(by_id(output)) == {"a", "b"}


@pytest.mark.parametrize(
    "text", ["[" * 100_000 + "\n", '{"response": {"status_code": []}}\n', '{"response": 5, "id": "x"}\n', "null\n"]
)
def test_foreign_outputs_are_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    source, output = write(tmp_path / "in.jsonl", [request("a")]), tmp_path / "out.jsonl"
    output.write_text(text)
    done = run(source, output)
    assert done.exit_code == 2
    assert "line 1 of" in done.stderr
    assert output.read_text() == text


def test_a_pipe_is_no_batch(tmp_path: Path) -> None:
    """It would be empty when it is read again: "0 succeeded", and exit code 0."""
    os.mkfifo(tmp_path / "in")
    done = run(tmp_path / "in", tmp_path / "out.jsonl")
    assert done.exit_code == 2
    assert "not a pipe" in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("depth", [400, 900, 950, 970, 990, 5000])
def test_deep_bodies_fail_alone(tmp_path: Path, depth: int) -> None:
    """Some can be read where they cannot be written: the calls around differ."""
    deep: Any = "x"
    for _ in range(min(depth, 900)):
        deep = [deep]
    text = json.dumps(request("deep", metadata={"a": deep})).replace(
        '"x"', "[" * (depth - 900) + '"x"' + "]" * (depth - 900)
    )
    done = run(write(tmp_path / "in.jsonl", [text, request("b")]), tmp_path / "out.jsonl")
    assert done.exit_code in (0, 1), (done.output, done.exception)
    assert by_id(tmp_path / "out.jsonl")["b"]["status_code"] == 200
    assert len(results(tmp_path / "out.jsonl")) == 2


def test_long_lines_take_turns() -> None:
    size = MOST_BYTES // 2 + 1
    lines = _Lines(BatchRequest(k, str(k), "/v1/completions", {}, size) for k in range(5))
    at_once = most = 0

    async def work() -> None:
        nonlocal at_once, most
        while True:
            async with lines.following() as line:
                if line is None:
                    return
                at_once += 1
                most = max(most, at_once)
                await asyncio.sleep(0.001)
                at_once -= 1

    async def all_of_them() -> None:
        await asyncio.gather(*(work() for _ in range(8)))

    asyncio.run(all_of_them())
    assert most == 2


@pytest.mark.long
def test_lines_of_a_hundred_megabytes(tmp_path: Path) -> None:
    """Each is answered, one after the other."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with source.open("w") as file:
        for k in range(2):
            line = request(str(k), prompt="x", metadata={"text": "y" * 10**8})
            file.write(json.dumps(line) + "\n")
    code = "from tests.cli.test_batch import _OVER_THE_FAKE; exec(_OVER_THE_FAKE)"
    command = [sys.executable, "-c", code, "-1", "batch", str(source), "-o", str(output)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(by_id(output)) == 2
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss - before < 2_000_000
