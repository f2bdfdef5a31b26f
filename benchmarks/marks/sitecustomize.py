"""Calls that write down when they began and ended, in every Python process that starts with this folder in PYTHONPATH.

Python imports a module of this name when it starts. `CELLAR_MARKS` is the file; without it nothing happens. Marks are
kept and written by a thread, for a rank's process ends without asking anybody.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

WATCHED: dict[str, tuple[str, ...]] = {
    "cellar.engine.llm": ("LLM.generate",),
    "cellar.engine.outputs": ("OutputProcessor.process",),
    "cellar.schedule.steps.scheduler": ("StepScheduler.add", "StepScheduler.plan", "StepScheduler.commit"),
    "cellar.runtime.ranks.group": ("RankGroup.submit", "RankGroup._take"),
    "cellar.runtime.ranks.rank": ("read", "written"),
    "cellar.runtime.steps.rows": ("DeviceRows.apply",),
    "cellar.runtime.steps.executor": ("StepExecutor.launch", "step_inputs"),
    "cellar.runtime.steps.fixed_inputs": ("FixedInputs.lists", "FixedInputs.send"),
    "cellar.runtime.steps.graphs": ("StepGraphs.hidden", "StepGraphs.logits"),
    "cellar.runtime.steps.worker": ("StepWorker._publish",),
}
"""Modules, and what is called there."""

WRITE_SECONDS = 0.2

_marks: list[tuple[str, int, int]] = []
_undo: list[Callable[[], None]] = []


def marked(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The call, with a mark of each."""

    @functools.wraps(call)
    def timed(*arguments: Any, **named: Any) -> Any:
        begin = time.monotonic_ns()
        try:
            return call(*arguments, **named)
        finally:
            _marks.append((name, begin, time.monotonic_ns()))

    return timed


def watch(module: ModuleType) -> None:
    """Mark what is called in a module that has been imported, until `_undo` does its part."""
    for name in WATCHED[module.__name__]:
        owner: Any = module
        *classes, last = name.split(".")
        for part in classes:
            owner = getattr(owner, part)
        call = getattr(owner, last)
        setattr(owner, last, marked(call, name))
        _undo.append(functools.partial(setattr, owner, last, call))


class _Finder(importlib.abc.MetaPathFinder):
    """Watches modules as they are imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in WATCHED:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            watch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def write(path: str) -> None:
    """Append the marks that there are."""
    count = len(_marks)
    lines = [f"{os.getpid()} {begin} {end} {name}\n" for name, begin, end in _marks[:count]]
    del _marks[:count]
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(lines))


def begin(path: str) -> Callable[[], None]:
    """Mark all calls from now on, until what is returned is called."""
    ended = threading.Event()

    def write_all() -> None:
        while not ended.wait(WRITE_SECONDS):
            if _marks:
                write(path)

    def end() -> None:
        ended.set()
        writer.join()
        sys.meta_path.remove(finder)
        for undo in _undo:
            undo()
        _undo.clear()
        _marks.clear()

    for name in WATCHED:
        if name in sys.modules:
            watch(sys.modules[name])
    sys.meta_path.insert(0, finder := _Finder())
    writer = threading.Thread(target=write_all, name="marks", daemon=True)
    writer.start()
    return end


if "CELLAR_MARKS" in os.environ and __name__ == "sitecustomize":
    begin(os.environ["CELLAR_MARKS"])
