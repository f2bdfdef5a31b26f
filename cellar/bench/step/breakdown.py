"""Breakdown: what the time of a decode step went into, by kind of launch, beside what the machine needs at best."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from cellar.bench.step.kinds import IDLE, Launch, Traffic, in_order, kinds_of, linear_kinds, times_of
from cellar.core.errors import ConfigError
from cellar.core.specs import ModelSpec
from cellar.reports.limits import Limits

SCHEMA = 1


@dataclass(frozen=True)
class KindTime:
    """One kind of launch in one step: seconds, bytes, and the seconds that the machine needs for these at best.

    `limit_seconds` is bytes over bandwidth or FLOPs over their rate, whichever is longer; 0 where nothing is needed.
    """

    kind: str
    seconds: float
    launches: float
    nbytes: int
    flops: int
    limit_seconds: float


@dataclass(frozen=True)
class Breakdown:
    """A step of `batch` rows that decode with about `context` positions each, and of the tokens of a `prompt` beside
    them. Times in seconds per step.

    `seconds` was taken without the profiler, `profiled_seconds` with it; the kinds' times add up to the latter, but for
    the ends of the run.
    """

    model: str
    device: str
    dtype: str
    batch: int
    context: int
    graphs: bool
    num_steps: int
    seconds: float
    profiled_seconds: float
    limits: Limits
    limit_seconds: float
    kinds: tuple[KindTime, ...]
    prompt: int = 0

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps({"schema": SCHEMA, **asdict(self)})


def breakdown_from(text: str) -> Breakdown:
    """What `to_json` wrote. Raises ConfigError for anything else."""
    try:
        data = json.loads(text)
        if data.pop("schema") != SCHEMA:
            raise ValueError
        return Breakdown(
            **{
                **data,
                "limits": Limits(**data["limits"]),
                "kinds": tuple(KindTime(**kind) for kind in data["kinds"]),
            }
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("the file holds no breakdown of a step; make one with `cellar bench step --json`.") from error


def by_kind(
    launches: Sequence[Launch], spec: ModelSpec, needs: Mapping[str, Traffic], num_steps: int, limits: Limits
) -> tuple[KindTime, ...]:
    """The launches of `num_steps` steps, summed by kind, per step, and what each step `needs`."""
    kinds = kinds_of(launches, linear_kinds(spec))
    times, counts = times_of(launches, kinds), Counter(kinds)
    found = []
    for kind in in_order([*kinds, IDLE]):
        need = needs.get(kind, Traffic()).launched(counts[kind] / num_steps)
        found.append(
            KindTime(
                kind=kind,
                seconds=times.get(kind, 0) / 1e9 / num_steps,
                launches=counts[kind] / num_steps,
                nbytes=need.nbytes,
                flops=need.flops,
                limit_seconds=least_seconds(need, limits),
            )
        )
    return tuple(found)


def lines_of(found: Breakdown) -> list[str]:
    """A table for people."""
    lines = [
        f"{found.model}, {found.batch} x {found.context}{f' + {found.prompt}' if found.prompt else ''}, "
        f"{found.dtype}, {found.device}"
        f"{', graphs' if found.graphs else ''}",
        f"limits: {found.limits.bandwidth / 1e12:.3g} TB/s, {found.limits.flops / 1e12:.3g} TFLOP/s "
        f"({found.limits.source})",
        f"{'kind':<18} {'us':>9} {'of step':>8} {'MB':>9} {'GB/s':>8} {'of limit':>8} {'launches':>9}",
    ]
    whole = sum(kind.seconds for kind in found.kinds) or 1.0
    for kind in found.kinds:
        rate = share = megabytes = "-"
        if kind.nbytes and kind.seconds:
            megabytes, rate = f"{kind.nbytes / 1e6:.2f}", f"{kind.nbytes / kind.seconds / 1e9:.0f}"
            share = f"{kind.limit_seconds / kind.seconds:.0%}"
        lines.append(
            f"{kind.kind:<18} {kind.seconds * 1e6:>9.1f} {kind.seconds / whole:>8.1%} {megabytes:>9} {rate:>8} "
            f"{share:>8} {kind.launches:>9.1f}"
        )
    nbytes = sum(kind.nbytes for kind in found.kinds)
    share = f"{found.limit_seconds / found.seconds:.0%}"
    lines.append(
        f"{'step':<18} {found.seconds * 1e6:>9.1f} {'':>8} {nbytes / 1e6:>9.2f} "
        f"{nbytes / found.seconds / 1e9:>8.0f} {share:>8} {sum(kind.launches for kind in found.kinds):>9.1f}"
    )
    lines.append(
        f"limit of the step {found.limit_seconds * 1e6:.1f} us; under the profiler {found.profiled_seconds * 1e6:.1f}"
    )
    return lines


def least_seconds(need: Traffic, limits: Limits) -> float:
    """The time that bytes or FLOPs take at best, whichever is longer."""
    return max(need.nbytes / limits.bandwidth, need.flops / limits.flops)
