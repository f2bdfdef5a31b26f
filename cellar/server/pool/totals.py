"""Figures of several engines as those of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any

from cellar.core.messages import MemoryAnswer, SchedulerStats, Tier, TierStats

NOTHING = SchedulerStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)

_NOW = ("running", "waiting", "total_chunks", "free_chunks", "cached_chunks", "tiers")
"""Of what is; everything else counts what was."""


def summed(parts: Iterable[SchedulerStats]) -> SchedulerStats:
    """Of all of them."""
    total = NOTHING
    for one in parts:
        values: dict[str, Any] = {}
        for field in fields(SchedulerStats):
            a, b = getattr(total, field.name), getattr(one, field.name)
            if field.name == "tiers":
                values[field.name] = _tiers(a, b)
            elif field.name == "steps":
                values[field.name] = tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))
            else:
                values[field.name] = a + b
        total = SchedulerStats(**values)
    return total


def past(stats: SchedulerStats) -> SchedulerStats:
    """What an engine that has gone leaves behind: its counts, so that no sum ever falls, but nothing that it held."""
    return replace(stats, **{name: getattr(NOTHING, name) for name in _NOW})


def merged(answers: Sequence[MemoryAnswer], conversations: int) -> MemoryAnswer:
    """What several engines say: of each conversation what the one says that has most of it, and the sum of all chunks
    that were dropped."""
    if not answers:
        return tuple({} for _ in range(conversations))
    found = [max((one[k] for one in answers), key=lambda tiers: sum(tiers.values())) for k in range(conversations)]
    dropped = [one[conversations] for one in answers if len(one) > conversations]
    if dropped:
        total: dict[Tier, int] = {}
        for tiers in dropped:
            for tier, count in tiers.items():
                total[tier] = total.get(tier, 0) + count
        found.append(total)
    return tuple(found)


def _tiers(a: Sequence[TierStats], b: Sequence[TierStats]) -> tuple[TierStats, ...]:
    by_tier = {one.tier: one for one in a}
    for one in b:
        if (before := by_tier.get(one.tier)) is not None:
            names = [field.name for field in fields(TierStats) if field.name != "tier"]
            by_tier[one.tier] = replace(before, **{name: getattr(before, name) + getattr(one, name) for name in names})
        else:
            by_tier[one.tier] = one
    return tuple(by_tier[tier] for tier in sorted(by_tier))
