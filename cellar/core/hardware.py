"""What a machine is, as data: devices, links, and the Profile of what was measured on it.

Every number carries its unit and where it comes from, so that a plan can say what it rests on.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from cellar.core.errors import ConfigError

PROFILE_SCHEMA = 1

Origin = Literal["measured", "datasheet", "fitted", "assumed"]


@dataclass(frozen=True, slots=True)
class Measure:
    """One number with its unit and origin. Seconds, bytes, FLOPs and their quotients; no prefixes."""

    value: float
    unit: str
    source: Origin


@dataclass(frozen=True, slots=True)
class Device:
    """A processor with its memory. `flops` maps a dtype to its rate of dense matrix products."""

    name: str
    kind: Literal["cpu", "gpu", "disk"]
    capacity: Measure
    bandwidth: Measure
    flops: Mapping[str, Measure] = field(default_factory=dict)
    launch: Measure | None = None
    cores: int | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """A way for bytes between two devices.

    `duplex` is the rate of both directions at once over the sum of each alone.
    """

    source: str
    target: str
    bandwidth: Measure
    latency: Measure | None = None
    duplex: Measure | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """A measured function of one variable at ascending points, linear in between and beyond."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    x_unit: str
    y_unit: str
    source: Origin = "measured"

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or not self.x:
            raise ConfigError(
                f"a curve needs as many y as x and at least one point, not {len(self.x)} and {len(self.y)}."
            )
        if any(a >= b for a, b in zip(self.x, self.x[1:], strict=False)):
            raise ConfigError("the x of a curve must ascend; sort its points.")

    def at(self, x: float) -> float:
        """Value at `x` by linear interpolation; the outer segments are continued."""
        if len(self.x) == 1:
            return self.y[0]
        i = min(max(bisect.bisect_right(self.x, x) - 1, 0), len(self.x) - 2)
        share = (x - self.x[i]) / (self.x[i + 1] - self.x[i])
        return self.y[i] + share * (self.y[i + 1] - self.y[i])


@dataclass(frozen=True, slots=True)
class Table:
    """Measured rows under named columns, e.g. the fastest linear kernel per (M, N, K)."""

    columns: tuple[str, ...]
    rows: tuple[tuple[float | int | str, ...], ...]
    source: Origin = "measured"

    def __post_init__(self) -> None:
        bad = [row for row in self.rows if len(row) != len(self.columns)]
        if bad:
            raise ConfigError(f"a row of a table has {len(bad[0])} values for {len(self.columns)} columns.")


@dataclass(frozen=True)
class Profile:
    """One measured, versioned file per machine and model; feeds every decision that depends on speed.

    `curves` and `tables` are filled by the probes under `runtime/probes`, each under names of its own.
    """

    machine: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    model: str | None = None
    curves: Mapping[str, Curve] = field(default_factory=dict)
    tables: Mapping[str, Table] = field(default_factory=dict)
    created: str = ""

    def device(self, kind: str) -> Device | None:
        """The first device of a kind, or None."""
        return next((d for d in self.devices if d.kind == kind), None)

    def merged(self, devices: Sequence[Device] = (), links: Sequence[Link] = (), **maps: Mapping[str, Any]) -> Profile:
        """A copy with what one probe found added; equal names are replaced."""
        named = {d.name: d for d in self.devices} | {d.name: d for d in devices}
        wires = {(link.source, link.target): link for link in (*self.links, *links)}
        return Profile(
            machine=self.machine,
            devices=tuple(named.values()),
            links=tuple(wires.values()),
            model=self.model,
            curves={**self.curves, **maps.get("curves", {})},
            tables={**self.tables, **maps.get("tables", {})},
            created=self.created,
        )

    def to_json(self) -> str:
        """The profile as a JSON document with its schema version."""
        return json.dumps({"schema": PROFILE_SCHEMA, **asdict(self)}, indent=1)

    def save(self, path: Path) -> None:
        """Write the profile to a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read a profile. Raises ConfigError if the document is not one or has another schema version."""
        try:
            data = json.loads(text)
            schema = data.pop("schema")
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise ConfigError("the file is not a profile; make one with `cellar profile`.") from error
        if schema != PROFILE_SCHEMA:
            raise ConfigError(
                f"the profile has schema {schema}, but {PROFILE_SCHEMA} is needed; run `cellar profile` again."
            )
        try:
            return cls(
                machine=data["machine"],
                devices=tuple(_device(d) for d in data["devices"]),
                links=tuple(_link(d) for d in data["links"]),
                model=data["model"],
                curves={name: Curve(**_tuples(c)) for name, c in data["curves"].items()},
                tables={
                    name: Table(tuple(t["columns"]), tuple(tuple(r) for r in t["rows"]), t["source"])
                    for name, t in data["tables"].items()
                },
                created=data["created"],
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(f"the profile is damaged at {error}; make it again with `cellar profile`.") from error

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a profile from a file. Raises ConfigError if it cannot be read."""
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"the profile {path} cannot be read ({error.strerror}); make one with `cellar profile`."
            ) from error


def _measure(data: Mapping[str, Any] | None) -> Measure | None:
    return None if data is None else Measure(**data)


def _device(data: Mapping[str, Any]) -> Device:
    return Device(
        name=data["name"],
        kind=data["kind"],
        capacity=Measure(**data["capacity"]),
        bandwidth=Measure(**data["bandwidth"]),
        flops={name: Measure(**m) for name, m in data["flops"].items()},
        launch=_measure(data["launch"]),
        cores=data["cores"],
    )


def _link(data: Mapping[str, Any]) -> Link:
    return Link(
        source=data["source"],
        target=data["target"],
        bandwidth=Measure(**data["bandwidth"]),
        latency=_measure(data["latency"]),
        duplex=_measure(data["duplex"]),
    )


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
