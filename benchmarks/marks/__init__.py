"""Where a prompt's milliseconds go, by what begins and ends when in all processes, on one clock."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.marks import sitecustomize

FEW = 0.5
"""Of all prompts: what fewer of them had is left out, as copies and collections are."""


class Mark(NamedTuple):
    """A call in the process of that number, in nanoseconds."""

    process: int
    begin: int
    end: int
    name: str


class Line(NamedTuple):
    """A call, in medians of milliseconds since its prompt began. Process 0 is this one."""

    process: int
    begin: float
    end: float
    name: str


@contextmanager
def marks() -> Iterator[Path]:
    """Marks of this process, and of all that start within, in the file that is given."""
    with tempfile.TemporaryDirectory() as folder:
        path, folders = Path(folder) / "marks", os.environ.get("PYTHONPATH")
        path.touch()
        here = str(Path(__file__).parent)
        os.environ["CELLAR_MARKS"] = str(path)
        os.environ["PYTHONPATH"] = here if folders is None else os.pathsep.join((here, folders))
        end = sitecustomize.begin(str(path))
        try:
            yield path
        finally:
            end()
            del os.environ["CELLAR_MARKS"]
            if folders is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = folders


def read(path: Path) -> list[Mark]:
    """What has been written, a moment after the last call."""
    time.sleep(3 * sitecustomize.WRITE_SECONDS)
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        process, begin, end, name = line.split(" ")
        found.append(Mark(int(process), int(begin), int(end), name))
    return found


def lines(found: list[Mark], whole: str, count: int) -> list[Line]:
    """Of the last `count` calls of `whole`: what began within them, in order. The k-th call of a name in a process is
    compared with the k-th of the others.
    """
    prompts = sorted((mark for mark in found if mark.name == whole), key=lambda mark: mark.begin)[-count:]
    found = sorted(found, key=lambda mark: mark.begin)
    processes = list(dict.fromkeys(mark.process for mark in (*prompts, *found)))
    places: dict[tuple[int, str, int], list[tuple[int, int]]] = defaultdict(list)
    for prompt in prompts:
        seen = Counter[tuple[int, str]]()
        for mark in found:
            if prompt.begin <= mark.begin < prompt.end:
                process = processes.index(mark.process)
                seen[process, mark.name] += 1
                place = process, mark.name, seen[process, mark.name]
                places[place].append((mark.begin - prompt.begin, mark.end - prompt.begin))
    there = []
    for (process, name, _), times in places.items():
        if len(times) > FEW * len(prompts):
            begin, end = (statistics.median(moments) / 1e6 for moments in zip(*times, strict=True))
            there.append(Line(process, begin, end, name))
    return sorted(there, key=lambda line: line.begin)
