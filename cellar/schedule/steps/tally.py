"""Tally: what a scheduler has counted since it began."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cellar.core.messages import SchedulerStats
from cellar.kv.store import KVStore, Reservation
from cellar.schedule.steps.request import RequestState


class Tally:
    """`num_places` are the shelves that a prefix can be found on: the device, and each slower tier."""

    def __init__(self, num_places: int) -> None:
        self.preemptions = 0
        self.generation_tokens = 0
        self._prompt_tokens = 0
        self._prefix_hits = 0
        self._hits = np.zeros(num_places, np.int64)  # of the prefix hits, by place
        self._recomputed = 0
        self._step_sizes = [0] * 32  # see SchedulerStats.steps
        self._step_tokens = 0

    def planned(self, tokens: int) -> None:
        """A step computes so many tokens, of decodes and prompts."""
        self._step_sizes[(tokens - 1).bit_length()] += 1
        self._step_tokens += tokens

    def admitted(self, state: RequestState, reservation: Reservation, now: float) -> None:
        """A request has got its row, for the first time or again after a suspension."""
        if state.num_cached < 0:
            state.num_cached = reservation.num_cached_tokens
            state.queue_seconds = now - state.arrived
            self._prompt_tokens += len(state.known)
            self._prefix_hits += state.num_cached
            self._hits += reservation.hits
            self._recomputed += reservation.num_recomputed
        else:  # only the KV of its last token was not computed then
            self._recomputed += len(state.known) - 1 - reservation.num_cached_tokens

    def stats(self, store: KVStore, running: int, waiting: int) -> SchedulerStats:
        """A snapshot; O(1). Prefix queries and hits count the tokens that requests come with."""
        kv = store.stats()
        return SchedulerStats(
            running=running,
            waiting=waiting,
            total_chunks=kv.total,
            free_chunks=kv.free,
            cached_chunks=kv.cached,
            prefix_queries=self._prompt_tokens,
            prefix_hits=self._prefix_hits,
            preemptions=self.preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self.generation_tokens,
            tiers=tuple(
                replace(stats, hit_tokens=hits)
                for stats, hits in zip(store.tier_stats(), self._hits.tolist(), strict=True)
            ),
            recomputed_tokens=self._recomputed,
            steps=tuple(self._step_sizes),
            step_tokens=self._step_tokens,
        )
