"""How long a device computes, by the profiler's record of its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def busy_seconds(work: Callable[[], object]) -> float | None:
    """Time in which at least one kernel or copy ran; None if the profiler saw nothing.

    Recording costs the host some microseconds a launch, so that the work as a whole takes longer than without; its
    kernels do not.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
    results = getattr(found.profiler, "kineto_results", None)
    if results is None:
        return None
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in results.events()
        if event.device_type() != DeviceType.CPU and _is_work(event)
    )
    return covered(spans) / 1e9 if spans else None


def covered(spans: list[tuple[int, int]]) -> int:
    """Length of the union of half-open spans, sorted by start."""
    total, reached = 0, 0
    for start, stop in spans:
        total += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def _is_work(event: Any) -> bool:
    """Kernels and copies, not the profiler's notes about them."""
    kind = getattr(event, "activity_type", None)
    return kind is None or kind() in ("kernel", "gpu_memcpy", "gpu_memset")
