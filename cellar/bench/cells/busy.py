"""How much of the time a device computes, by the profiler's record of its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def busy_share(work: Callable[[], object]) -> float | None:
    """Time in which at least one kernel or copy ran, by the time from the first one's start to the last one's end.

    None if the profiler saw nothing. Recording costs the host some microseconds a launch, so the share is a lower
    bound where the host is the limit.
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
    return share(spans)


def share(spans: list[tuple[int, int]]) -> float | None:
    """Part of [first start, last stop) that half-open spans, sorted by start, cover; None without any."""
    if not spans:
        return None
    covered, reached = 0, spans[0][0]
    for start, stop in spans:
        covered += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return covered / max(reached - spans[0][0], 1)


def _is_work(event: Any) -> bool:
    """Kernels and copies, not the profiler's notes about them."""
    kind = getattr(event, "activity_type", None)
    return kind is None or kind() in ("kernel", "gpu_memcpy", "gpu_memset")
