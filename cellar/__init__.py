"""Cellar: an LLM inference engine.

    from cellar import LLM, SamplingParams

    llm = LLM()
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=100))[0].outputs[0].text)

Names are loaded when they are first used, so that `import cellar` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cellar.version import __version__

if TYPE_CHECKING:
    from cellar.core.messages import CompletionOutput, RequestOutput
    from cellar.core.pooling import PoolingParams
    from cellar.core.sampling import SamplingParams
    from cellar.engine.llm import LLM
    from cellar.engine.stream import AsyncLLM

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "PoolingParams", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "cellar.engine.llm",
    "AsyncLLM": "cellar.engine.stream",
    "PoolingParams": "cellar.core.pooling",
    "SamplingParams": "cellar.core.sampling",
    "RequestOutput": "cellar.core.messages",
    "CompletionOutput": "cellar.core.messages",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cellar' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
