"""Choices for matrices that nobody has measured, from those that somebody has (FlashDecoding++ §5).

At few tokens a product takes as long as its matrix takes to read, times a factor by which each implementation falls
behind the memory: that factor changes slowly with the shape. So it is interpolated between measured shapes, over the
logarithms of N and K with weights that fall with the square of the distance, for every measured number of tokens; the
implementation with the least predicted time is chosen, in the sizes that a near shape runs it with.
docs/decisions/0019-any-gpu.md says how far that is from the measured best, leaving out one shape at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from cellar.ops.linear.choice import (
    Flat,
    Gemv,
    Kernel,
    LinearChoice,
    Shape,
    Timing,
    default_choice,
    default_fused,
)

# Farther than this factor from every measured shape, in N and K together, what is known says too little.
MOST_APART = 16.0


def interpolated(measured: Mapping[Shape, Sequence[Timing]], shape: Shape) -> LinearChoice | None:
    """The choice for a shape; None if none of its format and group is known, or none is near enough.

    measured: shape -> timings by ascending tokens; numbers of tokens that all of the shapes have are used.
    """
    near = {other: _apart(shape, other) for other in measured if other[2:] == shape[2:]}
    if not near or min(near.values()) > math.log2(MOST_APART):
        return None
    by_distance = sorted(near, key=lambda other: (near[other], other))
    tokens = sorted(set.intersection(*({t.m for t in measured[other]} for other in by_distance)))
    kernels = {m: _kernel_at(m, shape, measured, by_distance, near) for m in tokens}
    # More tokens than all have measured: by the rule of thumb.
    rule = default_choice(shape.n, shape.k)
    kernels |= {m: kernel for m, kernel in zip(rule.tokens, rule.kernels, strict=True) if m > max(tokens, default=0)}
    return LinearChoice(tuple(kernels), tuple(kernels.values()), default_fused(shape.k))


def _kernel_at(
    m: int,
    shape: Shape,
    measured: Mapping[Shape, Sequence[Timing]],
    by_distance: Sequence[Shape],
    near: Mapping[Shape, float],
) -> Kernel:
    timings = {other: next(t for t in measured[other] if t.m == m) for other in by_distance}
    ways: dict[str, Callable[[Timing], float | None]] = {
        "library": lambda t: t.library,
        "flat": lambda t: t.flat,
        "gemv": lambda t: t.gemv,
    }
    factors = {}
    for name, seconds in ways.items():
        known = {other: s for other, t in timings.items() if (s := seconds(t)) is not None}
        if known:
            weights = {other: 1 / (near[other] ** 2 + 1e-6) for other in known}
            total = sum(weights.values())
            factors[name] = sum(weights[o] * known[o] / (o.n * o.k) for o in known) / total
    best = min(factors, key=lambda name: factors[name])
    kind = {"library": None, "flat": Flat, "gemv": Gemv}[best]
    if kind is None:
        return None
    return _sizes(kind, m, shape, measured, by_distance)


def _sizes(
    kind: type[Flat] | type[Gemv],
    m: int,
    shape: Shape,
    measured: Mapping[Shape, Sequence[Timing]],
    by_distance: Sequence[Shape],
) -> Kernel:
    """Those that the nearest shape runs the implementation with, at this number of tokens or the next one known.

    If that shape is more than twice or less than half as large, the rule of thumb's, which knows of programs.
    """
    rule = default_choice(shape.n, shape.k).at(m)
    for other in by_distance:
        if _apart(shape, other) > 1 and isinstance(rule, kind) and _takes(rule, m, shape):
            return rule
        for timing in sorted(measured[other], key=lambda t: abs(math.log2(t.m / m))):
            if isinstance(timing.kernel, kind) and _takes(timing.kernel, m, shape):
                return timing.kernel
    return None


def _takes(kernel: Kernel, m: int, shape: Shape) -> bool:
    n, k = shape.n, shape.k
    if isinstance(kernel, Flat):
        return kernel.depth * kernel.splits <= k and kernel.rows <= n
    if isinstance(kernel, Gemv):
        return m == 1 and kernel.block < 2 * k and kernel.ahead * kernel.block < k + kernel.block
    return True


def _apart(one: Shape, other: Shape) -> float:
    """How often one shape is twice the other, in N and in K."""
    return math.hypot(math.log2(one.n / other.n), math.log2(one.k / other.k))
