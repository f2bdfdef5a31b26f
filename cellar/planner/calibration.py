"""Published and measured times, and constants fitted to them.

PaLM on TPU v4 (Pope et al., tables 2 and 3): 2,048 tokens of prompt, 64 generated. Steps of a model on a
machine: whatever was measured there (`cellar.bench.measured_steps`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from cellar.core.hardware import Measure, Table
from cellar.planner.cost import Dimensions
from cellar.planner.machines import Machine
from cellar.planner.partition import BF16, INT8, Choice, Formats, Work, choices, torus
from cellar.planner.steps import StepPrices
from cellar.planner.work import StepWork

PROMPT, GENERATE = 2048, 64


@dataclass(frozen=True, slots=True)
class Case:
    """One published run: `seconds` for a prefill, or for GENERATE decode steps. `mfu` in percent."""

    model: str
    chips: int
    phase: str
    batch: int
    formats: Formats
    layout: str
    seconds: float
    mfu: float

    @property
    def steps(self) -> int:
        """Steps that the seconds cover."""
        return GENERATE if self.phase == "decode" else 1

    @property
    def tokens(self) -> int:
        """Tokens that the seconds cover."""
        return self.batch * (GENERATE if self.phase == "decode" else PROMPT)

    @property
    def work(self) -> Work:
        """One step; a decode at the middle of its contexts."""
        if self.phase == "decode":
            return Work(self.batch, 1, PROMPT + GENERATE / 2)
        return Work(self.batch, PROMPT, PROMPT)


PALM = (
    Case("palm-540b", 64, "prefill", 1, INT8, "2D heads", 0.29, 43),
    Case("palm-540b", 64, "decode", 64, INT8, "2D batch", 1.82, 14),
    Case("palm-540b", 64, "prefill", 512, BF16, "XYZ batch", 85.2, 76),
    Case("palm-540b", 64, "decode", 512, BF16, "2D batch", 6.0, 33),
    Case("palm-62b", 16, "prefill", 1, INT8, "2D heads", 0.16, 36),
    Case("palm-62b", 16, "decode", 32, INT8, "2D batch", 0.73, 8),
    Case("palm-62b", 32, "prefill", 512, BF16, "XYZ batch", 20.2, 73),
    Case("palm-62b", 8, "decode", 512, BF16, "2D batch", 5.1, 37),
)


def best(case: Case, d: Dimensions, machine: Machine) -> Choice:
    """The layout that the model chooses for a case on the torus that the chips make."""
    found = choices(d, machine, case.chips, case.work, case.formats, mesh=torus(case.chips))
    return min(found, key=lambda choice: choice.timeline.seconds)


def seconds(case: Case, d: Dimensions, machine: Machine) -> float:
    """What the model predicts for a case with its own choice of layout."""
    return best(case, d, machine).timeline.seconds * case.steps


def with_constants(machine: Machine, matmul: float, hbm: float, network: float, hop: float) -> Machine:
    """A machine with the four constants that the fit moves; `hop` in seconds."""
    c = machine.constants
    return replace(
        machine,
        constants=replace(
            c,
            matmul=Measure(matmul, "share", "fitted"),
            hbm=Measure(hbm, "share", "fitted"),
            attention_matmul=Measure(matmul, "share", "fitted"),
            attention_hbm=Measure(hbm, "share", "fitted"),
            network=Measure(network, "share", "fitted"),
        ),
        networks=tuple(replace(n, hop=Measure(hop, "s", "fitted")) for n in machine.networks),
    )


# What one would guess beforehand, and how far (in logarithms) the fit may go for one standard deviation of error.
GUESS = np.array([0.75, 0.80, 0.50, 5e-6])
LOOSE = np.array([0.10, 0.10, 0.50, 1.00])
TRUST = 0.05  # relative error of a published time that one standard deviation of a guess is worth


def fit(cases: Sequence[Case], models: dict[str, Dimensions], machine: Machine) -> tuple[float, float, float, float]:
    """matmul, hbm and network shares and seconds a hop with the least squared errors of log times, near the guess.

    Four cases can hold four free constants exactly and at absurd values; the guess keeps them physical.
    """

    def errors(log: np.ndarray) -> np.ndarray:
        candidate = with_constants(machine, *np.exp(log))
        missed = [np.log(seconds(case, models[case.model], candidate) / case.seconds) / TRUST for case in cases]
        return np.array([*missed, *((log - np.log(GUESS)) / LOOSE)])

    upper = np.log([1.0, 1.0, 1.0, 1e-3])
    found = least_squares(errors, np.log(GUESS), bounds=(np.full(4, -np.inf), upper), diff_step=1e-3)
    matmul, hbm, network, hop = np.exp(found.x)
    return float(matmul), float(hbm), float(network), float(hop)


STEP_COLUMNS = ("tokens", "sampled", "attended", "resident", "prompts", "seconds")


def table_name(model: str, dtype: str) -> str:
    """Where a model's steps are in a profile: by the last part of its name, and the type it computes in."""
    return f"steps.{model.rstrip('/').split('/')[-1].lower()}.{dtype}"


def read_steps(table: Table) -> list[tuple[StepWork, float]]:
    """The rows as `fit_steps` wants them."""
    found = []
    for row in table.rows:
        tokens, sampled, attended, resident, prompts, seconds = (float(value) for value in row)
        found.append((StepWork(int(tokens), int(sampled), attended, resident, bool(prompts)), seconds))
    return found


# Shares and seconds a step before its steps were seen: products, memory, both in attention, and what does not grow.
STEP_GUESS = np.array([0.7, 0.7, 0.3, 0.5, 1e-3])
STEP_LOOSE = np.array([1.0, 1.0, 1.0, 1.0, 2.0])
STEP_TRUST = 0.3


def fit_steps(d: Dimensions, machine: Machine, formats: Formats, seen: Sequence[tuple[StepWork, float]]) -> Machine:
    """A machine whose constants make the cost model meet measured steps of one model: (work, seconds) of each.

    Fitted are the shares that products and attention reach of compute and memory, and the seconds of a step that do not
    grow with it. Shares may pass 1: a small model lives in a processor's cache, beyond the memory's rate. Errors are in
    log time and count less the larger they are, since a shared machine stalls now and then.
    """

    def prices(log: np.ndarray) -> StepPrices:
        return StepPrices(d, _with_steps(machine, *np.exp(log)), formats)

    def errors(log: np.ndarray) -> np.ndarray:
        candidate = prices(log)
        missed = [np.log(candidate.seconds(work) / taken) / STEP_TRUST for work, taken in seen]
        return np.array([*missed, *((log - np.log(STEP_GUESS)) / STEP_LOOSE)])

    found = least_squares(errors, np.log(STEP_GUESS), loss="soft_l1", diff_step=1e-3)
    return _with_steps(machine, *np.exp(found.x))


def _with_steps(machine: Machine, matmul: float, hbm: float, scores: float, cache: float, step: float) -> Machine:
    return replace(
        machine,
        constants=replace(
            machine.constants,
            matmul=Measure(float(matmul), "share", "fitted"),
            hbm=Measure(float(hbm), "share", "fitted"),
            attention_matmul=Measure(float(scores), "share", "fitted"),
            attention_hbm=Measure(float(cache), "share", "fitted"),
            layer_seconds=Measure(0.0, "s", "fitted"),
            step_seconds=Measure(float(step), "s", "fitted"),
        ),
    )


KERNELS = ("matmul", "attention_matmul", "attention_hbm", "product_overlap", "layer_seconds", "eager_seconds")
KERNEL_GUESS = np.array([0.7, 0.3, 0.7, 0.8, 1e-5, 2e-4])


def fit_kernels(d: Dimensions, machine: Machine, formats: Formats, seen: Sequence[tuple[StepWork, float]]) -> Machine:
    """A machine with the KERNELS constants that meet an accelerator's steps: (work, seconds), decodes and prompts.

    The share of the memory's rate is left as it is: it can be measured alone. Least squares of log times.
    """

    def candidate(values: np.ndarray) -> Machine:
        constants = {
            name: replace(getattr(machine.constants, name), value=float(value), source="fitted")
            for name, value in zip(KERNELS, values, strict=True)
        }
        return replace(machine, constants=replace(machine.constants, **constants))

    def errors(values: np.ndarray) -> np.ndarray:
        prices = StepPrices(d, candidate(values), formats)
        return np.array([np.log(prices.seconds(work) / taken) for work, taken in seen])

    bounds = np.full(6, 1e-7), np.array([1.0, 1.0, 1.0, 1.0, 1e-4, 1e-3])
    return candidate(least_squares(errors, KERNEL_GUESS, bounds=bounds, x_scale=KERNEL_GUESS, diff_step=1e-3).x)
