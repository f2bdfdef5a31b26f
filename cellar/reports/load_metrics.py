"""The latencies of a load test, and what they are called. Imports nothing: the command line reads it at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One kind of latency: its name in flags and JSON, as a title, and in lines."""

    name: str
    title: str
    short: str


METRICS: Mapping[str, Metric] = {
    m.name: m
    for m in (
        Metric("ttft", "Time to First Token", "TTFT"),
        Metric("tpot", "Time per Output Token (excl. 1st token)", "TPOT"),
        Metric("itl", "Inter-token Latency", "ITL"),
        Metric("e2el", "End-to-end Latency", "E2EL"),
        Metric("norm", "Normalized Latency (E2EL per output token)", "NORM"),
    )
}

GOODPUT_METRICS = ("ttft", "tpot", "e2el")
"""Latencies of one request, which a goodput may bound."""
