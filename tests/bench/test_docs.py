"""Every command of docs/bench.md and docs/batch.md, as it stands there, with the demo model."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.limits import SECONDS

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def commands(page: str) -> list[str]:
    joined = "\n".join(blocks(page, "sh")).replace("\\\n", " ")
    return [line.split("#")[0].strip() for line in joined.splitlines() if line.strip()]


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(command: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, (command, done.stdout[-1000:], done.stderr[-2000:])
    return done.stdout


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server of the page's first command, on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = str(free.getsockname()[1])
    (command,) = (c for c in commands("bench.md") if c.startswith("cellar serve"))
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command.replace("8000", number).split(), "--log-level", "warning"], env=environment(), stderr=file
        )
        try:
            end = time.monotonic() + 120
            while True:
                assert process.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < end
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{number}/health", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.2)
            yield number
        finally:
            process.terminate()
            process.wait(SECONDS)


def write_datasets(folder: Path) -> None:
    turns = [{"context_tokens": 20, "output_tokens": 8}, {"context_tokens": 50, "output_tokens": 9}]
    (folder / "lengths.json").write_text(json.dumps([{"turns": turns}, {"turns": turns[:1]}]))
    rows = [(0, 600, [0, 1]), (0, 700, [0, 2]), (3000, 40, [3]), (3001, 600, [0, 1]), (6000, 60, [4])]
    lines = [{"timestamp": t, "input_length": n, "output_length": 6, "hash_ids": ids} for t, n, ids in rows]
    (folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.long
@pytest.mark.parametrize("command", [c for c in commands("bench.md") if not c.startswith("cellar serve")])
def test_load_tests(command: str, port: str, tmp_path: Path) -> None:
    write_datasets(tmp_path)
    *lines, last = run(command.replace("8000", port), tmp_path).strip().splitlines()
    found = json.loads(last)
    if "--compare" in command:
        assert found["request_throughput"] > 0
        assert any("ahead in all rounds" in line for line in lines)
        return
    for one in found if isinstance(found, list) else [found]:
        assert one["failed"] == 0
        assert one["completed"] >= 4
        assert one["mean_ttft_ms"] > 0
    assert any("Serving Benchmark Result" in line for line in lines)
    if "--save-result" in command:
        names = {path.name for path in (tmp_path / "results").iterdir()}
        assert names == {"sweep.json", "sweep.csv", "sweep.png", "sweep-cdf.png"}


@pytest.mark.long
def test_batches(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(blocks("batch.md", "json")[0])
    texts = []
    for command in commands("batch.md"):
        run(command, tmp_path)
        (name,) = re.findall(r"-o (\S+)", command)
        records = [json.loads(line) for line in (tmp_path / name).read_text(encoding="utf-8").splitlines()]
        assert {record["custom_id"] for record in records} == {"q1", "q2"}
        assert {record["response"]["status_code"] for record in records} == {200}
        assert all(set(record) == {"id", "custom_id", "response", "error"} for record in records)
        texts.append({record["custom_id"]: record["response"]["body"]["usage"] for record in records})
    assert texts[0]["q1"]["completion_tokens"] == 20


def test_the_pages_name_flags_that_there_are() -> None:
    import typer

    from cellar.cli.main import build

    verbs = typer.main.get_command(build()).commands  # type: ignore[attr-defined]
    for page, verb in (("bench.md", verbs["bench"].commands["serve"]), ("batch.md", verbs["batch"])):
        there = {name for parameter in verb.params for name in parameter.opts}
        named = set(re.findall(r"--[a-z][a-z-]+", (DOCS / page).read_text(encoding="utf-8")))
        assert named
        assert named <= there, named - there
