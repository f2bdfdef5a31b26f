"""Arrivals of an open loop: a Poisson process, drawn before the clock starts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cellar.core.errors import ConfigError

FloatArray = NDArray[np.float64]


def poisson(rate: float, seconds: float, seed: int) -> FloatArray:
    """Ascending times in [0, seconds) of a Poisson process with `rate` arrivals a second.

    The same seed gives the same process at another speed, so systems and loads are compared on the same luck.
    """
    if not (rate > 0 and seconds > 0):
        raise ConfigError(f"rate is {rate} and seconds is {seconds}; both must be positive.")
    rng = np.random.default_rng(seed)
    expected = rate * seconds
    times = np.cumsum(rng.exponential(1.0, int(expected + 6 * expected**0.5) + 16))
    while times[-1] < expected:  # once in 10^9 runs
        times = np.append(times, times[-1] + np.cumsum(rng.exponential(1.0, len(times))))
    return np.asarray(times[times < expected] / rate, np.float64)
