"""Cells over HTTP, whole: a server in a process of its own answers every request."""

from __future__ import annotations

import pytest

from benchmarks.cells_http import Load, measure


@pytest.mark.long
def test_every_request_is_answered_and_costs_something() -> None:
    found = measure(Load(hidden=8, device="cpu", connections=3, requests=30))
    assert found["requests_per_second"] > 0
    assert found["requests_per_second_without_http"] > 0
    assert found["server_cpu_us"] > 0
    assert 0 < found["p50"] <= found["p90"]
