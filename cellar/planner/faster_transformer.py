"""FasterTransformer on A100 (its published GPT guide): times of whole runs, and the constants of `a100` fitted to some.

GPT models of F = 4E, serial blocks, fp16, 51,200 words, on hosts of eight A100 80 GB with NVSwitch and eight InfiniBand
cards. All are tensor parallel: 1D weight-stationary, attention by heads, over up to four hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from cellar.core.hardware import Measure
from cellar.core.layouts import Layout, Mesh
from cellar.planner.cost import Dimensions, dimensions
from cellar.planner.machines import Machine
from cellar.planner.models import decoder_spec
from cellar.planner.partition import BF16, Work, block_timeline


@dataclass(frozen=True, slots=True)
class Run:
    """One run: `batch` sequences of `prompt` tokens on `chips`, `generate` tokens for each, in `seconds`."""

    model: str
    chips: int
    batch: int
    prompt: int
    generate: int
    seconds: float


def _runs(model: str, chips: int, prompt: int, generate: int, times: dict[int, float]) -> list[Run]:
    """`times`: batch -> milliseconds."""
    return [Run(model, chips, batch, prompt, generate, time / 1e3) for batch, time in times.items()]


FITTED = (
    *_runs("gpt-20b", 1, 20, 8, {1: 225, 8: 239, 64: 452, 256: 1352}),
    *_runs("gpt-20b", 2, 20, 8, {1: 147, 8: 169, 64: 314, 256: 844}),
    *_runs("gpt-20b", 4, 20, 8, {1: 102, 8: 121, 64: 200, 256: 533}),
    *_runs("gpt-20b", 1, 60, 20, {1: 560, 8: 635, 64: 1352, 256: 4141}),
    *_runs("gpt-20b", 2, 60, 20, {1: 358, 8: 429, 64: 887, 256: 2424}),
    *_runs("gpt-20b", 4, 60, 20, {1: 248, 8: 299, 64: 574, 256: 1574}),
    *_runs("gpt-20b", 1, 200, 200, {1: 5648, 8: 6146, 64: 10766}),
    *_runs("gpt-20b", 4, 200, 200, {1: 2481, 8: 2851, 64: 4536}),
    *_runs("gpt-89b", 8, 512, 32, {1: 887.52, 4: 1133.22, 8: 1415.02, 16: 1952.2}),
    *_runs("mt-nlg-530b", 32, 20, 8, {1: 431, 8: 523, 64: 942, 256: 2483}),
    *_runs("mt-nlg-530b", 32, 60, 20, {1: 1037, 8: 1295, 64: 2646, 256: 7203}),
    *_runs("mt-nlg-530b", 32, 128, 8, {1: 451, 8: 766, 64: 3114, 256: 11232}),
)
JUDGED = (
    *_runs("gpt-20b", 8, 20, 8, {1: 89, 8: 107, 64: 169, 256: 416}),
    *_runs("gpt-20b", 8, 60, 20, {1: 212, 8: 247, 64: 454, 256: 1152}),
    *_runs("gpt-20b", 8, 200, 200, {1: 2080, 8: 2338, 64: 3621, 256: 7895}),
    *_runs("gpt-175b", 8, 128, 8, {1: 488.86, 4: 629.64, 8: 749.86, 16: 1037.47, 32: 1547.44}),
    *_runs("gpt-175b", 8, 512, 32, {1: 1719.96, 2: 1830.56, 4: 2092.56, 8: 2629.97, 16: 3706.23}),
    *_runs("mt-nlg-530b", 16, 20, 8, {1: 565, 8: 660, 64: 1191, 256: 3341}),
    *_runs("mt-nlg-530b", 16, 60, 20, {1: 1379, 8: 1631, 64: 3383, 128: 5406}),
    *_runs("mt-nlg-530b", 16, 128, 8, {1: 585, 8: 990, 32: 2251, 64: 4002}),
)
"""Runs on other numbers of chips and of another model than those that the constants are fitted to."""


def _gpt(name: str, layers: int, heads: int, head_dim: int) -> Dimensions:
    embed = heads * head_dim
    spec = decoder_spec(
        name, layers=layers, embed=embed, mlp=4 * embed, heads=heads, kv_heads=heads, head_dim=head_dim, vocab=51_200,
        gated=False, parallel=False,
    )  # fmt: skip
    return replace(dimensions(spec), norm_sums=2)


MODELS = {
    "gpt-20b": _gpt("gpt-20b", 44, 48, 128),
    "gpt-89b": _gpt("gpt-89b", 48, 96, 128),
    "gpt-175b": _gpt("gpt-175b", 96, 96, 128),
    "mt-nlg-530b": _gpt("mt-nlg-530b", 105, 128, 160),
}


def seconds(run: Run, machine: Machine) -> float:
    """What the cost model predicts: the prompts in one step, which make the first token, then a step for each other."""
    per_host = min(run.chips, machine.per_host)
    mesh = Mesh(1, run.chips // per_host, per_host)
    layout = Layout(mesh, "", "zy")
    outer = "y" if mesh.y > 1 else ""

    def step(new: int, context: float) -> float:
        work = Work(run.batch, new, context)
        return block_timeline(MODELS[run.model], machine, layout, work, BF16, outer=outer).seconds

    return step(run.prompt, run.prompt) + (run.generate - 1) * step(1, run.prompt + run.generate / 2)


# What one would guess beforehand of the network's share and of the seconds of a collective within a host and between
# hosts, and how far (in logarithms) the fit may go for one standard deviation of error.
GUESS = np.array([0.6, 2e-5, 3e-5])
LOOSE = np.array([0.3, 1.0, 1.0])
TRUST = 0.1


def with_constants(machine: Machine, values: Sequence[float]) -> Machine:
    """A machine with another share of its networks' rates, and other seconds of a collective on each."""
    share, *hops = values
    networks = tuple(
        replace(network, hop=Measure(float(hop), "s", "fitted"))
        for network, hop in zip(machine.networks, hops, strict=True)
    )
    constants = replace(machine.constants, network=Measure(float(share), "share", "fitted"))
    return replace(machine, constants=constants, networks=networks)


def fit(runs: Sequence[Run], machine: Machine) -> list[float]:
    """The network's constants with the least squared errors of log times; what one device does is left as it is.

    In a collective's seconds is all that a small product on many chips costs beyond its bytes: launches that no graph
    captured, waiting for the slowest chip.
    """

    def errors(log: np.ndarray) -> np.ndarray:
        candidate = with_constants(machine, np.exp(log).tolist())
        missed = [np.log(seconds(run, candidate) / run.seconds) / TRUST for run in runs]
        return np.array([*missed, *((log - np.log(GUESS)) / LOOSE)])

    upper = np.log([1.0, 1e-3, 1e-3])
    found = least_squares(errors, np.log(GUESS), bounds=(np.full(3, -np.inf), upper), diff_step=1e-3)
    return [float(value) for value in np.exp(found.x)]
