"""Where the engine lives. The server asks for it anew for every request: it may have been started again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from cellar.core.errors import ConfigError
from cellar.core.messages import SchedulerStats
from cellar.engine.opened import Opened
from cellar.engine.stream import AsyncLLM
from cellar.server.routing_figures import RoutingFigures
from cellar.text.chat import ChatTemplate
from cellar.text.generation import NEUTRAL, GenerationConfig
from cellar.text.pooling import read_pooling
from cellar.text.tokenizer import Tokenizer

_PLACES = ("kv_disk_path",)
"""Options that say where something lies, which is nobody's business."""


@dataclass(frozen=True)
class ServedModel:
    """What does not change while the server runs. Without a tokenizer there are token ids only."""

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    has_priorities: bool
    tokenizer: Tokenizer | None
    templates: ChatTemplate | None
    chunk_nbytes: int
    kv_tier: str
    generation: GenerationConfig = NEUTRAL
    vector_size: int = 1
    pooling: str = "last"
    cache: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, opened: Opened, names: tuple[str, ...]) -> ServedModel:
        """The model of an open front."""
        return cls(
            names,
            opened.front.reader.max_model_len,
            opened.spec.vocab_size,
            opened.config.schedule.scheduling_policy == "priority",
            opened.front.tokenizer,
            opened.front.templates,
            opened.spec.kv.chunk_nbytes(),
            "host" if opened.config.device.device in ("auto", "cpu") else "device",
            opened.generation,
            opened.spec.vector_size,
            read_pooling(opened.checkpoint),
            {name: str(value) for name, value in vars(opened.config.cache).items() if name not in _PLACES},
        )

    def with_template(self, file: str) -> ServedModel:
        """The same with the chat template of a file. Raises CheckpointError, ConfigError without a tokenizer."""
        if self.tokenizer is None:
            raise ConfigError(
                "chat_template is given, but there is no tokenizer to read what it renders; leave it out."
            )
        return replace(self, templates=ChatTemplate.read(file, self.tokenizer.special_tokens))


class EngineHost(Protocol):
    """Keeps an engine."""

    @property
    def llm(self) -> AsyncLLM | None:
        """The engine, if it runs now."""

    def stats(self) -> SchedulerStats | None:
        """Its snapshot; None while it does not run."""

    def engines(self) -> Mapping[str, SchedulerStats | None]:
        """Where there are several: the snapshot of each by its name, None for one that does not run. Else nothing."""

    def count_by(self, figures: RoutingFigures) -> None:
        """Have choices and moves between engines counted there from now on; before any request."""

    async def close(self) -> None:
        """Stop it and free its memory."""


class SameProcess:
    """The engine in a thread of this process; if it fails it stays down."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    @property
    def llm(self) -> AsyncLLM | None:
        """The engine, unless its loop has ended."""
        return self._llm if self._llm.running else None

    def stats(self) -> SchedulerStats | None:
        """A snapshot; may be a step old."""
        return self._llm.stats() if self._llm.running else None

    def engines(self) -> Mapping[str, SchedulerStats | None]:
        """It is the only one."""
        return {}

    def count_by(self, figures: RoutingFigures) -> None:
        """There is nothing to choose."""

    async def close(self) -> None:
        """Stop the engine."""
        await asyncio.to_thread(self._llm.close)
