"""Conversations like those of ShareGPT, made from what Pensieve's evaluation says about them (§3.6.1).

Table 3.2: 48,159 conversations, on average 5.56 turns, 37.77 tokens of request, 204.58 of answer. The text: 36 % have
at least 5 turns (§3.6.4), and 0.57 % had more than 16,384 tokens and were dropped. Five figures fix five numbers of
log-normal distributions (turns: rounded up; lengths: a factor of the conversation's own times one of the turn's). The
spread of the lengths is that of 55 real conversations. Fitted with 300,000 draws; a test measures the figures again.
"""

from __future__ import annotations

import numpy as np

from cellar.bench.workloads import Conversation, Piece, Turn

CONVERSATIONS = 48_159
MAX_CONTEXT = 16_384

TURNS_LOG_MEAN, TURNS_LOG_STD = 0.9955, 1.168
ASKED_MEAN, ASKED_LOG_STD = 39.6, 1.23
ANSWERED_MEAN, ANSWERED_LOG_STD = 213.4, 0.88
OWN_LOG_STD = 0.585
"""Part of both lengths' spread that a conversation has for itself: who writes long letters gets long answers."""


def table_conversations(count: int, seed: int = 0) -> tuple[Conversation, ...]:
    """`count` conversations of at most MAX_CONTEXT tokens, repeatable; more of them begin with the same ones."""
    random = np.random.default_rng([seed, *b"table 3.2"])
    found: list[Conversation] = []
    key = 1 << 40  # no piece is shared: below are common prefixes
    while len(found) < count:
        turns = int(np.ceil(random.lognormal(TURNS_LOG_MEAN, TURNS_LOG_STD)))
        own = OWN_LOG_STD * random.standard_normal()
        asked = _lengths(random, turns, own, ASKED_MEAN, ASKED_LOG_STD)
        answered = _lengths(random, turns, own, ANSWERED_MEAN, ANSWERED_LOG_STD)
        if sum(asked) + sum(answered) <= MAX_CONTEXT:
            found.append(Conversation(tuple(Turn((Piece(key + k, asked[k]),), answered[k]) for k in range(turns))))
            key += turns
    return tuple(found)


def _lengths(random: np.random.Generator, count: int, own: float, mean: float, std: float) -> list[int]:
    """At least one token each."""
    turn_std = np.sqrt(std**2 - OWN_LOG_STD**2)
    drawn = np.exp(np.log(mean) - std**2 / 2 + own + turn_std * random.standard_normal(count))
    return [max(1, round(length)) for length in drawn.tolist()]
