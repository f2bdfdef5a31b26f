"""Repeats in token rows: where they are, and scores that keep a decoder out of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_MIX = 0x2545F4914F6CDD1D  # any odd factor that spreads over 64 bits


def run_keys(rows: Tensor, size: int, fill: int) -> Tensor:
    """A number for the ``size`` tokens that end at each place of [batch, time]; equal runs, equal numbers.

    Places before the row's start count as ``fill``. Sums wrap at 64 bits, so unequal runs share a number about
    once in 2**64 pairs.
    """
    runs = F.pad(rows, (size - 1, 0), value=fill).unfold(1, size, 1)
    keys = torch.zeros_like(rows)
    for place in range(size):
        keys = (keys + runs[..., place] + 1) * _MIX
    return keys


def repeat_mask(rows: Tensor, size: int) -> Tensor:
    """Where in [batch, time] a token ends a run of ``size`` tokens that stood before in its row."""
    keys = run_keys(rows, size, -1)
    earlier = torch.ones(keys.shape[1], keys.shape[1], dtype=torch.bool, device=rows.device).tril(-1)
    earlier[:, : size - 1] = False
    return ((keys[:, :, None] == keys[:, None, :]) & earlier).any(dim=2)


def share_repeating(stories: Tensor, size: int = 8) -> float:
    """Share of the rows that hold a run of ``size`` tokens twice."""
    return float(repeat_mask(stories, size).any(dim=1).float().mean())


class Restraint:
    """What to take off the scores of the next token so that a text does not go in circles.

    A token that would complete a repeated run of n tokens loses ``bars[n]``. A token v loses
    ``strength * max(0, log((uses + 1) / (window * share + 1)))``, where ``uses`` counts it in the last ``window``
    tokens and ``share`` is its share of the training text: content words pay, "the" and commas hardly do.
    """

    def __init__(self, shares: Tensor, bars: dict[int, float], strength: float, window: int) -> None:
        self.vocabulary = len(shares)
        self.expected = window * shares + 1
        self.bars = bars
        self.strength = strength
        self.window = window

    @classmethod
    def of_text(cls, text: Tensor, vocabulary: int, bars: dict[int, float], strength: float, window: int) -> Restraint:
        """With the shares counted in ``text``."""
        counts = torch.bincount(text, minlength=vocabulary).float()
        return cls(counts / counts.sum(), bars, strength, window)

    def penalty(self, rows: Tensor, ends: int) -> Tensor:
        """Penalties [batch, ends, vocabulary] of the token after each of the last ``ends`` places of [batch, time].

        The id ``vocabulary`` marks places without a token.
        """
        nothing = self.vocabulary
        batch, time = rows.shape
        shape = (batch, ends, nothing + 1)
        recent = F.pad(rows, (self.window - 1, 0), value=nothing).unfold(1, self.window, 1)[:, time - ends :]
        uses = torch.zeros(shape, device=rows.device).scatter_add_(
            2, recent, torch.ones((), device=rows.device).expand(recent.shape)
        )[..., :nothing]
        result = self.strength * torch.log((uses + 1) / self.expected).clamp_(min=0)
        place = torch.arange(time, device=rows.device)
        earlier = place[None, : time - 1] < place[time - ends :, None]
        for size, bar in self.bars.items():
            keys = run_keys(rows, size - 1, nothing)
            seen = (keys[:, time - ends :, None] == keys[:, None, : time - 1]) & earlier
            followers = torch.where(seen, rows[:, None, 1:], nothing)
            barred = torch.zeros(shape, device=rows.device).scatter_(2, followers, bar)
            result += barred[..., :nothing]
        return result
