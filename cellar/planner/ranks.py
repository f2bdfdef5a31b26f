"""What engines over several GPUs of one host do beside products, as it was measured (docs/performance/h200-ranks.md).

A plan of 1D by heads is tensor parallelism: captured steps with one sum through boxes in peers' memory where the
algebra has a reduce-scatter and a gather. Every other layout is launched kernel by kernel and sends through NCCL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cellar.core.collectives import OURS, SEND, SUM
from cellar.core.hardware import Measure, Origin
from cellar.planner.collectives import Collectives, Fit, Line
from cellar.planner.sharding import Kind


@dataclass(frozen=True, slots=True)
class RankConstants:
    """What several devices add to a step's products and collectives.

    A product of tensor parallelism takes `product_seconds` at least, however little of it a device has. A layer of a
    layout that is not captured takes the device `layer_seconds` more, and the host `call_seconds` for each collective
    that begins, beside the `eager_seconds` of `Constants`. Products hide `gather_overlap` of the weights that are
    gathered a layer ahead. `copies`: bytes/s that a device's copy engines send in all while it multiplies, which carry
    the sums of micro-batches (`core/micro_batches.py`); 0: steps are not cut so.
    """

    product_seconds: Measure
    layer_seconds: Measure
    call_seconds: Measure
    gather_overlap: Measure
    copies: Measure


def _seconds(value: float, source: Origin) -> Measure:
    return Measure(value, "s", source)


UNKNOWN = RankConstants(
    product_seconds=_seconds(0.0, "assumed"),
    layer_seconds=_seconds(0.0, "assumed"),
    call_seconds=_seconds(0.0, "assumed"),
    gather_overlap=Measure(1.0, "share", "assumed"),
    copies=Measure(0.0, "bytes/s", "assumed"),
)
"""Of machines on which no engine of ours has run: gathers hide as in Pope et al., launches cost nothing."""

SUMS = {2**14: 3.5, 2**16: 4.7, 2**18: 7.5, 2**19: 10.8, 2**20: 13.4, 2**21: 19.2, 2**24: 84.4, 2**26: 327.0}
"""Microseconds of a sum of so many bytes through boxes, four H200, 2026-11-26 (`benchmarks/sums.py`, a0a34b3)."""

SUMS_JUDGED = (2**19, 2**21)
"""Sizes that `NVLINK`'s lines of sums were not fitted to; they are within 6 % of them."""

# Fitted by tests/planner/rank_fits.py to steps of 1D, 2D and XYZ on four H100 (Llama-3-70B with 8 layers, device time),
# judged on those of X (a test does both): a collective with the copies before and behind it, whatever it sends; bytes/s
# of gathers, and of sums of 4 and of 2, which were added up in several passes then (in one since 0088, not timed).
LAID_START, LAID_LAYER = 3.606e-5, 7.20e-5
LAID_GATHER, LAID_SUM_OF_4, LAID_SUM_OF_2 = 1.580e11, 6.837e10, 1.0207e11

# Fitted by tests/planner/rank_fits.py to Llama-3-8B's decodes on two and four H200, and judged on Llama-3-70B's on
# four: within 8 % of all of them and of its prompts (a test does both). On one device smaller products, of int4, take
# less.
PRODUCT = 6.76e-6

# Of the host, for a collective of a step that is not captured: StarCoder's decodes on four H200 with attention by heads
# have four a layer and take 69 to 73 ms in 40 layers; judged on those by batch, which have six and take 103 to 110.
LAID_CALL = 4.0e-4

NVLINK_RANKS = RankConstants(
    product_seconds=_seconds(PRODUCT, "fitted"),
    layer_seconds=_seconds(LAID_LAYER, "fitted"),
    call_seconds=_seconds(LAID_CALL, "fitted"),
    # XYZ takes as long as its gathers and its products one after the other, X nearly so.
    gather_overlap=Measure(0.0, "share", "measured"),
    copies=Measure(1.86e11, "bytes/s", "measured"),  # on four H100, to all peers together (0089)
)
"""Of H100 and H200, which NVLink joins in the same way: layouts were measured on the one, tensor parallelism on the
other.
"""


def nvlink(start: float, gather: float, sum_of_4: float, sum_of_2: float) -> Collectives:
    """Among GPUs of one host that NVLink 4 joins, without multicast; more than four are priced as four.

    Layouts' collectives take `start` seconds, and gathers and sums of four and of two ranks have these rates. Sums of
    tensor parallelism are `collectives.fit` of SUMS, by what a rank must send: small ones at once, large ones by
    pieces.
    """

    def one(kind: str, ranks: int, source: Origin, *lines: tuple[float, float, float]) -> Fit:
        return Fit(OURS, kind, ranks, tuple(Line(*line) for line in lines), source=source)

    def laid(kind: Kind, ranks: int, rate: float, source: Origin = "fitted") -> Fit:
        return one(kind.value, ranks, source, (math.inf, start, 1 / rate))

    return Collectives(
        (
            one(SUM, 4, "measured", (393216.0, 3.354e-6, 1.0900e-11), (math.inf, 8.495e-6, 3.0943e-12)),
            laid(Kind.ALL_GATHER, 4, gather),
            laid(Kind.REDUCE_SCATTER, 2, sum_of_2),
            laid(Kind.REDUCE_SCATTER, 4, sum_of_4),
            # All parts to all, or an exchange and a gather; and exchanges that add nothing: not timed alone.
            laid(Kind.ALL_REDUCE, 4, gather, "assumed"),
            laid(Kind.ALL_TO_ALL, 4, gather, "assumed"),
            one(SEND, 2, "measured", (math.inf, 1.25e-5, 1 / 2.24e11)),  # NCCL's latency, and a copy to a peer
        )
    )


NVLINK = nvlink(LAID_START, LAID_GATHER, LAID_SUM_OF_4, LAID_SUM_OF_2)
