"""Which parser reads a model's calls: by name, or by what its chat template shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cellar.text.tools.call import ToolParser
from cellar.text.tools.deepseek import CALLS, DeepSeekParser
from cellar.text.tools.hermes import OPEN, HermesParser
from cellar.text.tools.llama import LlamaParser
from cellar.text.tools.mistral import TAG, MistralParser
from cellar.text.tools.pythonic import START, PythonicParser

# vLLM's names; `qwen3` writes as Hermes does.
PARSERS: Mapping[str, Callable[[], ToolParser]] = {
    "hermes": HermesParser,
    "qwen3": HermesParser,
    "llama3_json": LlamaParser,
    "llama4_pythonic": PythonicParser,
    "pythonic": PythonicParser,
    "mistral": MistralParser,
    "deepseek_v3": DeepSeekParser,
    "deepseek_v31": DeepSeekParser,
}

SPECIAL_TAGS = frozenset({"mistral", "deepseek_v3", "deepseek_v31"})
"""Parsers whose tags are special tokens in their models' vocabularies: the text must keep them."""

# What a template has to hold for a parser to read its model's calls; the first that matches. None: another format.
_SIGNS: tuple[tuple[str, str | None], ...] = (
    (CALLS, "deepseek_v3"),
    (TAG, "mistral"),
    ("<function=", None),
    (OPEN, "hermes"),
    (START, "llama4_pythonic"),
    ("[func_name1(", "llama4_pythonic"),
    ('"parameters": dictionary of argument name and its value', "llama3_json"),
)


def parser_of(templates: Mapping[str, str]) -> str | None:
    """The name of the parser for a model with these chat templates; None if they show no known format."""
    source = templates.get("tool_use") or templates.get("default") or ""
    return next((parser for sign, parser in _SIGNS if sign in source), None)
