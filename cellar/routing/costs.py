"""What a request costs at each replica, in seconds: by the prices, by who holds what, and by the company there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellar.core.messages import Tier
from cellar.kv.costs import Floats
from cellar.routing.holdings import Held
from cellar.routing.prices import MARGIN, RoutePrices


@dataclass(frozen=True, slots=True)
class Company:
    """Of each replica: seconds until its prompts so far are done, its requests and the tokens of their contexts, and
    tokens of the device's K and V that are free, or only cached. All [replicas].
    """

    wait: Floats
    requests: Floats
    context: Floats
    free: Floats
    cached: Floats


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds at each replica [replicas]: until the prompt's turn (`wait`) and until its memory (`room`), loads,
    computing, and all steps of its answer. `others` are those by which the requests that are there end later, in sum.
    `saved` is what computing all of the prompt would take more than `load` and `compute`. `movable` are the seconds
    that each could save others by writing what it holds to the remote tier, if that pays; empty if nothing is moved.
    """

    wait: Floats
    room: Floats
    load: Floats
    compute: Floats
    decode: Floats
    others: Floats
    saved: Floats
    movable: Floats

    @property
    def first(self) -> Floats:
        """Until the first token."""
        return self.wait + self.room + self.load + self.compute

    @property
    def total(self) -> Floats:
        """Until the last one, and what it costs others."""
        return self.first + self.decode + self.others


def costs(
    prices: RoutePrices,
    prompt_tokens: int,
    output_tokens: float,
    num_chunks: int,
    held: Held,
    company: Company,
    false: Mapping[Tier, Floats] | None = None,
) -> Costs:
    """Of a prompt whose first `num_chunks` chunks are `held`, and an answer of so many tokens.

    `false` is the share of chunks that a replica is wrongly said to hold, by tier: as much is taken off.
    """
    each = prices.chunks(num_chunks)
    whole = float(each.sum())
    rest = num_chunks * prices.chunk_size
    tail = prices.ranges(np.array([[rest, prompt_tokens]]))
    count = len(company.wait)
    spared, load, tokens = np.zeros(count), np.zeros(count), np.zeros(count)
    known = np.zeros(count)  # seconds of chunks that a faster tier was seen to hold
    anywhere = None if prices.move is None else np.zeros((num_chunks, count), np.float32)
    for tier, where in sorted(held.items()):
        pays = prices.pays(tier, num_chunks)
        if pays is None:
            continue
        if anywhere is not None:
            anywhere += where
        seconds, chunks = (pays @ where).astype(np.float64)
        if false is not None and tier in false:
            lies = false[tier]
            true = _without(seconds, whole - known, lies)
            known = known + seconds
            chunks = chunks * np.divide(true, seconds, out=np.zeros(count), where=seconds > 0)
            seconds = true
        if tier is Tier.DEVICE:
            spared += seconds
            tokens += chunks * prices.chunk_size
            continue
        price = prices.load[tier]
        loads = chunks * price.per_chunk + np.where(chunks > 0, price.fixed, 0.0)
        worth = seconds * (1 + MARGIN) > loads
        load += np.where(worth, loads, 0.0)
        spared += np.where(worth, seconds, 0.0)
    compute = np.maximum(whole - spared, 0.0) + tail
    movable = np.empty(0)
    remote = prices.load.get(Tier.REMOTE)
    if anywhere is not None and remote is not None and prices.move is not None:
        way = prices.move + remote.per_chunk
        gain = np.where(each > way * (1 + MARGIN), each - way, 0.0)
        found = anywhere.any(1)
        movable = (gain @ anywhere).astype(np.float64)
        moved = np.maximum(float((gain * found).sum()) - movable, 0.0)
        # `moved` chunks are loaded instead of being computed.
        counts = np.where(gain > 0, 1.0, 0.0)
        number = np.maximum(float((counts * found).sum()) - (counts @ anywhere), 0.0)
        compute = np.maximum(compute - moved - number * way, tail)
        load = load + number * way
    decode = output_tokens * prices.decode(company.requests + 1, company.context + prompt_tokens + output_tokens / 2)
    # Whoever is there stands still while the prompt is computed, and has longer steps while the answer is.
    others = company.requests * (compute + output_tokens * prices.joining(prompt_tokens + output_tokens / 2))
    room = _room(prompt_tokens + output_tokens - tokens, company, decode)
    saved = whole + tail - compute - load
    return Costs(company.wait, room, load, compute, decode, others, saved, movable)


def _without(seen: Floats, all_of: Floats, false: NDArray[np.float64]) -> Floats:
    """What is true of what was seen, if `false` of the rest is seen as well: seen = true + false * (all - true)."""
    rest = np.maximum(1 - false, 1e-3)
    found: Floats = np.maximum((seen - false * all_of) / rest, 0.0)
    return found


def _room(need: Floats, company: Company, decode: Floats) -> Floats:
    """Seconds until so many tokens of memory are there, if requests end evenly in the time that an answer takes."""
    short = np.maximum(need - np.maximum(company.free, 0) - np.maximum(company.cached, 0), 0.0)
    return np.where(short > 0, short / np.maximum(company.context, 1.0) * decode, 0.0)
