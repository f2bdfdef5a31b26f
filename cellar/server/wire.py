"""What goes over the socket between the engine's process and a front, pickled.

A front numbers its sequences; the engine's process makes ids of its own of the front's number and the sequence's, so
that fronts need not agree on ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cellar.core.config import EngineConfig
from cellar.core.messages import FinishReason, Logprobs, MemoryAnswer, SchedulerStats
from cellar.core.specs import ModelSpec
from cellar.text.generation import NEUTRAL, GenerationConfig


@dataclass(frozen=True)
class Ready:
    """The engine's first message: what was opened."""

    config: EngineConfig
    spec: ModelSpec
    checkpoint: Path | None
    max_model_len: int
    generation: GenerationConfig = NEUTRAL


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


@dataclass(frozen=True, slots=True)
class Step:
    """What some turns brought a front, and how things stand after them."""

    frames: list[Frame]
    stats: SchedulerStats


@dataclass(frozen=True, slots=True)
class Told:
    """The answer to the front's question of that number."""

    number: int
    answer: MemoryAnswer


@dataclass(frozen=True, slots=True)
class Call:
    """A method of the engine to be called for one sequence; of `memory` the number is that of the question."""

    method: str
    number: int
    arguments: tuple[Any, ...] = ()
