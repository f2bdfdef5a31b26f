"""What it is worth to keep a chunk: value = cost(context) * weight(idle times); the least worth goes first.

A policy says both factors and orders nothing; comparing is done when a slot is needed, because values change with time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from cellar.kv.costs import CostCurve, Floats
from cellar.kv.turns import NextTurns

Integers = NDArray[np.integer]

PolicyName = Literal["value", "chance", "lru"]


class Policy(Protocol):
    """Both factors must be positive; of equal values the longest idle goes first, then the leading chunk."""

    @property
    def next_turns(self) -> NextTurns | None:
        """Who is to be told of the turns of all conversations."""

    def cost(self, contexts: NDArray[np.integer]) -> Floats:
        """Of computing a chunk again whose end has a context of so many tokens: [n] -> [n]."""

    def weight(self, idle: Floats, turns: Integers) -> Floats:
        """Of chunks whose conversations have been idle so long, in seconds, inf where there is none, and have had so
        many turns: [n, k] each -> [n].
        """


class LeastRecentlyUsed:
    """The chunk whose conversation was active longest ago; of one conversation the leading chunk."""

    next_turns: NextTurns | None = None

    def cost(self, contexts: NDArray[np.integer]) -> Floats:
        """The same for all."""
        return np.ones(len(contexts))

    def weight(self, idle: Floats, turns: Integers) -> Floats:
        """Of the one that was active last."""
        found: Floats = 1.0 / idle.min(1)
        return found


class RetentionValue:
    """Cost(l) / T (Pensieve §3.4.3.1, equation 3.4): leading chunks are cheap, the long idle unlikely to return.

    A chunk that several conversations share is worth the sum over them, or a common system prompt, cheapest of all,
    would go first. `costs` are seconds at context lengths (the paper measures powers of two); between them they are
    interpolated, beyond the last extended.
    """

    next_turns: NextTurns | None = None

    def __init__(self, costs: Mapping[int, float]) -> None:
        self._curve = CostCurve(costs)

    def cost(self, contexts: NDArray[np.integer]) -> Floats:
        """Interpolated between the lengths that were measured."""
        return self._curve(contexts)

    def weight(self, idle: Floats, turns: Integers) -> Floats:
        """The sum of 1 / T."""
        found: Floats = (1.0 / idle).sum(1)
        return found


class ChanceValue:
    """Cost(l) times the chance per second that a conversation goes on, learned from its like.

    Equation 3.4 assumes 1 / T for that chance, and leaves out the turns that the text before it names (Pensieve
    §3.4.3.1). Until something has been seen both are the same. `costs` as in RetentionValue.
    """

    def __init__(self, costs: Mapping[int, float]) -> None:
        self.next_turns = NextTurns()
        self._value = RetentionValue(costs)

    def cost(self, contexts: NDArray[np.integer]) -> Floats:
        """As in RetentionValue."""
        return self._value.cost(contexts)

    def weight(self, idle: Floats, turns: Integers) -> Floats:
        """The sum of the chances."""
        there = np.isfinite(idle)
        found: Floats = np.where(there, self.next_turns.chance(np.where(there, idle, 0.0), turns), 0.0).sum(1)
        return found


def named_policy(name: PolicyName | None, costs: Mapping[int, float], has_tiers: bool = True) -> Policy:
    """value: RetentionValue; chance: ChanceValue; lru: LeastRecentlyUsed; None: value with slower tiers, else lru."""
    match name or ("value" if has_tiers else "lru"):
        case "value":
            return RetentionValue(costs)
        case "chance":
            return ChanceValue(costs)
        case "lru":
            return LeastRecentlyUsed()
