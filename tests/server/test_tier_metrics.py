"""What /metrics and the page are told of the tiers below the device."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from cellar.core.messages import SchedulerStats, Tier, TierStats
from cellar.server.metrics import Metrics
from cellar.server.status import EngineStatus

DEVICE = TierStats(Tier.DEVICE, 8, 1, 5, 2)
HOST = TierStats(
    *(Tier.HOST, 100, 40, 60, 0),
    *(7, 67, 1, 0.5, 2.0),
    load_nbytes=448,
    save_nbytes=4288,
    hit_tokens=112,
)
ALONE = SchedulerStats(1, 2, 8, 1, 5, 100, 50, 3, 100, 20, (DEVICE,))
WITH_HOST = replace(ALONE, tiers=(replace(DEVICE, hit_tokens=30), HOST), recomputed_tokens=9)


def test_metrics_say_what_a_tier_holds_and_what_has_moved() -> None:
    text = Metrics("m", lambda: WITH_HOST).text().decode()
    for name, value in (
        ("total_chunks", 100),
        ("cached_chunks", 60),
        ("loaded_chunks_total", 7),
        ("saved_chunks_total", 67),
        ("failed_chunks_total", 1),
        ("load_seconds_total", 0.5),
        ("save_seconds_total", 2.0),
        ("loaded_bytes_total", 448),
        ("saved_bytes_total", 4288),
    ):
        assert f'cellar:kv_tier_{name}{{model_name="m",tier="host"}} {float(value)}' in text


def test_metrics_say_where_prompt_tokens_came_from() -> None:
    text = Metrics("m", lambda: WITH_HOST).text().decode()
    for source, value in (("device", 30), ("host", 112), ("disk", 0), ("remote", 0), ("recomputed", 9)):
        assert f'cellar:prompt_tokens_by_source_total{{model_name="m",source="{source}"}} {float(value)}' in text


def test_without_tiers_there_are_no_figures_of_them() -> None:
    assert "kv_tier" not in Metrics("m", lambda: ALONE).text().decode()


def status(kv_tier: str, stats: SchedulerStats) -> Any:
    made = EngineStatus.__new__(EngineStatus)
    made._model = SimpleNamespace(kv_tier=kv_tier, chunk_nbytes=64)  # type: ignore[assignment]
    return made._engine(stats)["memory"]


def test_page_gets_a_shelf_for_each_tier() -> None:
    assert [tier["tier"] for tier in status("device", ALONE)] == ["device"]
    device, host = status("device", WITH_HOST)
    assert host == {"tier": "host", "chunk_bytes": 64, "chunks": 100, "used_chunks": 0, "cached_chunks": 60}
    assert [tier["tier"] for tier in status("host", WITH_HOST)] == ["host", "offload"], "two shelves, two names"
    assert device["chunks"] == 8
