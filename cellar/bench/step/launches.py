"""The launches of a step, read from a profile that torch's profiler (Kineto) has made."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch._C._autograd import DeviceType
from torch.overrides import TorchFunctionMode
from torch.profiler import record_function

from cellar.bench.step.kinds import Launch

_PACKAGE = str(Path(__file__).parents[2])
_CALLER = "called by "


class Callers(TorchFunctionMode):
    """Names, as a range of the profile, the file of ours that made each call of torch.

    The profiler's own way (`with_stack`) traces all Python of all threads; with a second thread that waits with a time
    limit, Python 3.11 and that tracer were seen to hand each other the interpreter for ever.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and not _is_ours(frame.f_code.co_filename):
            frame = frame.f_back
        with record_function(_CALLER + frame.f_code.co_filename):
            return func(*args, **(kwargs or {}))


def _is_ours(file: str) -> bool:
    return file.startswith(_PACKAGE) and file != __file__


def device_launches(found: Any) -> list[Launch]:
    """Kernels and copies by start."""
    events = found.profiler.kineto_results.events()
    there = [e for e in events if e.device_type() != DeviceType.CPU and _is_work(e)]
    launches = [Launch(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in there]
    return sorted(launches, key=lambda launch: launch.start)


def cpu_launches(found: Any) -> list[Launch]:
    """Operations that no other operation has called, by start, each with the file of ours that called it."""
    events = [e for e in found.profiler.kineto_results.events() if _is_operation(e.name()) or _is_caller(e.name())]
    events.sort(key=lambda e: (e.start_ns(), -e.duration_ns(), not _is_caller(e.name())))
    launches: list[Launch] = []
    caller, until = None, 0
    for event in events:
        start, stop = event.start_ns(), event.start_ns() + event.duration_ns()
        if _is_caller(event.name()):
            if start >= until:  # not one within another
                caller, until = event.name().removeprefix(_CALLER), stop
        elif not launches or start >= launches[-1].stop:
            launches.append(Launch(event.name(), start, stop, caller if start < until else None))
    return launches


def _is_work(event: Any) -> bool:
    """Kernels and copies, not the profiler's notes about them."""
    kind = getattr(event, "activity_type", None)
    return kind is None or kind() in ("kernel", "gpu_memcpy", "gpu_memset")


def _is_operation(name: str) -> bool:
    """Not an alias, which is the same tensor once more."""
    return "::" in name and not name.startswith("<") and name != "aten::alias"


def _is_caller(name: str) -> bool:
    return name.startswith(_CALLER)
