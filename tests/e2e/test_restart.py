"""Conversations on a disk: an engine that was closed or killed finds them again, and its greedy tokens are the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cellar import LLM
from cellar.core.messages import SchedulerStats
from cellar.runtime.tiers.index import RECORD_NBYTES
from tests.conformance.test_models import Case, saved_model
from tests.e2e.test_tiers import CHUNK, FAMILIES, FIRST_NOW, GREEDY, TALKS, Tokens, opened, small_options
from tests.limits import SECONDS

TURNS = 3
SIZE = 0.02  # GiB


def histories() -> tuple[list[list[int]], list[list[list[int]]]]:
    """How the conversations begin, and what is said in each turn."""
    rng = np.random.default_rng(11)
    common = rng.integers(3, 101, CHUNK + 3).tolist()
    said = [[rng.integers(3, 101, 13).tolist() for _ in range(TURNS)] for _ in range(TALKS)]
    return [common[: len(common) * (k % 2)] for k in range(TALKS)], said


def turn(llm: LLM, talks: list[list[int]], said: list[list[list[int]]], number: int) -> Tokens:
    """One turn of all conversations, half of them at a time; -> the answers."""
    for talk, words in zip(talks, said, strict=True):
        talk += words[number]
    answers: Tokens = []
    for part in (talks[: TALKS // 2], talks[TALKS // 2 :]):
        answers += [o.outputs[0].token_ids for o in llm.generate(part, GREEDY, use_tqdm=False)]
    for talk, answer in zip(talks, answers, strict=True):
        talk += answer
    return answers


def nothing(disk: Path) -> None:
    """Done between two processes."""


def run(
    folder: Path, chunks: int, between: Callable[[Path], None] = nothing, disk: Path | None = None, **options: object
) -> tuple[list[Tokens], list[SchedulerStats]]:
    """TURNS turns, each by an engine of its own if there is a disk; -> answers, and the figures of each engine."""
    talks, said = histories()
    if disk is None:
        with opened(folder, **small_options(folder, chunks, **options)) as llm:
            return [turn(llm, talks, said, number) for number in range(TURNS)], [llm.stats()]
    answers, figures = [], []
    for number in range(TURNS):
        options |= {"kv_disk_path": disk, "kv_disk_size": SIZE}
        with opened(folder, **small_options(folder, chunks, **options)) as llm:
            answers.append(turn(llm, talks, said, number))
            figures.append(llm.stats())
        between(disk)
    return answers, figures


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_every_turn_by_an_engine_of_its_own(case: Case, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    saved_model(case, tmp_path / "model")
    plenty, _ = run(tmp_path / "model", 400)
    answers, figures = run(tmp_path / "model", 24, disk=tmp_path / "kv")
    assert answers == plenty
    for number, stats in enumerate(figures[1:], 1):
        assert stats.tiers[1].loaded > TALKS, "the conversations were found"
        assert stats.prefix_hits > TALKS * number * CHUNK
        assert stats.tiers[1].failed == 0


def test_with_a_host_between_device_and_disk(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    saved_model(FAMILIES[0], tmp_path / "model")
    answers, figures = run(tmp_path / "model", 12, disk=tmp_path / "kv", kv_offloading_size=0.002)
    assert answers == run(tmp_path / "model", 400)[0]
    assert figures[-1].tiers[2].loaded > TALKS
    assert figures[-1].tiers[1].saved > 10, "the host is used, though the disk has all"


def _wiped(which: Callable[[int], bool]) -> Callable[[Path], None]:
    """Chunks whose number in their sequence (by the end in their record) is wanted, or whose slot is, are gone."""

    def wipe(disk: Path) -> None:
        (index,) = disk.rglob("index")
        data = bytearray(index.read_bytes())
        for at in range(0, len(data), RECORD_NBYTES):
            end = int.from_bytes(data[at + 4 : at + 8], "little")
            if end and which((end - 1) // CHUNK):
                data[at : at + RECORD_NBYTES] = bytes(RECORD_NBYTES)
        index.write_bytes(data)

    return wipe


def _scrambled(disk: Path) -> None:
    """Every third chunk of the segments is damaged."""
    for path in disk.rglob("segment-*"):
        data = np.fromfile(path, np.uint8)
        data[:: 3 * 4096] ^= 1
        data.tofile(path)


HOLES = {
    "front": _wiped(lambda chunk: chunk == 0),
    "middle": _wiped(lambda chunk: chunk == 1),
    "end": _wiped(lambda chunk: chunk >= 2),
    "everywhere": _wiped(lambda chunk: chunk % 2 == 0),
    "damaged": _scrambled,
}


@pytest.mark.parametrize("name", HOLES)
@pytest.mark.parametrize("case", FIRST_NOW)
def test_holes_are_computed_again(case: Case, name: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    saved_model(case, tmp_path / "model")
    answers, figures = run(tmp_path / "model", 12, HOLES[name], tmp_path / "kv")
    assert answers == run(tmp_path / "model", 400)[0]
    assert figures[-1].prefix_hits > 0
    assert (figures[-1].tiers[1].failed > 0) == (name == "damaged"), "what is damaged is counted"


def test_chunks_of_other_models_are_not_found(tmp_path: Path) -> None:
    """Other weights, and another size of chunks, on one directory."""
    for number, case in enumerate(FAMILIES[:2]):
        (tmp_path / str(number)).mkdir()
        saved_model(case, tmp_path / str(number))
    answers, _ = run(tmp_path / "0", 12, disk=tmp_path / "kv")
    for folder, size in (("1", CHUNK), ("0", 32)):
        talks, said = histories()
        options = small_options(tmp_path / folder, 12) | {"block_size": size, "kv_cache_memory_bytes": 2**22}
        with opened(tmp_path / folder, kv_disk_path=tmp_path / "kv", kv_disk_size=SIZE, **options) as llm:
            turn(llm, talks, said, 0)
            assert llm.stats().tiers[1].loaded == 0
    assert run(tmp_path / "0", 12, disk=tmp_path / "kv")[0] == answers


_KILLED = """
import asyncio, sys
from cellar import AsyncLLM
from tests.e2e.test_restart import *

async def main(folder, disk):
    talks, said = histories()
    llm = AsyncLLM(folder, **small_options(Path(folder), 60), kv_disk_path=disk, kv_disk_size=SIZE)
    answers = []
    for talk, words in zip(talks, said):
        async for output in llm.generate(talk + words[0], GREEDY):
            answer = output.outputs[0].token_ids
        answers.append(answer)
    print(answers, flush=True)
    for _ in range(1200):
        if llm.stats().tiers[1].saved >= 2 * TALKS:
            print("saved", flush=True)
        await asyncio.sleep(0.1)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.long
def test_killed_engine_has_written_what_was_idle(tmp_path: Path) -> None:
    """Memory is plenty: nothing has to leave, and within seconds all is on the disk."""
    folder, disk = tmp_path / "model", tmp_path / "kv"
    folder.mkdir()
    saved_model(FAMILIES[0], folder)
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(folder), str(disk)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert process.stdout.readline() == "saved\n"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(SECONDS)
        process.stdout.close()
    plenty, _ = run(folder, 400)
    assert first == f"{plenty[0]}\n"
    talks, said = histories()
    for talk, words, answer in zip(talks, said, plenty[0], strict=True):
        talk += words[0] + answer
    with opened(folder, **small_options(folder, 60), kv_disk_path=disk, kv_disk_size=SIZE) as llm:
        assert turn(llm, talks, said, 1) == plenty[1]
        assert llm.stats().tiers[1].loaded >= 2 * TALKS
        assert llm.stats().tiers[1].failed == 0
