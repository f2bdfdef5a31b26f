"""Lengths of sentences: drawn like those of the WMT-15 Europarl set, fixed, clipped, or read from WikiText-2."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from cellar.core.errors import ConfigError
from cellar.core.messages import IntArray

MEAN, P99, LONGEST = 24.0, 100.0, 330
"""What BatchMaker §2.7.1-3 tells of its data set."""

RATIO_SPREAD = 0.25
"""Standard deviation of log(target length / source length) of a translated pair: our assumption, the paper has none."""


def _log_normal() -> tuple[float, float]:
    """(mu, sigma) of the log-normal distribution with that mean and 99th percentile.

    ln MEAN = mu + sigma^2 / 2 and ln P99 = mu + z sigma: a quadratic in sigma.
    """
    z = 2.3263478740408408
    sigma = z - math.sqrt(z * z - 2 * math.log(P99 / MEAN))
    return math.log(MEAN) - sigma * sigma / 2, sigma


def wmt_like(count: int, rng: np.random.Generator, longest: int = LONGEST) -> IntArray:
    """int32 [count]: log-normal lengths with the paper's mean, p99 and maximum; drawn again where above `longest`.

    A `longest` of 50 or 100 gives the narrower sets of figure 2.11.
    """
    return _paired(count, rng, longest, 1)[0]


def wmt_like_pairs(count: int, rng: np.random.Generator, longest: int = LONGEST) -> tuple[IntArray, IntArray]:
    """Source and target lengths of `count` translated pairs: each like `wmt_like`, and alike within a pair."""
    source, target = _paired(count, rng, longest, 2)
    return source, target


def _paired(count: int, rng: np.random.Generator, longest: int, sides: int) -> list[IntArray]:
    mu, sigma = _log_normal()
    # log(b / a) of two normals with correlation r has the variance 2 sigma^2 (1 - r).
    correlation = 1 - RATIO_SPREAD**2 / (2 * sigma * sigma)
    found = np.empty((sides, 0), np.int32)
    while found.shape[1] < count:
        first = rng.standard_normal((1, count))
        others = correlation * first + math.sqrt(1 - correlation**2) * rng.standard_normal((sides - 1, count))
        drawn = np.ceil(np.exp(mu + sigma * np.concatenate([first, others])) - 0.5).astype(np.int32)
        drawn = np.maximum(drawn, 1)
        found = np.concatenate([found, drawn[:, (drawn <= longest).all(axis=0)]], axis=1)
    return list(found[:, :count])


def fixed(count: int, length: int = int(MEAN)) -> IntArray:
    """int32 [count] of one length: the set on which the ideal line is drawn."""
    return np.full(count, length, np.int32)


def wikitext_lengths(path: Path) -> IntArray:
    """Words per sentence of a WikiText file: headings left out, a sentence ends with a full stop standing alone.

    Raises ConfigError if there is no such file.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is not there; give a WikiText-2 file, or use another source of lengths.")
    lengths: list[int] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.split(" ")
        words = [word for word in words if word]
        if not words or words[0] == "=":
            continue
        length = 0
        for word in words:
            length += 1
            if word == ".":
                lengths.append(length)
                length = 0
        if length:
            lengths.append(length)
    return np.array(lengths, np.int32)


def lengths_from(source: str, count: int, rng: np.random.Generator) -> IntArray:
    """`wmt`, `wmt-50` (clipped), `fixed-24`, or the path of a WikiText file, sampled. Raises ConfigError."""
    kind, dash, number = source.partition("-")
    if kind in ("wmt", "fixed") and (not dash or (number.isdigit() and int(number) > 0)):
        if kind == "fixed":
            return fixed(count, int(number) if dash else int(MEAN))
        return wmt_like(count, rng, int(number) if dash else LONGEST)
    return rng.choice(wikitext_lengths(Path(source)), count)
