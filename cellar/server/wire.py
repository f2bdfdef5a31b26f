"""What goes over the socket between the engine's process and a front, pickled.

A front numbers its sequences; the engine's process makes ids of its own of the front's number and the sequence's, so
that fronts need not agree on ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from cellar.core.config import EngineConfig
from cellar.core.errors import CellarError
from cellar.core.messages import (
    EngineRates,
    FinishReason,
    FloatArray,
    IntArray,
    Logprobs,
    MemoryAnswer,
    Request,
    SchedulerStats,
)
from cellar.core.sampling import SamplingParams
from cellar.core.specs import ModelSpec
from cellar.routing.basis import Basis
from cellar.routing.digest import DigestShape
from cellar.routing.report import ReplicaReport
from cellar.text.generation import NEUTRAL, GenerationConfig


@dataclass(frozen=True)
class Ready:
    """The engine's first message: what was opened. Without a `basis` it makes no reports."""

    config: EngineConfig
    spec: ModelSpec
    checkpoint: Path | None
    max_model_len: int
    generation: GenerationConfig = NEUTRAL
    basis: Basis | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    """Log-probabilities of several sequences in one set of arrays: an object of each takes longer than its bytes.

    The first `counts[0]` rows are of the sequence `numbers[0]`, and so on.
    """

    numbers: list[int]
    counts: list[int]
    logprobs: Logprobs

    @classmethod
    def of(cls, logprobs: Mapping[int, Logprobs]) -> list[Joined]:
        """All of them; those with as many of the best go together."""
        widths: dict[int, dict[int, Logprobs]] = {}
        for number, one in logprobs.items():
            widths.setdefault(one.top_ids.shape[1], {})[number] = one
        return [cls._of_equal(some) for some in widths.values()]

    @classmethod
    def _of_equal(cls, logprobs: Mapping[int, Logprobs]) -> Joined:
        members = list(logprobs.values())
        arrays = (np.concatenate([getattr(one, name) for one in members]) for name in _ARRAYS)
        return cls(list(logprobs), [len(one.index) for one in members], Logprobs(*arrays))

    def parts(self) -> Iterator[tuple[int, Logprobs]]:
        """Each sequence's number and rows."""
        arrays, stop = [getattr(self.logprobs, name) for name in _ARRAYS], 0
        for number, count in zip(self.numbers, self.counts, strict=True):
            rows = slice(stop, stop := stop + count)
            yield number, Logprobs(*(array[rows] for array in arrays))


_ARRAYS = [field.name for field in fields(Logprobs)]


@dataclass(slots=True)
class Frame:
    """A front's share of one `StepOutput`, by the numbers of its sequences."""

    numbers: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: dict[int, tuple[FinishReason, int | str | None]] = field(default_factory=dict)
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    num_cached_tokens: dict[int, int] = field(default_factory=dict)
    queue_seconds: dict[int, float] = field(default_factory=dict)
    pooled: dict[int, FloatArray] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Log-probabilities travel joined."""
        scores, prompts = Joined.of(self.logprobs), Joined.of(self.prompt_logprobs)
        rest = self.num_cached_tokens, self.queue_seconds, self.pooled
        return _arrived, (self.numbers, self.tokens, self.finished, scores, prompts, *rest)


def _arrived(numbers: list[int], tokens: list[int], finished: Any, scores: Any, prompts: Any, *rest: Any) -> Frame:
    apart = (dict(part for joined in some for part in joined.parts()) for some in (scores, prompts))
    return Frame(numbers, tokens, finished, *apart, *rest)


BY_SEQUENCE = ("logprobs", "prompt_logprobs", "num_cached_tokens", "queue_seconds", "pooled", "finished")
"""Fields of a frame, and of a `StepOutput`, that map sequences to something."""


@dataclass(frozen=True, slots=True)
class Step:
    """What some turns brought a front, and how things stand after them."""

    frames: list[Frame]
    stats: SchedulerStats


@dataclass(frozen=True, slots=True)
class Watch:
    """The front wants reports, with digests of this shape."""

    shape: DigestShape


@dataclass(frozen=True, slots=True)
class Reported:
    """A report for the front's router, made after the sequence of the front's number `seen` had come."""

    seen: int
    report: ReplicaReport
    rates: EngineRates


@dataclass(frozen=True, slots=True)
class Told:
    """The answer to the front's question of that number."""

    number: int
    answer: MemoryAnswer | CellarError


@dataclass(frozen=True, slots=True)
class Terms:
    """What sequences share, sent once: they name it by its number until it is forgotten (both None)."""

    number: int
    params: SamplingParams | None = None
    stop_ids: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Add:
    """Sequences of one prompt and equal terms, each with its number and seed."""

    terms: int
    numbers: tuple[int, ...]
    seeds: tuple[int, ...]
    prompt: IntArray
    max_tokens: int
    priority: int
    salt: bytes
    conversation: str | None
    owner: str
    tenant: str
    output: IntArray | None

    @classmethod
    def of(cls, terms: int, numbers: tuple[int, ...], requests: Sequence[Request]) -> Add:
        """Of requests that differ in their seeds only."""
        one = requests[0]
        seeds = tuple(request.drawn_seed for request in requests)
        rest = (one.prompt, one.max_tokens, one.priority, one.salt, one.conversation, one.owner, one.tenant, one.output)
        return cls(terms, numbers, seeds, *rest)

    def requests(self, params: SamplingParams, stop_ids: frozenset[int], front: int) -> list[Request]:
        """The requests, under the engine's own names."""
        return [
            Request(
                id=engine_id(front, number),
                prompt=self.prompt,
                params=params,
                stop_ids=stop_ids,
                max_tokens=self.max_tokens,
                priority=self.priority,
                salt=self.salt,
                conversation=self.conversation,
                seed=seed,
                owner=f"{front}.{self.owner}" if self.owner else "",
                tenant=self.tenant,
                output=self.output,
            )
            for number, seed in zip(self.numbers, self.seeds, strict=True)
        ]


def engine_id(front: int, number: int) -> str:
    """The engine's name for a front's sequence."""
    return f"{front}.{number}"


@dataclass(frozen=True, slots=True)
class Call:
    """A method of the engine to be called for one sequence; of `memory` the number is that of the question."""

    method: str
    number: int
    arguments: tuple[Any, ...] = ()
