"""What a pass of a model whose weights are streamed moves, and which rows one of few tokens leaves to the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cellar.core.cpu_rows import MOST, most_tokens
from cellar.core.dtypes import DTYPE_BYTES
from cellar.core.specs import LayerSpec, ModelSpec, TensorSpec
from cellar.planner.rates import Rates

RECORDED_LAUNCHES = 1.7e-4
"""Seconds in which a layer's decodes are launched, whose layers have graphs (of up to 256 tokens, unless
`enforce_eager`; ranks that share layers have none, and are priced too fast): 5.3 ms of Llama-3-8B's 32 layers with
nothing to move, on an H200's host (docs/log/offload.md).
"""

LINK_READS = 0.8
"""Of the rate of copies over the link, what kernels reach that read host memory: K and V of the model's own type that
they attend to, and the CPU's products.
"""

LEAST_ROWS = 1024
"""Of a further matrix none or at least so many: of fewer not all cores have some. 64 of 14,336 columns took matrix
units 0.45 ms a layer in passes of 32 tokens; alone 64 take 0.27 ms and 1,024 0.58 (docs/log/offload.md).
"""


class Few(NamedTuple):
    """Passes that leave rows in host memory to the CPU: of up to `most` tokens (0: none does), and so many rows as suit
    those of `planned` tokens, which attend to so many `positions` in all.
    """

    most: int
    planned: int = 1
    positions: float = 0.0


NO_FEW = Few(0)


def few_tokens(spec: ModelSpec, sequences: int, units: bool = False, context: float = 0.0) -> Few:
    """Those of a plan for up to so many sequences: for all of them if no pass has more, else for one that is alone.
    `units`: see `Rates`; `context`: positions of each, half way through its answer.

    Plain rows suit both the CPU and an accelerator. Quantized ones have the order of one, and an accelerator writes out
    those of the CPU: so they are left to it only where most passes are that small.
    """
    codes = any(tensor.formats for layer in spec.layers for tensor in layer.tensors)
    most = most_tokens(codes=codes, units=units)
    if sequences <= most:
        return Few(most, sequences, sequences * context)
    return NO_FEW if codes else Few(most, 1, context)


@dataclass(frozen=True, slots=True)
class Away:
    """Bytes of weights that each pass brings from host memory and from the disk; where KV lies, on which `kind` of
    device: cpu or gpu.
    """

    host: int
    disk: int
    kv_place: str
    kind: str


@dataclass(frozen=True, slots=True)
class Moves:
    """Seconds of what a pass moves, whatever it computes, and what its CPU does: `disk` and `link` of any pass; in one
    of up to `few` tokens the link's are `few_link`, and the CPU multiplies for `few_rows`, for `few_each` more for each
    token but the first, and waits for an x for `few_waits`, for `few_sent` more for each. `attends`: it attends to KV,
    too. `idle`: see `Rates`.
    """

    disk: float
    link: float
    few_link: float
    few_rows: float
    attends: bool
    few: int = MOST
    few_waits: float = 0.0
    idle: float = 1.0
    few_each: float = 0.0
    few_sent: float = 0.0


class Left(NamedTuple):
    """Rows that are left to the CPU, in bytes of all layers; seconds in which it waits for x, and those in which what
    it is sent and sends for one more token is on the link.
    """

    nbytes: float = 0.0
    waits: float = 0.0
    sent: float = 0.0


def pass_moves(spec: ModelSpec, rates: Rates, away: Away, few: Few = NO_FEW) -> Moves:
    """What any pass moves, where those of `few` tokens on a GPU leave rows to the CPU (`few_tokens`)."""
    disk, link = channels_moved(rates, away)
    left = rows_left(spec, rates, away, few)
    one, each = _row_seconds(rates)
    return Moves(
        disk=disk,
        link=link,
        few_link=link - left.nbytes / rates.link,
        few_rows=left.nbytes * one,
        attends=attends(away),
        few=few.most,
        few_waits=left.waits,
        idle=rates.idle,
        few_each=left.nbytes * each,
        few_sent=left.sent,
    )


def channels_moved(rates: Rates, away: Away) -> tuple[float, float]:
    """Seconds of the disk and of the link, over which comes what the disk brought, too. A processor has none."""
    link = 0.0 if away.kind == "cpu" else (away.host + away.disk) / rates.link
    return away.disk / rates.disk, link


def attends(away: Away) -> bool:
    """Whether the CPU attends for an accelerator."""
    return away.kind != "cpu" and away.kv_place == "host"


def rows_left(spec: ModelSpec, rates: Rates, away: Away, few: Few) -> Left:
    """What the CPU multiplies for an accelerator in passes of few tokens: in one of as many as are planned for it has
    ended, attention, exchanges and what the device computes in between included, when the link has brought the rest.

    It goes through the layers with the device, and not beside it: in each it waits for an x for every matrix that has
    rows of its, and for a q if it attends, too. Launches are made beside it, if they can run ahead.
    """
    if away.kind == "cpu" or not few.most or not rates.multiply or not away.host:
        return Left()
    (one, each), more, size = _row_seconds(rates), few.planned - 1, DTYPE_BYTES[spec.dtype]
    waits = sum(layer.nbytes for layer in spec.layers) / rates.device
    waits += len(spec.layers) * (0.0 if rates.runs_ahead else RECORDED_LAUNCHES)
    sent = attention = 0.0
    if attends(away):
        waits += len(spec.layers) * rates.exchange
        sent = sum(_sent_to_attend(layer) for layer in spec.layers) * size / rates.link
        attention = few.positions * spec.kv.chunk_nbytes() / spec.kv.chunk_size / rates.attention
    found, whole, before = Left(0.0, waits, sent), -away.disk, 0.0
    for matrices in _from_the_end(spec):
        whole += sum(t.nbytes for t in matrices)
        last = min(whole, away.host)
        if last <= before:
            continue
        waits += len(matrices) * rates.exchange
        sent += sum(t.shape[1] for t in matrices) * size / rates.link
        back = sum(t.shape[0] for t in matrices) / sum(t.nbytes for t in matrices) * size / (LINK_READS * rates.link)
        here = waits + attention + (sent - before * back) * more
        row = one + (each + back) * more
        rows = (away.host / rates.link - here) / (1 / rates.link + row)
        least = before + sum(min(LEAST_ROWS, t.shape[0]) * t.nbytes / t.shape[0] for t in matrices)
        if before and rows < least:
            if here + least * row > (away.host - before) / rates.link:
                break
            rows = least
        nbytes = max(0.0, min(rows, last))
        found = Left(nbytes, waits, sent + max(0.0, nbytes - before) * back)
        if rows <= last:
            break
        sent, before = found.sent, last
    return found if found.nbytes else Left()


def matrices_of(layer: LayerSpec) -> list[TensorSpec]:
    """The largest last: what a CPU multiplies for an accelerator is the end, and in one matrix it is one exchange."""
    found = [t for t in layer.tensors if len(t.shape) == 2]
    largest = max(found, key=lambda t: t.nbytes, default=None)
    return sorted(found, key=lambda t: t is largest)


def _from_the_end(spec: ModelSpec) -> Iterator[list[TensorSpec]]:
    """The last matrices of all layers, those before them, and so on."""
    layers = [matrices_of(layer)[::-1] for layer in spec.layers]
    for k in range(max((len(found) for found in layers), default=0)):
        yield [found[k] for found in layers if k < len(found)]


def _sent_to_attend(layer: LayerSpec) -> float:
    """Numbers of a token: q, k and v, and what kernels fetch, as if the link were as fast."""
    return layer.head_dim * (layer.num_heads + 2 * layer.num_kv_heads + layer.num_heads / LINK_READS)


def _row_seconds(rates: Rates) -> tuple[float, float]:
    """What the CPU takes for a byte of its rows: for one token, and for each more, as if that were a straight line from
    one, which takes as long as reading does, to those that were measured, which computing may bind.
    """
    if not rates.multiply:
        return 0.0, 0.0
    one = 1 / rates.multiply
    if not rates.few_multiply or rates.few_measured < 2:
        return one, 0.0
    return one, max(0.0, 1 / rates.few_multiply - one) / (rates.few_measured - 1)
