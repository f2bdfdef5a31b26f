"""Constants of machines of several GPUs, fitted to steps that were measured there (docs/performance/h200-ranks.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares, minimize_scalar

from cellar.core.hardware import Measure
from cellar.core.layouts import Layout
from cellar.planner.cost import Dimensions
from cellar.planner.machines import Machine
from cellar.planner.partition import BF16
from cellar.planner.ranks import nvlink
from cellar.planner.steps import StepPrices
from cellar.planner.work import StepWork


def with_product(machine: Machine, seconds: float) -> Machine:
    """A machine on which a product of tensor parallelism takes at least so long."""
    return replace(machine, ranks=replace(machine.ranks, product_seconds=Measure(seconds, "s", "fitted")))


def fit_products(d: Dimensions, machine: Machine, seen: Sequence[tuple[int, StepWork, float]]) -> Machine:
    """A machine whose `product_seconds` meet steps of tensor parallelism: (devices, work, seconds) of each.

    One constant meets few steps exactly: the largest error of log times is the least.
    """

    def worst(microseconds: float) -> float:
        candidate = with_product(machine, 1e-6 * microseconds)
        prices = {count: StepPrices(d, candidate.with_devices(count)) for count in {count for count, _, _ in seen}}
        return max(abs(float(np.log(prices[count].seconds(work) / taken))) for count, work, taken in seen)

    return with_product(machine, 1e-6 * float(minimize_scalar(worst, bounds=(0.0, 50.0), method="bounded").x))


LAID_GUESS = np.array([3e-5, 1e-4, 1.5e11, 1e11, 1e11])
"""Seconds of a collective, of a layer's launches; bytes/s of gathers, of sums of four and of two."""


def with_layouts(machine: Machine, values: Sequence[float]) -> Machine:
    """A machine with other collectives of layouts, and seconds of their layers, in the order of the guess."""
    start, layer, *rates = values
    near = replace(machine.networks[0], measured=nvlink(start, *rates))
    ranks = replace(machine.ranks, layer_seconds=Measure(layer, "s", "fitted"))
    return replace(machine, networks=(near, *machine.networks[1:]), ranks=ranks)


def device_seconds(d: Dimensions, machine: Machine, layout: Layout, work: StepWork) -> float:
    """Of a step of a layout that was launched before it begins."""
    return replace(StepPrices(d, machine, BF16, layout, laid=True).cost, eager=0.0).seconds(work)


def fit_layouts(d: Dimensions, machine: Machine, seen: Sequence[tuple[Layout, StepWork, float]]) -> list[float]:
    """What `with_layouts` takes, by the least squares of log times of steps of layouts on the device."""

    def errors(values: np.ndarray) -> np.ndarray:
        candidate = with_layouts(machine, values.tolist())
        return np.array([np.log(device_seconds(d, candidate, lay, work) / taken) for lay, work, taken in seen])

    bounds = np.full(5, 1e-9), np.array([1e-3, 1e-2, 1e12, 1e12, 1e12])
    found = least_squares(errors, LAID_GUESS, bounds=bounds, x_scale=LAID_GUESS, diff_step=1e-3)
    return [float(value) for value in found.x]
