"""What the steps of a run were predicted to take, beside what they took."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cellar.bench.meter import MeteredRuntime, phase_of
from cellar.core.messages import Emit, StepPlan, StepResult
from cellar.planner.moves import Moves
from cellar.planner.passes import channel_seconds
from cellar.planner.saved import SavedPlan
from cellar.planner.work import StepCost, step_work
from cellar.runtime.protocol import Runtime


@dataclass(frozen=True, slots=True)
class PhaseForecast:
    """Seconds of all steps of one phase."""

    phase: str
    num_steps: int
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class ChannelForecast:
    """Seconds of all steps on one way: disk, link, cpu or device. Ways work at once."""

    channel: str
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class ForecastReport:
    """A run of `seconds` that made `tokens`. What passed between its steps was not predicted. `channels`: of a model
    whose weights are streamed.
    """

    source: str
    phases: tuple[PhaseForecast, ...]
    tokens: int
    seconds: float
    channels: tuple[ChannelForecast, ...] = ()

    @property
    def predicted(self) -> float:
        """Seconds that all steps should have taken."""
        return sum(phase.predicted for phase in self.phases)

    @property
    def measured(self) -> float:
        """Seconds that all steps took."""
        return sum(phase.measured for phase in self.phases)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: with rates in generated tokens per second."""
        rates = {"predicted_rate": self.tokens / self.predicted, "measured_rate": self.tokens / self.seconds}
        return {**asdict(self), "predicted": self.predicted, "measured": self.measured, **rates}

    def lines(self) -> list[str]:
        """A table for people."""
        total = PhaseForecast("all steps", sum(p.num_steps for p in self.phases), self.predicted, self.measured)
        found = [_line(f"predicted by the {self.source}", "steps", "predicted s", "measured s", "ratio")]
        for phase in (*self.phases, total):
            ratio = f"{phase.predicted / phase.measured:.2f}" if phase.measured else "-"
            seconds = f"{phase.predicted:.3f}", f"{phase.measured:.3f}"
            found.append(_line(f"  {phase.phase}", f"{phase.num_steps:,}", *seconds, ratio))
        for way in self.channels:
            ratio = f"{way.predicted / way.measured:.2f}" if way.measured else "-"
            found.append(_line(f"  {way.channel} busy", "", f"{way.predicted:.3f}", f"{way.measured:.3f}", ratio))
        predicted, measured = self.tokens / self.predicted, self.tokens / self.seconds
        ratio = f"{predicted / measured:.2f}"
        found.append(_line("  generated tok/s", "", f"{predicted:,.1f}", f"{measured:,.1f}", ratio))
        return found


def _line(label: str, steps: str, predicted: str, measured: str, ratio: str) -> str:
    return f"{label:<48} {steps:>7} {predicted:>12} {measured:>12} {ratio:>6}"


@dataclass
class Forecast:
    """Sums over the steps of an engine that is opened with `wrap`. `cost`, once it is known, prices each of them."""

    cost: StepCost | None = None
    source: str = ""
    _moves: Moves | None = None
    _busy: Callable[[], Mapping[str, float]] | None = None
    _before: Mapping[str, float] = field(default_factory=dict)
    _channels: dict[str, float] = field(default_factory=dict)
    _sums: dict[str, list[float]] = field(default_factory=dict)

    def wrap(self, runtime: Runtime[StepPlan]) -> Runtime[StepPlan]:
        """The runtime, observed."""
        return MeteredRuntime(runtime, self.observe)

    def follow(self, plan: SavedPlan, busy: Callable[[], Mapping[str, float]] | None = None) -> None:
        """Predict what the plan does. `busy`: seconds of each channel so far, of a model whose weights are streamed."""
        self.cost, self.source = plan.cost, f"plan for {plan.machine}"
        moves = plan.figures.get("moves")
        if moves is not None and busy is not None:
            self._moves, self._busy = Moves(**moves), busy
            self._before = dict(busy())

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Count a step that has finished."""
        if self.cost is None or result.error is not None:
            return
        spans = plan.spans
        phase = phase_of(plan)
        work = step_work(spans.start, spans.stop, int((spans.emit == Emit.LAST).sum()), self.cost.windows)
        work = work._replace(prompts=phase != "decode")
        predicted = self.cost.seconds(work)
        if self._moves is not None:
            for name, seconds in channel_seconds(self.cost, self._moves, work).items():
                self._channels[name] = self._channels.get(name, 0.0) + seconds
        sums = self._sums.setdefault(phase, [0, 0.0, 0.0])
        for i, value in enumerate((1, predicted, result.seconds)):
            sums[i] += value

    def clear(self) -> None:
        """Forget the steps so far."""
        self._sums.clear()
        self._channels.clear()
        self._before = {} if self._busy is None else dict(self._busy())

    def report(self, tokens: int, seconds: float) -> ForecastReport | None:
        """The sums, of a run of `seconds` that made `tokens`; None if nothing was predicted."""
        phases: Sequence[str] = [phase for phase in ("prefill", "mixed", "decode") if phase in self._sums]
        if not phases:
            return None
        rows = [PhaseForecast(p, int(self._sums[p][0]), self._sums[p][1], self._sums[p][2]) for p in phases]
        busy = {} if self._busy is None else self._busy()
        ways = [ChannelForecast(n, s, busy.get(n, 0.0) - self._before.get(n, 0.0)) for n, s in self._channels.items()]
        used = tuple(way for way in ways if way.predicted or way.measured)
        return ForecastReport(self.source, tuple(rows), tokens, seconds, used)
