"""Reasoning of a served model: how it is marked, and which switches its chat template has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cellar.core.sampling import SamplingParams
from cellar.server.errors import refused
from cellar.text.chat import ChatTemplate
from cellar.text.reasoning.registry import OFF, STYLES, style_of, thinking_after
from cellar.text.tokenizer import Tokenizer

SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates let reasoning be turned on and off (Qwen 3, GLM; Granite, DeepSeek V3.1)."""

EFFORT = "reasoning_effort"
BUDGET = "thinking_token_budget"


class Reasoning:
    """What the server knows of it. `name` is that of a style, or None: as the templates show."""

    def __init__(self, name: str | None, templates: ChatTemplate | None, tokenizer: Tokenizer | None) -> None:
        sources = {} if templates is None else templates.sources
        name = name or style_of(sources) or OFF
        self._style = None if name == OFF or tokenizer is None else STYLES[name]
        self._read = frozenset(v for v in (*SWITCHES, EFFORT) if templates is not None and templates.reads(v))
        # Marks that are special tokens would be skipped.
        special = frozenset() if tokenizer is None else tokenizer.special_ids
        marks = () if self._style is None or tokenizer is None else (*self._style.opens, *self._style.closes)
        self._special = any(tokenizer is not None and tokenizer.piece_to_id(mark) in special for mark in marks)

    @property
    def known(self) -> bool:
        """True if answers may hold reasoning that is told apart."""
        return self._style is not None

    @property
    def switch(self) -> str | None:
        """The template's variable that turns reasoning on and off, if it has one."""
        return next((name for name in SWITCHES if name in self._read), None)

    def reads(self, name: str) -> bool:
        """True if the template reads one of `SWITCHES`, or `EFFORT`."""
        return name in self._read

    def variables(self, given: Mapping[str, Any], effort: str | None = None) -> dict[str, Any]:
        """Variables for the template: those given, and what `reasoning_effort` means to it. Raises ApiError.

        A template without that variable, but with a switch, knows off ("none") and on (any other effort).
        """
        for name in (*SWITCHES, EFFORT):
            if given.get(name) is not None and name not in self._read and (self.known or given[name] is not False):
                raise refused(
                    f"the model's chat template does not read {name}; leave it out of chat_template_kwargs.",
                    "chat_template_kwargs",
                )
        if effort is None:
            return dict(given)
        if EFFORT in self._read:
            return {EFFORT: effort, **given}
        if self.switch is not None:
            return {self.switch: effort != "none", **given}
        if effort != ("medium" if self.known else "none"):
            nothing = "always thinks as it does" if self.known else "does not think"
            raise refused(f"reasoning_effort has no effect: this model {nothing}; leave it out.", EFFORT)
        return dict(given)

    def applied(self, params: SamplingParams, prompt: str | None, budget: int | None = None) -> SamplingParams:
        """How to sample the answer to a rendered prompt, so that its reasoning comes apart, and ends in time.

        Raises ApiError for a budget that nothing would use.
        """
        if budget is not None and not self.known:
            raise refused("thinking_token_budget has no effect: this model does not think; leave it out.", BUDGET)
        thinking = None if self._style is None else thinking_after(self._style, prompt or "")
        if thinking is None:
            return params
        return replace(
            params,
            thinking=replace(thinking, budget=budget),
            skip_special_tokens=params.skip_special_tokens and not self._special,
        )
