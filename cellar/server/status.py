"""/engine/status: what the page's live view draws, in one small JSON object.

Counters and the clock stand side by side, so whoever asks twice has rates. Like /metrics, of which it is an extract,
it needs no API key.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import Any

from cellar.core.errors import RequestError
from cellar.core.messages import SchedulerStats, TierStats
from cellar.server.host import EngineHost, ServedModel
from cellar.text.chat import ChatTemplate
from cellar.text.rendering import Rendering
from cellar.version import __version__

PATH = "/engine/status"


class EngineStatus:
    """The engine at this moment, and the few facts of the model by which a page suits it."""

    def __init__(self, host: EngineHost, model: ServedModel, key_required: bool, templates: Rendering | None) -> None:
        self._host = host
        self._model = model
        self._fixed: dict[str, Any] = {
            "version": __version__,
            "key_required": key_required,
            "model": {
                "name": model.names[0],
                "max_model_len": model.max_model_len,
                **template_facts(templates),
            },
        }
        logging.getLogger("uvicorn.access").addFilter(_not_polled)

    def now(self) -> dict[str, Any]:
        """The answer. `time` is in seconds of a clock that only runs forward; `engine` is null while there is none."""
        stats = self._host.stats()
        return {**self._fixed, "time": monotonic(), "engine": None if stats is None else self._engine(stats)}

    def _engine(self, stats: SchedulerStats) -> dict[str, Any]:
        used = stats.total_chunks - stats.free_chunks - stats.cached_chunks
        return {
            "running": stats.running,
            "waiting": stats.waiting,
            "preemptions": stats.preemptions,
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "prefix_queries": stats.prefix_queries,
            "prefix_hits": stats.prefix_hits,
            "memory": [
                {
                    "tier": self._model.kv_tier,
                    "chunk_bytes": self._model.chunk_nbytes,
                    "chunks": stats.total_chunks,
                    "used_chunks": used,
                    "cached_chunks": stats.cached_chunks,
                },
                *(self._tier(tier) for tier in stats.tiers[1:]),
            ],
        }

    def _tier(self, stats: TierStats) -> dict[str, Any]:
        """A tier below the device. Where the device's own memory is the host's, a second share of that is `offload`."""
        name = stats.tier.name.lower()
        return {
            "tier": "offload" if name == self._model.kv_tier else name,
            "chunk_bytes": self._model.chunk_nbytes,
            "chunks": stats.total,
            "used_chunks": stats.referenced,
            "cached_chunks": stats.cached,
        }


def template_facts(templates: ChatTemplate | Rendering | None) -> dict[str, bool]:
    """What a chat template does with a conversation, found out by rendering one.

    `chat`: there is a template. `reads_system`: a system message reaches the model. `continues`: nothing stands
    between the user's words and the answer, so the model goes on with what the user wrote.
    """
    user, answer = {"role": "user", "content": "first"}, {"role": "assistant", "content": "second"}
    talk = _rendered(templates, [user, answer])
    instructed = _rendered(templates, [{"role": "system", "content": "third"}, user])
    return {
        "chat": bool(templates),
        "reads_system": "third" in instructed,
        "continues": not templates or "firstsecond" in talk,
    }


def _rendered(templates: ChatTemplate | Rendering | None, messages: list[dict[str, str]]) -> str:
    """The prompt; empty if the template refuses it."""
    if not templates:
        return ""
    try:
        return templates.render(messages, add_generation_prompt=messages[-1]["role"] != "assistant")
    except RequestError:
        return ""


def _not_polled(record: logging.LogRecord) -> bool:
    """Keeps a page that looks every second out of the access log."""
    return not (isinstance(record.args, tuple) and len(record.args) > 2 and record.args[2] == PATH)
